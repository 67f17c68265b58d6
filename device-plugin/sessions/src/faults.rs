//! Reports the faults of containers, and which processes they end.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bursar_host::clock::ClockReading;
use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, GpuUuid, PodUid};
use tokio::sync::{Notify, mpsc};

use crate::fault_notifier::KmsgBarrier;
use crate::recovery::{Fault, KillTarget, RecoveryPolicy, XidTarget};
use crate::{CondemnedProcess, RunningContainer, Sessions, lock};

impl Sessions {
    /// Notified each time that a process reports a sticky error.
    pub fn fault_reports(&self) -> Arc<Notify> {
        self.fault_notifier.reports()
    }

    /// Registers the reader of the kernel log, and returns the barriers that it has to release.
    /// From now on each hello waits until the reader has drained the log. Otherwise an XID of the
    /// former image, or of a former process with that pid, would count for the new image.
    pub fn register_kmsg_reader(&self) -> mpsc::Receiver<KmsgBarrier> {
        self.fault_notifier.register_kmsg_reader()
    }

    /// Sets what the agent does about poisoned contexts of an allocation's container. An allocation
    /// that has ended is ignored.
    pub fn set_recovery_policy(&self, allocation: &AllocationId, policy: RecoveryPolicy) {
        let _ = self.with_container(allocation, |container| container.set_policy(policy));
    }

    /// Finds the image of a host process, if its container uses one of the GPUs `on` and the
    /// process had started by then.
    pub fn find_xid_target(&self, pid: u32, on: &[GpuUuid], by: BootTime) -> Option<XidTarget> {
        let find = |running: &RunningContainer| {
            let container = lock(&running.container);
            Some((
                container.find_xid_target(pid, on, by)?,
                container.pod().clone(),
            ))
        };
        let found = lock(&self.shared.containers).values().find_map(find);
        let (mut target, pod) = found?;
        // Reading `/proc` takes time, so the agent does it without the locks.
        target.root = self.resolver.root_process(target.image.process, &pod);
        Some(target)
    }

    /// Records that an image lost its context by this XID. An allocation that has ended is ignored.
    pub fn record_xid(&self, target: &XidTarget, code: u32, now: ClockReading) {
        let _ = self.with_container(&target.allocation, |container| {
            container.record_xid(target, code, now);
        });
    }

    /// Restarts the poisoned images of an allocation's container below this process generation. An
    /// allocation that has ended is ignored.
    pub fn require_generation(
        &self,
        allocation: &AllocationId,
        generation: u64,
        now: ClockReading,
    ) {
        let _ = self.with_container(allocation, |container| {
            container.require_generation(generation, now)
        });
    }

    /// Returns the faults since the last call, after the agent has decided about faults whose
    /// deadline has passed. `unreachable_for` is the time since the agent last reached the API
    /// server.
    pub fn take_new_faults(
        &self,
        unreachable_for: Duration,
        now: ClockReading,
    ) -> Vec<(AllocationId, Fault)> {
        self.collect_from_containers(|container| {
            container.tick_faults(unreachable_for, now);
            container.faults_mut().take_unreported()
        })
    }

    /// The open faults of all containers.
    pub fn open_faults(&self) -> Vec<(AllocationId, Fault)> {
        self.collect_from_containers(|container| container.faults().log().faults().to_vec())
    }

    /// The processes that the agent has to kill for faults.
    pub fn processes_to_kill(&self, now: BootTime) -> BTreeSet<CondemnedProcess> {
        let poisoned = self.collect_from_containers(|container| {
            let pod = container.pod().clone();
            let targets = container.faults().log().kill_targets(now);
            targets.map(|target| (target, pod.clone())).collect()
        });
        // Reading `/proc` takes time, so the agent does it without the locks.
        let condemned = |(allocation, (target, pod)): (AllocationId, (KillTarget, PodUid))| {
            let (process, ends_alone) = match target {
                KillTarget::Process(process) => (process, true),
                KillTarget::RootOf(process) => (self.resolver.root_process(process, &pod)?, false),
                KillTarget::Root(process) => (process, false),
            };
            Some(CondemnedProcess {
                allocation,
                process,
                ends_alone,
            })
        };
        poisoned.into_iter().filter_map(condemned).collect()
    }
}
