use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use bursar_ledger::BootTime;
use bursar_protocol::connect;
use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::fd_passing::receive_with_fd;
use bursar_protocol::messages::{self, Message, RejectReason, Request, Response};
use bursar_protocol::units::Units;

use bursar_gpu::memory_sample::GpuMemorySample;

use super::fault_notifier::KmsgBarrier;
use super::*;

mod handshake;
mod hostile;
mod passed;

/// Resolves every process to every pod, or to none.
struct FakeResolver(bool);

impl ContainerResolver for FakeResolver {
    fn process(&self, pid: u32) -> Option<Process> {
        CgroupResolver::new("/proc".into()).process(pid)
    }

    fn container(&self, _pid: u32, _pod: &PodUid) -> Option<String> {
        self.0.then(|| "here".to_owned())
    }
}

/// Resolves every process to every pod, and counts the walks to root processes.
#[derive(Default)]
struct CountingResolver(AtomicUsize);

impl ContainerResolver for CountingResolver {
    fn process(&self, pid: u32) -> Option<Process> {
        FakeResolver(true).process(pid)
    }

    fn container(&self, pid: u32, pod: &PodUid) -> Option<String> {
        FakeResolver(true).container(pid, pod)
    }

    fn root_process(&self, process: Process, _pod: &PodUid) -> Option<Process> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Some(process)
    }
}

struct FakeIdleSampler;

impl MemorySampler for FakeIdleSampler {
    fn sample(&self, _gpu: &GpuUuid) -> Option<GpuMemorySample> {
        Some(GpuMemorySample::default())
    }
}

/// A driver that charges nothing and counts its samples. The first sample waits until the test
/// resumes it.
#[derive(Default)]
struct FakeHungSampler {
    samples: AtomicUsize,
    resume: Mutex<Option<Receiver<()>>>,
}

impl MemorySampler for FakeHungSampler {
    fn sample(&self, _gpu: &GpuUuid) -> Option<GpuMemorySample> {
        self.samples.fetch_add(1, Ordering::SeqCst);
        let held = lock(&self.resume).take();
        // The receive ends by a message, or with the test.
        let _ = held.map(|held| held.recv());
        Some(GpuMemorySample::default())
    }
}

fn session_spec() -> SessionSpec {
    SessionSpec {
        allocation: AllocationId::from_bits(7),
        pod: "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap(),
        gpus: vec![("GPU-aaaa".parse().unwrap(), Bytes::gib(1))],
        managed: Bytes::ZERO,
        device_ids: None,
    }
}

fn sessions(run_dir: &Path, members: bool) -> Sessions {
    Sessions::new(
        run_dir.to_owned(),
        Arc::new(FakeIdleSampler),
        Arc::new(FakeResolver(members)),
    )
}

/// Sessions whose driver answers once the returned sender has sent a message or was dropped.
fn sessions_with_hung_sampler(run_dir: &Path) -> (Sessions, Arc<FakeHungSampler>, Sender<()>) {
    let (go_on, held) = channel();
    let charges = Arc::new(FakeHungSampler {
        resume: Mutex::new(Some(held)),
        ..FakeHungSampler::default()
    });
    let sessions = Sessions::new(
        run_dir.to_owned(),
        Arc::clone(&charges) as Arc<dyn MemorySampler>,
        Arc::new(FakeResolver(true)),
    );
    (sessions, charges, go_on)
}

fn connect(run_dir: &Path) -> UnixStream {
    let socket = run_dir.join("alloc/0000000000000007/agent.sock");
    let stream = UnixStream::connect(socket).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    stream
}

fn receive(stream: &mut UnixStream) -> Response {
    connect::read_message(stream).unwrap()
}

fn hello(run_dir: &Path) -> (UnixStream, CreditPage) {
    hello_as(run_dir, 1)
}

fn hello_as(run_dir: &Path, image: u64) -> (UnixStream, CreditPage) {
    let mut stream = connect(run_dir);
    stream
        .write_all(
            &Request::Hello {
                version: 1,
                image,
                holdings: vec![],
            }
            .frame(),
        )
        .unwrap();
    let mut bytes = [0; 4096];
    let (_, page) = receive_with_fd(&stream, &mut bytes).unwrap();
    (stream, CreditPage::open(page.unwrap()).unwrap())
}

fn assert_served(run_dir: &Path) {
    let (mut stream, page) = hello(run_dir);
    stream
        .write_all(
            &Request::Credit {
                account: 0,
                units: Units(1),
            }
            .frame(),
        )
        .unwrap();
    assert!(matches!(
        receive(&mut stream),
        Response::Granted { account: 0, .. }
    ));
    assert!(page.slot(0).unwrap().charge(Units(1)).is_ok());
}

/// Asserts that the best of three attempts takes less than a second, as a busy machine may be late.
/// A silent peer that blocked others would cost two seconds every time.
fn assert_fast(attempt: impl Fn() -> Duration) {
    let times = [(); 3].map(|()| attempt());
    let best = times.iter().min();
    assert!(best < Some(&Duration::from_secs(1)), "{times:?}");
}

/// Runs the blocking side of a test beside the runtime that serves.
async fn run_blocking(run_dir: &Path, test: impl FnOnce(&Path) + Send + 'static) {
    let run_dir = run_dir.to_owned();
    tokio::task::spawn_blocking(move || test(&run_dir))
        .await
        .unwrap();
}

#[tokio::test]
async fn any_user_of_the_container_can_connect() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    sessions.serve(session_spec()).await.unwrap();
    sessions.serve(session_spec()).await.unwrap();
    let alloc = folder.path().join("alloc/0000000000000007");
    assert_eq!(alloc.metadata().unwrap().mode() & 0o777, 0o755);
    assert_eq!(
        alloc.join("agent.sock").metadata().unwrap().mode() & 0o777,
        0o666
    );
    assert_eq!(std::fs::read_dir(&alloc).unwrap().count(), 1);
    run_blocking(folder.path(), assert_served).await;
    assert_eq!(sessions.container_usage()[0].processes.len(), 1);
}

#[tokio::test]
async fn hello_is_rejected_when_the_peer_is_in_another_container() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), false);
    sessions.serve(session_spec()).await.unwrap();
    run_blocking(folder.path(), |run_dir| {
        let mut stream = connect(run_dir);
        stream
            .write_all(
                &Request::Hello {
                    version: 1,
                    image: 1,
                    holdings: vec![],
                }
                .frame(),
            )
            .unwrap();
        assert_eq!(
            receive(&mut stream),
            Response::Rejected {
                reason: RejectReason::Identity
            }
        );
        let mut rest = [0; 1];
        assert_eq!(stream.read(&mut rest).unwrap(), 0);
    })
    .await;
}

#[tokio::test]
async fn peer_is_served_beside_garbage_silence_and_floods() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    sessions.serve(session_spec()).await.unwrap();
    run_blocking(folder.path(), |run_dir| {
        let silent: Vec<_> = (0..20).map(|_| connect(run_dir)).collect();
        for garbage in [
            &[0xff; 4096][..],
            &[0, 0],
            &[1, 0, 99],
            &[3, 0, 2, 0],
            b"GET / HTTP/1.1\r\n\r\n",
        ] {
            let mut stream = connect(run_dir);
            // The agent may have closed the socket before it took all bytes.
            let _ = stream.write_all(garbage);
            drop(stream);
        }
        let request = Request::Credit {
            account: 62,
            units: Units(1),
        }
        .frame()
        .repeat(50_000);
        assert_fast(|| {
            let (mut flood, _page) = hello(run_dir);
            flood
                .set_write_timeout(Some(Duration::from_millis(200)))
                .unwrap();
            // The peer reads no answer, so the agent stops reading from this peer alone.
            assert!(flood.write_all(&request).is_err());
            let start = Instant::now();
            assert_served(run_dir);
            start.elapsed()
        });
        drop(silent);
    })
    .await;
}

#[tokio::test]
async fn agent_serves_the_same_folder_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        let sessions = sessions(folder.path(), true);
        sessions.serve(session_spec()).await.unwrap();
        run_blocking(folder.path(), assert_served).await;
    }
}

#[tokio::test]
async fn removed_allocation_leaves_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    sessions.serve(session_spec()).await.unwrap();
    run_blocking(folder.path(), assert_served).await;
    sessions.remove(&AllocationId::from_bits(7)).await.unwrap();
    sessions.remove(&AllocationId::from_bits(7)).await.unwrap();
    assert!(sessions.container_usage().is_empty());
    for left in ["alloc", "sessions"] {
        assert_eq!(
            std::fs::read_dir(folder.path().join(left)).unwrap().count(),
            0,
            "{left}"
        );
    }
    let quota =
        sessions.set_requested_quota(&AllocationId::from_bits(7), &Account::Managed, Bytes::ZERO);
    assert!(matches!(quota, Err(SessionsError::Unknown(_))));
}

#[tokio::test]
async fn kmsg_before_a_hello_counts_for_the_image_before() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    sessions.serve(session_spec()).await.unwrap();
    run_blocking(folder.path(), assert_served).await;
    let allocation = AllocationId::from_bits(7);
    let images = || sessions.process_images(&allocation).unwrap();
    let before = images();
    assert_eq!(before.len(), 1);
    let mut waits = sessions.register_kmsg_reader();
    let reader = async {
        let asked = tokio::time::timeout(Duration::from_secs(5), waits.recv()).await;
        let waits: KmsgBarrier = asked.unwrap().unwrap();
        assert_eq!(images(), before, "no hello was answered meanwhile");
        let [(gpu, _)] = &session_spec().gpus[..] else {
            panic!()
        };
        let on = std::slice::from_ref(gpu);
        let suspect = sessions.find_xid_target(std::process::id(), on, BootTime(u64::MAX));
        sessions.record_xid(&suspect.unwrap(), 43, bursar_host::clock::read_clocks());
        assert_eq!(images(), [], "the image is fenced");
        waits.send(()).unwrap();
    };
    let execs = run_blocking(folder.path(), |run_dir| drop(hello_as(run_dir, 2)));
    tokio::join!(reader, execs);
    assert_eq!((images().len(), sessions.open_faults()), (1, vec![]));
    // A reader of the log that hangs, or has stopped, must not keep a process out.
    let start = Instant::now();
    run_blocking(folder.path(), |run_dir| drop(hello_as(run_dir, 3))).await;
    assert!(start.elapsed() < Duration::from_secs(3));
    drop(waits);
    run_blocking(folder.path(), |run_dir| drop(hello_as(run_dir, 4))).await;
}

#[tokio::test]
async fn process_is_admitted_while_a_gpu_hangs() {
    let folder = tempfile::tempdir().unwrap();
    let (sessions, charges, go_on) = sessions_with_hung_sampler(folder.path());
    sessions.serve(session_spec()).await.unwrap();
    run_blocking(folder.path(), move |run_dir| {
        assert_served(run_dir);
        // After this exec the agent asks the driver about the former image, and gets no answer.
        let _exec = hello_as(run_dir, 2);
        let start = Instant::now();
        while charges.samples.load(Ordering::SeqCst) == 0 {
            assert!(
                start.elapsed() < Duration::from_secs(5),
                "the driver is not sampled"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        let (mut stream, _page) = hello_as(run_dir, 2);
        stream.write_all(&Request::Refresh.frame()).unwrap();
        assert_eq!(receive(&mut stream), Response::Refreshed);
        drop(go_on);
    })
    .await;
}

#[tokio::test]
async fn report_without_a_new_fault_wakes_no_task() {
    let folder = tempfile::tempdir().unwrap();
    let resolver = Arc::new(CountingResolver::default());
    let sessions = Sessions::new(
        folder.path().to_owned(),
        Arc::new(FakeIdleSampler),
        resolver.clone(),
    );
    sessions.serve(session_spec()).await.unwrap();
    let reports = sessions.fault_reports();
    let is_woken = async || {
        let woken = tokio::time::timeout(Duration::ZERO, reports.notified());
        woken.await.is_ok()
    };
    let poisoned = |code| Request::Poisoned {
        account: 0,
        code,
        can_reexec: false,
    };
    let (mut stream, _page) = tokio::task::spawn_blocking({
        let run_dir = folder.path().to_owned();
        move || hello(&run_dir)
    })
    .await
    .unwrap();
    for (code, walks, wakes) in [(0, 0, false), (700, 1, true), (700, 2, false)] {
        let frame = poisoned(code).frame();
        (stream, ..) = tokio::task::spawn_blocking(move || {
            stream.write_all(&frame).unwrap();
            let answer = receive(&mut stream);
            (stream, answer)
        })
        .await
        .unwrap();
        assert_eq!(resolver.0.load(Ordering::SeqCst), walks, "{code}");
        assert_eq!(is_woken().await, wakes, "{code}");
        let now = bursar_host::clock::read_clocks();
        sessions.take_new_faults(Duration::ZERO, now);
    }
}

#[tokio::test]
async fn context_size_is_independent_of_what_tenants_say() {
    let folder = tempfile::tempdir().unwrap();
    let me = std::process::id();
    // The sample that NVML gives of a tenant with a context that has taken 400 MiB past the shim.
    let charges = FakeSampler(Mutex::new(GpuMemorySample {
        used: Bytes::mib(1_018),
        charges: [(me, Some(Bytes::mib(1_018)))].into_iter().collect(),
        ..GpuMemorySample::default()
    }));
    let sessions = Sessions::new(
        folder.path().to_owned(),
        Arc::new(charges),
        Arc::new(FakeResolver(true)),
    );
    let sessions = sessions.with_context_sizes(folder.path().join("contexts.json"));
    sessions.serve(session_spec()).await.unwrap();
    run_blocking(folder.path(), |run_dir| {
        let (mut stream, page) = hello(run_dir);
        let slot = page.slot(0).unwrap();
        let context = slot.context();
        let granted = Request::Credit {
            account: 0,
            units: context,
        };
        stream.write_all(&granted.frame()).unwrap();
        assert!(matches!(receive(&mut stream), Response::Granted { .. }));
        slot.charge(context).unwrap();
        let context_made = Request::ContextMade { account: 0 };
        stream.write_all(&context_made.frame()).unwrap();
        let unmeasured = Response::ContextSize {
            account: 0,
            units: Units::holding(512 << 20).unwrap(),
        };
        assert_eq!(receive(&mut stream), unmeasured);
    })
    .await;
    let (gpu, size) = (&session_spec().gpus[0].0, Bytes::mib(518));
    sessions.record_context_size(gpu, "580", size);
    assert_eq!(sessions.context_size(gpu), Some(size));
    sessions.set_driver_version("590");
    assert!(sessions.lacks_context_size(gpu, "590"));
}

#[tokio::test]
async fn driver_is_sampled_once_for_all_exited_processes_of_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("sessions/0000000000000007.json");
    std::fs::create_dir_all(record.parent().unwrap()).unwrap();
    let dead: Vec<String> = (4_000_000..4_000_020)
        .map(|pid| format!("[{pid},[100,0]]"))
        .collect();
    let text = format!(
        r#"{{"version":1,"processes":[],"exited":[{}]}}"#,
        dead.join(",")
    );
    std::fs::write(record, text).unwrap();
    let charges = Arc::new(FakeHungSampler::default());
    let sessions = Sessions::new(
        folder.path().to_owned(),
        Arc::clone(&charges) as Arc<dyn MemorySampler>,
        Arc::new(FakeResolver(true)),
    );
    sessions.serve(session_spec()).await.unwrap();
    let start = Instant::now();
    while sessions.container_usage()[0].accounts[0].exited > Bytes::ZERO {
        assert!(start.elapsed() < Duration::from_secs(5), "never settled");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(charges.samples.load(Ordering::SeqCst), 1);
}

/// A driver that always charges one exited process, and counts its samples.
#[derive(Default)]
struct FakeChargingSampler(AtomicUsize);

impl MemorySampler for FakeChargingSampler {
    fn sample(&self, _gpu: &GpuUuid) -> Option<GpuMemorySample> {
        self.0.fetch_add(1, Ordering::SeqCst);
        let charges = [(4_000_000, Some(Bytes::gib(1)))].into_iter().collect();
        Some(GpuMemorySample {
            used: Bytes::gib(1),
            charges,
            ..GpuMemorySample::default()
        })
    }
}

#[tokio::test]
async fn driver_is_sampled_once_for_all_waiting_containers() {
    let folder = tempfile::tempdir().unwrap();
    let driver = Arc::new(FakeChargingSampler::default());
    let sessions = Sessions::new(
        folder.path().to_owned(),
        Arc::clone(&driver) as Arc<dyn MemorySampler>,
        Arc::new(FakeResolver(true)),
    );
    std::fs::create_dir_all(folder.path().join("sessions")).unwrap();
    for number in 0..40 {
        let record = folder.path().join(format!("sessions/{number:016x}.json"));
        let text = r#"{"version":1,"processes":[],"exited":[[4000000,[100,0]],[4000001,[100,0]]]}"#;
        std::fs::write(record, text).unwrap();
        let served = SessionSpec {
            allocation: AllocationId::from_bits(number),
            ..session_spec()
        };
        sessions.serve(served).await.unwrap();
    }
    let start = Instant::now();
    let settled =
        |usage: &ContainerUsage| usage.accounts[0].exited.0 == 100 * bursar_protocol::units::UNIT;
    while !sessions.container_usage().iter().all(settled) {
        assert!(start.elapsed() < Duration::from_secs(20), "never settled");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (asked, took) = (driver.0.load(Ordering::SeqCst), start.elapsed());
    println!("{asked} samples in {took:?}");
    assert!(
        asked as u128 <= took.as_millis() / 100 + 2,
        "{asked} in {took:?}"
    );
}

#[tokio::test]
async fn peer_is_rejected_at_once_when_the_node_is_full() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true).with_connection_limit(1);
    sessions.serve(session_spec()).await.unwrap();
    run_blocking(folder.path(), |run_dir| {
        let first = hello(run_dir);
        assert_fast(|| {
            let start = Instant::now();
            let mut second = connect(run_dir);
            let busy = Response::Rejected {
                reason: RejectReason::Busy,
            };
            assert_eq!(receive(&mut second), busy);
            start.elapsed()
        });
        drop(first);
    })
    .await;
}

#[tokio::test]
async fn query_needs_no_session_and_ends_its_connection() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    sessions.serve(session_spec()).await.unwrap();
    run_blocking(folder.path(), |run_dir| {
        let query = |version| Request::Query {
            version,
            account: messages::Account::Device("GPU-aaaa".to_owned()),
        };
        let answer = |version| {
            let mut stream = connect(run_dir);
            stream.write_all(&query(version).frame()).unwrap();
            let answer = receive(&mut stream);
            assert_eq!(
                stream.read(&mut [0]).unwrap(),
                0,
                "the agent closes the connection"
            );
            answer
        };
        let empty = Response::Usage {
            quota: 1 << 30,
            used: 0,
            processes: vec![],
        };
        assert_eq!(answer(1), empty);
        assert_eq!(
            answer(u16::MAX),
            empty,
            "a newer version is answered as this one"
        );
        let goodbye = Response::Rejected {
            reason: RejectReason::Version,
        };
        assert_eq!(answer(0), goodbye);
        let (mut session, _page) = hello(run_dir);
        session.write_all(&query(1).frame()).unwrap();
        assert_eq!(session.read(&mut [0]).unwrap(), 0, "not within a session");
    })
    .await;
    assert_eq!(sessions.container_usage()[0].processes.len(), 1);
}

#[tokio::test]
async fn requests_are_rate_limited_when_a_peer_floods() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    sessions.serve(session_spec()).await.unwrap();
    run_blocking(folder.path(), |run_dir| {
        let (mut stream, _page) = hello(run_dir);
        let start = Instant::now();
        stream
            .write_all(&Request::Refresh.frame().repeat(400))
            .unwrap();
        for _ in 0..400 {
            assert_eq!(receive(&mut stream), Response::Refreshed);
        }
        let took = start.elapsed();
        assert!(took > Duration::from_millis(300), "{took:?}");
    })
    .await;
}

/// A driver that returns the sample that the test has set.
#[derive(Default)]
struct FakeSampler(Mutex<GpuMemorySample>);

impl MemorySampler for FakeSampler {
    fn sample(&self, _gpu: &GpuUuid) -> Option<GpuMemorySample> {
        Some(lock(&self.0).clone())
    }
}

#[tokio::test]
async fn unreclaimed_is_bounded_by_samples_taken_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    let driver = Arc::new(FakeSampler::default());
    let sessions = Sessions::new(
        folder.path().to_owned(),
        Arc::clone(&driver) as Arc<dyn MemorySampler>,
        Arc::new(FakeResolver(true)),
    );
    let gpu: GpuUuid = "GPU-aaaa".parse().unwrap();
    let left = |number| BTreeMap::from([(gpu.clone(), number)]);
    let proven = async |number, held| {
        let start = Instant::now();
        while sessions.bound_unreclaimed(left(number)) != [(gpu.clone(), held)].into() {
            assert!(start.elapsed() < Duration::from_secs(5), "never proven");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        start.elapsed()
    };
    lock(&driver.0).used = Bytes::gib(4);
    assert_eq!(sessions.bound_unreclaimed(left(1)), BTreeMap::new());
    let took = proven(1, Bytes::gib(4)).await;
    assert!(took > Duration::from_millis(300), "{took:?}");
    lock(&driver.0).used = Bytes::gib(1);
    proven(1, Bytes::gib(1)).await;
    assert_eq!(
        sessions.bound_unreclaimed(left(2)),
        BTreeMap::new(),
        "another pod left memory since"
    );
    proven(2, Bytes::gib(1)).await;
    assert_eq!(sessions.bound_unreclaimed(BTreeMap::new()), BTreeMap::new());
    assert_eq!(
        sessions.bound_unreclaimed(left(2)),
        BTreeMap::new(),
        "the former bound was removed"
    );
}

#[tokio::test]
async fn exports_are_read_from_the_checkpoint_before_serving() {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("sessions/0000000000000007.json");
    std::fs::create_dir_all(record.parent().unwrap()).unwrap();
    let living = r#"{"process":{"pid":1,"start":1},"image":1,"granted":[4,0],"exported":[9,0]}"#;
    let text = format!(
        r#"{{"version":1,"processes":[{living}],"exited":[[2,[5,0]]],"orphaned":[[3,[1,0]]],"gpus":["GPU-aaaa"]}}"#
    );
    std::fs::write(record, text).unwrap();
    let sessions = sessions(folder.path(), true);
    let exported = |id| sessions.exported_bytes(&AllocationId::from_bits(id));
    let expected = [(
        "GPU-aaaa".parse().unwrap(),
        Bytes(5 * bursar_protocol::units::UNIT),
    )];
    assert_eq!(exported(7), expected, "no more than was granted");
    assert_eq!(exported(8), []);
}

#[tokio::test]
async fn checkpoint_stays_removed_when_a_process_exits_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    sessions.serve(session_spec()).await.unwrap();
    run_blocking(folder.path(), |run_dir| drop(hello(run_dir))).await;
    let allocation = session_spec().allocation;
    // A task that is being polled may have the container too.
    let container = Arc::clone(&lock(&sessions.shared.containers)[&allocation].container);
    let path = sessions.checkpoint_path(&allocation);
    assert!(path.exists());
    sessions.remove(&allocation).await.unwrap();
    let image = lock(&container).process_images().remove(0);
    lock(&container).handle_exit(image.process, 1);
    lock(&container).flush_changes(Instant::now() + Duration::from_secs(60));
    assert!(!path.exists());
}

/// Waits until `reached` is true, since the tasks need time to run.
async fn wait_until(reached: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !reached() {
        assert!(Instant::now() < until, "not reached");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn gpu_tasks_end_when_no_container_has_the_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    let recut = |number: u64| SessionSpec {
        allocation: AllocationId::from_bits(number),
        gpus: vec![(format!("MIG-{number}").parse().unwrap(), Bytes::gib(1))],
        ..session_spec()
    };
    for number in 0..20 {
        let before = recut(number);
        sessions.serve(before.clone()).await.unwrap();
        sessions.serve(recut(number + 1)).await.unwrap();
        sessions.remove(&before.allocation).await.unwrap();
        wait_until(|| lock(&sessions.shared.gpus_with_task).len() == 1).await;
    }
    // The task runs on while another process may hold memory of an ended pod.
    let gpu = recut(20).gpus[0].0.clone();
    sessions.bound_unreclaimed(BTreeMap::from([(gpu, 1)]));
    sessions.remove(&recut(20).allocation).await.unwrap();
    wait_until(|| {
        lock(&sessions.shared.unreclaimed)
            .values()
            .all(|left| left.upper_bound.is_some())
    })
    .await;
    assert_eq!(lock(&sessions.shared.gpus_with_task).len(), 1);
    sessions.bound_unreclaimed(BTreeMap::new());
    wait_until(|| lock(&sessions.shared.gpus_with_task).is_empty()).await;
}
