//! Tests the fd store as a process, with agents that crash and send garbage.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bursar_protocol::fd_passing::{receive_message, send_message, send_with_fd};
use bursar_protocol::fdstore::{
    Blob, FdStoreRequest, FdStoreResponse, MAX_BLOB, Refusal, SOCKET_NAME, StoredLease, VERSION,
};
use bursar_protocol::messages::Message;
use rand::RngExt as _;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_bursar-fdstore");

const TIMEOUT: Duration = Duration::from_secs(10);

/// Set when the test binary runs itself as an agent: the folder of the fd store.
const AGENT_FOLDER_ENV: &str = "FD_STORE_TEST_AGENT";

struct FdStore {
    folder: TempDir,
    process: Child,
}

impl FdStore {
    fn start() -> FdStore {
        let mut command = Command::new(PROGRAM);
        command.stderr(Stdio::null());
        FdStore::start_command(command)
    }

    fn start_command(mut command: Command) -> FdStore {
        let folder = tempfile::tempdir().unwrap();
        let process = command.arg(folder.path()).spawn().unwrap();
        FdStore::wait_until_listening(folder, process)
    }

    fn wait_until_listening(folder: TempDir, process: Child) -> FdStore {
        let fd_store = FdStore { folder, process };
        let since = Instant::now();
        while fd_store.connect().is_none() {
            assert!(since.elapsed() < TIMEOUT, "the fd store does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        fd_store
    }

    fn connect(&self) -> Option<UnixStream> {
        dial(self.folder.path())
    }

    fn agent(&self) -> Agent {
        Agent::connect(self.folder.path())
    }

    /// The resident memory of the process, in bytes.
    fn resident_bytes(&self) -> u64 {
        let status = format!("/proc/{}/status", self.process.id());
        let status = std::fs::read_to_string(status).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib: u64 = line
            .unwrap()
            .trim()
            .trim_end_matches(" kB")
            .parse()
            .unwrap();
        kib << 10
    }

    /// How many descriptors of [`memory_with`] the process has open.
    fn open_memory_count(&self) -> usize {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.process.id())).unwrap();
        let files = fds.filter_map(|fd| fd.unwrap().path().read_link().ok());
        let is_memfd = |file: &PathBuf| file.to_string_lossy().starts_with("/memfd:retained");
        files.filter(is_memfd).count()
    }
}

impl Drop for FdStore {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn dial(folder: &Path) -> Option<UnixStream> {
    let stream = UnixStream::connect(folder.join(SOCKET_NAME)).ok()?;
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    Some(stream)
}

struct Agent(UnixStream);

impl Agent {
    /// Connects and says hello.
    fn connect(folder: &Path) -> Agent {
        let mut agent = Agent(dial(folder).unwrap());
        let ready = agent.ask(&FdStoreRequest::Hello { version: VERSION });
        assert!(matches!(ready, FdStoreResponse::Ready { .. }), "{ready:?}");
        agent
    }

    fn ask(&mut self, message: &FdStoreRequest) -> FdStoreResponse {
        self.ask_with(message, None).0
    }

    fn ask_with(
        &mut self,
        message: &FdStoreRequest,
        fd: Option<&OwnedFd>,
    ) -> (FdStoreResponse, Option<OwnedFd>) {
        send_message(&self.0, message, fd.map(AsFd::as_fd)).unwrap();
        receive_message(&self.0).unwrap()
    }

    fn put(&mut self, lease: u64) -> FdStoreResponse {
        self.send_put(lease);
        receive_message(&self.0).unwrap().0
    }

    fn send_put(&self, lease: u64) {
        let message = FdStoreRequest::Put {
            lease,
            blob: blob(lease),
        };
        send_message(&self.0, &message, Some(memory_with(lease).as_fd())).unwrap();
    }

    fn list(&mut self) -> Vec<StoredLease> {
        let (mut all, mut from) = (Vec::new(), 0);
        loop {
            let FdStoreResponse::Listed { leases } = self.ask(&FdStoreRequest::List { from })
            else {
                panic!("unexpected response to list")
            };
            let Some(last) = leases.last() else {
                return all;
            };
            from = last.lease + 1;
            all.extend(leases);
        }
    }

    fn is_disconnected(&mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0) | Err(_))
    }
}

fn memory_with(content: u64) -> OwnedFd {
    let fd = memfd_create("retained", MemfdFlags::CLOEXEC).unwrap();
    let mut file = File::from(fd);
    file.write_all(&content.to_le_bytes()).unwrap();
    file.into()
}

fn read_content(fd: OwnedFd) -> u64 {
    let (mut file, mut bytes) = (File::from(fd), [0; 8]);
    file.rewind().unwrap();
    file.read_exact(&mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

const QUOTES: usize = 2;

fn blob_of(length: usize) -> Blob {
    let text = "x".repeat(length % (MAX_BLOB - QUOTES + 1));
    Blob::try_from(text).unwrap()
}

fn blob(lease: u64) -> Blob {
    blob_of(usize::try_from(lease * 37).unwrap())
}

/// Runs in a process of its own for [`acknowledged_leases_outlive_killed_agents`]: puts leases and
/// prints which were acknowledged.
#[test]
fn an_agent_that_puts_leases_until_it_is_killed() {
    let Some(folder) = std::env::var_os(AGENT_FOLDER_ENV) else {
        return;
    };
    let mut agent = Agent::connect(Path::new(&folder));
    let next = agent.list().last().map_or(1, |last| last.lease + 1);
    for lease in next.. {
        assert_eq!(agent.put(lease), FdStoreResponse::Stored);
        println!("put {lease}");
        if lease % 3 == 0 {
            let drop = FdStoreRequest::Drop { lease: lease - 1 };
            assert_eq!(agent.ask(&drop), FdStoreResponse::Dropped);
            println!("dropped {}", lease - 1);
        }
    }
}

#[test]
fn acknowledged_leases_outlive_killed_agents() {
    let fd_store = FdStore::start();
    let (mut last_put, mut acknowledged) = (0, std::collections::BTreeSet::new());
    for _ in 0..20 {
        let mut agent = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "an_agent_that_puts_leases_until_it_is_killed",
                "--nocapture",
            ])
            .env(AGENT_FOLDER_ENV, fd_store.folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(agent.stdout.take().unwrap()).lines();
        let parse_line = |line: String| {
            let mut words = line.split(' ').map(str::to_owned);
            let word = words.next()?;
            Some((word, words.next()?.parse::<u64>().ok()?))
        };
        let mut received = 0;
        let enough = rand::rng().random_range(1..40);
        while received < enough {
            let line = lines.next().expect("the agent prints a line").unwrap();
            received += usize::from(record_line(
                parse_line(line),
                &mut acknowledged,
                &mut last_put,
            ));
        }
        agent.kill().unwrap();
        for line in lines.map_while(Result::ok) {
            record_line(parse_line(line), &mut acknowledged, &mut last_put);
        }
        agent.wait().unwrap();

        let mut next = fd_store.agent();
        let listed: Vec<u64> = next.list().iter().map(|entry| entry.lease).collect();
        // The kill may come between an operation and its line: one put more, one drop more.
        let more: Vec<_> = listed
            .iter()
            .filter(|lease| !acknowledged.contains(lease))
            .collect();
        assert!(more.is_empty() || more == [&(last_put + 1)], "{more:?}");
        let fewer: Vec<_> = acknowledged
            .iter()
            .filter(|lease| !listed.contains(lease))
            .collect();
        assert!(
            fewer.is_empty() || (fewer == [&(last_put - 1)] && last_put % 3 == 0),
            "acknowledged and lost: {fewer:?} of {last_put}"
        );
        acknowledged = listed.into_iter().collect();
        last_put = acknowledged.last().copied().unwrap_or(last_put);
    }
    let mut agent = fd_store.agent();
    for StoredLease { lease, blob: held } in agent.list() {
        assert_eq!(held, blob(lease));
        let (answer, fd) = agent.ask_with(&FdStoreRequest::Get { lease }, None);
        assert_eq!(
            answer,
            FdStoreResponse::Lease(StoredLease { lease, blob: held })
        );
        assert_eq!(read_content(fd.unwrap()), lease);
    }
}

fn record_line(
    reported: Option<(String, u64)>,
    acknowledged: &mut std::collections::BTreeSet<u64>,
    last_put: &mut u64,
) -> bool {
    match reported {
        Some((word, lease)) if word == "put" => {
            *last_put = lease;
            acknowledged.insert(lease)
        }
        Some((word, lease)) if word == "dropped" => acknowledged.remove(&lease),
        _ => false,
    }
}

#[test]
fn newest_agent_is_served_and_the_previous_disconnected() {
    let fd_store = FdStore::start();
    let mut first = fd_store.agent();
    assert_eq!(first.put(7), FdStoreResponse::Stored);
    let mut silent = Agent(fd_store.connect().unwrap());
    assert_eq!(
        first.put(8),
        FdStoreResponse::Stored,
        "a connection without a hello closes no other"
    );
    let mut second = fd_store.agent();
    assert!(first.is_disconnected());
    assert_eq!(second.list().len(), 2);
    let refused = FdStoreResponse::Refused(Refusal::NoHello);
    assert_eq!(silent.ask(&FdStoreRequest::Drop { lease: 7 }), refused);
    assert_eq!(second.list().len(), 2);
}

#[test]
fn descriptor_of_a_killed_agent_is_there_for_the_next() {
    let fd_store = FdStore::start();
    let killed = fd_store.agent();
    let pid = Pid::from_child(&fd_store.process);
    kill_process(pid, Signal::STOP).unwrap();
    killed.send_put(7);
    drop(killed);
    let mut next = Agent(fd_store.connect().unwrap());
    let hello = FdStoreRequest::Hello { version: VERSION };
    send_message(&next.0, &hello, None).unwrap();
    kill_process(pid, Signal::CONT).unwrap();
    let ready: FdStoreResponse = receive_message(&next.0).unwrap().0;
    assert!(
        matches!(ready, FdStoreResponse::Ready { leases: 1, .. }),
        "{ready:?}"
    );
    assert_eq!(next.list()[0].lease, 7);
}

#[test]
fn agent_in_another_pid_namespace_is_served() {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", PROGRAM]);
    let fd_store = FdStore::start_command(command);
    assert_eq!(fd_store.agent().put(1), FdStoreResponse::Stored);
}

#[test]
fn fd_store_survives_when_its_log_reader_exits() {
    let mut command = Command::new(PROGRAM);
    command.stderr(Stdio::piped());
    let mut fd_store = FdStore::start_command(command);
    drop(fd_store.process.stderr.take());
    assert_eq!(fd_store.agent().put(1), FdStoreResponse::Stored);
    assert_eq!(fd_store.agent().list().len(), 1);
}

#[test]
fn lease_is_put_once_updated_and_dropped() {
    let fd_store = FdStore::start();
    let mut agent = fd_store.agent();
    let put = |lease| FdStoreRequest::Put {
        lease,
        blob: blob(lease),
    };
    let refused = |refusal| FdStoreResponse::Refused(refusal);
    assert_eq!(agent.ask(&put(1)), refused(Refusal::NoDescriptor));
    assert_eq!(agent.put(1), FdStoreResponse::Stored);
    assert_eq!(agent.put(1), refused(Refusal::Exists));
    let update = |lease| FdStoreRequest::Update {
        lease,
        blob: blob(9),
    };
    assert_eq!(agent.ask(&update(1)), FdStoreResponse::Stored);
    assert_eq!(agent.ask(&update(2)), refused(Refusal::Missing));
    assert_eq!(agent.list()[0].blob, blob(9));
    assert_eq!(
        agent.ask(&FdStoreRequest::Drop { lease: 1 }),
        FdStoreResponse::Dropped
    );
    assert_eq!(
        agent.ask(&FdStoreRequest::Drop { lease: 1 }),
        FdStoreResponse::Dropped
    );
    assert_eq!(
        agent.ask(&FdStoreRequest::Get { lease: 1 }),
        refused(Refusal::Missing)
    );
    assert_eq!(
        agent.ask(&FdStoreRequest::Hello { version: 1 }),
        refused(Refusal::Version)
    );
}

#[test]
fn descriptor_without_a_lease_is_closed() {
    let fd_store = FdStore::start();
    let mut agent = fd_store.agent();
    for lease in 1..=50 {
        agent.ask_with(&FdStoreRequest::List { from: 0 }, Some(&memory_with(0)));
        assert_eq!(agent.put(lease), FdStoreResponse::Stored);
        agent.put(lease);
    }
    assert_eq!(fd_store.open_memory_count(), 50);
    for lease in 1..=50 {
        agent.ask(&FdStoreRequest::Drop { lease });
    }
    assert_eq!(fd_store.open_memory_count(), 0);
}

#[test]
fn fd_store_is_full_at_its_open_file_limit() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 84; exec \"$0\" \"$@\""]);
    command.arg(env!("CARGO_BIN_EXE_bursar-fdstore"));
    let fd_store = FdStore::start_command(command);
    let mut agent = fd_store.agent();
    let room = (1..).find(|lease| agent.put(*lease) != FdStoreResponse::Stored);
    assert_eq!(room, Some(21));
    assert_eq!(agent.put(99), FdStoreResponse::Refused(Refusal::Full));
    assert_eq!(fd_store.agent().list().len(), 20);
}

#[test]
fn agent_is_served_while_no_connection_can_be_accepted() {
    let fd_store = FdStore::start();
    let mut agent = fd_store.agent();
    let process = Pid::from_child(&fd_store.process);
    // The store's standard streams take all numbers below the limit.
    let limit = Rlimit {
        current: Some(3),
        maximum: getrlimit(Resource::Nofile).maximum,
    };
    prlimit(Some(process), Resource::Nofile, limit).unwrap();
    let _waiting = fd_store.connect().unwrap();
    let timeout = Some(Duration::from_secs(2));
    agent.0.set_read_timeout(timeout).unwrap();
    for _ in 0..2 {
        assert_eq!(agent.list(), []);
    }
}

#[test]
fn full_fd_store_stays_within_its_memory() {
    const LIMIT: u64 = 64 << 20;
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(PROGRAM);
    let process = command.arg(folder.path()).arg(LIMIT.to_string()).spawn();
    let fd_store = FdStore::wait_until_listening(folder, process.unwrap());
    let mut agent = fd_store.agent();
    let fd = OwnedFd::from(File::open("/dev/null").unwrap());
    // The longest blobs, after blobs of other lengths that leave holes of all sizes.
    let blob = |lease: u64, round: u64| {
        let length = match round {
            0 => usize::try_from(lease * 37).unwrap(),
            _ => MAX_BLOB - QUOTES,
        };
        blob_of(length)
    };
    let mut leases = 0;
    let full = loop {
        let put = FdStoreRequest::Put {
            lease: leases + 1,
            blob: blob(leases, 0),
        };
        match agent.ask_with(&put, Some(&fd)).0 {
            FdStoreResponse::Stored => leases += 1,
            other => break other,
        }
    };
    assert_eq!(full, FdStoreResponse::Refused(Refusal::Full));
    for lease in 1..=leases {
        let update = FdStoreRequest::Update {
            lease,
            blob: blob(lease, 1),
        };
        assert_eq!(agent.ask(&update), FdStoreResponse::Stored);
    }
    let rss = fd_store.resident_bytes();
    println!(
        "{leases} leases of the longest blobs: {rss} bytes, {} each",
        rss / leases
    );
    assert_eq!(leases, 8192);
    assert!(rss < LIMIT * 9 / 10, "{rss}");
}

#[test]
fn partial_message_and_garbage_delay_no_agent_for_long() {
    let fd_store = FdStore::start();
    let mut partial = fd_store.connect().unwrap();
    partial
        .write_all(&FdStoreRequest::Hello { version: VERSION }.frame()[..3])
        .unwrap();
    let mut garbage = fd_store.connect().unwrap();
    garbage.write_all(&[1, 0, 99]).unwrap();
    let idle_connections: Vec<_> = (0..20).map(|_| fd_store.connect().unwrap()).collect();
    let since = Instant::now();
    assert_eq!(fd_store.agent().put(1), FdStoreResponse::Stored);
    assert!(since.elapsed() < Duration::from_secs(4), "{since:?}");
    drop((partial, garbage, idle_connections));
}

#[test]
fn message_of_a_later_version_is_refused_and_ends_nothing() {
    let send = |agent: &Agent, payload: &str| {
        let length = u16::try_from(payload.len()).unwrap().to_le_bytes();
        let frame = [&length, payload.as_bytes()].concat();
        send_with_fd(&agent.0, &frame, memory_with(1)).unwrap();
        receive_message::<FdStoreResponse>(&agent.0).unwrap().0
    };
    let fd_store = FdStore::start();
    let mut agent = fd_store.agent();
    assert_eq!(agent.put(1), FdStoreResponse::Stored);
    for payload in [r#"{"Seal":{"lease":1}}"#, r#"{"Drop":{"lease":1,"if":2}}"#] {
        let refused = FdStoreResponse::Refused(Refusal::Unknown);
        assert_eq!(send(&agent, payload), refused);
    }
    assert_eq!(agent.list().len(), 1);
    assert_eq!(fd_store.open_memory_count(), 1);
    let stranger = Agent(fd_store.connect().unwrap());
    let refused = FdStoreResponse::Refused(Refusal::NoHello);
    assert_eq!(send(&stranger, r#""Seal""#), refused);
    agent.0.write_all(&[0xff, 0xff]).unwrap();
    assert!(agent.is_disconnected(), "no frame is that long");
}

#[test]
fn second_fd_store_leaves_the_socket_to_the_first() {
    let fd_store = FdStore::start();
    assert_eq!(fd_store.agent().put(1), FdStoreResponse::Stored);
    let second = Command::new(env!("CARGO_BIN_EXE_bursar-fdstore"))
        .arg(fd_store.folder.path())
        .output()
        .unwrap();
    assert!(!second.status.success());
    let stderr = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(stderr.contains("another fd store holds"), "{stderr}");
    assert_eq!(fd_store.agent().list().len(), 1);
}

#[test]
fn fd_store_starts_empty_after_a_kill() {
    let mut fd_store = FdStore::start();
    assert_eq!(fd_store.agent().put(1), FdStoreResponse::Stored);
    fd_store.process.kill().unwrap();
    fd_store.process.wait().unwrap();
    let mut next = Command::new(env!("CARGO_BIN_EXE_bursar-fdstore"));
    next.arg(fd_store.folder.path()).stderr(Stdio::null());
    fd_store.process = next.spawn().unwrap();
    let since = Instant::now();
    while fd_store.connect().is_none() {
        assert!(since.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(fd_store.agent().list().is_empty());
}
