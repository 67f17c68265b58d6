//! Tests an agent without an API server. It restarts containers that await eviction, and the
//! operator finds the same state afterwards.

use std::time::{Duration, Instant};

use bursar_crds::GpuNodeStatus;
use bursar_crds::context_policy::FaultAction;
use serde_json::json;

use crate::api::FakeGpuNodeApi;
use crate::common::kubelet::Pod;
use crate::container::{Container, PLAIN, configure};
use crate::machine::{GPU, Machine};

/// How long an agent waits for an eviction (`sessions/recovery.rs`).
const OFFLINE_AFTER: Duration = Duration::from_secs(30);

/// Waits until the agent's status in the API server satisfies `is`.
async fn until(
    api: &FakeGpuNodeApi,
    description: &str,
    is: impl Fn(&GpuNodeStatus) -> bool,
) -> GpuNodeStatus {
    let start = Instant::now();
    loop {
        let status: GpuNodeStatus = serde_json::from_value(api.status()).unwrap();
        if is(&status) {
            return status;
        }
        // The agent repeats a failed write after 30 s at most.
        assert!(
            start.elapsed() < OFFLINE_AFTER + OFFLINE_AFTER,
            "{description}: {status:?}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn pod_awaiting_eviction_is_restarted_while_offline() {
    let mut machine = Machine::new().await;
    configure(&machine, "");
    let api = FakeGpuNodeApi::start(&machine);
    for (namespace, most) in [("some", 5), ("none", 0)] {
        let policy = json!({ "action": "Evict", "maxRestarts": most });
        api.set_namespace(namespace, json!({ "contextPolicy": policy }));
    }
    machine.start_agent();
    machine.kubelet.until_allocatable(GPU, 32).await;
    let mut programs = Vec::new();
    for namespace in ["some", "none"] {
        let pod = Pod {
            namespace: namespace.to_owned(),
            ..Pod::with(namespace, GPU, 4)
        };
        machine.kubelet.admit(&pod).await.unwrap();
        std::fs::create_dir_all(machine.cgroup(&pod)).unwrap();
        let mut program = Container::start(&machine, &pod, PLAIN).await;
        program.ok("open libcuda.so.1");
        programs.push(program);
    }
    for program in &mut programs {
        program.ok("fault");
        assert_eq!(program.call("sync"), "err 700");
    }
    until(&api, "the reported faults", |status| {
        status.faults.len() == 2
    })
    .await;
    // From here on the agent has nothing to write, so no failed write tells it that the API server
    // is unreachable.
    api.set_unreachable(true);
    let start = Instant::now();
    while programs.iter_mut().any(Container::is_alive) {
        assert!(start.elapsed() < 2 * OFFLINE_AFTER, "they wait for ever");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(start.elapsed() >= OFFLINE_AFTER, "{:?}", start.elapsed());
    api.set_unreachable(false);
    // A restart closes the fault. The fault beyond the restart limit stays open for an eviction.
    let status = until(&api, "the faults after the restart", |status| {
        let [fault] = status.faults.as_slice() else {
            return false;
        };
        fault.action == Some(FaultAction::BeyondMaximum)
    })
    .await;
    let container = status.faults[0].container.as_ref().unwrap();
    assert_eq!(
        (
            container.namespace.as_str(),
            container.process_generation > 0
        ),
        ("none", true)
    );
}
