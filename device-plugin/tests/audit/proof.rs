//! Tests that memory of exited processes is not given away beside managed memory, which hides
//! whether it is free.

use std::time::{Duration, Instant};

use crate::common::eventually;
use crate::container::{Container, PLAIN};
use crate::devices::DeviceCgroups;
use crate::gpu_node_api::FakeGpuNodeApi;
use crate::honest::check_no_findings;
use crate::managed::{machine_with, start_owner};
use crate::reclaim::{export_from, park, wait_for_bytes_in_state};

const GIB: u64 = 1 << 30;
/// For so long nothing is given away. A proof without managed memory takes half a second.
const UNPROVEN_TIME: Duration = Duration::from_secs(3);

#[tokio::test]
async fn memory_stays_unreclaimed_until_managed_memory_has_left() {
    let machine = machine_with(|_| {}).await;
    let mut devices = DeviceCgroups::v1(&machine);
    let (owner_pod, mut owner) = start_owner(&machine, &mut devices, 64).await;
    let managed = owner.number(&format!("managed {}", 64 * GIB));
    let (pod, mut exporter) = export_from(&machine, "exporter").await;
    let parked = park(&mut exporter);
    owner.ok(&format!("touch {managed} {}", 16 * GIB));
    drop(exporter);
    let mut next = Container::start(&machine, &pod, PLAIN).await;
    next.ok("open libcuda.so.1");
    let request = format!("alloc {}", 3 * GIB);
    assert_eq!(
        next.call(&request),
        "err 2",
        "a descriptor holds the memory"
    );
    drop(parked);
    let start = Instant::now();
    while start.elapsed() < UNPROVEN_TIME {
        owner.ok(&format!("touch {managed} {}", 16 * GIB));
        assert_eq!(next.call(&request), "err 2", "managed memory hides it");
    }
    drop(next);
    machine.end(&pod);
    wait_for_bytes_in_state(&machine, "leaked", 6 * GIB).await;
    let queued_pod = machine.admit("queued", 12).await;
    let expected = "waiting for 12 GiB on one GPU: largest free 9 GiB";
    machine.until_refused(&queued_pod, expected).await;
    check_no_findings(&machine).await;
    drop(owner);
    machine.end(&owner_pod);
    machine.until_started(&queued_pod).await;
}

#[tokio::test]
async fn drain_frees_memory_that_managed_memory_hides() {
    let mut api = None;
    let machine = machine_with(|machine| api = Some(FakeGpuNodeApi::start(machine))).await;
    let api = api.unwrap();
    let mut devices = DeviceCgroups::v1(&machine);
    let (_, mut owner) = start_owner(&machine, &mut devices, 64).await;
    let managed = owner.number(&format!("managed {}", 64 * GIB));
    let (pod, mut exporter) = export_from(&machine, "exporter").await;
    let parked = park(&mut exporter);
    owner.ok(&format!("touch {managed} {}", 16 * GIB));
    drop((exporter, parked));
    machine.end(&pod);
    wait_for_bytes_in_state(&machine, "leaked", 6 * GIB).await;
    let queued_pod = machine.admit("queued", 12).await;
    let expected = "waiting for 12 GiB on one GPU: largest free 9 GiB";
    machine.until_refused(&queued_pod, expected).await;
    let status = api.status();
    let mut gpus = status["gpus"].as_array().unwrap().iter();
    let is_shared = |gpu: &&serde_json::Value| gpu["free"] != 0;
    let gpu = gpus.find(is_shared).unwrap()["uuid"].as_str().unwrap();
    api.drain(&[gpu]);
    eventually("the drain ends the owner", || !owner.is_alive()).await;
    api.drain(&[]);
    machine.until_started(&queued_pod).await;
}
