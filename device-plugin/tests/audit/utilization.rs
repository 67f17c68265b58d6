//! Tests the SM utilization of containers: NVML's samples of processes, summed for each container.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::common::PATIENCE;
use crate::container::{Container, PLAIN, configure, machine};
use crate::findings::wait_for_metric;
use crate::machine::{GPU, Machine};

const GIB: u64 = 1 << 30;
/// A GPU whose driver has no utilization of processes, and one that is partitioned.
const WITHOUT_UTILIZATION: [&str; 2] = [
    r#"
process-utilization = false
[[gpu]]
name = "NVIDIA H200"
uuid = "GPU-00000000-0000-0000-0000-000000000001"
memory = "16Gi"
minor = 0
"#,
    r#"
[[gpu]]
name = "NVIDIA H200"
uuid = "GPU-00000000-0000-0000-0000-000000000001"
memory = "32Gi"
minor = 0
[[gpu.mig]]
profile = "1g.18gb"
uuid = "MIG-00000000-0000-0000-0000-000000000001"
memory = "16Gi"
"#,
];

/// The SM utilization of each pod.
async fn utilization(machine: &Machine) -> BTreeMap<String, f64> {
    let (_, text) = machine.get("/metrics").await;
    let lines = text.lines();
    let lines = lines.filter_map(|line| line.strip_prefix("bursar_container_sm_utilization_ratio"));
    let series = lines.filter_map(|line| {
        let (labels, value) = line.strip_prefix('{')?.split_once("} ")?;
        assert!(labels.contains(r#"container="main",gpu="GPU-"#), "{labels}");
        let pod = labels.split(r#"pod=""#).nth(1)?.split('"').next()?;
        Some((pod.to_owned(), value.parse().ok()?))
    });
    series.collect()
}

async fn wait_for_utilization(machine: &Machine, wanted: &[(&str, f64)]) {
    let wanted = wanted
        .iter()
        .map(|(pod, ratio)| ((*pod).to_owned(), *ratio));
    let wanted: BTreeMap<String, f64> = wanted.collect();
    let start = Instant::now();
    loop {
        let now = utilization(machine).await;
        if now == wanted {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{now:?} is not {wanted:?}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// A running program of a pod, which has memory of a GPU.
async fn start(machine: &Machine, pod: &crate::common::kubelet::Pod) -> Container {
    let mut program = Container::start(machine, pod, PLAIN).await;
    program.ok("open libcuda.so.1");
    program.ok(&format!("alloc {GIB}"));
    program
}

#[tokio::test]
async fn container_has_the_utilization_of_its_processes() {
    let machine = machine("").await;
    let utilize = |program: &Container, percent: &[&str]| {
        let pid = program.pid().to_string();
        let words = [&["utilize", pid.as_str()], percent].concat();
        machine.lab.run_simgpu(&words).unwrap();
    };
    let (busy, idle) = (
        machine.admit("busy", 8).await,
        machine.admit("idle", 4).await,
    );
    let first = start(&machine, &busy).await;
    let other = start(&machine, &idle).await;
    utilize(&first, &["40"]);
    wait_for_utilization(&machine, &[("busy", 0.4), ("idle", 0.0)]).await;
    let second = start(&machine, &busy).await;
    utilize(&second, &["35"]);
    wait_for_utilization(&machine, &[("busy", 0.75), ("idle", 0.0)]).await;
    utilize(&second, &["90"]);
    wait_for_utilization(&machine, &[("busy", 1.0), ("idle", 0.0)]).await;
    for program in [&first, &second, &other] {
        utilize(program, &[]);
    }
    // NVML finds no samples of a GPU that no process used.
    wait_for_utilization(&machine, &[("busy", 0.0), ("idle", 0.0)]).await;
    drop(other);
    wait_for_utilization(&machine, &[("busy", 0.0)]).await;
}

#[tokio::test]
async fn utilization_is_absent_where_nvml_has_none() {
    for driver in WITHOUT_UTILIZATION {
        let mut machine = Machine::with_driver(driver).await;
        configure(&machine, "");
        machine.start_agent();
        machine.kubelet.until_allocatable(GPU, 16).await;
        let pod = machine.admit("a", 8).await;
        let _program = start(&machine, &pod).await;
        let memory = "bursar_container_drift_bytes";
        wait_for_metric(&machine, memory, r#"pod="a""#, |_| true).await;
        wait_for_metric(&machine, "bursar_gpu_audit_stale", "", |stale| stale == 0).await;
        assert_eq!(utilization(&machine).await, BTreeMap::new());
        assert!(!machine.log().contains("ERROR"), "{}", machine.log());
    }
}
