//! Runs `cargo demo` as a newcomer does, on a cluster of its own.

use std::process::Stdio;
use std::time::{Duration, Instant};

use bursar_e2e::artifacts::Artifacts;
use bursar_e2e::progress::Progress;
use bursar_e2e::workspace::Profile;
use libtest_mimic::{Failed, Trial};
use tokio::process::Command;

use crate::shared_cluster;

/// The promise for a run for which everything is built.
const PROMISE: Duration = Duration::from_secs(90);
/// A machine with other work may break the promise once.
const RUNS: usize = 2;
/// A run that takes longer hangs.
const HUNG: Duration = Duration::from_secs(300);
/// Parts of the progress lines on standard error, in their order.
const REPORTED: &[&str] = &[
    "GiB guaranteed, up to",
    "then CUDA_ERROR_OUT_OF_MEMORY",
    "waits: ",
    "is deleted to make room",
    "borrowed, and is preempted",
    "runs again in place after",
    "everything is taken down",
];
/// Parts of the standard output, in their order.
const PRINTED: &[&str] = &[
    "$ kubectl bursar explain pod",
    "$ kubectl bursar top -A",
    "$ kubectl bursar budgets",
    "got its guarantee back in",
];

pub(crate) fn trials() -> Vec<Trial> {
    let yours = shared_cluster::kubeconfig().is_some();
    vec![Trial::test("surface/cluster/demo", demo_is_quick).with_ignored_flag(yours)]
}

fn demo_is_quick() -> Result<(), Failed> {
    // Both clusters at once would take the memory and the time of the demo.
    shared_cluster::take_down();
    let progress = Progress::start();
    Artifacts::from_workspace(Profile::Dev, crate::harness(), &progress)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let mut took = Vec::new();
    for _ in 0..RUNS {
        took.push(runtime.block_on(run())?);
        progress.report(format_args!("cargo demo: {:.1?}", took[took.len() - 1]));
        if took.iter().any(|took| *took < PROMISE) {
            return Ok(());
        }
    }
    Err(format!("the demo took {took:.1?}, and not less than {PROMISE:?}").into())
}

/// Runs the demo, checks what it shows, and returns its duration.
async fn run() -> Result<Duration, Failed> {
    let begin = Instant::now();
    let demo = Command::new(crate::harness())
        .args(["demo", "--name=demo-trial"])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(HUNG, demo).await??;
    let took = begin.elapsed();
    let [printed, reported] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{printed}\n{reported}");
    has_in_order(&reported, REPORTED)?;
    has_in_order(&printed, PRINTED)?;
    Ok(took)
}

fn has_in_order(text: &str, parts: &[&str]) -> Result<(), String> {
    let mut rest = text;
    for part in parts {
        let found = rest.split_once(part);
        let missing = || format!("no `{part}` in its place:\n{text}");
        rest = found.ok_or_else(missing)?.1;
    }
    Ok(())
}
