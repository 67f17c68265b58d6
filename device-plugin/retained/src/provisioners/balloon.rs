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

use super::Provisioners;
use crate::scrub_check::read_line;

/// How long the process may take to start and to allocate; it stops to allocate after two seconds
/// (`provisioner/src/balloon.rs`).
const INFLATE_TIMEOUT: Duration = Duration::from_millis(2_500);

/// How long the process may take to exit, which frees the memory.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// How often the agent checks whether the process has exited.
const EXIT_POLL: Duration = Duration::from_millis(5);

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
        look: &mut dyn FnMut(Bytes),
    ) -> Result<(), BalloonError> {
        let mut command = self.program.command(gpu);
        command.args(["balloon", "--gpu", gpu.as_str(), "--bytes"]);
        command.arg(bytes.0.to_string());
        let held = self.run_balloon(gpu, command, look);
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
        look: &mut dyn FnMut(Bytes),
    ) -> Result<(), String> {
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
            let first = read_held(&mut output, INFLATE_TIMEOUT)?;
            look(first);
            drop(input);
            let second = read_held(&mut output, EXIT_TIMEOUT)?;
            match first == second {
                true => Ok(()),
                false => Err(format!("it held {first}, and {second} afterwards")),
            }
        });
        if held.is_err()
            && let Some(child) = self.balloons().get_mut(gpu)
        {
            // Its memory must be free when the grants of the GPU go on.
            let _ = child.kill();
        }
        let until = Instant::now() + EXIT_TIMEOUT;
        while self.has_balloon(gpu) {
            if Instant::now() >= until {
                return Err("its process hangs in the driver".to_owned());
            }
            std::thread::sleep(EXIT_POLL);
        }
        held
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

fn read_held(output: &mut ChildStdout, timeout: Duration) -> Result<Bytes, String> {
    let line = read_line(output, Instant::now() + timeout)?;
    let held: Result<Held, _> = serde_json::from_str(&line);
    let held = held.map_err(|error| format!("its process printed {line:?}: {error}"))?;
    Ok(Bytes(held.bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provisioners::Program;

    fn gpu() -> GpuUuid {
        "GPU-a".parse().unwrap()
    }

    /// Runs a script as the balloon's process. Returns what the look was told, and the outcome.
    fn run(script: &str) -> (Option<Bytes>, Result<(), String>) {
        let folder = tempfile::tempdir().unwrap();
        let provisioners = Provisioners::new(Program::without_driver(folder.path(), "none"));
        run_on(&provisioners, script)
    }

    fn run_on(provisioners: &Provisioners, script: &str) -> (Option<Bytes>, Result<(), String>) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut told = None;
        let held = provisioners.run_balloon(&gpu(), command, &mut |bytes| told = Some(bytes));
        (told, held)
    }

    #[test]
    fn balloon_counts_only_when_held_until_its_input_closes() {
        let line = r#"echo '{"bytes":7}'"#;
        let (told, held) = run(&format!("{line}; read closed; {line}"));
        assert_eq!((told, held), (Some(Bytes(7)), Ok(())));
        for ends_early in [line.to_owned(), format!("{line}; kill -9 $$")] {
            let (told, held) = run(&ends_early);
            assert_eq!(told, Some(Bytes(7)));
            assert!(held.is_err(), "{ends_early}");
        }
        let (_, less) = run(&format!(r#"{line}; read closed; echo '{{"bytes":6}}'"#));
        assert!(less.is_err());
        assert!(run("echo hello").1.is_err());
    }

    #[test]
    fn balloon_that_does_not_answer_is_killed() {
        let begun = Instant::now();
        let (told, held) = run("exec sleep 60");
        assert_eq!(told, None);
        assert!(held.is_err());
        assert!(begun.elapsed() < Duration::from_secs(20));
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
