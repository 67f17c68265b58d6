//! Counts the allocations that processes were denied, and limits log lines about them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bursar_protocol::messages::REFUSED_BY_DRIVER;

use bursar_ledger::units::Bytes;

use super::super::lock;
use super::super::usage::DeniedAllocation;
use super::memory::ContainerMemory;

/// The most function names that the agent counts for one container, since its processes choose the
/// names.
const MAX_FUNCTIONS: usize = 32;
/// The name under which denials of all further functions count.
const OTHER_FUNCTIONS: &str = "other";

/// How often a container's refusals for the same reason are logged, since a program may ask in a
/// loop.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Why the agent refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RefusalReason {
    /// The image is poisoned, or its GPU is being drained.
    Fenced,
    /// The checkpoint is lost, and the driver has not yet shown which processes have memory.
    RecordLost,
    /// The quota has too few free bytes.
    Quota,
    /// The agent could not write the grant to the checkpoint.
    Unrecorded,
    /// The process has no page that accepts the grant.
    NoPage,
}

impl RefusalReason {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            RefusalReason::Fenced => "fenced",
            RefusalReason::RecordLost => "record-lost",
            RefusalReason::Quota => "quota",
            RefusalReason::Unrecorded => "unrecorded",
            RefusalReason::NoPage => "no-page",
        }
    }
}

/// The last log line of each reason, and the lines left out since.
#[derive(Debug, Default)]
pub(super) struct LogLimiter(BTreeMap<String, (Instant, u64)>);

impl LogLimiter {
    /// Returns the number of lines left out for the same reason if a line is due now; otherwise
    /// counts another one.
    pub(super) fn due(&mut self, reason: &str, now: Instant) -> Option<u64> {
        let Some((logged_at, suppressed)) = self.0.get_mut(reason) else {
            self.0.insert(reason.to_owned(), (now, 0));
            return Some(0);
        };
        if now.saturating_duration_since(*logged_at) < LOG_INTERVAL {
            *suppressed = suppressed.saturating_add(1);
            return None;
        }
        *logged_at = now;
        Some(std::mem::take(suppressed))
    }
}

/// Limits log lines for all containers together: a full `/run` or a lack of descriptors affects all
/// of them at the same time.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedLogLimiter(Arc<Mutex<LogLimiter>>);

impl SharedLogLimiter {
    /// Returns the number of lines left out for the same reason if a line is due now.
    pub(crate) fn due(&self, reason: &str, now: Instant) -> Option<u64> {
        lock(&self.0).due(reason, now)
    }
}

/// Counts the allocations that the container's processes were denied.
#[derive(Debug, Default)]
pub(super) struct Denials {
    by_function: BTreeMap<String, u64>,
    last: Option<DeniedAllocation>,
    /// The allocations that the driver refused within the quota.
    by_driver: u64,
}

impl Denials {
    /// Counts a denial. Returns the name under which it counts: that of the function, if the name
    /// is valid and the names are few.
    fn count(&mut self, function: &str) -> String {
        let is_name = (1..=64).contains(&function.len())
            && function
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        // One entry is reserved for all other functions.
        let has_room = self.by_function.len() + 1 < MAX_FUNCTIONS;
        let known = self.by_function.contains_key(function) || has_room;
        let name = if is_name && known {
            function
        } else {
            OTHER_FUNCTIONS
        };
        let count = self.by_function.entry(name.to_owned()).or_default();
        *count = count.saturating_add(1);
        name.to_owned()
    }

    /// The denials by driver function.
    pub(super) fn by_function(&self) -> Vec<(String, u64)> {
        self.by_function.clone().into_iter().collect()
    }

    /// The last denial.
    pub(super) fn last(&self) -> Option<&DeniedAllocation> {
        self.last.as_ref()
    }

    /// The allocations that the driver refused within the quota.
    pub(super) fn by_driver(&self) -> u64 {
        self.by_driver
    }

    /// Records that a process was denied memory. Without a refusal at the same time the shim did
    /// not ask the agent, or got no answer.
    pub(super) fn record(
        &mut self,
        memory: &ContainerMemory,
        log_limiter: &mut LogLimiter,
        pid: u32,
        account: u8,
        bytes: u64,
        function: &str,
    ) {
        if let Some(function) = function.strip_prefix(REFUSED_BY_DRIVER) {
            self.by_driver = self.by_driver.saturating_add(1);
            if let Some(suppressed) = log_limiter.due("refused by the driver", Instant::now()) {
                let allocation = memory.allocation();
                tracing::warn!(
                    %allocation, pid, account, bytes, function, suppressed,
                    "allocation refused by the driver within the quota"
                );
            }
            return;
        }
        let index = usize::from(account);
        let function = self.count(function);
        let denied_account = memory.account(index).cloned();
        self.last = denied_account.map(|account| DeniedAllocation {
            function: function.clone(),
            account,
            bytes: Bytes(bytes),
            quota: Bytes(memory.credit().quota(index).bytes()),
            free: Bytes(memory.credit().free(index).bytes()),
        });
        // The prefix keeps a function name that a peer chose apart from the agent's own reasons.
        let key = format!("denied {function}");
        if let Some(suppressed) = log_limiter.due(&key, Instant::now()) {
            let allocation = memory.allocation();
            tracing::info!(%allocation, pid, account, bytes, function, suppressed, "allocation denied");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_that_peers_name_are_bounded() {
        let mut denials = Denials::default();
        for number in 0..100 {
            denials.count(&format!("cuMemAlloc{number}"));
        }
        assert_eq!(denials.count("not a name\n"), OTHER_FUNCTIONS);
        assert_eq!(denials.count("cuMemAlloc0"), "cuMemAlloc0");
        assert_eq!(denials.by_function().len(), MAX_FUNCTIONS);
        let sum: u64 = denials.by_function().iter().map(|(_, count)| count).sum();
        assert_eq!(sum, 102);
    }

    #[test]
    fn refusals_are_logged_once_a_minute_for_each_reason() {
        let (mut limiter, start) = (LogLimiter::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(limiter.due("quota", after(0)), Some(0));
        assert_eq!(limiter.due("fenced", after(1)), Some(0), "each by itself");
        assert_eq!(limiter.due("quota", after(1)), None);
        assert_eq!(limiter.due("quota", after(59)), None);
        assert_eq!(limiter.due("quota", after(60)), Some(2));
        assert_eq!(limiter.due("quota", after(61)), None);
        assert_eq!(limiter.due("quota", after(300)), Some(1));
    }

    #[test]
    fn log_line_is_due_once_for_all_containers() {
        let (limiter, start) = (SharedLogLimiter::default(), Instant::now());
        let clone = limiter.clone();
        assert_eq!(limiter.due("record", start), Some(0));
        assert_eq!(clone.due("record", start), None);
        assert_eq!(clone.due("accept", start), Some(0));
        let later = start + Duration::from_secs(60);
        assert_eq!(clone.due("record", later), Some(1));
    }
}
