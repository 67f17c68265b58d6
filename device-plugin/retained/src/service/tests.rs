//! Tests the service between its tasks: what each result changes, and which tasks follow.

use std::process::{Command, Stdio};

use bursar_gpu::memory_sample::{GpuMemorySample, MemorySampler};
use bursar_host::checkpoint::Checkpoint;
use bursar_ledger::units::PodUid;
use bursar_sessions::lease_handle::{LeaseHandle, NodeView};
use tempfile::TempDir;

use super::*;
use crate::scrub_check::{ScrubProcess, Verdict};

/// A driver that cannot answer.
struct FakeSilentSampler;

impl MemorySampler for FakeSilentSampler {
    fn sample(&self, _gpu: &GpuUuid) -> Option<GpuMemorySample> {
        None
    }
}

/// A host without processes.
struct FakeResolver;

impl ContainerResolver for FakeResolver {
    fn process(&self, _pid: u32) -> Option<Process> {
        None
    }

    fn container(&self, _pid: u32, _pod: &PodUid) -> Option<String> {
        None
    }
}

fn gpu() -> GpuUuid {
    "GPU-a".parse().unwrap()
}

/// A node with this GPU and room for a scrub check.
fn node(gpu: GpuUuid) -> NodeView {
    NodeView {
        generations: BTreeMap::from([(gpu.clone(), 1)]),
        free: BTreeMap::from([(gpu, Bytes::gib(16))]),
        ..NodeView::default()
    }
}

fn result(verdict: Verdict, context: Option<Bytes>) -> ScrubCheckResult {
    ScrubCheckResult {
        verdict,
        context,
        process: ScrubProcess::default(),
    }
}

/// A service on a machine without a provisioner, a driver and an fd store.
struct Fixture {
    state: State,
    drain: watch::Sender<DrainState>,
    _folder: TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let program = Program::without_driver(folder.path(), "no-provisioner");
        let run_dir = folder.path().to_owned();
        let sessions = Sessions::new(run_dir, Arc::new(FakeSilentSampler), Arc::new(FakeResolver))
            .with_context_sizes(folder.path().join("contexts.json"));
        let (drain, drained) = watch::channel(DrainState::default());
        let mut state = State::new(LeaseService {
            commands: LeaseHandle::channel().1,
            store_events: None,
            sessions: Arc::new(sessions),
            membership: Arc::new(FakeResolver),
            provisioners: Arc::new(Provisioners::new(program.clone())),
            program,
            scrub_cache: ScrubCache::load(Checkpoint::new(folder.path().join("scrubbed.json"))),
            lease_ids: LeaseIds::new(std::time::UNIX_EPOCH),
            key: NodeKey::new("node-a".to_owned(), [1; 32]).unwrap(),
            live_leases: watch::Sender::default(),
            drain: drained,
            released_gpus: watch::Sender::default(),
            status: watch::Sender::default(),
        });
        // The verdicts of scrub checks are for the GPU's generation.
        state.leases.reconcile(node(gpu()), &BTreeMap::new());
        Fixture {
            state,
            drain,
            _folder: folder,
        }
    }

    fn drain(&mut self, gpu: GpuUuid) {
        let requested = BTreeSet::from([gpu]);
        self.drain.send_modify(|state| state.requested = requested);
        self.state.apply_drain();
    }

    /// Waits for all tasks.
    async fn finish_jobs(&mut self) {
        while let Some(done) = self.state.jobs.join_next().await {
            self.state.handle_completion(done.unwrap());
        }
    }

    /// Begins a scrub check that has this result, and ends it.
    fn run_scrub_check(&mut self, result: ScrubCheckResult) {
        self.state.scrub_checks.insert(gpu());
        let with = self.state.driver_epoch(&gpu());
        let done = Completion::ScrubChecked(gpu(), with, result);
        self.state.handle_completion(done);
    }
}

#[tokio::test]
async fn context_is_not_measured_at_once_again_if_implausible() {
    for context in [None, Some(Bytes::ZERO), Some(Bytes::gib(2))] {
        let mut fixture = Fixture::new();
        fixture.run_scrub_check(result(Verdict::Scrubbed, context));
        fixture.finish_jobs().await;
        fixture.state.reconcile(node(gpu()));
        assert!(fixture.state.scrub_checks.is_empty(), "{context:?}");
    }
}

#[tokio::test]
async fn drained_gpu_is_held_until_its_scrub_check_has_exited() {
    let mut fixture = Fixture::new();
    fixture.drain(gpu());
    assert!(fixture.state.released_gpus().contains(&gpu()));
    // The process ends with its input.
    let mut command = Command::new("cat");
    let mut hung = command.stdin(Stdio::piped()).spawn().unwrap();
    let input = hung.stdin.take();
    fixture.run_scrub_check(ScrubCheckResult {
        process: hung.into(),
        ..result(Verdict::Unknown("timed out".to_owned()), None)
    });
    assert!(!fixture.state.released_gpus().contains(&gpu()));
    drop(input);
    fixture.finish_jobs().await;
    assert!(fixture.state.released_gpus().contains(&gpu()));
}

#[tokio::test]
async fn drain_does_not_wait_for_the_retry_of_a_scrub_check() {
    let mut fixture = Fixture::new();
    fixture.run_scrub_check(result(Verdict::Unknown("busy".to_owned()), None));
    fixture.finish_jobs().await;
    fixture.state.reconcile(node(gpu()));
    assert!(fixture.state.jobs.is_empty(), "the retry is not due");
    fixture.drain(gpu());
    assert!(fixture.state.released_gpus().contains(&gpu()));
}
