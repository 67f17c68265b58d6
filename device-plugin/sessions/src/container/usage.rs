//! Reports the container's usage to the audit and the metrics, and applies quotas.

use std::sync::Arc;

use bursar_ledger::units::{Bytes, GpuUuid};

use bursar_protocol::units::Units;

use super::super::accounts::NO_PID;
use super::super::closer::SocketCloser;
use super::super::usage::ContainerUsage;
use super::denials::SharedLogLimiter;
use super::quotas::QuotaInForce;
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
            generation: self.generation,
            exited_pids: self.memory.credit.exited_pids(),
            had_managed: self.memory.had_managed(),
            requests: self.requests,
            denied: self.denials.by_function(),
            last_denied: self.denials.last().cloned(),
            driver_refusals: self.denials.by_driver(),
            unclosed_sockets: self.closer.as_ref().map_or(0, |closer| closer.unclosed()),
            poisoned_images: self.fault_log.poisoned,
            ordered_restarts: self.fault_log.restarted,
            restarts_in_place: self.fault_log.restarted_in_place,
            last_fault: self.fault_log.last_fault().cloned(),
        }
    }

    /// Sets the closer of the container's sockets.
    pub(in super::super) fn set_closer(&mut self, closer: Arc<SocketCloser>) {
        self.closer = Some(closer);
    }

    /// Sets the limiter of log lines that concern all containers.
    pub(in super::super) fn set_log_limiter(&mut self, limiter: SharedLogLimiter) {
        self.shared_log_limiter = limiter;
    }

    /// Limits the number of pages that wait for reuse.
    pub(in super::super) fn set_free_page_limit(&mut self, count: usize) {
        self.pages.set_max_free(count);
    }

    /// Replaces what the driver takes of an account beyond what processes are charged.
    pub(in super::super) fn set_overhead(&mut self, gpu: &GpuUuid, bytes: Bytes) {
        let Some(index) = self.memory.account_index(gpu) else {
            return;
        };
        let before = self.memory.credit.overhead(index);
        self.memory
            .credit
            .set_overhead(index, Units::within(bytes.0));
        if self.memory.credit.overhead(index) != before {
            self.reclaim_excess();
            self.memory.refresh_pages();
        }
    }

    /// Lowers an account below the requested quota; `None` removes the override. The checkpoint
    /// holds the override.
    pub(in super::super) fn override_quota(&mut self, account: &Account, bytes: Option<Bytes>) {
        let Some(index) = self
            .memory
            .accounts
            .iter()
            .position(|other| other == account)
        else {
            return;
        };
        let ordered = bytes.map(|bytes| Units::within(bytes.0));
        if !self.quotas.order(index, ordered) {
            return;
        }
        self.apply_quota(index);
        self.write_checkpoint();
    }

    /// Reclaims idle credit beyond the quota: after the quota was lowered, freed bytes must not be
    /// used again.
    pub(in super::super) fn reclaim_excess(&mut self) {
        let mut changed = false;
        for index in 0..self.memory.accounts.len() {
            let excess = self.memory.credit.excess(index);
            if excess > Units::ZERO {
                let before = self.memory.credit.granted(index);
                self.memory.reclaim_idle(NO_PID, index, excess);
                if let Some(covered) = self.memory.credit.covered_by(index) {
                    self.memory
                        .reclaim_idle(NO_PID, covered, self.memory.credit.excess(index));
                }
                changed |= self.memory.credit.granted(index) != before;
            }
        }
        if changed {
            self.write_checkpoint();
        }
    }

    /// Changes the requested quota of an account.
    pub(in super::super) fn set_requested_quota(&mut self, account: &Account, quota: Bytes) {
        let Some(index) = self
            .memory
            .accounts
            .iter()
            .position(|other| other == account)
        else {
            return;
        };
        self.quotas.request(index, Units::within(quota.0));
        self.apply_quota(index);
    }

    /// Applies the requested quota of an account, or a lower override.
    pub(super) fn apply_quota(&mut self, index: usize) {
        let is_managed = self.memory.accounts.get(index) == Some(&Account::Managed);
        let (quota, covered) = match self.quotas.in_force(index, is_managed) {
            QuotaInForce::Own(quota) => (quota, None),
            QuotaInForce::Covered(quota) => (quota, Some(index)),
        };
        if is_managed {
            self.memory.credit.set_covered(covered);
        }
        self.memory.credit.set_quota(index, quota);
        // The quota of covered managed memory follows those of the GPUs.
        for index in 0..self.memory.accounts.len() {
            for slot in self
                .memory
                .processes
                .values()
                .filter_map(|state| state.page.as_ref()?.slot(index))
            {
                slot.set_quota(self.memory.credit.quota(index));
            }
        }
        self.reclaim_excess();
    }
}
