//! Takes over from a predecessor: what it left on the host becomes the node's state again.
//!
//! 1. The checkpoint gives bookings, claims and bindings. Lost, malformed or of another boot: the
//!    bindings are read from the CDI files, each of which carries its own, and those of managed memory
//!    from the kubelet's device checkpoint. What pods that had ended left is not known then: no GPU is bound before
//!    it is proven how much of it is held. So too where a CDI
//!    file only another version of the agent can read.
//! 2. The kubelet's device checkpoint gives the bookings that are lacking, of pods that are still there.
//! 3. Pods whose cgroup is gone are released.
//! 4. Files that no binding stands for are withdrawn.
//! 5. The sockets of all bindings are served again, with the managed memory of their containers. A CDI file that is missing is written once the
//!    GPUs are known; one that is there stays as it is, for its container runs with it.

use std::collections::BTreeSet;

use tracing::{info, warn};

use super::allocator::Core;
use super::checkpoint_state::{Holder, State};
use super::host::{Found, Host};
use crate::checkpoint::LoadError;
use crate::kubelet::device_checkpoint::Held;
use crate::ledger::{Ledger, Moment, Placement, RestoreError, Share};
use crate::node::cdi;
use crate::node::pod_cgroups::PodCgroup;
use crate::units::{AllocationId, PodUid, Quanta, Quantum, Resource};

/// Why the checkpoint is not gone on with.
#[derive(Debug, thiserror::Error)]
enum NoState {
    #[error("there is none")]
    Missing,
    #[error("it is of another boot")]
    OtherBoot,
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Restore(#[from] RestoreError),
}

impl<H: Host> Core<H> {
    /// Takes over what was `found`, with what the kubelet remembers of our resources.
    pub async fn recover(&mut self, found: Found, kubelet: &[Held], now: Moment) {
        let Found {
            checkpoint,
            cdi,
            unread,
            allocations,
        } = found;
        let mut kept = BTreeSet::new();
        if let Err(why) = self.restore(checkpoint, now) {
            self.rebuild(&cdi, kubelet, now);
            let bindings = self.ledger.bindings().count();
            // A new boot is no loss: nothing of the old one lives.
            let lost = match why {
                NoState::OtherBoot => false,
                NoState::Missing => bindings > 0 || !unread.is_empty(),
                NoState::Load(_) | NoState::Restore(_) => true,
            };
            if lost {
                warn!(%why, bindings, "checkpoint not used: rebuilt from the host");
                self.troubles.rebuilt = Some(match unread.len() {
                    0 => why.to_string(),
                    count => {
                        format!(
                            "{why}; {count} CDI files of another version of the agent were not read"
                        )
                    }
                });
                self.unproven = true;
                kept = unread;
            }
        }
        self.book_what_the_kubelet_knows(kubelet, now);
        self.find_leftovers(&cdi, allocations, &kept);
        self.unsaved = true;
        self.release_the_dead(now).await;
        if self.save().is_ok() {
            self.withdraw().await;
        }
        self.expose_all(cdi).await;
        info!(bindings = self.ledger.bindings().count(), "recovered");
    }

    fn restore(
        &mut self,
        found: Result<Option<State>, LoadError>,
        now: Moment,
    ) -> Result<(), NoState> {
        let State {
            boot,
            ledger,
            holders,
        } = found?.ok_or(NoState::Missing)?;
        if boot != self.boot {
            return Err(NoState::OtherBoot);
        }
        let managed = super::capacity::managed_capacity(&self.config);
        self.ledger = Ledger::restore(ledger, self.config.quantum, now)?;
        self.ledger.set_managed_capacity(managed);
        self.holders = holders;
        Ok(())
    }

    fn rebuild(&mut self, cdi: &[cdi::Binding], kubelet: &[Held], now: Moment) {
        for binding in cdi {
            let cdi::Binding {
                allocation,
                pod,
                container,
                tokens,
                gpus,
            } = binding;
            let placement = placement(gpus, self.config.quantum);
            self.ledger.adopt(
                *allocation,
                Resource::DeviceMemory,
                tokens.clone(),
                pod.clone(),
                placement,
            );
            self.holders.insert(
                *allocation,
                Holder {
                    container: container.clone(),
                    pod: None,
                },
            );
        }
        // Managed memory leaves no file. Whether the container has started cannot be told; as its
        // tokens are taken anyway, nobody loses by counting it.
        for held in kubelet
            .iter()
            .filter(|held| held.resource == Resource::ManagedMemory)
        {
            let placement = Placement::Managed(held.tokens.quanta());
            self.ledger
                .book(held.allocation, held.resource, held.tokens.clone(), now);
            self.ledger.adopt(
                held.allocation,
                held.resource,
                held.tokens.clone(),
                held.pod.clone(),
                placement,
            );
            self.remember(held);
        }
    }

    /// The kubelet keeps entries of pods that are long gone until it next allocates.
    fn book_what_the_kubelet_knows(&mut self, kubelet: &[Held], now: Moment) {
        for held in kubelet {
            if self.pods.follow(&held.pod) != PodCgroup::Gone {
                self.ledger
                    .book(held.allocation, held.resource, held.tokens.clone(), now);
                self.remember(held);
            }
        }
    }

    fn remember(&mut self, held: &Held) {
        let holder = || Holder {
            container: held.container.clone(),
            pod: None,
        };
        self.holders.entry(held.allocation).or_insert_with(holder);
    }

    async fn release_the_dead(&mut self, now: Moment) {
        let pods: Vec<PodUid> = self.ledger.pods().into_iter().cloned().collect();
        for pod in pods {
            if self.pods.follow(&pod) == PodCgroup::Gone {
                self.release(&pod, now).await;
            }
        }
    }

    /// Allocations whose unreadable CDI file is `kept` go when the kubelet forgets them.
    fn find_leftovers(
        &mut self,
        cdi: &[cdi::Binding],
        allocations: BTreeSet<AllocationId>,
        kept: &BTreeSet<AllocationId>,
    ) {
        let bound: BTreeSet<AllocationId> = self
            .ledger
            .bindings()
            .flat_map(|binding| binding.allocations)
            .collect();
        let on_host = cdi
            .iter()
            .map(|binding| binding.allocation)
            .chain(allocations);
        let known: BTreeSet<AllocationId> = self.ledger.allocations().map(|(id, _)| id).collect();
        let stays =
            |id: &AllocationId| bound.contains(id) || kept.contains(id) && known.contains(id);
        self.leftovers.extend(on_host.filter(|id| !stays(id)));
        self.holders.retain(|id, _| known.contains(id));
    }

    async fn expose_all(&mut self, cdi: Vec<cdi::Binding>) {
        let bindings = self
            .ledger
            .bindings()
            .filter(|binding| binding.resource == Resource::DeviceMemory);
        self.unfinished = bindings.flat_map(|binding| binding.allocations).collect();
        for device in cdi {
            if !self.unfinished.contains(&device.allocation) {
                continue;
            }
            let managed = self.managed_of(&device.pod, device.allocation);
            match self.host.expose(&device, managed).await {
                Ok(()) => {
                    self.unfinished.remove(&device.allocation);
                }
                Err(error) => self.troubles.host = Some((error.concern(), error.to_string())),
            }
        }
    }
}

/// Where a CDI file says that memory is. Its quotas may count in another quantum than this node's now.
fn placement(gpus: &[cdi::BoundGpu], quantum: Quantum) -> Placement {
    let share = |gpu: &cdi::BoundGpu| Share {
        gpu: gpu.uuid.clone(),
        quanta: Quanta(u32::try_from(gpu.quota.0.div_ceil(quantum.bytes())).unwrap_or(u32::MAX)),
    };
    Placement::Device(gpus.iter().map(share).collect())
}
