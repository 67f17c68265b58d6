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
use crate::holder::{PodOrder, Report};
use crate::process::Request;
use crate::turns::Weight;

/// With these weights and this round the holder sets slices of 8,000 and 500 us.
const WEIGHTS: [u16; 2] = [94, 6];
const ROUND: Duration = Duration::from_micros(8_500);

/// The least ratio of finished work. An H200 that keeps to its slices shows 11.8.
const LEAST_RATIO: u64 = 8;

/// Below this ratio slices have no effect.
const INERT_RATIO: u64 = 2;

/// The kernels that each load finishes at least: an H200 shows 250 for the shorter slice.
const LEAST_FINISHED: u64 = 20;

/// A load creates a context first, which takes longest where nothing else keeps the driver loaded.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// The time before a measurement, and its length. A process counts as active for less.
const SETTLE: Duration = Duration::from_millis(200);
const MEASURE: Duration = Duration::from_secs(1);
const KEEP_ACTIVE: Duration = Duration::from_millis(200);

/// The looks in which the groups of the loads are found, which are the newest on the node.
const MAX_LOOKS: usize = 20;

/// The most outcomes on record.
const MAX_OUTCOMES: usize = 32;

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

/// The outcome of a test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Tested {
    pub(crate) verdict: Verdict,
    /// The channel groups of the driver itself, if the test has come so far.
    pub(crate) driver_groups: Option<usize>,
}

/// The outcomes of this node's tests.
pub(crate) struct Outcomes(Checkpoint);

impl Outcomes {
    pub(crate) fn new(file: Checkpoint) -> Self {
        Self(file)
    }

    fn load(&self) -> Vec<(Versions, Tested)> {
        let loaded = self.0.load_or_set_aside().unwrap_or_else(|error| {
            warn!(%error, "failed to read the outcomes of tests of time slices; the agent tests again");
            None
        });
        loaded.unwrap_or_default()
    }

    /// The outcome for these versions, if one is on record.
    pub(crate) fn get(&self, versions: &Versions) -> Option<Tested> {
        let mut known = self.load().into_iter();
        known.find_map(|(of, tested)| (of == *versions).then_some(tested))
    }

    /// Records an outcome. A test without a verdict is repeated instead.
    pub(crate) fn record(&self, versions: &Versions, tested: &Tested) {
        if matches!(tested.verdict, Verdict::Unknown(_)) {
            return;
        }
        let mut known = self.load();
        known.retain(|(of, _)| of != versions);
        known.push((versions.clone(), tested.clone()));
        let excess = known.len().saturating_sub(MAX_OUTCOMES);
        known.drain(..excess);
        if let Err(error) = self.0.save(&known) {
            warn!(%error, "failed to write the outcome of a test of time slices; the next agent tests again");
        }
    }
}

/// Runs the test until `is_needed` ends, because somebody else is to have the GPU. The caller has
/// seen that nothing uses it.
pub(crate) async fn test(
    program: &Program,
    gpu: &GpuUuid,
    device: &Path,
    is_needed: impl Future<Output = ()>,
) -> Tested {
    let mut test = Test::default();
    let finished = tokio::select! {
        finished = test.measure(program, gpu, device) => finished,
        () = is_needed => Err(io::Error::other("a pod has the GPU now")),
    };
    let driver_groups = test.driver_groups;
    test.end().await;
    let verdict = match finished {
        Ok(finished) => judge(finished),
        Err(error) => Verdict::Unknown(format!("the test of time slices failed: {error}")),
    };
    Tested {
        verdict,
        driver_groups,
    }
}

/// Judges the work that each load has finished, first with the longer slice for the first load,
/// then with the shorter. Work that follows the slices a little, or of one load alone, is no
/// verdict: something else was on the GPU.
fn judge([longer, shorter]: [[u64; 2]; 2]) -> Verdict {
    let is_at_least =
        |ratio: u64| longer[0] >= longer[1] * ratio && shorter[1] >= shorter[0] * ratio;
    let is_inert = [longer, shorter]
        .iter()
        .all(|[one, other]| one.max(other) < &(one.min(other) * INERT_RATIO));
    let told = format!(
        "two loads with slices of 16 : 1 finished {} : {} kernels, and {} : {} with 1 : 16",
        longer[0], longer[1], shorter[0], shorter[1]
    );
    if [longer, shorter].concat().iter().min() < Some(&LEAST_FINISHED) {
        Verdict::Unknown(told)
    } else if is_at_least(LEAST_RATIO) {
        Verdict::Enforced
    } else if is_inert {
        Verdict::NotEnforced(told)
    } else {
        Verdict::Unknown(told)
    }
}

/// The processes of a test.
#[derive(Default)]
struct Test {
    holder: Option<HolderProcess>,
    loads: Vec<Load>,
    driver_groups: Option<usize>,
}

impl Test {
    async fn measure(
        &mut self,
        program: &Program,
        gpu: &GpuUuid,
        device: &Path,
    ) -> io::Result<[[u64; 2]; 2]> {
        // Without the driver's answers no load is started.
        let holder = HolderProcess::start(gpu, device, ROUND)?;
        let holder = self.holder.insert(holder);
        let pods = Vec::new();
        holder.send(&Request::Pods { pods }).await?;
        for _ in WEIGHTS {
            self.loads.push(Load::start(program, gpu).await?);
        }
        for load in &mut self.loads {
            load.wait_for_work().await?;
        }
        let [first, second] = WEIGHTS;
        let mut finished = [[0; 2]; 2];
        for (weights, finished) in [[first, second], [second, first]].iter().zip(&mut finished) {
            let pods = self
                .loads
                .iter()
                .zip(weights)
                .map(|(load, weight)| PodOrder {
                    uid: load.pid.to_string(),
                    weight: Weight::try_from(*weight).ok(),
                    processes: [load.pid].into(),
                });
            let report = wait_for_groups(holder, pods.collect()).await?;
            let in_use = report.in_use.map(|in_use| in_use as usize);
            self.driver_groups = in_use.and_then(|all| all.checked_sub(report.known));
            let processes = self.loads.iter().map(|load| load.pid).collect();
            let active = Request::Active { processes };
            holder.send(&active).await?;
            sleep(SETTLE).await;
            let done = |loads: &[Load]| [0, 1].map(|load| loads[load].finished());
            let before = done(&self.loads);
            let mut left = MEASURE;
            while left > Duration::ZERO {
                holder.send(&active).await?;
                sleep(KEEP_ACTIVE).await;
                left = left.saturating_sub(KEEP_ACTIVE);
            }
            let after = done(&self.loads);
            *finished = [0, 1].map(|load| after[load].saturating_sub(before[load]));
        }
        for load in &mut self.loads {
            load.check_running()?;
        }
        Ok(finished)
    }

    /// Kills the processes, and waits for their ends: the holder's last, which may hang in the
    /// driver.
    async fn end(self) {
        for mut load in self.loads {
            // An error says that it has been waited for.
            let _ = load.child.kill().await;
        }
        if let Some(holder) = self.holder {
            holder.end().await;
        }
    }
}

/// Orders the pods until the holder has found groups of each.
async fn wait_for_groups(holder: &mut HolderProcess, pods: Vec<PodOrder>) -> io::Result<Report> {
    for _ in 0..MAX_LOOKS {
        let pods = pods.clone();
        let report = holder.send(&Request::Pods { pods }).await?;
        let report = report.unwrap_or_default();
        let found = report.pods.values().filter(|pod| pod.groups > 0);
        if found.count() == WEIGHTS.len() {
            return Ok(report);
        }
        sleep(SETTLE).await;
    }
    Err(io::Error::other(
        "the channel groups of its loads were not found",
    ))
}

/// A process that keeps the GPU busy; dropping it kills the process.
struct Load {
    child: Child,
    _input: Option<ChildStdin>,
    pid: u32,
    finished: watch::Receiver<u64>,
}

impl Load {
    async fn start(program: &Program, gpu: &GpuUuid) -> io::Result<Self> {
        let (program, of) = (program.clone(), gpu.clone());
        // The driver's files may be on a disk that hangs.
        let command = tokio::task::spawn_blocking(move || program.command(&of));
        let mut command = Command::from(command.await?);
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
            child,
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

    fn check_running(&mut self) -> io::Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => Err(io::Error::other(format!("a load has ended: {status}"))),
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

    fn tested(verdict: Verdict) -> Tested {
        Tested {
            verdict,
            driver_groups: Some(6),
        }
    }

    #[test]
    fn work_has_to_follow_the_slices_in_both_directions() {
        assert_eq!(judge([[3_000, 250], [254, 3_010]]), Verdict::Enforced);
        for inert in [[[1_600, 1_600]; 2], [[1_700, 1_500], [1_400, 1_600]]] {
            assert!(matches!(judge(inert), Verdict::NotEnforced(_)), "{inert:?}");
        }
    }

    #[test]
    fn work_that_something_else_has_shaped_is_no_verdict() {
        let foreign = [
            [[0, 0]; 2],
            [[3_000, 0]; 2],
            [[3_000, 250]; 2],
            [[3_000, 900], [900, 3_000]],
            [[3_000, 250], [254, 0]],
        ];
        for foreign in foreign {
            assert!(matches!(judge(foreign), Verdict::Unknown(_)), "{foreign:?}");
        }
    }

    #[test]
    fn outcome_holds_for_its_versions_and_failed_tests_leave_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = || Checkpoint::new(folder.path().join("compute.json"));
        let outcomes = Outcomes::new(file());
        let enforced = tested(Verdict::Enforced);
        let inert = tested(Verdict::NotEnforced("1 : 1".to_owned()));
        outcomes.record(&versions("580.1"), &enforced);
        outcomes.record(&versions("590.1"), &inert);
        let failed = tested(Verdict::Unknown("busy".to_owned()));
        outcomes.record(&versions("590.1"), &failed);
        let next = Outcomes::new(file());
        assert_eq!(next.get(&versions("580.1")), Some(enforced));
        assert_eq!(next.get(&versions("590.1")), Some(inert));
        assert_eq!(next.get(&versions("590.2")), None);
    }

    #[test]
    fn outcomes_of_a_later_version_are_kept_beside() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("compute.json");
        let later = r#"{"version":2,"outcomes":[]}"#;
        std::fs::write(&file, later).unwrap();
        let outcomes = Outcomes::new(Checkpoint::new(file));
        assert_eq!(outcomes.get(&versions("580.1")), None);
        let enforced = tested(Verdict::Enforced);
        outcomes.record(&versions("580.1"), &enforced);
        let kept = std::fs::read_to_string(folder.path().join("compute.unread"));
        assert_eq!(kept.unwrap(), later);
        assert_eq!(outcomes.get(&versions("580.1")), Some(enforced));
    }

    #[test]
    fn firmware_is_read_from_the_drivers_description() {
        let text = "Model: \t\t NVIDIA H200\nGPU Firmware: \t 580.159.04\nGPU Excluded:\t No\n";
        assert_eq!(firmware_version(text), "580.159.04");
        assert_eq!(firmware_version(""), "");
    }
}
