//! Tests whether a GPU keeps to time slices: two loads of the agent's own, on an idle GPU.
//!
//! Reading a slice back proves nothing, because the driver answers with its own note. So the test
//! compares finished work, for each model, driver and firmware.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use bursar_host::checkpoint::Checkpoint;
use bursar_ledger::units::GpuUuid;
use bursar_supervision::provisioners::Program;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::child::HolderProcess;
use crate::holder::PodOrder;
use crate::process::Request;
use crate::turns::Weight;

/// Weights and a round by which the slices are 8,000 and 500 us.
const WEIGHTS: [u16; 2] = [94, 6];
const ROUND: Duration = Duration::from_micros(8_500);

/// The least ratio of finished work. An H200 that keeps to its slices shows 11.8.
const LEAST_RATIO: u64 = 8;

/// A load creates a context first, which takes longest where nothing else keeps the driver loaded.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// The time before a measurement, and its length. A process counts as active for less.
const SETTLE: Duration = Duration::from_millis(200);
const MEASURE: Duration = Duration::from_secs(1);
const KEEP_ACTIVE: Duration = Duration::from_millis(200);

/// The looks in which the groups of the loads are found, which are the newest on the node.
const MAX_LOOKS: usize = 20;

/// The most verdicts on record.
const MAX_VERDICTS: usize = 32;

/// Whether a GPU keeps to time slices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The test has shown that it does.
    Enforced,
    /// The test has shown that it does not.
    NotEnforced(String),
    /// The test has not run, or has failed.
    Unknown(String),
}

/// The versions that a verdict holds for: the firmware schedules the groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Versions {
    pub(crate) model: String,
    pub(crate) driver: String,
    pub(crate) firmware: String,
}

/// The firmware's version in the driver's description of a GPU; empty without one.
pub(crate) fn firmware_version(information: &str) -> String {
    let mut lines = information.lines();
    let version = lines.find_map(|line| line.strip_prefix("GPU Firmware:"));
    version.unwrap_or_default().trim().to_owned()
}

/// The verdicts of this node's agents.
pub(crate) struct Verdicts(Checkpoint);

impl Verdicts {
    pub(crate) fn new(file: Checkpoint) -> Self {
        Self(file)
    }

    fn load(&self) -> Vec<(Versions, Verdict)> {
        let loaded = self.0.load_or_set_aside().unwrap_or_else(|error| {
            warn!(%error, "failed to read the verdicts on time slices; the agent tests again");
            None
        });
        loaded.unwrap_or_default()
    }

    /// The verdict for these versions, if one is on record.
    pub(crate) fn get(&self, versions: &Versions) -> Option<Verdict> {
        let mut known = self.load().into_iter();
        known.find_map(|(of, verdict)| (of == *versions).then_some(verdict))
    }

    /// Records a verdict. A test that failed is repeated instead.
    pub(crate) fn record(&self, versions: Versions, verdict: Verdict) {
        if matches!(verdict, Verdict::Unknown(_)) {
            return;
        }
        let mut known = self.load();
        known.retain(|(of, _)| *of != versions);
        known.push((versions, verdict));
        let excess = known.len().saturating_sub(MAX_VERDICTS);
        known.drain(..excess);
        if let Err(error) = self.0.save(&known) {
            warn!(%error, "failed to write the verdict on time slices; the next agent tests again");
        }
    }
}

/// Runs the test. The caller has seen that nothing else uses the GPU.
pub(crate) async fn test(program: &Program, gpu: &GpuUuid, device: &Path) -> Verdict {
    match measure(program, gpu, device).await {
        Ok(finished) => judge(finished),
        Err(error) => Verdict::Unknown(format!("the test of time slices failed: {error}")),
    }
}

/// Judges the work that each load has finished, first with the longer slice for the first load,
/// then with the shorter.
fn judge([longer, shorter]: [[u64; 2]; 2]) -> Verdict {
    let holds = |most: u64, least: u64| most >= least.max(1) * LEAST_RATIO;
    if holds(longer[0], longer[1]) && holds(shorter[1], shorter[0]) {
        return Verdict::Enforced;
    }
    Verdict::NotEnforced(format!(
        "two loads with slices of 16 : 1 finished {} : {} kernels, and {} : {} with 1 : 16",
        longer[0], longer[1], shorter[0], shorter[1]
    ))
}

async fn measure(program: &Program, gpu: &GpuUuid, device: &Path) -> io::Result<[[u64; 2]; 2]> {
    // Without the driver's answers no load is started.
    let pods = Vec::new();
    let mut holder = HolderProcess::start(gpu, device, ROUND)?;
    holder.send(&Request::Pods { pods }).await?;
    drop(holder);
    let mut loads = [Load::start(program, gpu)?, Load::start(program, gpu)?];
    for load in &mut loads {
        load.wait_for_work().await?;
    }
    let [first, second] = WEIGHTS;
    let mut finished = [[0; 2]; 2];
    for (weights, finished) in [[first, second], [second, first]].iter().zip(&mut finished) {
        let mut holder = HolderProcess::start(gpu, device, ROUND)?;
        let pods = loads.iter().zip(weights).map(|(load, weight)| PodOrder {
            uid: load.pid.to_string(),
            weight: Weight::try_from(*weight).ok(),
            processes: [load.pid].into(),
            is_doubted: false,
        });
        let pods = pods.collect();
        wait_for_groups(&mut holder, pods).await?;
        let processes = loads.iter().map(|load| load.pid).collect();
        let active = Request::Active { processes };
        holder.send(&active).await?;
        sleep(SETTLE).await;
        let before = loads.each_ref().map(Load::finished);
        let mut left = MEASURE;
        while left > Duration::ZERO {
            holder.send(&active).await?;
            sleep(KEEP_ACTIVE).await;
            left = left.saturating_sub(KEEP_ACTIVE);
        }
        let after = loads.each_ref().map(Load::finished);
        *finished = [0, 1].map(|load| after[load].saturating_sub(before[load]));
    }
    Ok(finished)
}

/// Orders the pods until the holder has found groups of each.
async fn wait_for_groups(holder: &mut HolderProcess, pods: Vec<PodOrder>) -> io::Result<()> {
    for _ in 0..MAX_LOOKS {
        let pods = pods.clone();
        let report = holder.send(&Request::Pods { pods }).await?;
        let found = report
            .into_iter()
            .flat_map(|report| report.pods.into_values());
        if found.filter(|pod| pod.groups > 0).count() == WEIGHTS.len() {
            return Ok(());
        }
        sleep(SETTLE).await;
    }
    Err(io::Error::other(
        "the channel groups of its loads were not found",
    ))
}

/// A process that keeps the GPU busy; dropping it kills the process.
struct Load {
    _child: Child,
    _input: Option<ChildStdin>,
    pid: u32,
    finished: watch::Receiver<u64>,
}

impl Load {
    fn start(program: &Program, gpu: &GpuUuid) -> io::Result<Self> {
        let mut command = Command::from(program.command(gpu));
        let command = command.args(["compute-load", "--gpu", gpu.as_str()]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn()?;
        let output = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let (sender, finished) = watch::channel(0);
        tokio::spawn(async move {
            let mut lines = BufReader::new(output).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if let Ok(Finished { finished }) = serde_json::from_str(&line) {
                    sender.send_replace(finished);
                }
            }
        });
        Ok(Self {
            pid: child.id().ok_or(io::ErrorKind::NotFound)?,
            _input: child.stdin.take(),
            _child: child,
            finished,
        })
    }

    async fn wait_for_work(&mut self) -> io::Result<()> {
        let works = self.finished.wait_for(|finished| *finished > 0);
        match timeout(START_TIMEOUT, works).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(io::Error::other("a load has exited")),
            Err(_) => Err(io::Error::other("a load has finished nothing")),
        }
    }

    fn finished(&self) -> u64 {
        *self.finished.borrow()
    }
}

/// A line of a load.
#[derive(Deserialize)]
struct Finished {
    finished: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versions(driver: &str) -> Versions {
        Versions {
            model: "NVIDIA H200".to_owned(),
            driver: driver.to_owned(),
            firmware: driver.to_owned(),
        }
    }

    #[test]
    fn work_has_to_follow_the_slices_in_both_directions() {
        assert_eq!(judge([[3_000, 250], [254, 3_010]]), Verdict::Enforced);
        for inert in [[[1_600, 1_600]; 2], [[3_000, 250]; 2], [[0, 0]; 2]] {
            assert!(matches!(judge(inert), Verdict::NotEnforced(_)), "{inert:?}");
        }
    }

    #[test]
    fn verdict_holds_for_its_versions_and_failed_tests_leave_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = || Checkpoint::new(folder.path().join("compute.json"));
        let verdicts = Verdicts::new(file());
        let inert = Verdict::NotEnforced("1 : 1".to_owned());
        verdicts.record(versions("580.1"), Verdict::Enforced);
        verdicts.record(versions("590.1"), inert.clone());
        verdicts.record(versions("590.1"), Verdict::Unknown("busy".to_owned()));
        let next = Verdicts::new(file());
        assert_eq!(next.get(&versions("580.1")), Some(Verdict::Enforced));
        assert_eq!(next.get(&versions("590.1")), Some(inert));
        assert_eq!(next.get(&versions("590.2")), None);
    }

    #[test]
    fn effects_of_a_later_version_are_kept_beside() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("compute.json");
        let later = r#"{"version":2,"verdicts":[]}"#;
        std::fs::write(&file, later).unwrap();
        let verdicts = Verdicts::new(Checkpoint::new(file));
        assert_eq!(verdicts.get(&versions("580.1")), None);
        verdicts.record(versions("580.1"), Verdict::Enforced);
        let kept = std::fs::read_to_string(folder.path().join("compute.unread"));
        assert_eq!(kept.unwrap(), later);
        assert_eq!(verdicts.get(&versions("580.1")), Some(Verdict::Enforced));
    }

    #[test]
    fn firmware_is_read_from_the_drivers_description() {
        let text = "Model: \t\t NVIDIA H200\nGPU Firmware: \t 580.159.04\nGPU Excluded:\t No\n";
        assert_eq!(firmware_version(text), "580.159.04");
        assert_eq!(firmware_version(""), "");
    }
}
