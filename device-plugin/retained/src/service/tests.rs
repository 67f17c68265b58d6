//! Tests the service between its tasks: what each result changes, and which tasks follow.

use std::process::{Command, Stdio};

use bursar_gpu::memory_sample::{GpuMemorySample, MemorySampler};
use bursar_host::checkpoint::Checkpoint;
use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, PodUid};
use bursar_protocol::fdstore::{Blob, KEEP_ALIVE};
use bursar_sessions::lease_handle::{LeaseHandle, NodeView};
use tempfile::TempDir;

use super::keep_alive::{encode_gpu, store_keep_alive};
use super::requests::send_memory;
use super::*;
use crate::fdstore_client::FakeFdStore;
use crate::leases::{Content, LeaseKey, LeaseRecord, Writer};
use bursar_supervision::scrub_check::{ScrubProcess, Verdict};

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

fn lease_of_one_gib(gpu: GpuUuid) -> LeaseRecord {
    LeaseRecord {
        title: LeaseKey {
            namespace: "team".to_owned(),
            name: "weights".to_owned(),
            key: [7; 32],
            gpu,
        },
        bytes: Bytes::gib(1),
        gpu_generation: 1,
        owner: AllocationId::from_bits(1),
        pod: "a".parse().unwrap(),
        openers: BTreeSet::new(),
        content: Content::Committed {
            token: 1,
            checksum: 1,
        },
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
            per_gpu: None,
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
            scrubbed: watch::Sender::default(),
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

    /// Connects to an fd store with an export keep-alive.
    fn connect(&mut self, keep_alive: Blob) -> FakeFdStore {
        let store = FakeFdStore::default();
        store
            .0
            .lock()
            .unwrap()
            .insert(KEEP_ALIVE, keep_alive.clone());
        self.state.handle_store_event(Some(StoreEvent::Connected {
            connection: store.connect(1),
            leases: BTreeMap::from([(LeaseId(KEEP_ALIVE), keep_alive)]),
            capacity: 16,
        }));
        store
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
        let epoch = self.state.driver_epoch(&gpu());
        let done = Completion::ScrubChecked(gpu(), epoch, result);
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

#[test]
fn gpu_lends_no_more_than_its_limit() {
    let mut fixture = Fixture::new();
    let check = |state: &State, gib| state.check_gpu_limit(&gpu(), Bytes::gib(gib));
    let unlimited = Ok(Bytes(u64::MAX));
    assert_eq!(check(&fixture.state, 80), unlimited, "there is no limit");
    fixture.state.service.per_gpu = Some(Bytes::gib(4));
    let leases = &mut fixture.state.leases;
    leases.begin_create(LeaseId(7), lease_of_one_gib(gpu()));
    leases.begin_create(LeaseId(8), lease_of_one_gib("GPU-b".parse().unwrap()));
    assert_eq!(check(&fixture.state, 3), Ok(Bytes::gib(3)));
    let free = Bytes::gib(3).0;
    let refused = Err(RetainedRefusal::GpuLimit { free });
    assert_eq!(check(&fixture.state, 4), refused);
    fixture.state.leases.abort_create(LeaseId(7));
    assert_eq!(check(&fixture.state, 4), Ok(Bytes::gib(4)));
}

#[tokio::test]
async fn keep_alive_ends_with_the_last_lease_of_its_instance() {
    let instance: GpuUuid = "MIG-a".parse().unwrap();
    let lease = lease_of_one_gib(instance.clone());
    let mut fixture = Fixture::new();
    fixture.state.leases.begin_create(LeaseId(7), lease);
    let store = fixture.connect(encode_gpu(&instance));
    fixture.state.reconcile(node(instance.clone()));
    let stored = KeepAlive::Stored(Some(instance.clone()));
    assert_eq!(fixture.state.keep_alive, stored);
    fixture.state.leases.abort_create(LeaseId(7));
    fixture.state.reconcile(node(instance));
    assert_eq!(fixture.state.keep_alive, KeepAlive::Closing);
    fixture.finish_jobs().await;
    assert_eq!(fixture.state.keep_alive, KeepAlive::None);
    assert!(store.0.lock().unwrap().is_empty());
}

#[tokio::test]
async fn drain_closes_the_keep_alive_of_its_gpu_only() {
    let mut fixture = Fixture::new();
    fixture.connect(encode_gpu(&gpu()));
    let other: GpuUuid = "GPU-b".parse().unwrap();
    fixture.drain(other.clone());
    let stored = KeepAlive::Stored(Some(gpu()));
    assert_eq!(fixture.state.keep_alive, stored);
    assert_eq!(fixture.state.released_gpus(), BTreeSet::from([other]));
    fixture.drain(gpu());
    assert!(fixture.state.released_gpus().is_empty());
    fixture.finish_jobs().await;
    assert_eq!(fixture.state.released_gpus(), BTreeSet::from([gpu()]));
}

#[tokio::test]
async fn keep_alive_of_an_unknown_gpu_is_closed() {
    let mut fixture = Fixture::new();
    let store = fixture.connect(Blob::default());
    fixture.finish_jobs().await;
    assert_eq!(fixture.state.keep_alive, KeepAlive::None);
    assert!(store.0.lock().unwrap().is_empty());
}

#[tokio::test]
async fn keep_alive_is_what_the_last_connection_lists() {
    let mut fixture = Fixture::new();
    fixture.connect(encode_gpu(&gpu()));
    // A task of the connection before.
    let late = Completion::KeepAliveChanged(0, KeepAlive::None);
    fixture.state.handle_completion(late);
    let stored = KeepAlive::Stored(Some(gpu()));
    assert_eq!(fixture.state.keep_alive, stored);
}

#[tokio::test]
async fn keep_alive_replaces_another_one_of_the_fd_store() {
    let mut fixture = Fixture::new();
    let store = fixture.connect(encode_gpu(&gpu()));
    let other: GpuUuid = "GPU-b".parse().unwrap();
    let (connection, fd) = (store.connect(1), rustix::pipe::pipe().unwrap().0);
    let done = store_keep_alive(connection, other.clone(), fd).await;
    fixture.state.handle_completion(done);
    let stored = KeepAlive::Stored(Some(other.clone()));
    assert_eq!(fixture.state.keep_alive, stored);
    let listed = store.0.lock().unwrap().remove(&KEEP_ALIVE);
    assert_eq!(listed, Some(encode_gpu(&other)));
}

#[tokio::test]
async fn drained_gpu_is_held_until_a_lost_fd_store_lists_leases() {
    let fd = rustix::pipe::pipe().unwrap().0;
    let stored = store_keep_alive(Connection::lost(), gpu(), fd).await;
    assert!(matches!(stored, Completion::Nothing));
    let mut fixture = Fixture::new();
    fixture.connect(encode_gpu(&gpu()));
    fixture.state.connection = Some(Connection::lost());
    fixture.drain(gpu());
    fixture.finish_jobs().await;
    assert!(fixture.state.released_gpus().is_empty());
    fixture.state.handle_store_event(Some(StoreEvent::Lost));
    fixture.state.handle_store_event(Some(StoreEvent::Lost));
    fixture.state.publish();
    assert_eq!(fixture.state.service.status.borrow().store_losses, 1);
}

/// Creates lease 7, whose descriptor is sent to the store by the connection of this number. Returns
/// the reply to its writer.
async fn create_lease(
    fixture: &mut Fixture,
    store: &FakeFdStore,
    connection: u64,
) -> RetainedResponse {
    let writer = Content::Writing(Writer {
        process: Process { pid: 10, start: 1 },
        image: 5,
        token: 99,
        until: BootTime(u64::MAX),
    });
    let record = LeaseRecord {
        openers: BTreeSet::from(["a".parse().unwrap()]),
        content: writer,
        ..lease_of_one_gib(gpu())
    };
    fixture.state.leases.begin_create(LeaseId(7), record);
    let memory = rustix::pipe::pipe().unwrap().0;
    let connection = store.connect(connection);
    let created = send_memory(&connection, LeaseId(7), Blob::default(), memory).await;
    let (reply, replied) = oneshot::channel();
    fixture.state.finish_create(LeaseId(7), created, reply);
    replied.await.unwrap().response
}

#[tokio::test]
async fn lease_ends_if_the_fd_store_refuses_its_descriptor() {
    let mut fixture = Fixture::new();
    let store = fixture.connect(encode_gpu(&gpu()));
    store.0.lock().unwrap().insert(7, Blob::default());
    let response = create_lease(&mut fixture, &store, 1).await;
    assert!(matches!(response, RetainedResponse::Write { lease: 7, .. }));
    assert!(fixture.state.leases.get(LeaseId(7)).is_some());
    fixture.finish_jobs().await;
    assert!(fixture.state.leases.get(LeaseId(7)).is_none());
}

#[tokio::test]
async fn stored_lease_stays() {
    let mut fixture = Fixture::new();
    let store = fixture.connect(encode_gpu(&gpu()));
    create_lease(&mut fixture, &store, 1).await;
    fixture.finish_jobs().await;
    assert!(fixture.state.leases.get(LeaseId(7)).is_some());
    assert!(store.0.lock().unwrap().contains_key(&7));
}

#[tokio::test]
async fn lease_of_an_earlier_connection_is_not_handed_out() {
    let mut fixture = Fixture::new();
    let store = fixture.connect(encode_gpu(&gpu()));
    let response = create_lease(&mut fixture, &store, 0).await;
    let refused = RetainedResponse::Refused(RetainedRefusal::Unavailable);
    assert_eq!(response, refused);
    assert!(fixture.state.leases.get(LeaseId(7)).is_none());
}
