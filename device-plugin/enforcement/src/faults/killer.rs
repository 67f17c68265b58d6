//! Kills the processes that the sessions condemn for faults.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bursar_ledger::BootTime;
use bursar_sessions::{CondemnedProcess, Process, Sessions};
use tracing::warn;

use super::forked_children::ProcessTree;
use crate::audit::kill::kill;

/// The time between two log lines about a process that does not end.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Kills condemned processes, and remembers them until they are condemned no more.
pub struct Killer {
    proc: PathBuf,
    sessions: Arc<Sessions>,
    /// The condemned processes, each with the time of its last log line.
    condemned: BTreeMap<CondemnedProcess, BootTime>,
}

impl Killer {
    /// Kills processes below `proc`, the host's `/proc`.
    pub fn new(proc: PathBuf, sessions: Arc<Sessions>) -> Killer {
        Killer {
            proc,
            sessions,
            condemned: BTreeMap::new(),
        }
    }

    /// Kills each condemned process, and the forked children of those that end alone. The caller
    /// tries again until no process is condemned: a process in an uninterruptible wait ends late.
    pub fn kill_condemned(&mut self, now: BootTime) {
        let condemned = self.sessions.processes_to_kill(now);
        self.condemned.retain(|known, _| condemned.contains(known));
        // A child that outlives its parent has another parent, so the tree is read before the kill.
        let mut tree = None;
        for target in condemned {
            let (is_first, is_logged) = note(&mut self.condemned, target, now);
            let mut processes = vec![target.process];
            if target.ends_alone && is_first {
                let tree = tree.get_or_insert_with(|| ProcessTree::read(&self.proc));
                let mut children = tree.take_device_holders(target.process);
                children.retain(|child| !self.sessions.has_session(&target.allocation, *child));
                processes.extend(children);
            }
            for process in processes {
                self.kill(&target, process, is_logged);
            }
        }
    }

    fn kill(&self, condemned: &CondemnedProcess, process: Process, is_logged: bool) {
        let CondemnedProcess {
            allocation,
            process: _,
            ends_alone,
        } = condemned;
        let pid = process.pid;
        match kill(&self.proc, process) {
            Ok(true) if is_logged => {
                warn!(%allocation, pid, ends_alone, "killed a process for a poisoned context");
            }
            Err(error) if is_logged => {
                warn!(%allocation, pid, %error, "failed to kill a process");
            }
            Ok(_) | Err(_) => {}
        }
    }
}

/// Notes a try. Returns whether it is the first one, and whether it is logged.
fn note(
    condemned: &mut BTreeMap<CondemnedProcess, BootTime>,
    target: CondemnedProcess,
    now: BootTime,
) -> (bool, bool) {
    match condemned.entry(target) {
        Entry::Vacant(first) => {
            first.insert(now);
            (true, true)
        }
        Entry::Occupied(mut logged) if now.since(*logged.get()) >= LOG_INTERVAL => {
            logged.insert(now);
            (false, true)
        }
        Entry::Occupied(_) => (false, false),
    }
}

#[cfg(test)]
mod tests {
    use bursar_ledger::units::AllocationId;

    use super::*;

    #[test]
    fn process_that_does_not_end_is_logged_once_a_minute() {
        let target = CondemnedProcess {
            allocation: AllocationId::from_bits(1),
            process: Process { pid: 7, start: 70 },
            ends_alone: true,
        };
        let (mut condemned, mut lines) = (BTreeMap::new(), 0);
        for tick in 0..600_u64 {
            let (is_first, is_logged) = note(&mut condemned, target, BootTime(200 * tick));
            assert_eq!(is_first, tick == 0);
            lines += usize::from(is_logged);
        }
        assert_eq!(lines, 2, "two minutes");
    }
}
