//! Checks whether the driver clears memory between tenants: once per boot, GPU generation and
//! driver, in a process of its own.
//!
//! Bursar does not clear retained memory itself (F6 in docs/internals/facts.md), so a GPU gets none
//! before the check has passed. The same process measures what a CUDA context takes, which is what
//! every tenant's context is charged.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_gpu::memory_sample::MemorySampler;
use bursar_host::checkpoint::Checkpoint;
use bursar_ledger::units::{Bytes, GpuUuid};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::provisioners::Program;

/// How long the process may take: it creates a context and reads less than 4 GiB.
const CHECK_TIMEOUT: Duration = Duration::from_secs(60);

/// The most memory that the process takes of a GPU: a context, and what it reads
/// (`provisioner/src/scrub_check.rs`).
pub const MAX_MEMORY: Bytes = Bytes::mib(1024 + 256);

/// The longest line that the agent reads of the output.
const MAX_LINE_LENGTH: usize = 4096;

/// The result for one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Freed memory comes back cleared.
    Scrubbed,
    /// Freed memory comes back with old content.
    NotScrubbed,
    /// The check failed, with this error.
    Unknown(String),
}

/// The lines that the process prints.
#[derive(Deserialize)]
#[serde(tag = "verdict")]
enum ScrubOutput {
    /// The process has a context and no other memory, and waits until its input is closed.
    Context {},
    Scrubbed {},
    NotScrubbed {
        old_words: u64,
    },
    Failed {
        error: String,
    },
}

/// The state that a verdict is valid for: a driver that is loaded again may have other options, and
/// its GPUs other memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DriverEpoch {
    /// The driver's version.
    pub driver: String,
    /// The GPU's generation, if the agent knows it.
    pub generation: Option<u64>,
}

/// The verdicts, in a file that a reboot removes.
#[derive(Debug)]
pub struct ScrubCache {
    file: Checkpoint,
    verdicts: BTreeMap<GpuUuid, (DriverEpoch, Verdict)>,
}

impl ScrubCache {
    /// Loads the verdicts of earlier agents of this boot.
    pub fn load(file: Checkpoint) -> ScrubCache {
        let verdicts = file.load_or_set_aside().unwrap_or_else(|error| {
            warn!(%error, "failed to read the scrub verdicts; the agent checks again");
            None
        });
        ScrubCache {
            file,
            verdicts: verdicts.unwrap_or_default(),
        }
    }

    /// The verdict on a GPU that is valid for `now`.
    pub fn get(&self, gpu: &GpuUuid, now: &DriverEpoch) -> Option<&Verdict> {
        let (epoch, verdict) = self.verdicts.get(gpu)?;
        (epoch == now).then_some(verdict)
    }

    /// Records the verdict on a GPU. A failed check does not change an earlier verdict: the agent
    /// repeats a check to measure the context.
    pub fn record(&mut self, gpu: GpuUuid, epoch: DriverEpoch, verdict: Verdict) {
        let before = self.get(&gpu, &epoch);
        match (&verdict, before) {
            (Verdict::Unknown(error), Some(Verdict::Scrubbed | Verdict::NotScrubbed)) => {
                warn!(%gpu, error, "failed to repeat the scrub check; its earlier verdict stays valid");
                return;
            }
            (Verdict::Scrubbed, _) => info!(%gpu, "freed memory comes back cleared"),
            (other, _) => {
                warn!(%gpu, verdict = ?other, "freed memory is not known to come back cleared; the gpu gets no retained memory")
            }
        }
        self.verdicts.insert(gpu, (epoch, verdict));
        self.save();
    }

    /// Removes the verdicts on all other GPUs.
    pub fn retain_gpus(&mut self, gpus: &BTreeSet<GpuUuid>) {
        let before = self.verdicts.len();
        self.verdicts.retain(|gpu, _| gpus.contains(gpu));
        if self.verdicts.len() != before {
            self.save();
        }
    }

    /// Removes the verdict on a GPU.
    pub fn forget(&mut self, gpu: &GpuUuid) {
        if self.verdicts.remove(gpu).is_some() {
            self.save();
        }
    }

    fn save(&self) {
        // The next agent repeats failed checks.
        let definite: BTreeMap<_, _> = self
            .verdicts
            .iter()
            .filter(|(_, (_, verdict))| !matches!(verdict, Verdict::Unknown(_)))
            .collect();
        if let Err(error) = self.file.save(&definite) {
            warn!(%error, "failed to write the scrub verdict; the next agent checks again");
        }
    }
}

/// The process of a check.
#[derive(Debug, Default)]
pub struct ScrubProcess(Option<Child>);

impl ScrubProcess {
    /// Whether the process has exited. A process that hangs in the driver has not, though it got
    /// SIGKILL.
    pub fn has_ended(&mut self) -> bool {
        let status = self.0.as_mut().map(Child::try_wait);
        !matches!(status, Some(Ok(None)))
    }
}

/// The outcome of a check.
#[derive(Debug)]
pub struct ScrubCheckResult {
    /// Whether freed memory comes back cleared.
    pub verdict: Verdict,
    /// The memory of a context, if NVML reported it; zero if NVML does not list the process.
    pub context: Option<Bytes>,
    /// The process of the check.
    pub process: ScrubProcess,
}

/// Runs a check for at most [`CHECK_TIMEOUT`] and the time of `charges`. The thread does not delay
/// the agent's exit.
pub async fn run_check(
    program: Program,
    gpu: GpuUuid,
    charges: Arc<dyn MemorySampler>,
) -> ScrubCheckResult {
    let (sender, receiver) = oneshot::channel();
    let thread = std::thread::Builder::new()
        .name("scrub-check".to_owned())
        .spawn(move || {
            let mut command = program.command(&gpu);
            command.args(["scrub-check", "--gpu", gpu.as_str()]);
            let (mut process, mut context) = (ScrubProcess::default(), None);
            let measure = |pid| {
                let sample = charges.sample(&gpu);
                context = sample.and_then(|sample| sample.charges.bytes_of(pid));
            };
            let verdict = run_process(command, CHECK_TIMEOUT, &mut process, measure);
            let _ = sender.send(ScrubCheckResult {
                verdict: verdict.unwrap_or_else(Verdict::Unknown),
                context,
                process,
            });
        });
    let unknown = |why: String| ScrubCheckResult {
        verdict: Verdict::Unknown(why),
        context: None,
        process: ScrubProcess::default(),
    };
    match thread {
        Ok(_) => receiver
            .await
            .unwrap_or_else(|_| unknown("its thread has exited".to_owned())),
        Err(error) => unknown(error.to_string()),
    }
}

/// Runs the process until it exits; calls `measure` with its pid while it has a context and no
/// other memory.
fn run_process(
    mut command: Command,
    timeout: Duration,
    process: &mut ScrubProcess,
    measure: impl FnOnce(u32),
) -> Result<Verdict, String> {
    let child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    let child = process.0.insert(child);
    let until = Instant::now() + timeout;
    let verdict = read_verdict(child, until, measure)
        .and_then(|verdict| wait_for_exit(child, until).map(|()| verdict));
    if verdict.is_err() {
        // A process that hangs in the driver would block this thread.
        let _ = child.kill();
    }
    verdict
}

/// Reads the verdict from the output.
fn read_verdict(
    child: &mut Child,
    until: Instant,
    measure: impl FnOnce(u32),
) -> Result<Verdict, String> {
    let input = child.stdin.take();
    let mut output = child.stdout.take().ok_or("the scrub check has no output")?;
    let mut text = read_line(&mut output, until)?;
    if let Ok(ScrubOutput::Context {}) = serde_json::from_str(&text) {
        measure(child.id());
        drop(input);
        text = read_line(&mut output, until)?;
    }
    match serde_json::from_str(&text) {
        Ok(ScrubOutput::Scrubbed {}) => Ok(Verdict::Scrubbed),
        Ok(ScrubOutput::NotScrubbed { old_words }) => {
            warn!(old_words, "freed memory came back with old content");
            Ok(Verdict::NotScrubbed)
        }
        Ok(ScrubOutput::Failed { error }) => Err(error),
        Ok(ScrubOutput::Context {}) => Err("the scrub check reported a second context".to_owned()),
        Err(error) => Err(format!("the scrub check printed {text:?}: {error}")),
    }
}

/// Reads one line of the output, at most [`MAX_LINE_LENGTH`] bytes.
pub(crate) fn read_line(output: &mut ChildStdout, until: Instant) -> Result<String, String> {
    let mut line = Vec::new();
    while line.len() < MAX_LINE_LENGTH {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|error| error.to_string())?;
        match poll(&mut [PollFd::new(output, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err("its process timed out".to_owned()),
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.to_string()),
        }
        let mut byte = [0];
        match output.read(&mut byte).map_err(|error| error.to_string())? {
            0 => break,
            _ if byte == [b'\n'] => break,
            _ => line.extend(byte),
        }
    }
    Ok(String::from_utf8_lossy(&line).into_owned())
}

/// Waits for the exit, so that the process leaves no zombie.
pub(crate) fn wait_for_exit(child: &mut Child, until: Instant) -> Result<(), String> {
    loop {
        match child.try_wait() {
            Ok(Some(_)) => return Ok(()),
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
            Ok(None) => return Err("its process timed out".to_owned()),
            Err(error) => return Err(error.to_string()),
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl From<Child> for ScrubProcess {
    fn from(child: Child) -> ScrubProcess {
        ScrubProcess(Some(child))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict_of(script: &str) -> Result<Verdict, String> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run_process(
            command,
            Duration::from_secs(20),
            &mut ScrubProcess::default(),
            |_| {},
        )
    }

    #[test]
    fn scrub_check_continues_after_measurement() {
        let mut command = Command::new("sh");
        let script = r#"echo '{"verdict":"Context"}'; read never; echo '{"verdict":"Scrubbed"}'"#;
        command.args(["-c", script]);
        let (mut process, mut measured) = (ScrubProcess::default(), None);
        let timeout = Duration::from_secs(20);
        let verdict = run_process(command, timeout, &mut process, |pid| measured = Some(pid));
        assert_eq!(verdict, Ok(Verdict::Scrubbed));
        assert_eq!(measured, process.0.as_ref().map(Child::id));
    }

    #[test]
    fn scrub_check_output_is_bounded() {
        let start = Instant::now();
        assert!(verdict_of("yes | tr -d '\\n'").is_err());
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn hung_scrub_check_is_killed_and_reaped() {
        let mut command = Command::new("sleep");
        command.arg("60");
        let mut process = ScrubProcess::default();
        assert!(run_process(command, Duration::from_millis(20), &mut process, |_| {}).is_err());
        let pid = process.0.as_ref().unwrap().id();
        let until = Instant::now() + Duration::from_secs(20);
        while !process.has_ended() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!std::fs::exists(format!("/proc/{pid}")).unwrap());
    }

    #[test]
    fn only_a_scrubbed_verdict_counts_as_scrubbed() {
        let clean = r#"echo '{"verdict":"Scrubbed","rounds":12,"bytes":2097152}'"#;
        assert_eq!(verdict_of(clean), Ok(Verdict::Scrubbed));
        let dirty = r#"echo '{"verdict":"NotScrubbed","rounds":12,"bytes":2097152,"old_words":3}'"#;
        assert_eq!(verdict_of(dirty), Ok(Verdict::NotScrubbed));
        for other in [
            r#"echo '{"verdict":"Failed","error":"no room"}'"#,
            "exit 1",
            "echo hello",
        ] {
            assert!(verdict_of(other).is_err(), "{other}");
        }
    }

    #[test]
    fn verdicts_are_those_of_the_nodes_gpus() {
        let folder = tempfile::tempdir().unwrap();
        let load = || ScrubCache::load(Checkpoint::new(folder.path().join("scrub.json")));
        let mut verdicts = load();
        for number in 0..1_000 {
            let instance: GpuUuid = format!("MIG-{number}").parse().unwrap();
            let with = DriverEpoch {
                driver: "580".to_owned(),
                generation: Some(1),
            };
            verdicts.record(instance.clone(), with, Verdict::Scrubbed);
            verdicts.retain_gpus(&[instance].into());
        }
        assert_eq!((verdicts.verdicts.len(), load().verdicts.len()), (1, 1));
    }

    #[test]
    fn verdict_stays_when_a_repeated_check_fails() {
        let folder = tempfile::tempdir().unwrap();
        let load = || ScrubCache::load(Checkpoint::new(folder.path().join("scrub.json")));
        let gpu: GpuUuid = "GPU-a".parse().unwrap();
        let with = |generation| DriverEpoch {
            driver: "580".to_owned(),
            generation: Some(generation),
        };
        let busy = Verdict::Unknown("busy".to_owned());
        let mut verdicts = load();
        for verdict in [Verdict::NotScrubbed, Verdict::Scrubbed] {
            verdicts.record(gpu.clone(), with(7), verdict.clone());
            verdicts.record(gpu.clone(), with(7), busy.clone());
            for verdicts in [&verdicts, &load()] {
                assert_eq!(verdicts.get(&gpu, &with(7)), Some(&verdict));
            }
        }
        verdicts.record(gpu.clone(), with(8), busy.clone());
        assert_eq!(verdicts.get(&gpu, &with(8)), Some(&busy));
    }

    #[test]
    fn golden_scrub_verdicts_are_read() {
        let verdict = |gpu: &str, generation, verdict| {
            let epoch = DriverEpoch {
                driver: "580.159.04".to_owned(),
                generation,
            };
            (gpu.parse().unwrap(), (epoch, verdict))
        };
        let verdicts: BTreeMap<GpuUuid, _> = BTreeMap::from([
            verdict("GPU-a", Some(7), Verdict::Scrubbed),
            verdict("GPU-b", None, Verdict::NotScrubbed),
        ]);
        bursar_host::testing::assert_golden_checkpoint("scrubbed.json", &verdicts);
    }

    #[test]
    fn verdicts_of_a_later_version_are_kept_beside() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("scrub.json");
        std::fs::write(&file, r#"{"version":2,"verdicts":[]}"#).unwrap();
        let mut verdicts = ScrubCache::load(Checkpoint::new(file));
        assert!(verdicts.verdicts.is_empty());
        let epoch = DriverEpoch {
            driver: "580".to_owned(),
            generation: Some(7),
        };
        verdicts.record("GPU-a".parse().unwrap(), epoch, Verdict::Scrubbed);
        let kept = std::fs::read_to_string(folder.path().join("scrub.unread"));
        assert_eq!(kept.unwrap(), r#"{"version":2,"verdicts":[]}"#);
    }

    #[test]
    fn verdict_holds_for_one_driver_and_generation() {
        let folder = tempfile::tempdir().unwrap();
        let verdicts = || ScrubCache::load(Checkpoint::new(folder.path().join("scrub.json")));
        let [a, b]: [GpuUuid; 2] = ["GPU-a", "GPU-b"].map(|gpu| gpu.parse().unwrap());
        let with = |driver: &str, generation| DriverEpoch {
            driver: driver.to_owned(),
            generation: Some(generation),
        };
        let mut first = verdicts();
        first.record(a.clone(), with("580", 7), Verdict::Scrubbed);
        let busy = Verdict::Unknown("busy".to_owned());
        first.record(b.clone(), with("580", 1), busy);
        let mut second = verdicts();
        assert_eq!(second.get(&a, &with("580", 7)), Some(&Verdict::Scrubbed));
        assert_eq!(second.get(&a, &with("590", 7)), None);
        assert_eq!(second.get(&a, &with("580", 8)), None);
        assert_eq!(second.get(&b, &with("580", 1)), None);
        second.forget(&a);
        for verdicts in [second, verdicts()] {
            assert_eq!(verdicts.get(&a, &with("580", 7)), None);
        }
    }
}
