//! Shows in which order a hello waits, on the agent's side of one connection and with paused time.

use super::*;
use crate::checkpoint::SessionCheckpoint;
use crate::closer::SocketCloser;
use crate::connection::Connection;
use crate::rate_limit::RateLimiter;
use crate::stream::Listener;

/// An agent that serves one connection.
struct FakeAgent {
    container: Arc<Mutex<Container>>,
    notifier: FaultNotifier,
    limiter: Arc<Mutex<RateLimiter>>,
    listener: Listener,
    folder: tempfile::TempDir,
}

impl FakeAgent {
    fn start() -> FakeAgent {
        let folder = tempfile::tempdir().unwrap();
        let record = SessionCheckpoint::open(folder.path().join("record.json")).unwrap();
        let (container, _) = Container::restore(
            session_spec(),
            record,
            false,
            &FakeResolver(true),
            BootTime::default(),
        );
        let closer = SocketCloser::new(session_spec().allocation);
        FakeAgent {
            container: Arc::new(Mutex::new(container)),
            notifier: FaultNotifier::default(),
            limiter: Arc::new(Mutex::new(RateLimiter::new(Duration::ZERO))),
            listener: Listener::bind(&folder.path().join("agent.sock"), closer, true).unwrap(),
            folder,
        }
    }

    /// Connects, and says hello.
    fn send_hello(&self) -> UnixStream {
        let mut stream = UnixStream::connect(self.folder.path().join("agent.sock")).unwrap();
        let hello = Request::Hello {
            version: 1,
            image: 1,
            holdings: vec![],
        };
        stream.write_all(&hello.frame()).unwrap();
        stream
    }

    async fn serve_connection(&self) {
        let connection = Connection::new(
            Arc::clone(&self.container),
            Arc::new(FakeResolver(true)),
            Arc::clone(&self.limiter),
            self.notifier.clone(),
            None,
            SharedLogLimiter::default(),
        );
        connection.run(self.listener.accept().await.unwrap()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn hello_is_dropped_when_its_peer_has_hung_up() {
    let agent = FakeAgent::start();
    drop(agent.send_hello());
    let served = tokio::time::timeout(Duration::from_secs(60), agent.serve_connection());
    assert!(served.await.is_ok(), "the agent waits for its exit");
    assert!(lock(&agent.container).process_images().is_empty());
}

#[tokio::test(start_paused = true)]
async fn hello_waits_for_its_turn_before_the_kernel_log() {
    let agent = FakeAgent::start();
    let debt = Duration::from_secs(60);
    lock(&agent.limiter).charge(debt, Instant::now());
    let mut barriers = agent.notifier.register_kmsg_reader();
    let _peer = agent.send_hello();
    let start = tokio::time::Instant::now();
    tokio::select! {
        barrier = barriers.recv() => assert!(barrier.is_some()),
        () = agent.serve_connection() => panic!("the hello passed the log"),
    }
    assert!(start.elapsed() > debt / 2, "{:?}", start.elapsed());
}
