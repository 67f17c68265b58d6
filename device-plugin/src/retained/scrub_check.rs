//! Finds out whether the driver clears memory between tenants: once per boot, GPU, its generation
//! and driver, by a process of its own, the canary.
//!
//! Nothing of ours clears kept memory (F6 in docs/facts.md), so there is none on a GPU before the
//! canary saw that the driver does. What its context takes is measured on the way: that is what
//! every tenant's context is charged.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::provisioners::Program;
use crate::checkpoint::Checkpoint;
use crate::sessions::DriverCharges;
use crate::units::{Bytes, GpuUuid};

/// How long the canary may take: it makes a context, and looks at less than 4 GiB.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the canary takes of a GPU at the most: a context, and what it looks at
/// (`worker/src/canary.rs`).
pub const TAKEN: Bytes = Bytes::mib(1024 + 256);

/// The longest line that is read of it.
const LONGEST_LINE: usize = 4096;

/// What is known of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Freed memory comes back cleared.
    Scrubbed,
    /// It does not.
    NotScrubbed,
    /// It was not seen: why.
    Unseen(String),
}

/// What the canary prints.
#[derive(Deserialize)]
#[serde(tag = "verdict")]
enum Printed {
    /// It has a context and nothing else, and waits until its input ends.
    Context {},
    Scrubbed {},
    NotScrubbed {
        old_words: u64,
    },
    Failed {
        error: String,
    },
}

/// What a verdict is of: a driver that is loaded anew may have other options, and has lost what
/// each GPU had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct With {
    /// The driver's version.
    pub driver: String,
    /// G of the GPU, where it is known.
    pub generation: Option<u64>,
}

/// What was seen, on a file that a reboot takes away.
#[derive(Debug)]
pub struct Verdicts {
    file: Checkpoint,
    seen: BTreeMap<GpuUuid, (With, Verdict)>,
}

impl Verdicts {
    /// Those that earlier agents of this boot came to.
    pub fn of(file: Checkpoint) -> Verdicts {
        let seen = file.load().ok().flatten().unwrap_or_default();
        Verdicts { file, seen }
    }

    /// Whether a GPU clears memory as it is now; none where that was not looked at.
    pub fn of_gpu(&self, gpu: &GpuUuid, now: &With) -> Option<&Verdict> {
        let (with, verdict) = self.seen.get(gpu)?;
        (with == now).then_some(verdict)
    }

    /// A GPU was looked at.
    pub fn note(&mut self, gpu: GpuUuid, with: With, verdict: Verdict) {
        match &verdict {
            Verdict::Scrubbed => info!(%gpu, "freed memory comes back cleared"),
            other => warn!(%gpu, verdict = ?other, "no kept memory on this gpu"),
        }
        self.seen.insert(gpu, (with, verdict));
        self.save();
    }

    /// Forgets the verdicts of all other GPUs.
    pub fn keep_gpus(&mut self, gpus: &BTreeSet<GpuUuid>) {
        let before = self.seen.len();
        self.seen.retain(|gpu, _| gpus.contains(gpu));
        if self.seen.len() != before {
            self.save();
        }
    }

    /// Nothing is known of a GPU any more.
    pub fn forget(&mut self, gpu: &GpuUuid) {
        if self.seen.remove(gpu).is_some() {
            self.save();
        }
    }

    fn save(&self) {
        // What was not seen is looked at again by a successor.
        let definite: BTreeMap<_, _> = self
            .seen
            .iter()
            .filter(|(_, (_, verdict))| !matches!(verdict, Verdict::Unseen(_)))
            .collect();
        if let Err(error) = self.file.save(&definite) {
            warn!(%error, "verdict not written: the next agent looks again");
        }
    }
}

/// The process that looks.
#[derive(Debug, Default)]
pub struct Canary(Option<Child>);

impl Canary {
    /// Whether it has ended: one that hangs in the driver does not, killed or not.
    pub fn has_ended(&mut self) -> bool {
        let status = self.0.as_mut().map(Child::try_wait);
        !matches!(status, Some(Ok(None)))
    }
}

/// What came of a look.
#[derive(Debug)]
pub struct Looked {
    /// Whether freed memory comes back cleared.
    pub verdict: Verdict,
    /// What a context takes, where NVML told.
    pub context: Option<Bytes>,
    /// The process that looked.
    pub canary: Canary,
}

/// Looks; takes up to [`PATIENCE`], and as long as `charges` takes. On a thread of its own, which
/// nobody waits for when the agent ends.
pub async fn look(program: Program, gpu: GpuUuid, charges: Arc<dyn DriverCharges>) -> Looked {
    let (tell, told) = oneshot::channel();
    let looks = std::thread::Builder::new()
        .name("canary".to_owned())
        .spawn(move || {
            let mut command = program.command(&gpu);
            command.args(["canary", "--gpu", gpu.as_str()]);
            let (mut canary, mut context) = (Canary::default(), None);
            let measure = |pid| {
                let look = charges.look(&gpu);
                context = look.and_then(|look| look.charges.of(pid));
            };
            let verdict = run(command, PATIENCE, &mut canary, measure);
            let _ = tell.send(Looked {
                verdict: verdict.unwrap_or_else(Verdict::Unseen),
                context,
                canary,
            });
        });
    let unseen = |why: String| Looked {
        verdict: Verdict::Unseen(why),
        context: None,
        canary: Canary::default(),
    };
    match looks {
        Ok(_) => told
            .await
            .unwrap_or_else(|_| unseen("its thread has ended".to_owned())),
        Err(error) => unseen(error.to_string()),
    }
}

/// Runs the canary to its end; `measure` is told its pid while it has a context and nothing else.
fn run(
    mut command: Command,
    patience: Duration,
    canary: &mut Canary,
    measure: impl FnOnce(u32),
) -> Result<Verdict, String> {
    let child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    let child = canary.0.insert(child);
    let until = Instant::now() + patience;
    let verdict =
        hear(child, until, measure).and_then(|verdict| ended(child, until).map(|()| verdict));
    if verdict.is_err() {
        // It may hang in the driver: its end is not waited for here.
        let _ = child.kill();
    }
    verdict
}

/// What the canary says in the end.
fn hear(child: &mut Child, until: Instant, measure: impl FnOnce(u32)) -> Result<Verdict, String> {
    let input = child.stdin.take();
    let mut output = child.stdout.take().ok_or("the canary has no output")?;
    let mut text = line(&mut output, until)?;
    if let Ok(Printed::Context {}) = serde_json::from_str(&text) {
        measure(child.id());
        drop(input);
        text = line(&mut output, until)?;
    }
    match serde_json::from_str(&text) {
        Ok(Printed::Scrubbed {}) => Ok(Verdict::Scrubbed),
        Ok(Printed::NotScrubbed { old_words }) => {
            warn!(old_words, "words of freed memory came back");
            Ok(Verdict::NotScrubbed)
        }
        Ok(Printed::Failed { error }) => Err(error),
        Ok(Printed::Context {}) => Err("the canary has a second context".to_owned()),
        Err(error) => Err(format!("the canary printed {text:?}: {error}")),
    }
}

/// A line of what the canary prints, as far as it goes.
fn line(output: &mut ChildStdout, until: Instant) -> Result<String, String> {
    let mut line = Vec::new();
    while line.len() < LONGEST_LINE {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|error| error.to_string())?;
        match poll(&mut [PollFd::new(output, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err("the canary does not come back".to_owned()),
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

/// Waits for the canary's end, so that it leaves no zombie.
fn ended(child: &mut Child, until: Instant) -> Result<(), String> {
    loop {
        match child.try_wait() {
            Ok(Some(_)) => return Ok(()),
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
            Ok(None) => return Err("the canary does not come back".to_owned()),
            Err(error) => return Err(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(script: &str) -> Result<Verdict, String> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(
            command,
            Duration::from_secs(20),
            &mut Canary::default(),
            |_| {},
        )
    }

    #[test]
    fn canary_goes_on_once_its_context_was_measured() {
        let mut command = Command::new("sh");
        let script = r#"echo '{"verdict":"Context"}'; read never; echo '{"verdict":"Scrubbed"}'"#;
        command.args(["-c", script]);
        let (mut canary, mut measured) = (Canary::default(), None);
        let patience = Duration::from_secs(20);
        let verdict = run(command, patience, &mut canary, |pid| measured = Some(pid));
        assert_eq!(verdict, Ok(Verdict::Scrubbed));
        assert_eq!(measured, canary.0.as_ref().map(Child::id));
    }

    #[test]
    fn canary_that_prints_without_end_is_read_no_further() {
        let begun = Instant::now();
        assert!(said("yes | tr -d '\\n'").is_err());
        assert!(begun.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_canary_that_does_not_come_back_is_killed_and_leaves_no_zombie() {
        let mut command = Command::new("sleep");
        command.arg("60");
        let mut canary = Canary::default();
        assert!(run(command, Duration::from_millis(20), &mut canary, |_| {}).is_err());
        let pid = canary.0.as_ref().unwrap().id();
        let until = Instant::now() + Duration::from_secs(20);
        while !canary.has_ended() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!std::fs::exists(format!("/proc/{pid}")).unwrap());
    }

    #[test]
    fn only_a_canary_that_saw_cleared_memory_counts_as_one() {
        let clean = r#"echo '{"verdict":"Scrubbed","rounds":12,"bytes":2097152}'"#;
        assert_eq!(said(clean), Ok(Verdict::Scrubbed));
        let dirty = r#"echo '{"verdict":"NotScrubbed","rounds":12,"bytes":2097152,"old_words":3}'"#;
        assert_eq!(said(dirty), Ok(Verdict::NotScrubbed));
        for other in [
            r#"echo '{"verdict":"Failed","error":"no room"}'"#,
            "exit 1",
            "echo hello",
        ] {
            assert!(said(other).is_err(), "{other}");
        }
    }

    #[test]
    fn a_verdict_holds_for_this_driver_and_generation_and_what_was_not_seen_is_looked_at_again() {
        let folder = tempfile::tempdir().unwrap();
        let verdicts = || Verdicts::of(Checkpoint::new(folder.path().join("scrub.json")));
        let [a, b]: [GpuUuid; 2] = ["GPU-a", "GPU-b"].map(|gpu| gpu.parse().unwrap());
        let with = |driver: &str, generation| With {
            driver: driver.to_owned(),
            generation: Some(generation),
        };
        let mut first = verdicts();
        first.note(a.clone(), with("580", 7), Verdict::Scrubbed);
        let busy = Verdict::Unseen("busy".to_owned());
        first.note(b.clone(), with("580", 1), busy);
        let mut second = verdicts();
        assert_eq!(second.of_gpu(&a, &with("580", 7)), Some(&Verdict::Scrubbed));
        assert_eq!(second.of_gpu(&a, &with("590", 7)), None);
        assert_eq!(second.of_gpu(&a, &with("580", 8)), None);
        assert_eq!(second.of_gpu(&b, &with("580", 1)), None);
        second.forget(&a);
        for verdicts in [second, verdicts()] {
            assert_eq!(verdicts.of_gpu(&a, &with("580", 7)), None);
        }
    }
}
