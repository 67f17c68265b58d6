//! Ends checks that hang, so that a run always reports what it has seen.

use std::io;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The longest run of a check outside of the long tier. It is four times that of the slowest check,
/// the trials on the cluster, on two cores.
pub(super) const CHECK_TIMEOUT: Duration = Duration::from_secs(70 * 60);

/// The longest run of a check of the long tier.
pub(super) const LONG_TIMEOUT: Duration = Duration::from_secs(4 * 60 * 60);

const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Waits for the exit of a child, and kills it with its descendants after `timeout`.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] after `timeout`, or the operating system's error.
pub(super) fn wait_within(child: &mut Child, timeout: Duration) -> io::Result<ExitStatus> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if start.elapsed() >= timeout {
            kill_tree(child);
            child.wait()?;
            let message = format!("still running after {timeout:?}; it was killed");
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Kills a child and its descendants. All are stopped before the first is killed: until then a
/// process could fork, and a killed process no longer leads to its children.
fn kill_tree(child: &Child) {
    let mut pids = vec![child.id()];
    send(&pids, Signal::STOP);
    loop {
        let found = pids.iter().flat_map(|pid| children(*pid));
        let new: Vec<u32> = found.filter(|pid| !pids.contains(pid)).collect();
        if new.is_empty() {
            break;
        }
        send(&new, Signal::STOP);
        pids.extend(new);
    }
    send(&pids, Signal::KILL);
}

/// Sends a signal to those of the processes that have not exited meanwhile.
fn send(pids: &[u32], signal: Signal) {
    for pid in pids {
        let pid = i32::try_from(*pid).ok().and_then(Pid::from_raw);
        pid.map(|pid| kill_process(pid, signal).ok());
    }
}

/// Returns the child processes of every thread of a process.
fn children(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter();
    let threads = threads.flatten().flatten();
    let lists =
        threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|pids| {
            let pids = pids.split_whitespace().flat_map(str::parse);
            pids.collect::<Vec<u32>>()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn child_is_killed_with_its_descendants_at_the_deadline() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 600 & echo started; wait"]);
        let mut child = shell.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = child.stdout.take().unwrap();
        output.read_exact(&mut [0; 8]).unwrap();
        let error = wait_within(&mut child, Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // The output ends only when the shell and its descendant have exited.
        assert_eq!(output.read_to_end(&mut Vec::new()).unwrap(), 0);
    }

    #[test]
    fn child_that_ends_in_time_has_its_status() {
        let mut child = Command::new("false").spawn().unwrap();
        let status = wait_within(&mut child, Duration::from_secs(60)).unwrap();
        assert_eq!(status.code(), Some(1));
    }
}
