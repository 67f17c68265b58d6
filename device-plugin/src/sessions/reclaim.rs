//! Proves what the dead exported free: one task per GPU.
//!
//! ```text
//!   every LOOK_EVERY, while there is anything to prove, and until no container has the GPU:
//!   what the dead exported (all containers), what ended pods left --> what the living have --> the driver --> held (pure)
//! ```
//!
//! In this order: who died, or exported, or allocated after it was asked about is in the driver's answer, and
//! counts as holding.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::accounts::Books;
use super::orphan_bound::{Held, Looks, Own};
use super::{Shared, lock};
use crate::units::{AllocationId, Bytes, GpuUuid, LeaseId};

/// From one look to the next: [`LOOKS`](super::held::LOOKS) of them take half a second.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What pods that ended left on a GPU, to be proven free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Left {
    /// Another number for each time that something was left.
    pub(super) number: u64,
    /// The most that is held of it; none before that is proven.
    pub(super) held: Option<Bytes>,
}

/// What is asked about.
#[derive(Debug)]
struct Asked {
    kept: BTreeMap<AllocationId, Books>,
    left: Option<u64>,
}

/// Runs until no container has the GPU and dead processes left nothing there. A GPU that hangs holds up
/// its own task only.
pub(super) async fn watch(gpu: GpuUuid, shared: Arc<Shared>) {
    let mut every = tokio::time::interval(LOOK_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut looks = Looks::default();
    let mut exports = shared.exports.subscribe();
    loop {
        every.tick().await;
        exports.mark_unchanged();
        let Some(asked) = ask(&shared, &gpu) else {
            looks.clear();
            if shared.unwatch(&gpu) || exports.changed().await.is_err() {
                return;
            }
            continue;
        };
        let own = own(&shared, &gpu);
        let before = living(&shared, &gpu);
        let (driver, of) = (Arc::clone(&shared.charges), gpu.clone());
        let answer = tokio::task::spawn_blocking(move || driver.look(&of));
        let Ok(Some(look)) = answer.await else {
            continue;
        };
        let mut leases = living(&shared, &gpu);
        leases.retain(|lease, _| before.contains_key(lease));
        looks.add(asked, &look, &own, &leases);
        let news = looks
            .held()
            .is_some_and(|(asked, held)| settle(&shared, &gpu, asked, &held));
        if news {
            // A process that ends with the same exports as one before it is another question.
            looks.clear();
        }
    }
}

fn ask(shared: &Shared, gpu: &GpuUuid) -> Option<Asked> {
    let running = lock(&shared.running);
    let kept = running
        .iter()
        .filter_map(|(id, running)| Some((*id, lock(&running.container).kept(gpu)?)));
    let asked = Asked {
        kept: kept.collect(),
        left: lock(&shared.left).get(gpu).map(|left| left.number),
    };
    (!asked.kept.is_empty() || asked.left.is_some()).then_some(asked)
}

fn own(shared: &Shared, gpu: &GpuUuid) -> BTreeMap<u32, Own> {
    let running = lock(&shared.running);
    running
        .values()
        .flat_map(|running| lock(&running.container).own_of(gpu))
        .collect()
}

/// The kept leases on a GPU that the vault has.
fn living(shared: &Shared, gpu: &GpuUuid) -> BTreeMap<LeaseId, Bytes> {
    let living = shared.living.as_ref().map(|living| living.borrow());
    let of_it = living.as_ref().and_then(|living| living.get(gpu));
    of_it.cloned().unwrap_or_default()
}

/// At most `held` is held of what was asked about: whether that frees anything.
fn settle(shared: &Shared, gpu: &GpuUuid, asked: &Asked, held: &Held) -> bool {
    let of_nobody = held.of(None);
    if let Some(left) = lock(&shared.left).get_mut(gpu)
        && asked.left == Some(left.number)
    {
        left.held = Some(left.held.map_or(of_nobody, |before| before.min(of_nobody)));
    }
    let running = lock(&shared.running);
    let mut freed = false;
    for (id, kept) in &asked.kept {
        if let Some(running) = running.get(id) {
            freed |= lock(&running.container).keep_at_most(gpu, held.of(Some(id)), kept);
        }
    }
    freed
}
