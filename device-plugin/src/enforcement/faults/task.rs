//! The loop: reads the kernel's log, applies policies, tells, kills.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::confirmation::Waiting;
use super::kmsg::{Log, Named};
use super::{events, policy};
use crate::clock::{self, Present};
use crate::config::PathsConfig;
use crate::enforcement::audit::kill::kill;
use crate::gpu::xid::Told;
use crate::gpu_node::quota_overrides::Orders;
use crate::gpu_node::{Events, FaultReport};
use crate::ledger::Moment;
use crate::metrics::Metrics;
use crate::node::actor::Snapshot;
use crate::sessions::{Sessions, Suspect};

/// How often the kernel's log is read, and what is overdue looked for.
const EVERY: Duration = Duration::from_millis(200);

/// What the loop works with.
pub struct Around {
    /// Where the log is, and `/proc`.
    pub paths: PathsConfig,
    /// Who knows the processes.
    pub sessions: Arc<Sessions>,
    /// The node's containers.
    pub snapshots: watch::Receiver<Snapshot>,
    /// What the node's `GpuNode` orders; none before the API server told any.
    pub orders: watch::Receiver<Option<Orders>>,
    /// What NVML told of XIDs lately.
    pub xids: watch::Receiver<Told>,
    /// Since when the node's status could not be written; none while it can.
    pub unheard: watch::Receiver<Option<Instant>>,
    /// Where people are told.
    pub events: Events,
    /// Where it is counted.
    pub metrics: Metrics,
}

/// Acts on faults until `stop`, and keeps `faults` at those that are open.
pub async fn run(around: Around, faults: watch::Sender<Vec<FaultReport>>, stop: CancellationToken) {
    let news = around.sessions.news();
    let (mut waits, mut waiting) = (around.sessions.wait_for_log(), Vec::new());
    let mut log = opened(&around.paths.kernel_log);
    let (mut generations, mut claims) = (BTreeMap::new(), Waiting::default());
    let mut xids = around.xids.clone();
    let mut every = interval(EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = news.notified() => {}
            Ok(()) = xids.changed() => {}
            1.. = waits.recv_many(&mut waiting, waits.max_capacity()) => {}
            _ = every.tick() => {}
        }
        let now = clock::present();
        around.order(now);
        let read = log.as_mut().map(|log| log.read(now.moment));
        let (named, is_whole) = read.unwrap_or((Vec::new(), true));
        for (named, at) in named {
            // Before an image is greeted that took the process over.
            if let Some(suspect) = around.suspect(named, at) {
                claims.push(named, at, suspect);
            }
        }
        let told = xids.borrow_and_update().clone();
        for (named, suspect) in claims.confirmed(&told, now.moment) {
            around.sessions.xid(&suspect, named.xid, now);
            info!(
                pid = named.pid,
                xid = named.xid,
                "xid of a container's process"
            );
        }
        if is_whole {
            for waits in waiting.drain(..) {
                // One that waited too long has gone.
                let _ = waits.send(());
            }
        } else if !waiting.is_empty() {
            every.reset_immediately();
        }
        around.tell(now);
        around.kill();
        let open = around.open(&mut generations);
        faults.send_if_modified(|before| {
            let changed = *before != open;
            *before = open;
            changed
        });
    }
}

impl Around {
    fn order(&self, now: Present) {
        let Some(Orders {
            contexts, restarts, ..
        }) = &*self.orders.borrow()
        else {
            return;
        };
        for container in self.snapshots.borrow().containers.iter() {
            let allocation = &container.allocation;
            if let Some(policy) = policy::policy(contexts, container) {
                self.sessions.set_context_policy(allocation, policy);
            }
            if let Some(generation) = policy::reach(restarts, container) {
                self.sessions.reach(allocation, generation, now);
            }
        }
    }

    fn suspect(&self, Named { gpu, pid, .. }: Named, at: Moment) -> Option<Suspect> {
        let on = self.snapshots.borrow().inventory.at(gpu);
        self.sessions.suspect(pid, &on, at)
    }

    fn tell(&self, now: Present) {
        let alone = self.unheard.borrow().map(|since| since.elapsed());
        let faults = self.sessions.new_faults(alone.unwrap_or_default(), now);
        if faults.is_empty() {
            return;
        }
        let containers = &self.snapshots.borrow().containers;
        for (allocation, fault) in faults {
            self.metrics.poisoned(&fault);
            events::event(&self.events, &allocation, &fault, containers);
        }
    }

    /// Again and again until the image has ended.
    fn kill(&self) {
        for (allocation, process) in self.sessions.condemned() {
            match kill(&self.paths.proc, process) {
                Ok(true) => warn!(%allocation, pid = process.pid, "killed for a poisoned context"),
                Ok(false) => {}
                Err(error) => warn!(%allocation, pid = process.pid, %error, "not killed"),
            }
        }
    }

    /// `generations`: G of the GPU when each fault was first seen.
    fn open(&self, generations: &mut BTreeMap<String, u64>) -> Vec<FaultReport> {
        let open = self.sessions.faults();
        let snapshot = self.snapshots.borrow();
        let reports = open.into_iter().map(|(allocation, fault)| {
            let now = snapshot.generations.get(&fault.gpu).copied();
            let id = events::id(&allocation, &fault);
            let generation = *generations.entry(id).or_insert(now.unwrap_or_default());
            events::report(&allocation, &fault, generation, &snapshot.containers)
        });
        let reports: Vec<_> = reports.collect();
        generations.retain(|id, _| reports.iter().any(|report| report.id == *id));
        reports
    }
}

/// None where it cannot be read: the shims' reports are all that is known then.
fn opened(path: &Path) -> Option<Log> {
    Log::open(path)
        .inspect_err(|error| {
            warn!(path = %path.display(), %error, "the kernel's log is not read: XIDs name no processes");
        })
        .ok()
}
