//! Shows that descriptors which tenant processes pass delay no neighbour, with an agent of two
//! threads.
//!
//! Each descriptor is the last reference to a socket that lingers for seconds. The tests run with
//! and without the kernel's refusal of descriptors.

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use bursar_protocol::fd_passing::send_with_fd;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sockopt};

use super::*;
use crate::closer::SocketCloser;
use crate::stream::Listener;

/// How long the close of such a socket blocks.
const LINGERS: Duration = Duration::from_secs(12);

/// The time in which 99 of 100 round trips of a neighbour end.
const NEIGHBOUR_WITHIN: Duration = Duration::from_millis(100);

/// The allocation of the neighbour, in the same sessions.
const NEIGHBOUR: u64 = 8;

fn neighbour_spec() -> SessionSpec {
    SessionSpec {
        allocation: AllocationId::from_bits(NEIGHBOUR),
        ..session_spec()
    }
}

/// A listener that accepts no connection and reads no byte.
fn silent_listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

/// A socket with more to send than its peer reads, so that its close lingers.
fn lingering_socket(peer: &TcpListener) -> TcpStream {
    let stream = TcpStream::connect(peer.local_addr().unwrap()).unwrap();
    sockopt::set_socket_linger(&stream, Some(LINGERS)).unwrap();
    stream.set_nonblocking(true).unwrap();
    while (&stream).write(&[0; 1 << 16]).is_ok() {}
    stream
}

/// Sends a byte, in band or out of band, with the last reference to a lingering socket. Returns
/// whether the kernel accepted the descriptor.
fn pass_descriptor(to: &UnixStream, peer: &TcpListener, flags: SendFlags) -> bool {
    let stream = lingering_socket(peer);
    let fds = [stream.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut with = SendAncillaryBuffer::new(&mut space);
    with.push(SendAncillaryMessage::ScmRights(&fds));
    let bytes = [std::io::IoSlice::new(&[0])];
    let sent = rustix::net::sendmsg(to, &bytes, &mut with, flags | SendFlags::NOSIGNAL);
    if sent.is_err() {
        // The test process itself now closes the socket.
        sockopt::set_socket_linger(&stream, None).unwrap();
    }
    sent.is_ok()
}

/// When a process passes a descriptor.
#[derive(Clone, Copy, Debug)]
enum PassedWhen {
    BeforeHello,
    AfterHello,
    OutOfBand,
    /// The connection has no permit.
    WithoutPermit,
}

fn attack(run_dir: &Path, peer: &TcpListener, how: PassedWhen) -> (UnixStream, bool) {
    let stream = match how {
        PassedWhen::AfterHello => hello(run_dir).0,
        _ => connect(run_dir),
    };
    let flags = match how {
        PassedWhen::OutOfBand => SendFlags::OOB,
        _ => SendFlags::empty(),
    };
    let passed = pass_descriptor(&stream, peer, flags);
    // The agent reads this byte after the out-of-band one.
    let _ = (&stream).write_all(&[0]);
    (stream, passed)
}

/// The round trip of a neighbour that 99 of 100 do not exceed.
fn round_trip(run_dir: &Path) -> Duration {
    p99_round_trip(hello_to(run_dir, NEIGHBOUR).0)
}

fn p99_round_trip(mut stream: UnixStream) -> Duration {
    let trip = |_| {
        std::thread::sleep(Duration::from_millis(2));
        let start = Instant::now();
        stream.write_all(&Request::Refresh.frame()).unwrap();
        assert_eq!(receive(&mut stream), Response::Refreshed);
        start.elapsed()
    };
    let mut times: Vec<Duration> = (0..300).map(trip).collect();
    times.sort();
    times[times.len() * 99 / 100]
}

fn hello_to(run_dir: &Path, allocation: u64) -> (UnixStream, CreditPage) {
    let socket = run_dir.join(format!("alloc/{allocation:016x}/agent.sock"));
    let mut stream = UnixStream::connect(socket).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let hello = Request::Hello {
        version: 1,
        image: 1,
        holdings: vec![],
    };
    stream.write_all(&hello.frame()).unwrap();
    let (_, page) = receive_with_fd(&stream, &mut [0; 4096]).unwrap();
    (stream, CreditPage::open(page.unwrap()).unwrap())
}

fn unclosed_sockets(sessions: &Sessions) -> usize {
    sessions
        .container_usage()
        .iter()
        .map(|usage| usage.unclosed_sockets)
        .sum()
}

/// Lets six processes pass a socket each. Returns a neighbour's round trip, and how many
/// descriptors were accepted.
async fn attack_six_times(
    sessions: &Sessions,
    run_dir: &Path,
    how: PassedWhen,
) -> (Duration, usize) {
    let run_dir = run_dir.to_owned();
    let six = tokio::task::spawn_blocking(move || {
        let peer = silent_listener();
        let attacks: Vec<_> = (0..6).map(|_| attack(&run_dir, &peer, how)).collect();
        let taken = attacks.iter().filter(|(_, passed)| *passed).count();
        std::thread::sleep(Duration::from_millis(100));
        let trip = round_trip(&run_dir);
        (trip, taken, attacks, peer)
    });
    let (trip, taken, attacks, peer) = six.await.unwrap();
    println!(
        "{how:?}: {trip:?}, {taken} taken, {} unclosed",
        unclosed_sockets(sessions)
    );
    assert!(
        taken == 0 || unclosed_sockets(sessions) > 0,
        "none was the last reference"
    );
    drop((attacks, peer));
    let start = Instant::now();
    while unclosed_sockets(sessions) > 0 {
        assert!(start.elapsed() < Duration::from_secs(30), "never closed");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    (trip, taken)
}

async fn assert_neighbour_is_fast(sessions: Sessions, run_dir: &Path, taken: usize) {
    sessions.serve(neighbour_spec()).await.unwrap();
    sessions.serve(session_spec()).await.unwrap();
    for how in [
        PassedWhen::BeforeHello,
        PassedWhen::AfterHello,
        PassedWhen::OutOfBand,
    ] {
        let (trip, passed) = attack_six_times(&sessions, run_dir, how).await;
        assert_eq!(passed, taken, "{how:?}");
        assert!(trip < NEIGHBOUR_WITHIN, "{how:?}: {trip:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neighbour_is_served_when_kernel_refuses_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    assert_neighbour_is_fast(sessions, folder.path(), 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neighbour_is_served_when_passed_sockets_linger() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true).with_passed_descriptors();
    assert_neighbour_is_fast(sessions, folder.path(), 6).await;
}

/// Blocks the runtime's only worker until the guard is dropped, so that the agent accepts nothing.
fn block_worker() -> Sender<()> {
    let (started, blocked) = channel();
    let (guard, dropped) = channel();
    tokio::runtime::Handle::current().spawn(async move {
        started.send(()).unwrap();
        assert!(dropped.recv().is_err(), "the guard sends nothing");
    });
    blocked.recv().unwrap();
    guard
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn neighbour_is_served_when_refused_sockets_linger() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    let sessions = sessions.with_connection_limit(2).with_passed_descriptors();
    sessions.serve(neighbour_spec()).await.unwrap();
    sessions.serve(session_spec()).await.unwrap();
    let run_dir = folder.path().to_owned();
    let attacked = tokio::task::spawn_blocking(move || {
        let (neighbour, _page) = hello_to(&run_dir, NEIGHBOUR);
        let (_seated, peer) = (hello(&run_dir), silent_listener());
        for _ in 0..20 {
            let agent = block_worker();
            let (_stream, passed) = attack(&run_dir, &peer, PassedWhen::WithoutPermit);
            assert!(passed);
            drop(agent);
        }
        p99_round_trip(neighbour)
    });
    let trip = attacked.await.unwrap();
    assert!(trip < NEIGHBOUR_WITHIN, "{trip:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn neighbour_is_served_when_sessions_end_with_lingering_sockets() {
    let (folder, next) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let neighbours = sessions(next.path(), true);
    neighbours.serve(neighbour_spec()).await.unwrap();
    let sessions = sessions(folder.path(), true).with_passed_descriptors();
    sessions.serve(session_spec()).await.unwrap();
    let peer = silent_listener();
    let run_dir = folder.path().to_owned();
    let greeted = tokio::task::spawn_blocking(move || hello(&run_dir));
    let (session, _page) = greeted.await.unwrap();
    // The agent has not read all bytes when the sessions end.
    assert!(pass_descriptor(&session, &peer, SendFlags::empty()));
    assert!(pass_descriptor(
        &connect(folder.path()),
        &peer,
        SendFlags::empty()
    ));
    drop(sessions);
    let path = next.path().to_owned();
    let trip = tokio::task::spawn_blocking(move || round_trip(&path));
    let trip = trip.await.unwrap();
    assert!(trip < NEIGHBOUR_WITHIN, "{trip:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_is_not_accepted_while_its_sockets_linger() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true).with_passed_descriptors();
    sessions.serve(neighbour_spec()).await.unwrap();
    sessions.serve(session_spec()).await.unwrap();
    let run_dir = folder.path().to_owned();
    let many = tokio::task::spawn_blocking(move || {
        let peer = silent_listener();
        let attack = |_| attack(&run_dir, &peer, PassedWhen::BeforeHello).0;
        let attacks: Vec<_> = (0..closer::MAX_UNCLOSED + 16).map(attack).collect();
        std::thread::sleep(Duration::from_millis(500));
        let shut_out = connect(&run_dir);
        shut_out
            .set_read_timeout(Some(Duration::from_secs(1)))
            .unwrap();
        let frame = Request::Hello {
            version: 1,
            image: 1,
            holdings: vec![],
        }
        .frame();
        (&shut_out).write_all(&frame).unwrap();
        let answer = (&shut_out).read(&mut [0; 1]);
        assert!(answer.is_err(), "answered {answer:?}");
        let trip = round_trip(&run_dir);
        assert!(trip < NEIGHBOUR_WITHIN, "{trip:?}");
        (attacks, peer)
    });
    let held = many.await.unwrap();
    let waiting = unclosed_sockets(&sessions);
    println!("{waiting} wait to be closed");
    assert!(
        (closer::MAX_UNCLOSED..closer::MAX_UNCLOSED + 16).contains(&waiting),
        "{waiting}"
    );
    drop(held);
    run_blocking(folder.path(), |run_dir| {
        let start = Instant::now();
        while std::panic::catch_unwind(|| assert_served(run_dir)).is_err() {
            assert!(start.elapsed() < Duration::from_secs(60));
        }
    })
    .await;
}

#[tokio::test]
async fn accepted_socket_takes_no_descriptor_when_disabled() {
    let folder = tempfile::tempdir().unwrap();
    for refuses_descriptors in [true, false] {
        let path = folder.path().join(format!("{refuses_descriptors}.sock"));
        let closer = SocketCloser::new(AllocationId::from_bits(1));
        let listener = Listener::bind(&path, Arc::clone(&closer), refuses_descriptors).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let passed = pass_descriptor(&client, &silent_listener(), SendFlags::empty());
        let accepted = listener.accept().await.unwrap();
        let accepts = options::accepts_descriptors(&accepted).unwrap();
        assert_eq!(
            (passed, accepts),
            (!refuses_descriptors, !refuses_descriptors)
        );
        let is_refused = send_with_fd(&client, &[0], client.as_fd()).is_err();
        assert_eq!(is_refused, refuses_descriptors);
    }
}

#[tokio::test]
async fn listener_is_dropped_at_once_when_unaccepted_sockets_linger() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.sock");
    let closer = SocketCloser::new(AllocationId::from_bits(1));
    let listener = Listener::bind(&path, Arc::clone(&closer), false).unwrap();
    let (client, peer) = (UnixStream::connect(&path).unwrap(), silent_listener());
    assert!(pass_descriptor(&client, &peer, SendFlags::empty()));
    let start = Instant::now();
    drop(listener);
    assert!(
        start.elapsed() < Duration::from_secs(2),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(closer.unclosed(), 1);
}
