//! Starts the programs of the node process, and reaps every descendant.

use std::collections::{BTreeMap, HashMap};
use std::fs::OpenOptions;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};

/// The state of a program: its pid while it runs, then its exit code or signal in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ProcessState {
    Running(i32),
    Ended(String),
}

/// The programs that the node process was told to start, by name.
#[derive(Debug, Default)]
pub(super) struct Processes {
    states: Mutex<HashMap<String, ProcessState>>,
    ended: Condvar,
}

impl Processes {
    /// Locks the map. A poisoned lock is harmless, because each change is one insertion.
    fn states(&self) -> MutexGuard<'_, HashMap<String, ProcessState>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a program.
    ///
    /// # Errors
    /// When the name is in use, or the program or its log cannot be opened.
    pub(super) fn spawn(
        &self,
        name: &str,
        program: &Path,
        arguments: &[String],
        environment: &BTreeMap<String, String>,
        log: &Path,
    ) -> io::Result<i32> {
        // The lock is released once the child is in the map, or the reaper would miss its exit.
        let mut states = self.states();
        if let Some(ProcessState::Running(pid)) = states.get(name) {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{name} runs already, as {pid}"),
            ));
        }
        if !program.exists() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("{} is not there", program.display()),
            ));
        }
        let log = OpenOptions::new().create(true).append(true).open(log)?;
        let child = Command::new(program)
            .args(arguments)
            .envs(environment)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let pid = child.id().cast_signed();
        states.insert(name.to_owned(), ProcessState::Running(pid));
        Ok(pid)
    }

    /// Returns the state of the program.
    pub(super) fn state(&self, name: &str) -> Option<ProcessState> {
        self.states().get(name).cloned()
    }

    /// Sends SIGTERM to the program, or SIGKILL with `kill`, and waits for its exit. A program that
    /// ignores SIGTERM for `patience` is killed. Its descendants get no signal.
    ///
    /// # Errors
    /// When the program was never started, or survives SIGKILL by `patience`.
    pub(super) fn end(&self, name: &str, kill: bool, patience: Duration) -> io::Result<String> {
        let signals: &[Signal] = if kill {
            &[Signal::KILL]
        } else {
            &[Signal::TERM, Signal::KILL]
        };
        for signal in signals {
            match self.state(name) {
                None => {
                    return Err(io::Error::new(
                        io::ErrorKind::NotFound,
                        format!("{name} was never started"),
                    ));
                }
                Some(ProcessState::Ended(how)) => return Ok(how),
                Some(ProcessState::Running(pid)) => {
                    let sent = Pid::from_raw(pid).map(|pid| kill_process(pid, *signal));
                    match sent {
                        // The reaper has taken the exit already, and records it next.
                        None | Some(Ok(()) | Err(Errno::SRCH)) => {}
                        Some(Err(error)) => return Err(error.into()),
                    }
                }
            }
            if let Some(how) = self.wait(name, patience) {
                return Ok(how);
            }
        }
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("{name} lives on after SIGKILL and {patience:?}"),
        ))
    }

    /// Waits for the end of every program, for at most `patience` each. The caller has killed them.
    ///
    /// # Errors
    /// When a program lives on after `patience`.
    pub(super) fn wait_for_all(&self, patience: Duration) -> io::Result<()> {
        let names: Vec<String> = self.states().keys().cloned().collect();
        for name in names {
            self.wait(&name, patience).ok_or_else(|| {
                io::Error::new(io::ErrorKind::TimedOut, format!("{name} lives on"))
            })?;
        }
        Ok(())
    }

    fn wait(&self, name: &str, patience: Duration) -> Option<String> {
        let until = Instant::now() + patience;
        let mut states = self.states();
        loop {
            if let Some(ProcessState::Ended(how)) = states.get(name) {
                return Some(how.clone());
            }
            let left = until.checked_duration_since(Instant::now())?;
            states = self
                .ended
                .wait_timeout(states, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Reaps children and adopted orphans forever. Only a reaped program has the state `Ended`, so
    /// a thread of the node process must run this.
    pub(super) fn reap_forever(&self) {
        loop {
            match wait(WaitOptions::empty()) {
                Ok(Some((pid, status))) => self.record_exit(pid.as_raw_nonzero().get(), status),
                // The process has no child at present.
                Ok(None) | Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    fn record_exit(&self, pid: i32, status: WaitStatus) {
        let mut states = self.states();
        for state in states
            .values_mut()
            .filter(|state| **state == ProcessState::Running(pid))
        {
            *state = ProcessState::Ended(describe(status));
        }
        self.ended.notify_all();
    }
}

fn describe(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown end".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pid that no process has, since it is above the kernel's limit (`PID_MAX_LIMIT`).
    const REAPED: i32 = 1 << 22;

    #[test]
    fn end_waits_for_the_record_when_the_exit_was_reaped() {
        let processes = Processes::default();
        let running = ProcessState::Running(REAPED);
        processes.states().insert("program".to_owned(), running);
        let ended = processes.end("program", true, Duration::from_millis(1));
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
