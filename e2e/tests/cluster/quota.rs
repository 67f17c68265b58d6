//! Checks that a pod sees and gets its requested memory.

use bursar_e2e::pods::PodBuilder;
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::shared_cluster::{START_TIMEOUT, TrialContext, trial};

const GIB: u64 = 1 << 30;
/// The size of the greedy pod's allocations.
const CHUNK: u64 = 256 << 20;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("main/cluster/quota", a_pod_sees_its_quota),
        trial("main/cluster/greedy", a_greedy_pod_is_refused),
    ]
}

/// Parses the probe's line about `event` in a log.
pub(crate) fn event_line(event: &str) -> impl Fn(&str) -> Option<Value> {
    move |line| {
        let line: Value = serde_json::from_str(line).ok()?;
        (line["event"] == event).then_some(line)
    }
}

async fn a_pod_sees_its_quota(context: &mut TrialContext) -> Result<(), Failed> {
    let plan = PodBuilder::new("viewer", &context.environment.probe_image)
        .arguments(&["report"])
        .gib(10);
    context.pods.create(&plan).await?;
    let report = context
        .pods
        .wait_for_log_line("viewer", START_TIMEOUT, event_line("report"))
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
    context
        .pods
        .wait_until("viewer", "to succeed", START_TIMEOUT, |state| {
            state.phase == "Succeeded"
        })
        .await?;
    context.history.check_none_failed_or_restarted().await
}

async fn a_greedy_pod_is_refused(context: &mut TrialContext) -> Result<(), Failed> {
    let probe = context.environment.probe_image.clone();
    let pods = context.pods.clone();
    let neighbour = PodBuilder::new("neighbour", &probe)
        .arguments(&["hold", "--bytes=4Gi"])
        .gib(8);
    pods.create(&neighbour).await?;
    let holding = pods
        .wait_for_log_line("neighbour", START_TIMEOUT, event_line("holding"))
        .await?;
    // NVML, which `nvidia-smi` uses, also shows the quota, and the program as process 1.
    let nvml = &holding["nvml"]["seen"];
    assert_eq!(nvml["total"], 8 * GIB, "{holding}");
    let used = nvml["used"].as_u64().unwrap_or_default();
    // The allocation and a context.
    assert!((4 * GIB..5 * GIB).contains(&used), "{holding}");
    let alone = json!([{ "pid": 1, "bytes": used }]);
    assert_eq!(nvml["processes"], alone, "{holding}");
    let greedy = PodBuilder::new("greedy", &probe)
        .arguments(&["greedy", "--chunk=256Mi"])
        .gib(6);
    pods.create(&greedy).await?;
    let refused = pods
        .wait_for_log_line("greedy", START_TIMEOUT, event_line("refused"))
        .await?;
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
    // Both pods must be on the same GPU, or the test would show nothing.
    assert_eq!(
        refused["device"]["uuid"], holding["device"]["uuid"],
        "{refused} {holding}"
    );
    // The greedy pod holds all of its quota, and its neighbour still gets its own. (The contexts of
    // the neighbour's two processes take 518 MiB each of its 8 GiB.)
    let more = context
        .exec("neighbour", &["hold", "--bytes=2Gi", "--then=exit"])
        .await?;
    let more = more
        .lines()
        .find_map(event_line("holding"))
        .ok_or_else(|| format!("the neighbour was refused: {more}"))?;
    assert_eq!(more["got"], 2 * GIB, "{more}");
    assert_eq!(more["device"]["total"], 8 * GIB, "{more}");
    let state = pods.wait_until_running("neighbour", START_TIMEOUT).await?;
    assert_eq!(state.restarts, 0);
    context.history.check_none_failed_or_restarted().await
}
