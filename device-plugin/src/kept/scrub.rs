//! Finds out whether the driver clears memory between tenants: once per boot, GPU, its generation and driver, by a
//! process of its own.
//!
//! Nothing of ours clears kept memory (design F6), so there is none on a GPU before the canary saw that the driver does.

use std::collections::BTreeMap;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::workers::Program;
use crate::checkpoint::Checkpoint;
use crate::units::GpuUuid;

/// How long the canary may take: it makes a context, and looks at less than 4 GiB.
const PATIENCE: Duration = Duration::from_secs(60);

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
    Scrubbed {},
    NotScrubbed { old_words: u64 },
    Failed { error: String },
}

/// What a verdict is of: a driver that is loaded anew may have other options, and has lost what each GPU had.
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

/// Looks; takes up to [`PATIENCE`]. On a thread of its own, which nobody waits for when the agent ends.
pub async fn look(program: Program, gpu: GpuUuid) -> (Verdict, Canary) {
    let (tell, told) = oneshot::channel();
    let looks = std::thread::Builder::new()
        .name("canary".to_owned())
        .spawn(move || {
            let mut command = program.command(&gpu);
            command.args(["canary", "--gpu", gpu.as_str()]);
            let mut canary = Canary::default();
            let verdict = run(command, PATIENCE, &mut canary);
            let _ = tell.send((verdict.unwrap_or_else(Verdict::Unseen), canary));
        });
    let unseen = |why: String| (Verdict::Unseen(why), Canary::default());
    match looks {
        Ok(_) => told
            .await
            .unwrap_or_else(|_| unseen("its thread has ended".to_owned())),
        Err(error) => unseen(error.to_string()),
    }
}

fn run(mut command: Command, patience: Duration, canary: &mut Canary) -> Result<Verdict, String> {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    let child = canary.0.insert(child);
    let until = Instant::now() + patience;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => break,
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
            Ok(None) => {
                // It may hang in the driver: its end is not waited for here.
                let _ = child.kill();
                return Err("the canary does not come back".to_owned());
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    let mut text = String::new();
    if let Some(mut printed) = child.stdout.take() {
        printed
            .read_to_string(&mut text)
            .map_err(|error| error.to_string())?;
    }
    match serde_json::from_str(text.trim()) {
        Ok(Printed::Scrubbed {}) => Ok(Verdict::Scrubbed),
        Ok(Printed::NotScrubbed { old_words }) => {
            warn!(old_words, "words of freed memory came back");
            Ok(Verdict::NotScrubbed)
        }
        Ok(Printed::Failed { error }) => Err(error),
        Err(error) => Err(format!("the canary printed {text:?}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(script: &str) -> Result<Verdict, String> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, Duration::from_secs(20), &mut Canary::default())
    }

    #[test]
    fn a_canary_that_does_not_come_back_is_killed_and_leaves_no_zombie() {
        let mut command = Command::new("sleep");
        command.arg("60");
        let mut canary = Canary::default();
        assert!(run(command, Duration::from_millis(20), &mut canary).is_err());
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
