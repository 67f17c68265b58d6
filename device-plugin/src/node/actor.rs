//! The task that owns the node's state. Commands come by a channel and are taken one after the other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch::error::RecvError;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{debug, error};

use super::allocator::{Bind, BoundContainer, Core, Identity, Reply, Troubles, Wait};
use super::capacity;
use super::checkpoint_state::PodName;
use super::host::OsHost;
use super::pod_resolver::Identities;
use crate::clock;
use crate::config::ResourcesConfig;
use crate::gpu::Inventory;
use crate::gpu::drain::Drain;
use crate::gpu::generations::Generations;
use crate::gpu_node::quota_overrides::Orders;
use crate::gpu_node::{Events, PodRef, Reason};
use crate::kubelet::device_checkpoint::Held;
use crate::kubelet::devices::{Devices, DevicesError};
use crate::kubelet::plugin::{Allocator, NotBooked, NotBound};
use crate::kubelet::pod_resources::Holder;
use crate::ledger::View;
use crate::metrics::{BindResult, Counts, Metrics};
use crate::retained::status::KeptStatus;
use crate::units::{AllocationId, Bytes, GpuUuid, Resource, TokenSet};

/// How often pods' ends and waiters' patience are looked at: most of a release's delay.
pub const TICK: Duration = Duration::from_millis(250);
/// One in so many ticks looks at every container where nothing has changed.
const AT_REST: u32 = 4;
/// How often the kubelet's checkpoint is compared with the bookings.
pub const COLLECT: Duration = Duration::from_secs(10);
/// Commands that may wait for the task: far above what a kubelet sends at once.
const QUEUE: usize = 256;

/// What the task is asked.
#[derive(Debug)]
enum Command {
    Book {
        resource: Resource,
        tokens: TokenSet,
        reply: oneshot::Sender<AllocationId>,
    },
    Bind {
        bind: Bind,
        reply: Reply,
    },
    KubeletKnows {
        /// What its checkpoint has, where it can be read.
        held: Option<Vec<Held>>,
        /// Whom it lists with device memory, if it was asked.
        listed: Vec<Holder>,
    },
}

/// What the kubelet is told, per resource.
#[derive(Debug, Clone)]
pub struct Offers {
    /// Tokens of device memory.
    pub device: watch::Receiver<Devices>,
    /// Tokens of managed memory.
    pub managed: watch::Receiver<Devices>,
}

/// The node as it stands, for status and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The GPUs.
    pub inventory: Inventory,
    /// The memory.
    pub view: View,
    /// Who waits for it, the longest waiting first.
    pub waits: Vec<Wait>,
    /// What the ledger holds of device memory and of managed memory, in numbers.
    pub counts: [(Resource, Counts); 2],
    /// G of the present GPUs, and of the last that have left.
    pub generations: BTreeMap<GpuUuid, u64>,
    /// What is wrong.
    pub troubles: Troubles,
    /// Why the tokens cannot be advertised.
    pub too_many: Option<DevicesError>,
    /// The containers that have device memory.
    pub containers: Arc<[BoundContainer]>,
}

/// What the task follows.
pub struct Followed {
    /// The GPUs.
    pub inventory: watch::Receiver<Inventory>,
    /// Those whose worker hangs in the driver.
    pub stuck: watch::Receiver<BTreeSet<GpuUuid>>,
    /// Those that are drained.
    pub drain: watch::Receiver<Drain>,
    /// Which GPUs' drivers were seen to clear freed memory; none where namespaces share all GPUs.
    pub kept: Option<watch::Receiver<KeptStatus>>,
    /// What is ordered in the node's `GpuNode`; none before the API server told.
    pub orders: watch::Receiver<Option<Orders>>,
    /// What of GPUs is in use and charged to nobody, as far as the audit knows.
    pub withheld: watch::Receiver<BTreeMap<GpuUuid, Bytes>>,
}

impl Followed {
    fn inventory(&self) -> Inventory {
        let inventory = self.inventory.borrow().clone();
        let inventory = inventory.with_stuck(&self.stuck.borrow());
        inventory.with_draining(&self.drain.borrow())
    }
}

/// Asks the node; what the kubelet's plugins allocate from.
#[derive(Clone)]
pub struct Node {
    commands: mpsc::Sender<Command>,
    identities: Arc<Identities>,
    bind_wait: Duration,
    voice: Voice,
}

/// Where the node tells what happened.
#[derive(Debug, Clone)]
pub struct Voice {
    /// Events on pods.
    pub events: Events,
    /// Times and counts.
    pub metrics: Metrics,
}

impl Voice {
    /// A PreStartContainer of `pod` ended after `took`.
    fn started(&self, pod: Option<PodRef>, result: &Result<(), NotBound>, took: Duration) {
        let (counted, reason, message) = match result {
            Ok(()) => (
                BindResult::Bound,
                Reason::Bound,
                "GPU memory is bound".to_owned(),
            ),
            Err(error @ NotBound::NoRoom(_)) => (
                BindResult::NoRoom,
                Reason::WaitingForRoom,
                error.to_string(),
            ),
            Err(error) => (BindResult::Failed, Reason::NotBound, error.to_string()),
        };
        self.metrics.started(counted, took);
        if let Some(pod) = pod {
            self.events.on_pod(pod, reason, message);
        }
    }
}

impl Allocator for Node {
    async fn book(&self, resource: Resource, tokens: TokenSet) -> Result<AllocationId, NotBooked> {
        let begun = Instant::now();
        let (reply, booked) = oneshot::channel();
        let command = Command::Book {
            resource,
            tokens,
            reply,
        };
        self.commands
            .send(command)
            .await
            .map_err(|_| NotBooked::Stopping)?;
        let booked = booked.await.map_err(|_| NotBooked::Stopping);
        self.voice.metrics.allocated(begun.elapsed());
        booked
    }

    async fn bind(&self, resource: Resource, tokens: TokenSet) -> Result<(), NotBound> {
        let (begun, until) = (Instant::now(), clock::now() + self.bind_wait);
        let identity = match self.identities.find(resource, &tokens).await {
            Ok(identity) => identity,
            Err(error) => {
                let result = Err(error.into());
                self.voice.started(None, &result, begun.elapsed());
                return result;
            }
        };
        let pod = pod_ref(&identity);
        let (reply, bound) = oneshot::channel();
        let bind = Bind {
            resource,
            tokens,
            identity,
            until,
        };
        self.commands
            .send(Command::Bind { bind, reply })
            .await
            .map_err(|_| NotBound::Stopping)?;
        let result = bound.await.unwrap_or(Err(NotBound::Stopping));
        self.voice.started(pod, &result, begun.elapsed());
        result
    }
}

fn pod_ref(identity: &Identity) -> Option<PodRef> {
    let PodName { namespace, name } = identity.name.clone()?;
    Some(PodRef {
        namespace,
        name,
        uid: identity.pod.clone(),
    })
}

/// The task before it runs.
pub struct Actor {
    core: Core<OsHost>,
    config: ResourcesConfig,
    commands: mpsc::Receiver<Command>,
    collected: mpsc::WeakSender<Command>,
    identities: Arc<Identities>,
    followed: Followed,
    device: watch::Sender<Devices>,
    managed: watch::Sender<Devices>,
    snapshot: watch::Sender<Snapshot>,
    /// The moment of the last tick.
    pulse: watch::Sender<Instant>,
    too_many: Option<DevicesError>,
    generations: Generations,
}

/// Makes the task over a recovered `core`.
pub fn actor(
    core: Core<OsHost>,
    config: ResourcesConfig,
    identities: Identities,
    bind_wait: Duration,
    followed: Followed,
    generations: Generations,
    voice: Voice,
) -> (
    Actor,
    Node,
    Offers,
    watch::Receiver<Snapshot>,
    watch::Receiver<Instant>,
) {
    let (commands, received) = mpsc::channel(QUEUE);
    let none = |resource| Devices::new(resource, Vec::new()).expect("no token is not too many");
    let (device, device_offer) = watch::channel(none(Resource::DeviceMemory));
    let (managed, managed_offer) = watch::channel(none(Resource::ManagedMemory));
    let first = Snapshot {
        inventory: Inventory::Starting,
        view: core.view(clock::now()),
        waits: Vec::new(),
        counts: counts(&core),
        generations: BTreeMap::new(),
        troubles: Troubles::default(),
        too_many: None,
        containers: core.containers(),
    };
    let (snapshot, snapshots) = watch::channel(first);
    let (pulse, beats) = watch::channel(Instant::now());
    let identities = Arc::new(identities);
    let actor = Actor {
        core,
        config,
        collected: commands.downgrade(),
        commands: received,
        identities: identities.clone(),
        followed,
        device,
        managed,
        snapshot,
        pulse,
        too_many: None,
        generations,
    };
    let offers = Offers {
        device: device_offer,
        managed: managed_offer,
    };
    (
        actor,
        Node {
            commands,
            identities,
            bind_wait,
            voice,
        },
        offers,
        snapshots,
        beats,
    )
}

impl Actor {
    /// Works until nobody can ask any more: the kubelet's last calls are still answered while the agent
    /// stops, for an Allocate that fails fails its pod for ever.
    pub async fn run(mut self) {
        let mut tick = tokio::time::interval(TICK);
        let mut collect = tokio::time::interval(COLLECT);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut ticks = 0_u32;
        self.take_inventory().await;
        loop {
            tokio::select! {
                command = self.commands.recv() => match command {
                    Some(command) => self.take(command).await,
                    None => return,
                },
                changed = self.followed.inventory.changed() => match changed {
                    Ok(()) => self.take_inventory().await,
                    // The NVML watcher ends with the agent only.
                    Err(_) => return,
                },
                // It ends with the agent too.
                Ok(()) = self.followed.stuck.changed() => self.take_inventory().await,
                Ok(()) = self.followed.drain.changed() => self.take_inventory().await,
                Ok(()) = changed(&mut self.followed.kept) => self.take_cleared().await,
                // Without the API server nothing is ordered, and what was stands.
                Ok(()) = self.followed.orders.changed() => self.take_orders().await,
                Ok(()) = self.followed.withheld.changed() => {
                    let withheld = self.followed.withheld.borrow_and_update().clone();
                    self.core.withhold(withheld, clock::now()).await;
                    self.publish();
                }
                _ = tick.tick() => {
                    self.core.release_ended(clock::now()).await;
                    ticks = ticks.wrapping_add(1);
                    if self.core.is_stirred() || ticks.is_multiple_of(AT_REST) {
                        self.core.tick(clock::now()).await;
                        self.publish();
                    }
                    self.pulse.send_replace(Instant::now());
                }
                _ = collect.tick() => {
                    let trouble = self.core.host_mut().cdi_trouble();
                    self.core.note_cdi(trouble);
                    // For what could not be read or written before.
                    self.generations.see(self.followed.inventory.borrow().gpus());
                    self.core.note_generations(self.generations.all());
                    self.look_at_the_kubelet();
                }
            }
        }
    }

    async fn take(&mut self, command: Command) {
        let now = clock::now();
        match command {
            Command::Book {
                resource,
                tokens,
                reply,
            } => {
                let id = AllocationId::from_bits(rand::random());
                self.core.book(id, resource, tokens, now);
                debug!(allocation = %id, %resource, "booked");
                // The kubelet may have gone: the booking is collected then.
                let _ = reply.send(id);
            }
            Command::Bind { bind, reply } => {
                self.core.bind(bind, reply, now).await;
                // What is done about a container is best done before it runs.
                self.publish();
            }
            Command::KubeletKnows { held, listed } => {
                let known = held.map(|held| {
                    self.core.learn(&listed, &held);
                    held.iter().map(|held| held.allocation).collect()
                });
                self.core.collect(known.as_ref(), now).await;
            }
        }
    }

    async fn take_inventory(&mut self) {
        self.followed.inventory.mark_unchanged();
        let inventory = self.followed.inventory();
        if inventory == Inventory::Starting {
            return;
        }
        self.core.host_mut().forget_driver();
        self.generations.see(inventory.gpus());
        self.core.note_generations(self.generations.all());
        self.core
            .set_gpus(inventory.gpus().to_vec(), clock::now())
            .await;
        self.advertise(&inventory);
        self.publish();
    }

    async fn take_cleared(&mut self) {
        if let Some(kept) = &mut self.followed.kept {
            let cleared = kept.borrow_and_update().cleared.clone();
            self.core.set_cleared(cleared, clock::now()).await;
            self.publish();
        }
    }

    async fn take_orders(&mut self) {
        let Some(Orders { reservations, .. }) = self.followed.orders.borrow_and_update().clone()
        else {
            return;
        };
        self.core.reserve(&reservations, clock::now()).await;
        self.publish();
    }

    /// What cannot be advertised leaves what was: the pods that run keep their tokens.
    fn advertise(&mut self, inventory: &Inventory) {
        // Without any GPU there is nothing to register.
        if inventory.gpus().is_empty() {
            return;
        }
        match capacity::devices(inventory.gpus(), &self.config) {
            Ok([device, managed]) => {
                self.too_many = None;
                replace(&self.device, device);
                replace(&self.managed, managed);
            }
            Err(refused) => {
                if self.too_many.as_ref() != Some(&refused) {
                    error!(reason = refused.reason(), error = %refused, "not advertised");
                }
                self.too_many = Some(refused);
            }
        }
    }

    fn publish(&mut self) {
        let snapshot = Snapshot {
            inventory: self.followed.inventory(),
            view: self.core.view(clock::now()),
            waits: self.core.waits(),
            counts: counts(&self.core),
            generations: self.generations.all(),
            troubles: self.core.troubles().clone(),
            too_many: self.too_many.clone(),
            containers: self.core.containers(),
        };
        replace(&self.snapshot, snapshot);
    }

    /// Reads the kubelet's checkpoint beside the task, which goes on meanwhile; and asks for names that are lacking.
    fn look_at_the_kubelet(&self) {
        let (identities, commands) = (self.identities.clone(), self.collected.clone());
        let lacks_names = self.core.lacks_names();
        tokio::spawn(async move {
            let listed = match lacks_names {
                true => identities.list(Resource::DeviceMemory).await,
                false => Vec::new(),
            };
            let held = identities.kubelet().await.map(|known| known.held).ok();
            if let Some(commands) = commands.upgrade() {
                // The task has ended: nothing is left to collect for.
                let _ = commands.send(Command::KubeletKnows { held, listed }).await;
            }
        });
    }
}

/// Returns when what is followed has changed; never where nothing is.
async fn changed<T>(followed: &mut Option<watch::Receiver<T>>) -> Result<(), RecvError> {
    match followed {
        Some(followed) => followed.changed().await,
        None => std::future::pending().await,
    }
}

fn counts(core: &Core<OsHost>) -> [(Resource, Counts); 2] {
    [Resource::DeviceMemory, Resource::ManagedMemory]
        .map(|resource| (resource, core.counts(resource)))
}

fn replace<T: PartialEq>(sender: &watch::Sender<T>, value: T) {
    sender.send_if_modified(|now| {
        let changed = *now != value;
        if changed {
            *now = value;
        }
        changed
    });
}
