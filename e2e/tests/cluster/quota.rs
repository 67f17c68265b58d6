//! A pod sees, and gets, what it asked for.

use bursar_e2e::pods::PodPlan;
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::stage::{SOON, Stage, trial};

const GIB: u64 = 1 << 30;
/// What the greedy pod asks for at a time.
const CHUNK: u64 = 256 << 20;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("main/cluster/quota", a_pod_sees_its_quota),
        trial("main/cluster/greedy", a_greedy_pod_is_refused),
    ]
}

/// Takes the probe's line about `event` out of a log.
pub(crate) fn event(event: &str) -> impl Fn(&str) -> Option<Value> {
    move |line| {
        let line: Value = serde_json::from_str(line).ok()?;
        (line["event"] == event).then_some(line)
    }
}

async fn a_pod_sees_its_quota(stage: &mut Stage) -> Result<(), Failed> {
    let plan = PodPlan::new("viewer", &stage.scene.probe)
        .arguments(&["report"])
        .gib(10);
    stage.pods.create(&plan).await?;
    let report = stage
        .pods
        .until_logged("viewer", SOON, event("report"))
        .await?;
    assert_eq!(report["count"], 1, "{report}");
    let device = &report["devices"][0];
    assert_eq!(device["total"], 10 * GIB, "cuMemGetInfo: {report}");
    assert_eq!(device["total_mem"], 10 * GIB, "cuDeviceTotalMem: {report}");
    let free = device["free"].as_u64().unwrap_or_default();
    assert!(
        (9 * GIB..=10 * GIB).contains(&free),
        "cuMemGetInfo: {report}"
    );
    stage
        .pods
        .until("viewer", "to succeed", SOON, |state| {
            state.phase == "Succeeded"
        })
        .await?;
    stage.witness.nobody_failed_or_restarted()
}

async fn a_greedy_pod_is_refused(stage: &mut Stage) -> Result<(), Failed> {
    let probe = stage.scene.probe.clone();
    let pods = stage.pods.clone();
    let neighbour = PodPlan::new("neighbour", &probe)
        .arguments(&["hold", "--bytes=4Gi"])
        .gib(8);
    pods.create(&neighbour).await?;
    let holding = pods
        .until_logged("neighbour", SOON, event("holding"))
        .await?;
    // Through NVML, `nvidia-smi`'s view, it is the same: the quota, and itself as process 1.
    let seen = &holding["nvml"]["seen"];
    assert_eq!(seen["total"], 8 * GIB, "{holding}");
    let used = seen["used"].as_u64().unwrap_or_default();
    // What it took, and a context.
    assert!((4 * GIB..5 * GIB).contains(&used), "{holding}");
    let alone = json!([{ "pid": 1, "bytes": used }]);
    assert_eq!(seen["processes"], alone, "{holding}");
    let greedy = PodPlan::new("greedy", &probe)
        .arguments(&["greedy", "--chunk=256Mi"])
        .gib(6);
    pods.create(&greedy).await?;
    let refused = pods.until_logged("greedy", SOON, event("refused")).await?;
    assert_eq!(refused["refused"]["code"], 2, "{refused}");
    assert_eq!(
        refused["refused"]["name"], "CUDA_ERROR_OUT_OF_MEMORY",
        "{refused}"
    );
    let got = refused["got"].as_u64().unwrap_or_default();
    assert!(
        got <= 6 * GIB && got + CHUNK > 6 * GIB - GIB,
        "it got {got} bytes of its 6 GiB: {refused}"
    );
    // Both are on the same GPU, or nothing was shown.
    assert_eq!(
        refused["device"]["uuid"], holding["device"]["uuid"],
        "{refused} {holding}"
    );
    // The greedy one holds all that it got; the neighbour still gets of its own what it asks for. (Its
    // two processes' contexts take 518 MiB each of its 8 GiB.)
    let more = stage
        .exec("neighbour", &["hold", "--bytes=2Gi", "--then=exit"])
        .await?;
    let more = more
        .lines()
        .find_map(event("holding"))
        .ok_or_else(|| format!("the neighbour was refused: {more}"))?;
    assert_eq!(more["got"], 2 * GIB, "{more}");
    assert_eq!(more["device"]["total"], 8 * GIB, "{more}");
    let state = pods.until_running("neighbour", SOON).await?;
    assert_eq!(state.restarts, 0);
    stage.witness.nobody_failed_or_restarted()
}
