//! Tests balloons: memory that a descriptor holds is never proven free, and grants wait briefly.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::RecvTimeoutError;

use super::*;
use crate::reclaim::{Attempt, BalloonTurn, prove_by_balloon};

const CAPACITY: Bytes = Bytes::gib(16);

/// A GPU of which a descriptor holds some, and managed memory fills the rest. Its balloons displace
/// the latter.
#[derive(Default)]
struct FakeGpu {
    held: u64,
    /// The number of balloons.
    balloons: AtomicUsize,
    /// Balloons hang until a message comes.
    hang: Mutex<Option<Receiver<()>>>,
    panics: bool,
    /// Samples take so long.
    sample_time: Duration,
    /// Samples do not end while a balloon is held.
    samples_hang: bool,
    is_held: AtomicBool,
}

impl MemorySampler for FakeGpu {
    fn sample(&self, _gpu: &GpuUuid) -> Option<GpuMemorySample> {
        std::thread::sleep(self.sample_time);
        while self.samples_hang && self.is_held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(GpuMemorySample {
            used: CAPACITY,
            capacity: CAPACITY,
            ..GpuMemorySample::default()
        })
    }
}

impl Balloon for FakeGpu {
    fn hold(
        &self,
        _gpu: &GpuUuid,
        bytes: Bytes,
        look_time: Duration,
        until: Instant,
        look: &mut dyn FnMut(Bytes, Instant),
    ) -> Result<(), BalloonError> {
        self.balloons.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics, "this balloon panics");
        if let Some(hang) = lock(&self.hang).take() {
            let _ = hang.recv();
        }
        self.is_held.store(true, Ordering::SeqCst);
        let look_until = until - Duration::from_millis(750);
        if !self.sample_time.is_zero() {
            // A busy driver takes all the time that it is given.
            let look_from = look_until - look_time;
            std::thread::sleep(look_from.saturating_duration_since(Instant::now()));
        }
        look(Bytes(bytes.0.min(CAPACITY.0 - self.held)), look_until);
        self.is_held.store(false, Ordering::SeqCst);
        Ok(())
    }
}

fn gpu() -> GpuUuid {
    session_spec().gpus[0].0.clone()
}

/// Sessions with a served allocation on a GPU where ended pods left memory.
async fn sessions_on(run_dir: &Path, gpu: FakeGpu) -> (Sessions, Arc<FakeGpu>) {
    sessions_with_reserve(run_dir, gpu, Bytes::mib(512)).await
}

/// Sessions as in [`sessions_on`], whose balloons leave so much.
async fn sessions_with_reserve(
    run_dir: &Path,
    gpu: FakeGpu,
    reserved: Bytes,
) -> (Sessions, Arc<FakeGpu>) {
    let driver = Arc::new(gpu);
    let sessions = Sessions::new(
        run_dir.to_owned(),
        Arc::clone(&driver) as Arc<dyn MemorySampler>,
        Arc::new(FakeResolver(true)),
    );
    let balloon = Arc::clone(&driver) as Arc<dyn Balloon>;
    let sessions = sessions.with_balloon(balloon, reserved);
    sessions.serve(session_spec()).await.unwrap();
    sessions.bound_unreclaimed(BTreeMap::from([(self::gpu(), 1)]));
    (sessions, driver)
}

/// Holds a balloon, as the GPU's task does once it is due.
async fn prove(sessions: &Sessions) -> Attempt {
    sessions.set_evictable(&gpu(), Bytes::gib(4), true);
    let turn = BalloonTurn::take(&sessions.shared, &gpu()).unwrap();
    let pause = sessions.shared.grants.pause(&gpu()).await.unwrap();
    prove_by_balloon(turn, pause).await
}

fn proven(sessions: &Sessions) -> Option<Bytes> {
    let bounds = sessions.bound_unreclaimed(BTreeMap::from([(gpu(), 1)]));
    bounds.get(&gpu()).copied()
}

#[tokio::test]
async fn only_held_memory_stays_unproven_beside_a_balloon() {
    let held = 6 << 30;
    for (held, most) in [(held, held), (0, (512 + 64) << 20)] {
        let folder = tempfile::tempdir().unwrap();
        let gpu = FakeGpu {
            held,
            ..FakeGpu::default()
        };
        let (sessions, driver) = sessions_on(folder.path(), gpu).await;
        let before = sessions.balloons();
        let attempt = prove(&sessions).await;
        assert!(
            matches!(attempt, Attempt::Partial(bytes) if bytes.0 == CAPACITY.0 - held)
                == (held > 0)
        );
        assert_eq!(driver.balloons.load(Ordering::SeqCst), 1);
        let bound = proven(&sessions).unwrap();
        assert!((held..=most).contains(&bound.0), "{bound}");
        let (before, after) = (before.get(&self::gpu()), sessions.balloons()[&self::gpu()]);
        assert_eq!(after.bytes, Bytes::ZERO);
        let before = before.copied().unwrap_or_default();
        assert!(after.was_held_since(before), "the audit knows it");
    }
}

#[tokio::test]
async fn slow_samples_have_time_beside_a_balloon() {
    let folder = tempfile::tempdir().unwrap();
    let gpu = FakeGpu {
        sample_time: Duration::from_millis(180),
        ..FakeGpu::default()
    };
    let (sessions, _driver) = sessions_on(folder.path(), gpu).await;
    assert!(matches!(prove(&sessions).await, Attempt::Ended));
    let bound = proven(&sessions).unwrap();
    assert!(bound <= Bytes::mib(512 + 64), "{bound}");
}

#[tokio::test]
async fn no_balloon_begins_late_in_the_pause_of_grants() {
    let folder = tempfile::tempdir().unwrap();
    let gpu = FakeGpu {
        sample_time: Duration::from_secs(2),
        ..FakeGpu::default()
    };
    let (sessions, driver) = sessions_on(folder.path(), gpu).await;
    assert!(matches!(prove(&sessions).await, Attempt::NotBegun));
    assert_eq!(driver.balloons.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_credit_stays_when_no_balloon_can_begin() {
    for (reserved, begins) in [(CAPACITY, false), (Bytes::mib(512), true)] {
        let folder = tempfile::tempdir().unwrap();
        let gpu = FakeGpu::default();
        let (sessions, _driver) = sessions_with_reserve(folder.path(), gpu, reserved).await;
        let (stream, page) = hello(folder.path());
        let requester = stream.try_clone().unwrap();
        let answer = ask(requester)
            .recv_timeout(Duration::from_secs(20))
            .unwrap();
        assert!(matches!(answer, Response::Granted { .. }), "{answer:?}");
        let idle = || page.slot(0).unwrap().word().idle();
        let before = idle();
        assert!(before > 0);
        let attempt = prove(&sessions).await;
        assert_eq!(matches!(attempt, Attempt::NotBegun), !begins);
        assert_eq!(idle(), if begins { 0 } else { before });
    }
}

#[tokio::test]
async fn balloon_ends_with_the_pause_when_samples_hang() {
    let folder = tempfile::tempdir().unwrap();
    let gpu = FakeGpu {
        samples_hang: true,
        ..FakeGpu::default()
    };
    let (sessions, driver) = sessions_on(folder.path(), gpu).await;
    assert!(
        matches!(prove(&sessions).await, Attempt::Ended),
        "it lasts too long"
    );
    assert_eq!(driver.balloons.load(Ordering::SeqCst), 1);
    assert!(!driver.is_held.load(Ordering::SeqCst));
}

#[tokio::test]
async fn node_has_one_balloon_and_then_waits_for_an_audit() {
    let folder = tempfile::tempdir().unwrap();
    let (sessions, _driver) = sessions_on(folder.path(), FakeGpu::default()).await;
    let other: GpuUuid = "GPU-other".parse().unwrap();
    let take = |gpu: &GpuUuid| BalloonTurn::take(&sessions.shared, gpu);
    for gpu in [&gpu(), &other] {
        sessions.set_evictable(gpu, Bytes::gib(4), true);
    }
    let turn = take(&other).unwrap();
    assert!(take(&gpu()).is_none(), "two at once");
    drop(turn);
    assert!(!matches!(prove(&sessions).await, Attempt::Hung(_)));
    assert!(take(&other).is_none(), "the audit has old figures");
    sessions.set_evictable(&other, Bytes::gib(4), true);
    assert!(take(&other).is_some());
}

#[tokio::test]
async fn nothing_is_evicted_before_the_audit_allows_it() {
    let folder = tempfile::tempdir().unwrap();
    let (sessions, driver) = sessions_on(folder.path(), FakeGpu::default()).await;
    for (bytes, may_evict) in [(Bytes::ZERO, true), (Bytes::gib(4), false)] {
        sessions.set_evictable(&gpu(), bytes, may_evict);
        assert!(!sessions.shared.may_evict(&gpu(), Instant::now()));
    }
    sessions.set_evictable(&gpu(), Bytes::gib(4), true);
    let after = |seconds| Instant::now() + Duration::from_secs(seconds);
    assert!(sessions.shared.may_evict(&gpu(), after(2)));
    assert!(!sessions.shared.may_evict(&gpu(), after(4)), "it is old");
    let start = Instant::now();
    while driver.balloons.load(Ordering::SeqCst) == 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "no balloon");
        sessions.set_evictable(&gpu(), Bytes::gib(4), true);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(
        start.elapsed() > Duration::from_secs(4),
        "the samples get some time"
    );
}

/// Asks for credit on another thread, and reports each answer.
fn ask(mut stream: UnixStream) -> Receiver<Response> {
    let (sender, answers) = channel();
    let request = Request::Credit {
        account: 0,
        units: Units(1),
    };
    std::thread::spawn(move || {
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        stream.write_all(&request.frame()).unwrap();
        let _ = sender.send(receive(&mut stream));
    });
    answers
}

/// Checks that nothing comes for a moment.
fn assert_waits<T: std::fmt::Debug>(answers: &Receiver<T>) {
    let answer = answers.recv_timeout(Duration::from_millis(300));
    assert_eq!(answer.err(), Some(RecvTimeoutError::Timeout));
}

#[tokio::test(flavor = "multi_thread")]
async fn credit_and_hello_wait_for_a_balloon_and_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let (sessions, _driver) = sessions_on(folder.path(), FakeGpu::default()).await;
    let pause = sessions.shared.grants.pause(&gpu()).await.unwrap();
    let (sender, hellos) = channel();
    let run_dir = folder.path().to_owned();
    std::thread::spawn(move || sender.send(hello(&run_dir)).map_err(drop));
    assert_waits(&hellos);
    drop(pause);
    let (stream, _page) = hellos.recv_timeout(Duration::from_secs(20)).unwrap();
    let pause = sessions.shared.grants.pause(&gpu()).await.unwrap();
    let answers = ask(stream);
    assert_waits(&answers);
    drop(pause);
    let answer = answers.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(matches!(answer, Response::Granted { .. }), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn grants_go_on_when_a_balloon_hangs_or_panics() {
    let folder = tempfile::tempdir().unwrap();
    let (go_on, hang) = channel();
    let gpu = FakeGpu {
        hang: Mutex::new(Some(hang)),
        ..FakeGpu::default()
    };
    let (sessions, _driver) = sessions_on(folder.path(), gpu).await;
    let (stream, _page) = hello(folder.path());
    let start = Instant::now();
    let Attempt::Hung(hung) = prove(&sessions).await else {
        panic!("the balloon hangs");
    };
    assert!(start.elapsed() < Duration::from_secs(20));
    assert!(ask(stream).recv_timeout(Duration::from_secs(5)).is_ok());
    let bytes = || sessions.balloons()[&self::gpu()].bytes;
    assert!(bytes() > Bytes::ZERO, "the audit knows it");
    drop(go_on);
    hung.await.unwrap();
    assert_eq!(bytes(), Bytes::ZERO);

    let folder = tempfile::tempdir().unwrap();
    let gpu = FakeGpu {
        panics: true,
        ..FakeGpu::default()
    };
    let (sessions, _driver) = sessions_on(folder.path(), gpu).await;
    let (stream, _page) = hello(folder.path());
    assert!(matches!(prove(&sessions).await, Attempt::Ended));
    assert!(ask(stream).recv_timeout(Duration::from_secs(5)).is_ok());
    assert_eq!(sessions.balloons()[&self::gpu()].bytes, Bytes::ZERO);
}
