//! Fuzzes the checkpoint of a ledger for a second: another version of the agent may have written
//! it.
//!
//! `BOLERO_RANDOM_ITERATIONS=1000000 cargo test -p bursar-ledger --test fuzz` searches longer. A
//! failure prints the seed that repeats it (`BOLERO_RANDOM_SEED`).

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::cell::Cell;
use std::panic::AssertUnwindSafe;

use bursar_ledger::units::{AllocationId, Bytes, DeviceIdSet, Quanta, Quantum, Resource};
use bursar_ledger::{
    BindRequest, BootTime, Gpu, GpuSpread, Health, Ledger, Priority, RETRY_GRACE, Snapshot,
};

#[path = "../../protocol/tests/fuzz/mutate.rs"]
mod mutate;

const NOW: BootTime = BootTime(5_000);

fn add(ledger: &mut Ledger, id: u64, resource: Resource, ids: std::ops::Range<u16>) -> DeviceIdSet {
    let ids = DeviceIdSet::from_indexes(ids).unwrap();
    ledger.add_pending(AllocationId::from_bits(id), resource, ids.clone(), NOW);
    ids
}

fn bind(ledger: &mut Ledger, pod: &str, resource: Resource, containers: &[DeviceIdSet]) {
    for ids in containers {
        let request = BindRequest {
            resource,
            device_ids: ids.clone(),
            containers: containers.to_vec(),
            pod: pod.parse().unwrap(),
            spread: GpuSpread::default(),
            priority: Priority(7),
        };
        // A claim without room is queued.
        let _ = ledger.bind(request, NOW);
    }
}

/// Checkpoints of ledgers with claims in every state.
fn samples() -> Vec<Vec<u8>> {
    let mut ledger = Ledger::new(Quantum::Gib1);
    let empty = ledger.snapshot();
    ledger.set_gpus(["GPU-a", "GPU-b"].map(|uuid| Gpu {
        uuid: uuid.parse().unwrap(),
        capacity: Quanta(16),
        health: Health::Healthy,
    }));
    ledger.set_managed_capacity(Quanta(8));
    let pair = [
        add(&mut ledger, 1, Resource::DeviceMemory, 0..7),
        add(&mut ledger, 2, Resource::DeviceMemory, 7..16),
    ];
    bind(&mut ledger, "pair", Resource::DeviceMemory, &pair);
    ledger.set_namespace(&"pair".parse().unwrap(), "team");
    let managed = [add(&mut ledger, 3, Resource::ManagedMemory, 0..4)];
    bind(&mut ledger, "managed", Resource::ManagedMemory, &managed);
    let queued = [add(&mut ledger, 4, Resource::DeviceMemory, 16..36)];
    bind(&mut ledger, "queued", Resource::DeviceMemory, &queued);
    let other = [add(&mut ledger, 5, Resource::DeviceMemory, 36..46)];
    bind(&mut ledger, "other", Resource::DeviceMemory, &other);
    add(&mut ledger, 6, Resource::DeviceMemory, 50..52);
    ledger.add_unreclaimed("GPU-b".parse().unwrap(), Bytes::gib(2), NOW);
    ledger.set_withheld([("GPU-a".parse().unwrap(), Bytes::gib(1))].into());
    let all = [empty, ledger.snapshot()];
    all.iter()
        .map(|snapshot| serde_json::to_vec(snapshot).unwrap())
        .collect()
}

/// Takes every step of a node's life that needs no further input.
fn live_on(mut ledger: Ledger) {
    let later = NOW + RETRY_GRACE * 3;
    for now in [NOW, later] {
        ledger.advance(now);
        let view = ledger.view(now);
        for gpu in &view.gpus {
            assert!(gpu.free <= gpu.capacity, "{gpu:?}");
        }
        ledger.queued_claims(now);
        ledger.free_by_gpu().count();
        let again = Ledger::restore(ledger.snapshot(), Quantum::Gib1, now);
        assert!(again.is_ok(), "{again:?}");
    }
    let ids = add(&mut ledger, u64::MAX, Resource::DeviceMemory, 100..101);
    bind(&mut ledger, "new", Resource::DeviceMemory, &[ids]);
    let pods: Vec<_> = ledger.pods().into_iter().cloned().collect();
    for pod in pods {
        ledger.release_pod(&pod);
    }
    ledger.advance(later);
}

/// A checkpoint is refused, or restored to a ledger that serves pods.
#[test]
fn ledger_of_any_checkpoint_is_refused_or_serves_pods() {
    let samples = samples();
    let (tried, restored) = (Cell::new(0u64), Cell::new(0u64));
    let counters = AssertUnwindSafe((&tried, &restored));
    bolero::check!()
        .with_generator(mutate::edits())
        .for_each(|edits| {
            let (tried, restored) = *counters;
            tried.set(tried.get() + 1);
            let text = edits.apply(&samples);
            let snapshot = serde_json::from_slice::<Snapshot>(&text);
            let ledger = snapshot.map(|snapshot| Ledger::restore(snapshot, Quantum::Gib1, NOW));
            if let Ok(Ok(ledger)) = ledger {
                restored.set(restored.get() + 1);
                live_on(ledger);
            }
        });
    let (tried, restored) = (tried.get(), restored.get());
    println!("{tried} checkpoints, {restored} restored");
    assert!(restored * 100 > tried, "the changes reach nothing");
}
