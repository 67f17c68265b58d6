//! Reports the container's usage to the audit and the metrics, and applies quotas.

use std::sync::Arc;

use bursar_ledger::units::{Bytes, GpuUuid};

use bursar_protocol::units::Units;

use super::super::closer::SocketCloser;
use super::super::usage::ContainerUsage;
use super::{Account, Container};

impl Container {
    /// The usage at this moment.
    pub(in super::super) fn container_usage(&self) -> ContainerUsage {
        ContainerUsage {
            allocation: self.spec.allocation,
            pod: self.spec.pod.clone(),
            cgroup: self.cgroup.clone(),
            accounts: self.memory.balances(),
            processes: self.memory.process_credits(),
            generation: self.memory.generation(),
            exited_pids: self.memory.credit().exited_pids(),
            had_managed: self.memory.had_managed(),
            requests: self.recorder.request_count(),
            denied: self.denials.by_function(),
            last_denied: self.denials.last().cloned(),
            driver_refusals: self.denials.by_driver(),
            unclosed_sockets: self.closer.as_ref().map_or(0, |closer| closer.unclosed()),
            poisoned_images: self.faults.log().poisoned,
            ordered_restarts: self.faults.log().restarted,
            restarts_in_place: self.faults.log().restarted_in_place,
            last_fault: self.faults.log().last_fault().cloned(),
        }
    }

    /// Sets the closer of the container's sockets.
    pub(in super::super) fn set_closer(&mut self, closer: Arc<SocketCloser>) {
        self.closer = Some(closer);
    }

    /// Replaces what the driver takes of an account beyond what processes are charged.
    pub(in super::super) fn set_overhead(&mut self, gpu: &GpuUuid, bytes: Bytes) {
        if self.memory.set_overhead(gpu, Units::within(bytes.0)) {
            self.reclaim_excess();
            self.memory.refresh_pages();
        }
    }

    /// Lowers an account below the requested quota; `None` removes the override. The checkpoint
    /// holds the override.
    pub(in super::super) fn override_quota(&mut self, account: &Account, bytes: Option<Bytes>) {
        let ordered = bytes.map(|bytes| Units::within(bytes.0));
        if self.memory.order_quota(account, ordered) {
            self.reclaim_excess();
            self.write_checkpoint();
        }
    }

    /// Changes the requested quota of an account.
    pub(in super::super) fn set_requested_quota(&mut self, account: &Account, quota: Bytes) {
        if self.memory.request_quota(account, Units::within(quota.0)) {
            self.reclaim_excess();
        }
    }

    /// Reclaims idle credit beyond the quota: after the quota was lowered, freed bytes must not be
    /// used again.
    pub(in super::super) fn reclaim_excess(&mut self) {
        if self.memory.reclaim_excess() {
            self.write_checkpoint();
        }
    }
}
