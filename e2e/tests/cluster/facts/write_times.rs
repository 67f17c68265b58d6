//! Measures the API server's time for a write of a `GpuNode`'s status by the status's size (F20).

use std::time::{Duration, Instant};

use bursar_crds::GpuNode;
use bursar_e2e::control_plane::ControlPlane;
use bursar_e2e::progress::Progress;
use kube::api::{Api, Patch, PatchParams, PostParams};
use libtest_mimic::Failed;
use serde_json::{Value, json};

use super::CLUSTER;

const NODE: &str = "facts";
const GPUS: usize = 8;
const WRITES: usize = 100;
/// The pods of each GPU, for a status of about 3 KiB and one of about 85 KiB.
const PODS: [usize; 2] = [1, 90];

pub(super) async fn larger_gpu_node_takes_longer() -> Result<(), Failed> {
    let progress = Progress::start();
    let plane = ControlPlane::start(CLUSTER, crate::harness(), &progress).await?;
    let nodes: Api<GpuNode> = Api::all(plane.client());
    let node = GpuNode::new(NODE, Default::default());
    nodes.create(&PostParams::default(), &node).await?;
    let mut medians = Vec::new();
    for pods in PODS {
        let (bytes, mut times) = (status(pods, 0).to_string().len(), Vec::new());
        for number in 0..WRITES {
            let body = json!({ "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode",
                "metadata": { "name": NODE }, "status": status(pods, number) });
            times.push(time_of_write(&nodes, body).await?);
        }
        times.sort_unstable();
        let (median, p99) = (times[WRITES / 2], times[WRITES * 99 / 100]);
        progress.report(format_args!(
            "a write of a GpuNode of {:.1} KiB: {median:.1?} (median), {p99:.1?} (p99)",
            bytes as f64 / 1024.0
        ));
        medians.push(median);
    }
    plane.stop().await;
    assert!(medians[1] > 2 * medians[0], "{medians:?}");
    Ok(())
}

/// Writes the status as an agent does.
async fn time_of_write(nodes: &Api<GpuNode>, body: Value) -> Result<Duration, Failed> {
    let params = PatchParams::apply("bursar-agent").force();
    let patch = Patch::Apply(body);
    let begin = Instant::now();
    nodes.patch_status(NODE, &params, &patch).await?;
    Ok(begin.elapsed())
}

/// Returns a status whose GPUs have this many pods each. The number makes each write differ from
/// the one before.
fn status(pods: usize, number: usize) -> Value {
    let gpus = (0..GPUS).map(|gpu| {
        let pods = (0..pods).map(|pod| {
            let uid = format!("{gpu:08x}-0000-0000-0000-{pod:012x}");
            json!({ "uid": uid, "namespace": "team-of-research", "name": format!("trainer-{gpu}-of-8-{pod:04}"), "quanta": 1 })
        });
        let uuid = format!("GPU-{gpu:08x}-0000-0000-0000-000000000000");
        json!({ "uuid": uuid, "index": gpu, "model": "NVIDIA H100 80GB HBM3", "memory": "80Gi",
            "state": "Active", "generation": 1, "health": { "status": "Healthy", "reason": "Ok" },
            "capacity": 80, "free": number % 80, "largestFree": number % 80,
            "pods": pods.collect::<Vec<_>>() })
    });
    json!({ "quantum": "1Gi", "driverVersion": "580.159.04", "agentVersion": "0.1.0",
        "deviceMemory": { "allocatable": 640, "free": number, "largestFree": number % 80 },
        "gpus": gpus.collect::<Vec<_>>() })
}
