//! Fuzzes JSON files of the kubelet and of the agent, which another program may have written.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use bursar_gpu::generations::GpuGenerations;
use bursar_gpu::health::{Health, PersistedHealth};
use bursar_gpu::memory_sample::{GpuMemorySample, MemorySampler};
use bursar_gpu::{Gpu, GpuState};
use bursar_host::checkpoint::Checkpoint;
use bursar_kubelet::device_checkpoint::DeviceCheckpoint;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, Resource};
use bursar_node::cdi::CdiDir;
use bursar_protocol::units::Units;
use bursar_sessions::{CgroupResolver, SessionSpec, Sessions};

use crate::search;

/// The parser counts the kubelet's checkpoint entry by entry, and each accepted entry has device
/// ids.
#[test]
fn device_checkpoint_is_parsed_by_whole_entries() {
    let names = [(
        Resource::DeviceMemory,
        "bursar.dev/gpu-memory-gib".to_owned(),
    )];
    search("checkpoint", |bytes| {
        let Ok(checkpoint) = DeviceCheckpoint::parse(bytes, &names) else {
            return;
        };
        // A skipped entry may be no text.
        if let Ok(file) = serde_json::from_slice::<serde_json::Value>(bytes) {
            let entries = file["Data"]["PodDeviceEntries"].as_array();
            let own = checkpoint.entries.len() + checkpoint.skipped;
            assert!(own <= entries.map_or(0, Vec::len));
        }
        for held in &checkpoint.entries {
            let mut holders = checkpoint.entries_with(held.resource, &held.device_ids);
            assert!(holders.any(|holder| holder == held));
        }
    });
}

/// A CDI file is the binding of the allocation in its name, or malformed.
#[test]
fn cdi_file_is_a_binding_of_its_name_or_malformed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bursar.dev-gpu-0000000000000007.json");
    search("cdi", |bytes| {
        std::fs::write(&file, bytes).unwrap();
        let listed = CdiDir::new(folder.path().to_owned()).list().unwrap();
        assert_eq!(listed.bindings.len() + listed.unreadable.len(), 1);
        for binding in listed.bindings {
            assert_eq!(binding.allocation, AllocationId::from_bits(7));
        }
    });
}

struct EmptySampler;

impl MemorySampler for EmptySampler {
    fn sample(&self, _gpu: &GpuUuid) -> Option<GpuMemorySample> {
        Some(GpuMemorySample::default())
    }
}

/// An agent with a session record of any content serves the container and counts no more than a
/// credit word holds.
#[test]
fn session_record_of_any_content_is_served() {
    // The agent's run folder is on a tmpfs too.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let record = folder.path().join("sessions/0000000000000007.json");
    std::fs::create_dir_all(folder.path().join("sessions")).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let served = SessionSpec {
        allocation: AllocationId::from_bits(7),
        pod: "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap(),
        device_ids: None,
        gpus: vec![("GPU-aaaa".parse().unwrap(), Bytes::gib(1))],
        managed: Bytes::gib(1),
    };
    let shared = AssertUnwindSafe((runtime, served, folder));
    search("record", |bytes| {
        let (runtime, served, folder) = &*shared;
        std::fs::write(&record, bytes).unwrap();
        runtime.block_on(async {
            let run_dir = folder.path().to_owned();
            let membership = Arc::new(CgroupResolver::new("/proc".into()));
            let sessions = Sessions::new(run_dir, Arc::new(EmptySampler), membership);
            sessions.serve(served.clone()).await.unwrap();
            let usage = sessions.container_usage().into_iter();
            for usage in usage.flat_map(|container| container.accounts) {
                assert!(usage.granted.0 <= Units::MAX.bytes(), "{usage:?}");
                assert!(usage.exited.0 <= Units::MAX.bytes(), "{usage:?}");
            }
            sessions.remove(&served.allocation).await.unwrap();
            // This runtime drops the aborted listener only when the test's task gives way.
            tokio::task::yield_now().await;
        });
    });
}

/// The GPU `GPU-a`, absent or present.
fn gpu(away: bool) -> GpuState {
    GpuState {
        gpu: Gpu::with_uuid("GPU-a"),
        health: Health::Healthy,
        persisted: PersistedHealth {
            away,
            ..PersistedHealth::default()
        },
    }
}

/// A GPU's generation grows with each return, whatever generations the file has.
#[test]
fn generation_grows_after_a_file_of_any_content() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let [run, disk] = ["run.json", "disk.json"].map(|name| folder.path().join(name));
    search("generations", |bytes| {
        let Ok(content) = serde_json::from_slice::<serde_json::Value>(bytes) else {
            return;
        };
        let _ = std::fs::remove_file(&disk);
        Checkpoint::new(run.clone()).save(&content).unwrap();
        let file = |path: &std::path::Path| Checkpoint::new(path.to_owned());
        let generations = GpuGenerations::load(file(&run), file(&disk), "boot-2".to_owned());
        let mut generations = generations.unwrap();
        let uuid = gpu(false).gpu.uuid;
        let mut last = 0;
        for away in [true, false, true, false] {
            generations.observe(&[gpu(away)]);
            let now = generations.by_gpu()[&uuid];
            assert!(now >= last && (now > last || away), "{last} {now}");
            last = now;
        }
    });
}
