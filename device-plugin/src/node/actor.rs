//! The task that owns the node's state. Commands come by a channel and are taken one after the other.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error};

use super::clock;
use super::core::{Bind, Core, Reply, Troubles};
use super::host::OsHost;
use super::identity::Identities;
use super::offer;
use super::state::Holder;
use crate::config::ResourcesConfig;
use crate::inventory::Inventory;
use crate::kubelet::devices::{Devices, DevicesError};
use crate::kubelet::plugin::{Allocator, NotBooked, NotBound};
use crate::ledger::{Binding, View};
use crate::units::{AllocationId, Resource, TokenSet};

/// How often pods' ends and waiters' patience are looked at: most of a release's delay.
pub const TICK: Duration = Duration::from_millis(250);
/// How often the kubelet's checkpoint is compared with the bookings.
pub const COLLECT: Duration = Duration::from_secs(30);
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
    KubeletKnows(Option<BTreeSet<AllocationId>>),
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
    /// Who has it.
    pub bindings: Vec<Bound>,
    /// What is wrong.
    pub troubles: Troubles,
    /// Why the tokens cannot be advertised.
    pub too_many: Option<DevicesError>,
}

/// A binding with the names of its holders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bound {
    /// The binding.
    pub binding: Binding,
    /// The holders of its allocations, in their order, as far as they are known.
    pub holders: Vec<Holder>,
}

/// Asks the node; what the kubelet's plugins allocate from.
#[derive(Clone)]
pub struct Node {
    commands: mpsc::Sender<Command>,
    identities: Arc<Identities>,
    bind_wait: Duration,
}

impl Allocator for Node {
    async fn book(&self, resource: Resource, tokens: TokenSet) -> Result<AllocationId, NotBooked> {
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
        booked.await.map_err(|_| NotBooked::Stopping)
    }

    async fn bind(&self, resource: Resource, tokens: TokenSet) -> Result<(), NotBound> {
        let until = clock::now() + self.bind_wait;
        let identity = self.identities.find(resource, &tokens).await?;
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
        bound.await.unwrap_or(Err(NotBound::Stopping))
    }
}

/// The task before it runs.
pub struct Actor {
    core: Core<OsHost>,
    config: ResourcesConfig,
    commands: mpsc::Receiver<Command>,
    collected: mpsc::WeakSender<Command>,
    identities: Arc<Identities>,
    inventory: watch::Receiver<Inventory>,
    device: watch::Sender<Devices>,
    managed: watch::Sender<Devices>,
    snapshot: watch::Sender<Snapshot>,
    too_many: Option<DevicesError>,
}

/// Makes the task over a recovered `core`.
pub fn actor(
    core: Core<OsHost>,
    config: ResourcesConfig,
    identities: Identities,
    bind_wait: Duration,
    inventory: watch::Receiver<Inventory>,
) -> (Actor, Node, Offers, watch::Receiver<Snapshot>) {
    let (commands, received) = mpsc::channel(QUEUE);
    let none = |resource| Devices::new(resource, Vec::new()).expect("no token is not too many");
    let (device, device_offer) = watch::channel(none(Resource::DeviceMemory));
    let (managed, managed_offer) = watch::channel(none(Resource::ManagedMemory));
    let first = Snapshot {
        inventory: Inventory::Starting,
        view: core.view(clock::now()),
        bindings: Vec::new(),
        troubles: Troubles::default(),
        too_many: None,
    };
    let (snapshot, snapshots) = watch::channel(first);
    let identities = Arc::new(identities);
    let actor = Actor {
        core,
        config,
        collected: commands.downgrade(),
        commands: received,
        identities: identities.clone(),
        inventory,
        device,
        managed,
        snapshot,
        too_many: None,
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
        },
        offers,
        snapshots,
    )
}

impl Actor {
    /// Works until `shutdown`, or until nobody can ask any more.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut tick = tokio::time::interval(TICK);
        let mut collect = tokio::time::interval(COLLECT);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.take_inventory().await;
        loop {
            tokio::select! {
                command = self.commands.recv() => match command {
                    Some(command) => self.take(command).await,
                    None => return,
                },
                changed = self.inventory.changed() => match changed {
                    Ok(()) => self.take_inventory().await,
                    // The NVML thread ends with the agent only.
                    Err(_) => return,
                },
                _ = tick.tick() => {
                    self.core.tick(clock::now()).await;
                    self.publish();
                }
                _ = collect.tick() => {
                    let trouble = self.core.host_mut().cdi_trouble();
                    self.core.note_cdi(trouble);
                    self.look_at_the_kubelet();
                }
                () = shutdown.cancelled() => return,
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
            Command::Bind { bind, reply } => self.core.bind(bind, reply, now).await,
            Command::KubeletKnows(known) => self.core.collect(known.as_ref(), now).await,
        }
    }

    async fn take_inventory(&mut self) {
        let inventory = self.inventory.borrow_and_update().clone();
        if inventory == Inventory::Starting {
            return;
        }
        self.core.host_mut().forget_driver();
        self.core
            .set_gpus(inventory.gpus().to_vec(), clock::now())
            .await;
        self.advertise(&inventory);
        self.publish();
    }

    /// What cannot be advertised leaves what was: the pods that run keep their tokens.
    fn advertise(&mut self, inventory: &Inventory) {
        // Without any GPU there is nothing to register.
        if inventory.gpus().is_empty() {
            return;
        }
        match offer::devices(inventory.gpus(), &self.config) {
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

    fn publish(&self) {
        let bound = |binding: Binding| {
            let holders = binding
                .allocations
                .iter()
                .filter_map(|id| self.core.holder(*id).cloned())
                .collect();
            Bound { binding, holders }
        };
        let snapshot = Snapshot {
            inventory: self.inventory.borrow().clone(),
            view: self.core.view(clock::now()),
            bindings: self.core.bindings().map(bound).collect(),
            troubles: self.core.troubles().clone(),
            too_many: self.too_many.clone(),
        };
        replace(&self.snapshot, snapshot);
    }

    /// Reads the kubelet's checkpoint beside the task, which goes on meanwhile.
    fn look_at_the_kubelet(&self) {
        let (identities, commands) = (self.identities.clone(), self.collected.clone());
        tokio::spawn(async move {
            let known = identities.kubelet().await;
            let known = known
                .map(|known| known.held.iter().map(|held| held.allocation).collect())
                .ok();
            if let Some(commands) = commands.upgrade() {
                // The task has ended: nothing is left to collect for.
                let _ = commands.send(Command::KubeletKnows(known)).await;
            }
        });
    }
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
