//! Kills a process, and never another one that reuses its pid.

use std::io;
use std::path::Path;

use bursar_host::procfs::Stat;
use bursar_sessions::Process;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Sends SIGKILL to `process`; false where it has ended. `proc` is the host's `/proc`.
///
/// # Errors
/// Errors of `pidfd_open(2)` and `pidfd_send_signal(2)`.
pub fn kill(proc: &Path, process: Process) -> io::Result<bool> {
    let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    let pinned = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(false),
        pinned => pinned?,
    };
    // The pidfd pins the pid, so this is the start time of the pinned process, or it has ended.
    let start = Stat::read(proc, process.pid).map(|stat| stat.start_ticks);
    if start != Some(process.start) {
        return Ok(false);
    }
    match pidfd_send_signal(pinned, Signal::KILL) {
        Err(rustix::io::Errno::SRCH) => Ok(false),
        sent => Ok(sent.map(|()| true)?),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn kill_spares_a_process_that_reuses_the_pid() {
        let proc = Path::new("/proc");
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let start = Stat::parse(&text).unwrap().start_ticks;
        let earlier = Process {
            pid,
            start: start - 1,
        };
        assert!(!kill(proc, earlier).unwrap());
        assert!(child.try_wait().unwrap().is_none());
        let process = Process { pid, start };
        assert!(kill(proc, process).unwrap());
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        assert!(!kill(proc, process).unwrap(), "it is gone");
    }

    #[test]
    fn kill_ends_a_process_when_its_name_is_not_utf8() {
        let (mut child, _folder) = bursar_host::testing::process_with_non_utf8_name();
        let pid = child.id();
        let text =
            bursar_host::procfs::read_small(Path::new(&format!("/proc/{pid}/stat"))).unwrap();
        let start = Stat::parse(&text).unwrap().start_ticks;
        assert!(kill(Path::new("/proc"), Process { pid, start }).unwrap());
        assert_eq!(child.wait().unwrap().signal(), Some(9));
    }
}
