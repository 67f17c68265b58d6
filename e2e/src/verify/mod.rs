//! Runs the checks of this repository for `cargo verify`.
//!
//! A check is a command that passes by its exit code. The summary lines of test runners appear
//! below the check's name.
//!
//! ```text
//!   checks that compile --> most checks, one after another --> a job --> output of the jobs
//!                      \--> background jobs, one after another ----------/
//! ```
//!
//! Tests that measure times fail on a machine that other programs keep busy. So a few failed tests
//! and trials run once more alone, at the end, unless they draw random numbers. The summary names
//! the checks that pass only then.

mod book;
mod checks;
mod cli;
mod cluster;
mod deadline;
mod docs;
mod golden;
mod layers;
mod named;
mod passed;
mod seeds;
mod style;
mod surface;
mod tree;
mod write_sites;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::process::{Command, ExitCode};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;

pub use self::cluster::trials;
pub use self::surface::DashboardQueries;

use self::checks::{BackgroundJob, Check};
use self::named::{IncompleteRun, TestResults};
use self::passed::PassedChecks;
use crate::kube::{KUBERNETES_VERSIONS, KubernetesVersion};
use crate::progress::Progress;

/// The last check that has the processors to itself; background jobs start after it.
const COMPILE_CHECK: &str = "main/programs";

/// The most failed checks that run again: more have another cause than a busy machine.
const MAX_REPEATED: usize = 3;

/// The arguments of `cargo verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Print the checks, a line each, and run none.
    #[arg(long)]
    list: bool,
    /// Run only these: an area (`main/`), or a check's name. May be given several times.
    #[arg(long, value_name = "AREA|NAME")]
    only: Vec<String>,
    /// Run the long tier too: histories at full length, soaks, fuzzing. Of a committed tree, its
    /// checks that have passed in an earlier run do not run again.
    #[arg(long)]
    long: bool,
    /// Run trials on a cluster of this release, such as 1.34, and no other checks.
    #[arg(long, value_name = "RELEASE")]
    kubernetes: Option<KubernetesVersion>,
}

/// The error of a run. A failed check is no error but an outcome.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// A word of `--only` matches no check and no area.
    #[error("--only {0}: no check or area has this name; `cargo verify --list` prints them")]
    Unknown(String),
    /// No temporary file could be created for the output of a background job.
    #[error("no file for the output of checks that run beside others: {0}")]
    Output(#[from] io::Error),
}

/// Runs the selected checks, the cheap ones first, and all of them even after a failure.
///
/// # Errors
/// When `args` name an unknown check, or no temporary file can be created.
pub fn run(args: &VerifyArgs) -> Result<ExitCode, VerifyError> {
    let all = checks::all();
    let mut chosen = select(all, &args.only, args.long || args.list)?;
    if args.kubernetes.is_some() {
        chosen.retain(|check| check.trial().is_some());
    }
    if args.list {
        list(&chosen);
        return Ok(ExitCode::SUCCESS);
    }
    let progress = Progress::start();
    let is_long = chosen.iter().any(|check| check.is_long);
    if !is_long && let Some(seed) = seeds::fix() {
        progress.report(format_args!("random tests have the tree's seed, {seed}"));
    }
    let mut passed = match args.kubernetes {
        None if is_long => PassedChecks::of_tree(),
        _ => PassedChecks::default(),
    };
    if args.long {
        let before = chosen.len();
        chosen.retain(|check| !(check.is_long && passed.has(&check.name)));
        let known = before - chosen.len();
        progress.report(format_args!("{known} checks passed before on this tree"));
    }
    let version = args.kubernetes.unwrap_or(KUBERNETES_VERSIONS[0]);
    let jobs = || checks::background_jobs(&chosen, version, is_long);
    let (mut outcomes, mut running) = (Vec::new(), None);
    let mut results = TestResults::default();
    let queue = JobQueue::default();
    for check in chosen.iter().filter(|check| !check.runs_in_background()) {
        let run = || timed(|| check.run(&mut results));
        let outcome = run_check(&check.name, &check.promise, run, &progress);
        // Cargo may have compiled an edit of this run, which is not of the recorded tree.
        if check.is_long && !outcome.failed() && tree::is_committed() {
            passed.add(&check.name);
        }
        outcomes.push(outcome);
        if check.name == COMPILE_CHECK {
            running = Some(queue.start(jobs())?);
        }
    }
    queue.run();
    if let Some(running) = running {
        for job in running {
            let (name, promise) = (job.name, job.promise.clone());
            let join = || job.join(&mut results);
            outcomes.push(run_check(name, &promise, join, &progress));
        }
        let trials = chosen.iter().filter(|check| check.is_long);
        let trials = trials.filter(|trial| results.has_passed_in_job(&trial.name));
        let mut trials = trials.peekable();
        if trials.peek().is_some() && tree::is_committed() {
            trials.for_each(|trial| passed.add(&trial.name));
        }
    } else {
        // Jobs without other checks beside them print straight to the terminal.
        for mut job in jobs() {
            let run = || timed(|| checks::succeed_within(&mut job.command, job.timeout));
            outcomes.push(run_check(job.name, &job.promise, run, &progress));
        }
    }
    let repeat = |name| match jobs().into_iter().find(|job| job.name == name) {
        Some(job) => job.repeat(&results),
        None => chosen
            .iter()
            .find(|check| check.name == name)?
            .repeat(&results),
    };
    repeat_failed(&mut outcomes, repeat, &progress);
    Ok(report(&outcomes))
}

/// Prints the checks with their promises.
fn list(checks: &[&Check]) {
    let lengths = checks.iter().map(|check| check.name.len());
    let width = lengths.max().unwrap_or(0);
    for check in checks {
        let tier = if check.is_long { "(long) " } else { "" };
        println!("{:width$}  {tier}{}", check.name, check.promise);
    }
}

/// Runs the tests of a few failed checks once more, with nothing beside them. `repeat` returns
/// `None` for checks that another run would show nothing about.
fn repeat_failed(
    outcomes: &mut [Outcome],
    repeat: impl Fn(&'static str) -> Option<anyhow::Result<()>>,
    progress: &Progress,
) {
    let failed = outcomes.iter_mut().filter(|outcome| outcome.failed());
    let failed: Vec<_> = failed.collect();
    if failed.len() > MAX_REPEATED {
        progress.report(format_args!("no check runs again: {} failed", failed.len()));
        return;
    }
    for outcome in failed.into_iter().filter(|outcome| outcome.is_complete) {
        progress.report(format_args!("{}: once more, alone", outcome.name));
        match repeat(outcome.name) {
            None => progress.report(format_args!("no tests to run again")),
            Some(Ok(())) => outcome.passed_alone = true,
            Some(Err(again)) => {
                let why = outcome.failure.take();
                outcome.failure = why.map(|why| format!("{why}; again alone: {again}"));
            }
        }
    }
}

/// Returns the checks that `only` names, or all of them for an empty `only`. Checks of the long
/// tier need `long` or their full name.
fn select(
    checks: &'static [Check],
    only: &[String],
    long: bool,
) -> Result<Vec<&'static Check>, VerifyError> {
    let matches = |check: &Check, word: &str| {
        check.name == word
            || check
                .name
                .strip_prefix(word.trim_end_matches('/'))
                .is_some_and(|rest| rest.starts_with('/'))
    };
    if let Some(word) = only
        .iter()
        .find(|word| !checks.iter().any(|check| matches(check, word)))
    {
        return Err(VerifyError::Unknown(word.clone()));
    }
    let wanted = |check: &&Check| {
        let asked_for = only.is_empty() || only.iter().any(|word| matches(check, word));
        let in_full = only.contains(&check.name);
        asked_for && (long || in_full || !check.is_long)
    };
    Ok(checks.iter().filter(wanted).collect())
}

/// A background job that runs or waits for its turn, and the file with its output.
struct RunningJob {
    name: &'static str,
    promise: String,
    output: File,
    result: Receiver<Timed>,
}

/// The background jobs that did not start yet.
#[derive(Clone, Default)]
struct JobQueue(Arc<Mutex<WaitingJobs>>);

#[derive(Default)]
struct WaitingJobs {
    jobs: VecDeque<WaitingJob>,
    /// Whether a job with clusters runs.
    has_clusters: bool,
}

/// A job's command, and where to send its outcome.
struct WaitingJob {
    command: Command,
    has_clusters: bool,
    timeout: Duration,
    outcome: Sender<Timed>,
}

impl WaitingJobs {
    /// Takes the first job that may run now: jobs with clusters run one after another.
    fn take(&mut self) -> Option<WaitingJob> {
        let may_run = |job: &WaitingJob| !(job.has_clusters && self.has_clusters);
        let first = self.jobs.iter().position(may_run)?;
        let job = self.jobs.remove(first)?;
        self.has_clusters |= job.has_clusters;
        Some(job)
    }
}

impl JobQueue {
    /// Starts a thread that runs the jobs one after another. On two cores, the API servers of two
    /// jobs and the other checks starve each other.
    fn start(&self, jobs: Vec<BackgroundJob>) -> io::Result<Vec<RunningJob>> {
        let mut running = Vec::new();
        for job in jobs {
            let BackgroundJob {
                name,
                promise,
                mut command,
                has_clusters,
                timeout,
            } = job;
            let output = tempfile::tempfile()?;
            // The causes of failures name their places, and the runner's frames would bury them.
            command
                .env("RUST_BACKTRACE", "0")
                .stdout(output.try_clone()?)
                .stderr(output.try_clone()?);
            let (outcome, result) = mpsc::channel();
            self.lock().jobs.push_back(WaitingJob {
                command,
                has_clusters,
                timeout,
                outcome,
            });
            running.push(RunningJob {
                name,
                promise,
                output,
                result,
            });
        }
        let queue = self.clone();
        thread::spawn(move || queue.run());
        Ok(running)
    }

    /// Runs jobs until none is left that may run beside those of another thread.
    fn run(&self) {
        loop {
            let next = self.lock().take();
            let Some(mut job) = next else {
                return;
            };
            let outcome = timed(|| checks::succeed_within(&mut job.command, job.timeout));
            self.lock().has_clusters &= !job.has_clusters;
            // The receiver is gone only when the run has ended early.
            drop(job.outcome.send(outcome));
        }
    }

    fn lock(&self) -> MutexGuard<'_, WaitingJobs> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunningJob {
    /// Waits for the job's exit, prints its output and adds its tests to `results`. The error names
    /// the tests that failed.
    fn join(mut self, results: &mut TestResults) -> Timed {
        let (took, answer) = self.result.recv().unwrap_or_else(|_| {
            let panicked = anyhow::anyhow!("the thread of the background jobs panicked");
            (Duration::ZERO, Err(panicked))
        });
        let mut print = || -> io::Result<String> {
            self.output.rewind()?;
            let mut output = Vec::new();
            self.output.read_to_end(&mut output)?;
            io::stdout().write_all(&output)?;
            Ok(String::from_utf8_lossy(&output).into_owned())
        };
        let answer = match print() {
            Ok(output) => {
                results.record_job(self.name, &output);
                answer.map_err(|error| anyhow::anyhow!("{error}{}", failed_tests(&output)))
            }
            Err(error) => answer.and(Err(error.into())),
        };
        (took, answer)
    }
}

/// Returns the failed tests of a test runner's output, each with the first lines of its cause.
fn failed_tests(output: &str) -> String {
    const LINES: usize = 4;
    const WIDTH: usize = 300;
    let (mut failed, mut left) = (String::new(), 0);
    for line in output.lines().filter(|line| !line.trim().is_empty()) {
        if line.starts_with("---- ") {
            left = LINES;
        } else if line == "failures:" {
            left = 0;
        }
        if left > 0 {
            left -= 1;
            failed.push_str("\n  ");
            failed.extend(line.chars().take(WIDTH));
        }
    }
    failed
}

/// The duration and the outcome of a check.
type Timed = (Duration, anyhow::Result<()>);

fn timed(run: impl FnOnce() -> anyhow::Result<()>) -> Timed {
    let start = Instant::now();
    let answer = run();
    (start.elapsed(), answer)
}

struct Outcome {
    name: &'static str,
    duration: Duration,
    failure: Option<String>,
    /// Whether its tests ran to their end.
    is_complete: bool,
    /// Whether the check passed when it ran once more after its failure.
    passed_alone: bool,
}

impl Outcome {
    fn failed(&self) -> bool {
        self.failure.is_some() && !self.passed_alone
    }
}

fn run_check(
    name: &'static str,
    promise: &str,
    run: impl FnOnce() -> Timed,
    progress: &Progress,
) -> Outcome {
    progress.report(format_args!("{name}: {promise}"));
    let (took, answer) = run();
    Outcome {
        name,
        duration: took,
        is_complete: !matches!(&answer, Err(error) if error.downcast_ref::<IncompleteRun>().is_some()),
        failure: answer.err().map(|error| format!("{error:#}")),
        passed_alone: false,
    }
}

fn report(outcomes: &[Outcome]) -> ExitCode {
    let width = outcomes
        .iter()
        .map(|outcome| outcome.name.len())
        .max()
        .unwrap_or(0);
    println!();
    for outcome in outcomes {
        let answer = match &outcome.failure {
            None => "ok".to_owned(),
            Some(why) if outcome.passed_alone => format!("ok alone, after: {why}"),
            Some(why) => format!("FAILED: {why}"),
        };
        let seconds = outcome.duration.as_secs_f64();
        println!("{:width$}  {seconds:7.1} s  {answer}", outcome.name);
    }
    let failed = outcomes.iter().filter(|outcome| outcome.failed()).count();
    println!("\n{} passed, {failed} failed", outcomes.len() - failed);
    let alone = outcomes.iter().filter(|outcome| outcome.passed_alone);
    match alone.count() {
        0 => {}
        alone => println!("{alone} of them passed only when they ran once more, alone"),
    }
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(only: &[&str]) -> Result<Vec<&'static str>, VerifyError> {
        let only: Vec<String> = only.iter().map(|word| (*word).to_owned()).collect();
        Ok(select(checks::all(), &only, false)?
            .into_iter()
            .map(|check| check.name.as_str())
            .collect())
    }

    #[test]
    fn checks_have_unique_names_below_an_area() {
        let mut names = names(&[]).unwrap();
        assert!(names.iter().all(|name| name.split('/').count() >= 2));
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn failed_tests_are_named_with_their_causes() {
        let output = "test a ... FAILED\n\nfailures:\n\n---- a ----\nonly 8 pods ran\n--- pods\n\n\
                      one\ntwo\n\n---- b ----\n\n\nfailures:\n    a\n    b\n";
        assert_eq!(
            failed_tests(output),
            "\n  ---- a ----\n  only 8 pods ran\n  --- pods\n  one\n  ---- b ----"
        );
        assert_eq!(failed_tests("test a ... ok\n\ntest result: ok.\n"), "");
    }

    #[test]
    fn select_accepts_an_area_or_a_full_name() {
        let area = names(&["main/"]).unwrap();
        assert!(area.len() > 1);
        assert_eq!(names(&["main"]).unwrap(), area);
        assert_eq!(names(&[area[0]]).unwrap(), [area[0]]);
    }

    #[test]
    fn cluster_trials_share_one_background_job() {
        let all = checks::all();
        let jobs = |only: &str| {
            let chosen = select(all, &[only.to_owned()], false).unwrap();
            let jobs = checks::background_jobs(&chosen, KUBERNETES_VERSIONS[0], false);
            jobs.iter().map(|job| job.name).collect::<Vec<_>>()
        };
        assert!(jobs("enforcement/quota").is_empty());
        assert_eq!(jobs("enforcement/cluster"), ["main/cluster"]);
        assert_eq!(jobs("operator"), ["main/cluster", "operator/api/server"]);
    }

    #[test]
    fn jobs_with_clusters_run_one_after_another() {
        let job = |has_clusters| WaitingJob {
            command: Command::new("true"),
            has_clusters,
            timeout: Duration::ZERO,
            outcome: mpsc::channel().0,
        };
        let mut waiting = WaitingJobs {
            jobs: [true, true, false].map(job).into(),
            has_clusters: false,
        };
        let mut take = || waiting.take().map(|job| job.has_clusters);
        assert_eq!([take(), take(), take()], [Some(true), Some(false), None]);
        assert_eq!(waiting.jobs.len(), 1);
    }

    #[test]
    fn select_rejects_an_unknown_name() {
        assert!(
            matches!(names(&["mainly/"]), Err(VerifyError::Unknown(word)) if word == "mainly/")
        );
    }
}
