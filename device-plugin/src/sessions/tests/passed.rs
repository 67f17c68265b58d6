//! Descriptors that processes pass: the last reference to a socket that lingers for seconds, in front of an agent
//! with two threads, where the kernel refuses them and where it cannot.

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use bursar_protocol::fd_passing::send_with_fd;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sockopt};

use super::*;

/// Who closes such a socket waits so long.
const LINGERS: Duration = Duration::from_secs(12);

/// What a neighbour's round trip takes, but one in a hundred.
const NEIGHBOUR_WITHIN: Duration = Duration::from_millis(100);

/// The neighbour's allocation, of the same sessions.
const NEIGHBOUR: u64 = 8;

fn next_door() -> Served {
    Served {
        allocation: AllocationId::from_bits(NEIGHBOUR),
        ..served()
    }
}

/// A listener that accepts nothing and reads nothing.
fn deaf() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

/// A socket with more to send than its peer takes: closing it takes as long as it lingers.
fn lingering(peer: &TcpListener) -> TcpStream {
    let stream = TcpStream::connect(peer.local_addr().unwrap()).unwrap();
    sockopt::set_socket_linger(&stream, Some(LINGERS)).unwrap();
    stream.set_nonblocking(true).unwrap();
    while (&stream).write(&[0; 1 << 16]).is_ok() {}
    stream
}

/// Sends one byte, in band or out of it, with the last reference to a socket that lingers; whether it was taken.
fn pass(to: &UnixStream, peer: &TcpListener, flags: SendFlags) -> bool {
    let stream = lingering(peer);
    let fds = [stream.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut with = SendAncillaryBuffer::new(&mut space);
    with.push(SendAncillaryMessage::ScmRights(&fds));
    let bytes = [std::io::IoSlice::new(&[0])];
    let sent = rustix::net::sendmsg(to, &bytes, &mut with, flags | SendFlags::NOSIGNAL);
    if sent.is_err() {
        // This process closes it.
        sockopt::set_socket_linger(&stream, None).unwrap();
    }
    sent.is_ok()
}

/// How a process passes a descriptor.
#[derive(Clone, Copy, Debug)]
enum How {
    BeforeHello,
    AfterHello,
    OutOfBand,
    /// There is no seat for it.
    Refused,
}

fn attack(run_dir: &Path, peer: &TcpListener, how: How) -> (UnixStream, bool) {
    let stream = match how {
        How::AfterHello => hello(run_dir).0,
        _ => connect(run_dir),
    };
    let flags = match how {
        How::OutOfBand => SendFlags::OOB,
        _ => SendFlags::empty(),
    };
    let passed = pass(&stream, peer, flags);
    // After it: the agent reads on where the byte out of band was.
    let _ = (&stream).write_all(&[0]);
    (stream, passed)
}

/// What a neighbour waits for an answer, all but one time in a hundred.
fn round_trip(run_dir: &Path) -> Duration {
    trips(hello_to(run_dir, NEIGHBOUR).0)
}

fn trips(mut stream: UnixStream) -> Duration {
    let trip = |_| {
        std::thread::sleep(Duration::from_millis(2));
        let begun = Instant::now();
        stream.write_all(&Request::Refresh.frame()).unwrap();
        assert_eq!(receive(&mut stream), Response::Refreshed);
        begun.elapsed()
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

fn unclosed(sessions: &Sessions) -> usize {
    sessions.books().iter().map(|books| books.unclosed).sum()
}

/// Six processes pass a socket each; what a neighbour waits, and how many were taken.
async fn six(sessions: &Sessions, run_dir: &Path, how: How) -> (Duration, usize) {
    let run_dir = run_dir.to_owned();
    let six = tokio::task::spawn_blocking(move || {
        let peer = deaf();
        let attacks: Vec<_> = (0..6).map(|_| attack(&run_dir, &peer, how)).collect();
        let taken = attacks.iter().filter(|(_, passed)| *passed).count();
        std::thread::sleep(Duration::from_millis(100));
        let trip = round_trip(&run_dir);
        (trip, taken, attacks, peer)
    });
    let (trip, taken, attacks, peer) = six.await.unwrap();
    println!(
        "{how:?}: {trip:?}, {taken} taken, {} unclosed",
        unclosed(sessions)
    );
    assert!(
        taken == 0 || unclosed(sessions) > 0,
        "none was the last reference"
    );
    drop((attacks, peer));
    let begun = Instant::now();
    while unclosed(sessions) > 0 {
        assert!(begun.elapsed() < Duration::from_secs(30), "never closed");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    (trip, taken)
}

async fn neighbour_waits_for_nobody(sessions: Sessions, run_dir: &Path, taken: usize) {
    sessions.serve(next_door()).await.unwrap();
    sessions.serve(served()).await.unwrap();
    for how in [How::BeforeHello, How::AfterHello, How::OutOfBand] {
        let (trip, passed) = six(&sessions, run_dir, how).await;
        assert_eq!(passed, taken, "{how:?}");
        assert!(trip < NEIGHBOUR_WITHIN, "{how:?}: {trip:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neighbour_is_served_when_kernel_refuses_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    neighbour_waits_for_nobody(sessions, folder.path(), 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neighbour_is_served_when_passed_sockets_linger() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true).passed_descriptors();
    neighbour_waits_for_nobody(sessions, folder.path(), 6).await;
}

/// Blocks the runtime's only worker until the guard is dropped, so that the agent accepts nothing.
fn held_worker() -> Sender<()> {
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
    let sessions = sessions.limited_to(2).passed_descriptors();
    sessions.serve(next_door()).await.unwrap();
    sessions.serve(served()).await.unwrap();
    let run_dir = folder.path().to_owned();
    let attacked = tokio::task::spawn_blocking(move || {
        let (neighbour, _page) = hello_to(&run_dir, NEIGHBOUR);
        let (_seated, peer) = (hello(&run_dir), deaf());
        for _ in 0..20 {
            let agent = held_worker();
            let (_stream, passed) = attack(&run_dir, &peer, How::Refused);
            assert!(passed);
            drop(agent);
        }
        trips(neighbour)
    });
    let trip = attacked.await.unwrap();
    assert!(trip < NEIGHBOUR_WITHIN, "{trip:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn neighbour_is_served_when_sessions_end_with_lingering_sockets() {
    let (folder, next) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let neighbours = sessions(next.path(), true);
    neighbours.serve(next_door()).await.unwrap();
    let sessions = sessions(folder.path(), true).passed_descriptors();
    sessions.serve(served()).await.unwrap();
    let peer = deaf();
    let run_dir = folder.path().to_owned();
    let greeted = tokio::task::spawn_blocking(move || hello(&run_dir));
    let (session, _page) = greeted.await.unwrap();
    // More than the agent reads: some of it is unread.
    assert!(pass(&session, &peer, SendFlags::empty()));
    assert!(pass(&connect(folder.path()), &peer, SendFlags::empty()));
    drop(sessions);
    let path = next.path().to_owned();
    let trip = tokio::task::spawn_blocking(move || round_trip(&path));
    let trip = trip.await.unwrap();
    assert!(trip < NEIGHBOUR_WITHIN, "{trip:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_is_not_accepted_while_its_sockets_linger() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true).passed_descriptors();
    sessions.serve(next_door()).await.unwrap();
    sessions.serve(served()).await.unwrap();
    let run_dir = folder.path().to_owned();
    let many = tokio::task::spawn_blocking(move || {
        let peer = deaf();
        let attack = |_| attack(&run_dir, &peer, How::BeforeHello).0;
        let attacks: Vec<_> = (0..closer::MOST_WAIT + 16).map(attack).collect();
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
    let waiting = unclosed(&sessions);
    println!("{waiting} wait to be closed");
    assert!(
        (closer::MOST_WAIT..closer::MOST_WAIT + 16).contains(&waiting),
        "{waiting}"
    );
    drop(held);
    beside(folder.path(), |run_dir| {
        let begun = Instant::now();
        while std::panic::catch_unwind(|| is_served(run_dir)).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(60));
        }
    })
    .await;
}

#[tokio::test]
async fn accepted_socket_takes_no_descriptor_when_told_so() {
    let folder = tempfile::tempdir().unwrap();
    for asked in [true, false] {
        let path = folder.path().join(format!("{asked}.sock"));
        let closer = Closer::of(AllocationId::from_bits(1));
        let listener = Listener::bind(&path, Arc::clone(&closer), asked).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let early = pass(&client, &deaf(), SendFlags::empty());
        let accepted = listener.accept().await.unwrap();
        let takes = options::takes_descriptors(&accepted).unwrap();
        assert_eq!((early, takes), (!asked, !asked));
        let refused = send_with_fd(&client, &[0], client.as_fd()).is_err();
        assert_eq!(refused, asked);
    }
}

#[tokio::test]
async fn listener_is_dropped_at_once_when_unaccepted_sockets_linger() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.sock");
    let closer = Closer::of(AllocationId::from_bits(1));
    let listener = Listener::bind(&path, Arc::clone(&closer), false).unwrap();
    let (client, peer) = (UnixStream::connect(&path).unwrap(), deaf());
    assert!(pass(&client, &peer, SendFlags::empty()));
    let begun = Instant::now();
    drop(listener);
    assert!(
        begun.elapsed() < Duration::from_secs(2),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(closer.waiting(), 1);
}
