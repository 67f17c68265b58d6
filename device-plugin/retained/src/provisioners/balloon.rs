//! Holds device memory for a moment in a process of its own, to displace managed memory.
//!
//! The process prints the bytes that it holds, keeps them until its input is closed, and prints
//! them again before it exits. Only the second line shows that the memory was held until then: a
//! process that was killed, or that took too long, prints none.

use std::collections::BTreeMap;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bursar_ledger::units::{Bytes, GpuUuid};
use bursar_sessions::{Balloon, BalloonError};
use serde::Deserialize;
use tracing::warn;

use super::Provisioners;
use crate::scrub_check::read_line;

/// The time for the start of the process and its last allocation.
const START_TIME: Duration = Duration::from_millis(500);

/// How long the process may take to confirm what it has held.
const CONFIRM_TIMEOUT: Duration = Duration::from_millis(250);

/// How long the process may take to exit, which frees the memory. Then it has got SIGKILL.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// How often the agent checks whether the process has exited.
const EXIT_POLL: Duration = Duration::from_millis(5);

/// After so long a process that got SIGKILL hangs in the driver.
const HUNG_AFTER: Duration = Duration::from_secs(2);

/// How often the agent checks whether a process that got SIGKILL late has exited.
const HUNG_POLL: Duration = Duration::from_millis(100);

/// A line that the process prints.
#[derive(Deserialize)]
struct Held {
    bytes: u64,
}

impl Balloon for Provisioners {
    fn hold(
        &self,
        gpu: &GpuUuid,
        bytes: Bytes,
        look_time: Duration,
        until: Instant,
        look: &mut dyn FnMut(Bytes, Instant),
    ) -> Result<(), BalloonError> {
        let look_from = until - EXIT_TIMEOUT - CONFIRM_TIMEOUT - look_time;
        let allocates = look_from.saturating_duration_since(Instant::now() + START_TIME);
        let mut command = self.program.command(gpu);
        command.args(["balloon", "--gpu", gpu.as_str()]);
        command.args(["--bytes", &bytes.0.to_string()]);
        command.args(["--milliseconds", &allocates.as_millis().to_string()]);
        let held = self.run_balloon(gpu, command, look_from, until, look);
        held.map_err(|cause| BalloonError {
            gpu: gpu.clone(),
            cause,
        })
    }
}

impl Provisioners {
    /// Whether the process of a GPU's last balloon has not exited. A process that hangs in the
    /// driver does not, though it got SIGKILL.
    pub(super) fn has_balloon(&self, gpu: &GpuUuid) -> bool {
        is_running(&mut self.balloons(), gpu)
    }

    fn balloons(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, Child>> {
        self.balloons.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_balloon(
        &self,
        gpu: &GpuUuid,
        mut command: Command,
        look_from: Instant,
        until: Instant,
        look: &mut dyn FnMut(Bytes, Instant),
    ) -> Result<(), String> {
        let exit_at = until - EXIT_TIMEOUT;
        let look_until = exit_at - CONFIRM_TIMEOUT;
        let (input, output) = {
            // A drain that begins later sees this process.
            let mut balloons = self.balloons();
            if is_running(&mut balloons, gpu) {
                return Err("the last process hangs in the driver".to_owned());
            }
            if self.threads().is_barred(gpu) {
                return Err("the GPU is drained or lost".to_owned());
            }
            let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
            let mut child = child.map_err(|error| {
                let program = command.get_program().display();
                format!("{program}: {error}")
            })?;
            let pipes = (child.stdin.take(), child.stdout.take());
            balloons.insert(gpu.clone(), child);
            pipes
        };
        let held = output.ok_or("its process has no output".to_owned());
        let held = held.and_then(|mut output| {
            let first = read_held(&mut output, look_from)?;
            look(first, look_until);
            drop(input);
            let second = read_held(&mut output, exit_at)?;
            match first == second {
                true => Ok(()),
                false => Err(format!("it held {first}, and {second} afterwards")),
            }
        });
        if held.is_err() {
            // Its memory must be free when the grants of the GPU go on.
            self.kill_balloon(gpu);
        }
        self.wait_for_balloon(gpu, until);
        match Instant::now() <= until {
            true => held,
            false => Err("its process did not exit in time".to_owned()),
        }
    }

    /// Waits until the process of a balloon has exited, kills it at `until`, and reports the GPU as
    /// unfit while it hangs.
    fn wait_for_balloon(&self, gpu: &GpuUuid, until: Instant) {
        let mut hangs = false;
        while self.has_balloon(gpu) {
            let late = Instant::now().saturating_duration_since(until);
            if late.is_zero() {
                std::thread::sleep(EXIT_POLL);
                continue;
            }
            self.kill_balloon(gpu);
            if late >= HUNG_AFTER && !hangs {
                hangs = true;
                warn!(%gpu, "the process of a balloon hangs in the driver");
                self.records.set_balloon_hung(gpu, true);
            }
            std::thread::sleep(HUNG_POLL);
        }
        self.records.set_balloon_hung(gpu, false);
    }

    fn kill_balloon(&self, gpu: &GpuUuid) {
        if let Some(child) = self.balloons().get_mut(gpu) {
            let _ = child.kill();
        }
    }
}

fn is_running(balloons: &mut BTreeMap<GpuUuid, Child>, gpu: &GpuUuid) -> bool {
    let status = balloons.get_mut(gpu).map(Child::try_wait);
    let is_running = matches!(status, Some(Ok(None)));
    if !is_running {
        balloons.remove(gpu);
    }
    is_running
}

fn read_held(output: &mut ChildStdout, until: Instant) -> Result<Bytes, String> {
    let line = read_line(output, until)?;
    let held: Result<Held, _> = serde_json::from_str(&line);
    let held = held.map_err(|error| format!("its process printed {line:?}: {error}"))?;
    Ok(Bytes(held.bytes))
}

#[cfg(test)]
mod tests {
    use bursar_gpu::health::UnhealthyReason;

    use super::*;
    use crate::provisioners::Program;

    fn gpu() -> GpuUuid {
        "GPU-a".parse().unwrap()
    }

    /// Runs a script as the balloon's process. Returns the bytes that the look received, and the
    /// outcome.
    fn run(script: &str) -> (Option<Bytes>, Result<(), String>) {
        let folder = tempfile::tempdir().unwrap();
        let provisioners = Provisioners::new(Program::without_driver(folder.path(), "none"));
        run_on(&provisioners, script)
    }

    fn run_on(provisioners: &Provisioners, script: &str) -> (Option<Bytes>, Result<(), String>) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let (mut received, until) = (None, Instant::now() + Duration::from_secs(20));
        let look = &mut |bytes, _| received = Some(bytes);
        let held = provisioners.run_balloon(&gpu(), command, until, until, look);
        (received, held)
    }

    #[test]
    fn balloon_counts_only_when_held_until_its_input_closes() {
        let line = r#"echo '{"bytes":7}'"#;
        let (received, held) = run(&format!("{line}; read closed; {line}"));
        assert_eq!((received, held), (Some(Bytes(7)), Ok(())));
        for script in [line.to_owned(), format!("{line}; kill -9 $$")] {
            let (received, held) = run(&script);
            assert_eq!(received, Some(Bytes(7)));
            assert!(held.is_err(), "{script}");
        }
        let (_, less) = run(&format!(r#"{line}; read closed; echo '{{"bytes":6}}'"#));
        assert!(less.is_err());
        assert!(run("echo hello").1.is_err());
    }

    #[test]
    fn balloon_ends_at_its_deadline_when_it_does_not_answer() {
        let folder = tempfile::tempdir().unwrap();
        let provisioners = Provisioners::new(Program::without_driver(folder.path(), "none"));
        let line = r#"echo '{"bytes":7}'"#;
        for (script, is_received) in [("true", false), (line, true)] {
            let start = Instant::now();
            let until = start + Duration::from_secs(4);
            let mut command = Command::new("sh");
            command.args(["-c", &format!("{script}; exec sleep 60")]);
            let mut received = None;
            let look = &mut |_, look_until| {
                received = Some(look_until);
                let left = |until: Instant| until.saturating_duration_since(Instant::now());
                std::thread::sleep(left(look_until));
            };
            let look_from = start + Duration::from_secs(2);
            let held = provisioners.run_balloon(&gpu(), command, look_from, until, look);
            assert!(held.is_err() && start.elapsed() < Duration::from_secs(20));
            assert!(!provisioners.has_balloon(&gpu()));
            assert_eq!(received.is_some(), is_received);
            assert!(received.is_none_or(|received| received + EXIT_TIMEOUT < until));
        }
    }

    #[test]
    fn gpu_is_unfit_while_the_process_of_a_balloon_hangs() {
        let folder = tempfile::tempdir().unwrap();
        let provisioners = Provisioners::new(Program::without_driver(folder.path(), "none"));
        let hung = Command::new("sleep").arg("60").spawn().unwrap();
        provisioners.balloons().insert(gpu(), hung);
        provisioners.records.set_balloon_hung(&gpu(), true);
        let unfit = provisioners.unfit();
        let hangs = BTreeMap::from([(gpu(), UnhealthyReason::ProvisionerHung)]);
        assert_eq!(*unfit.borrow(), hangs);
        provisioners.records.update(&gpu(), |_| ());
        provisioners.records.publish_fitness(&gpu());
        assert_eq!(*unfit.borrow(), hangs, "a fit provisioner changes nothing");
        // SIGKILL ends this process.
        provisioners.wait_for_balloon(&gpu(), Instant::now());
        assert!(unfit.borrow().is_empty() && !provisioners.has_balloon(&gpu()));
    }

    #[test]
    fn balloon_waits_for_the_last_process_and_for_a_drain() {
        let folder = tempfile::tempdir().unwrap();
        let provisioners = Provisioners::new(Program::without_driver(folder.path(), "none"));
        let hung = Command::new("sleep").arg("60").spawn().unwrap();
        provisioners.balloons().insert(gpu(), hung);
        assert!(provisioners.may_hold(&gpu()), "a drain waits for it");
        let line = r#"echo '{"bytes":7}'"#;
        let script = format!("{line}; read closed; {line}");
        let (_, held) = run_on(&provisioners, &script);
        assert_eq!(held, Err("the last process hangs in the driver".to_owned()));
        provisioners
            .balloons()
            .get_mut(&gpu())
            .unwrap()
            .kill()
            .unwrap();
        while provisioners.has_balloon(&gpu()) {
            std::thread::yield_now();
        }
        provisioners.drain([gpu()].into());
        let (_, held) = run_on(&provisioners, &script);
        assert_eq!(held, Err("the GPU is drained or lost".to_owned()));
        provisioners.drain([].into());
        assert_eq!(run_on(&provisioners, &script).1, Ok(()));
    }
}
