//! Tests retained memory with clients that crash, fault and wait for each other, over the real
//! fd store and provisioner and the simulated driver.

#![allow(unsafe_code, reason = "launches a kernel")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

#[path = "support/fake_agent.rs"]
mod fake_agent;
#[path = "support/raw.rs"]
mod raw;

use std::alloc::Layout;
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::{RejectReason, Request, Response};
use bursar_runtime::driver::{Context, Driver, Grid, Parameter, Stream};
use bursar_runtime::error::{ErrorClass, ResourceError};
use bursar_runtime::retained::{
    Key, LeaseArena, LeaseClient, LeaseError, LeaseState, LeaseWriter, RetainedLease,
};
use bursar_runtime::{Block, DeviceMemoryResource, FreeError, Launch, Tag};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};
use bursar_sim_state::Sim;
use fake_agent::FakeAgent;
use raw::Raw as _;

const KEY: Key = [7; 32];
const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);
const NO_WAIT: Duration = Duration::ZERO;

fn context() -> Context {
    let device = Driver::get().unwrap().device(0).unwrap();
    device.primary_context().unwrap()
}

fn fake_agent() -> FakeAgent {
    FakeAgent::start(|program| Command::new(program))
}

fn writer(client: &LeaseClient, bytes: u64) -> LeaseWriter {
    match client.open("weights", &KEY, bytes, PATIENCE).unwrap() {
        LeaseState::Writing(writer) => writer,
        LeaseState::Ready(retained) => panic!("{retained:?} was there"),
    }
}

fn bytes_of(retained: &RetainedLease, at: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    retained
        .context()
        .copy_from_device(&mut bytes, retained.address() + at)
        .unwrap();
    bytes
}

/// Variables that tell a child process its role and the agent's socket.
const ROLE: &str = "RETAINED_TEST_ROLE";
const SOCKET: &str = "RETAINED_TEST_SOCKET";

/// Runs the calling test again in a child process.
fn role_process(test: &str, role: &str, socket: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(ROLE, role)
        .env(SOCKET, socket);
    command
}

/// Entry point of the child processes of other tests.
#[test]
fn role_of_a_client() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let client = LeaseClient::with_socket(
        &context(),
        &PathBuf::from(std::env::var_os(SOCKET).unwrap()),
    );
    match role.as_str() {
        "commits and is killed" => {
            let writer = writer(&client, 8 * MIB);
            let context = client.context();
            context.fill(writer.address(), 42, 8 << 20).unwrap();
            let retained = writer.commit().unwrap();
            assert_eq!(bytes_of(&retained, 0, 8), [42; 8]);
            kill_own_process();
        }
        "is killed while it writes" => {
            let writer = writer(&client, 8 * MIB);
            client.context().fill(writer.address(), 13, 4096).unwrap();
            kill_own_process();
        }
        "writes to retained memory" => {
            let retained = client.find("weights", &KEY, NO_WAIT).unwrap();
            let fill = client.context().fill(retained.address(), 1, 4096);
            assert!(fill.is_err(), "retained memory can be written");
        }
        "takes its time" => {
            let writer = writer(&client, 2 * MIB);
            println!("writing");
            // Waits for the parent.
            std::io::stdin().read_line(&mut String::new()).unwrap();
            client.context().fill(writer.address(), 9, 4096).unwrap();
            writer.commit().unwrap();
        }
        other => panic!("{other}"),
    }
}

fn kill_own_process() -> ! {
    let me = rustix::process::getpid();
    rustix::process::kill_process(me, rustix::process::Signal::KILL).unwrap();
    loop {
        std::thread::park();
    }
}

/// Waits until the usage falls: a provisioner closes its own file descriptor shortly after its
/// response.
fn assert_used_falls_to(machine: &Sim, bytes: u64) {
    let since = Instant::now();
    while machine.used(0) != bytes && since.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(machine.used(0), bytes);
}

fn run_role(role: &str, fake_agent: &FakeAgent) -> ExitStatus {
    role_process("role_of_a_client", role, &fake_agent.socket())
        .status()
        .unwrap()
}

#[test]
fn committed_lease_is_verified_after_a_kill() {
    run_in_subprocess(ONE_GPU, |_| {
        let fake_agent = fake_agent();
        assert!(!run_role("commits and is killed", &fake_agent).success());
        let client = LeaseClient::with_socket(&context(), &fake_agent.socket());
        let retained = client.find("weights", &KEY, NO_WAIT).unwrap();
        assert_eq!(
            bytes_of(&retained, retained.bytes() - 4096, 4096),
            [42; 4096]
        );
        let again = client.open("weights", &KEY, MIB, NO_WAIT).unwrap();
        let LeaseState::Ready(again) = again else {
            panic!("{again:?}")
        };
        assert_eq!((again.lease(), again.bytes()), (retained.lease(), 8 * MIB));
    });
}

#[test]
fn killed_writer_leaves_no_content() {
    run_in_subprocess(ONE_GPU, |machine| {
        let fake_agent = fake_agent();
        let client = LeaseClient::with_socket(&context(), &fake_agent.socket());
        // The first checksum allocates memory that stays with the context.
        let first = writer(&client, 2 * MIB).commit().unwrap();
        let before = machine.used(0) - 2 * MIB;
        first.discard().unwrap();
        assert_used_falls_to(machine, before);
        assert!(!run_role("is killed while it writes", &fake_agent).success());
        let error = client.find("weights", &KEY, NO_WAIT).unwrap_err();
        let reason = RetainedRefusal::Missing;
        assert!(
            matches!(&error, LeaseError::Refused { reason: refused, .. } if *refused == reason),
            "{error}"
        );
        let retained = writer(&client, 8 * MIB).commit().unwrap();
        assert_eq!(bytes_of(&retained, 0, 4096), [0; 4096]);
        retained.discard().unwrap();
        assert_used_falls_to(machine, before);
    });
}

#[test]
fn second_process_waits_for_the_writer() {
    run_in_subprocess(ONE_GPU, |_| {
        let fake_agent = fake_agent();
        let client = LeaseClient::with_socket(&context(), &fake_agent.socket());
        let mut writer = role_process("role_of_a_client", "takes its time", &fake_agent.socket());
        writer.stdin(std::process::Stdio::piped());
        let mut writer = writer.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let stdout = std::io::BufReader::new(writer.stdout.take().unwrap());
        let mut lines = std::io::BufRead::lines(stdout);
        assert!(lines.any(|line| line.unwrap() == "writing"));

        let error = client.find("weights", &KEY, NO_WAIT).unwrap_err();
        assert!(error.retryable() && error.class() == ErrorClass::NotReady);
        let opened = std::thread::scope(|scope| {
            let opening = scope.spawn(|| client.open("weights", &KEY, 2 * MIB, PATIENCE));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!opening.is_finished());
            drop(writer.stdin.take());
            opening.join().unwrap().unwrap()
        });
        let LeaseState::Ready(retained) = opened else {
            panic!("{opened:?}")
        };
        assert_eq!(bytes_of(&retained, 0, 4096), [9; 4096]);
        lines.for_each(drop);
        assert!(writer.wait().unwrap().success());
    });
}

#[test]
fn write_to_a_retained_lease_faults_the_writer_alone() {
    run_in_subprocess(ONE_GPU, |_| {
        let fake_agent = fake_agent();
        let client = LeaseClient::with_socket(&context(), &fake_agent.socket());
        let writer = writer(&client, 2 * MIB);
        client.context().fill(writer.address(), 5, 4096).unwrap();
        let retained = writer.commit().unwrap();
        assert!(run_role("writes to retained memory", &fake_agent).success());
        assert_eq!(bytes_of(&retained, 0, 8), [5; 8]);
        client.find("weights", &KEY, NO_WAIT).unwrap();
    });
}

#[test]
fn corrupt_lease_is_discarded_and_recreated() {
    run_in_subprocess(ONE_GPU, |_| {
        let fake_agent = fake_agent();
        let client = LeaseClient::with_socket(&context(), &fake_agent.socket());
        let first = commit_and_corrupt(&client, &fake_agent);
        let error = client.find("weights", &KEY, NO_WAIT).unwrap_err();
        assert!(
            matches!(error, LeaseError::Corrupt { lease, .. } if lease == first),
            "{error}"
        );
        let second = commit_and_corrupt(&client, &fake_agent);
        let opened = client.open("weights", &KEY, 2 * MIB, PATIENCE).unwrap();
        let LeaseState::Writing(writer) = opened else {
            panic!("{opened:?}")
        };
        let retained = writer.commit().unwrap();
        assert!(first < second && second < retained.generation());
    });
}

/// Commits a lease and changes one byte of it as a malicious process can, because an importer may
/// map the lease writable (F6 in `docs/internals/facts.md`).
fn commit_and_corrupt(client: &LeaseClient, fake_agent: &FakeAgent) -> u64 {
    use bursar_protocol::messages::Account;
    use bursar_protocol::messages::retained::LeaseName;
    use bursar_runtime::driver::Access;

    let retained = writer(client, 2 * MIB).commit().unwrap();
    let stream = bursar_protocol::connect::connect_to(&fake_agent.socket(), PATIENCE).unwrap();
    let question = Request::Retained(RetainedRequest::Open {
        version: 1,
        image: 1,
        account: Account::Device(fake_agent::GPU.to_owned()),
        name: LeaseName::try_from("weights".to_owned()).unwrap(),
        key: KEY,
        bytes: 0,
    });
    send_message(&stream, &question, None).unwrap();
    let (answer, fd) = receive_message(&stream).unwrap();
    let Response::Retained(RetainedResponse::Ready { bytes, .. }) = answer else {
        panic!("{answer:?}")
    };
    let driver = Driver::get().unwrap();
    let handle = driver.import(fd.unwrap().as_fd(), bytes).unwrap();
    let room = std::sync::Arc::new(driver.reserve(bytes).unwrap());
    let mapping = room
        .map(0, &handle, Access::ReadWrite, client.context())
        .unwrap();
    client
        .context()
        .fill(mapping.address() + 12_345, 1, 1)
        .unwrap();
    retained.lease()
}

/// Keeps a stream busy for 0.3 s.
fn spin(stream: &Stream) {
    const TAKES: &[Parameter] = &[Parameter::Value(8)];
    let spin = stream.context().load(c"").unwrap();
    // SAFETY: spin(uint64_t nanoseconds)
    let spin = unsafe { spin.function(c"spin").unwrap().declare(TAKES) };
    Launch::new(&spin, stream, Grid::linear(1, 1))
        .arg(300_000_000_u64)
        .submit()
        .unwrap();
}

#[test]
fn lease_is_unmapped_behind_the_work_that_uses_it() {
    run_in_subprocess(ONE_GPU, |_| {
        let fake_agent = fake_agent();
        let client = LeaseClient::with_socket(&context(), &fake_agent.socket());
        let stream = client.context().stream().unwrap();
        let ends: [fn(LeaseWriter); 2] = [drop, |writer| writer.discard().unwrap()];
        for end in ends {
            let writer = writer(&client, 2 * MIB);
            spin(&stream);
            let context = client.context();
            context
                .fill_async(writer.address(), 1, 4096, &stream)
                .unwrap();
            end(writer);
            assert_eq!(stream.is_idle(), Ok(true));
        }
        let retained = writer(&client, 2 * MIB).commit().unwrap();
        spin(&stream);
        drop(retained);
        assert_eq!(stream.is_idle(), Ok(true));
    });
}

#[test]
fn lease_stays_mapped_when_dropped_during_a_capture() {
    use cudarc::driver::sys::{CUstreamCaptureMode, cuStreamBeginCapture_v2, cuStreamEndCapture};

    run_in_subprocess(ONE_GPU, |_| {
        let fake_agent = fake_agent();
        let client = LeaseClient::with_socket(&context(), &fake_agent.socket());
        let (context, stream) = (client.context(), client.context().stream().unwrap());
        let writer = writer(&client, 2 * MIB);
        context.fill(writer.address(), 3, 4096).unwrap();
        let retained = writer.commit().unwrap();
        let address = retained.address();

        let _current = context.enter().unwrap();
        let captured = stream.as_raw() as cudarc::driver::sys::CUstream;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        let status = unsafe { cuStreamBeginCapture_v2(captured, mode) };
        status.result().unwrap();
        drop(retained);
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive, and the graph is valid for a write.
        let ended = unsafe { cuStreamEndCapture(captured, &raw mut graph) };
        ended.result().unwrap_err();

        // A kernel that was submitted before the drop would read the memory in the same way.
        let mut bytes = [0; 8];
        context.copy_from_device(&mut bytes, address).unwrap();
        assert_eq!(bytes, [3; 8]);
    });
}

#[test]
fn uncommitted_lease_is_discarded_when_dropped() {
    run_in_subprocess(ONE_GPU, |machine| {
        let fake_agent = fake_agent();
        let client = LeaseClient::with_socket(&context(), &fake_agent.socket());
        let before = machine.used(0);
        drop(writer(&client, 64 * MIB));
        assert_used_falls_to(machine, before);
        writer(&client, 2 * MIB).discard().unwrap();
        assert_used_falls_to(machine, before);
    });
}

/// Runs an agent that handles a number of requests by `answer`, and returns the kinds of the
/// requests.
fn scripted_agent(
    socket: &Path,
    questions: usize,
    mut answer: impl FnMut(&RetainedRequest) -> (RetainedResponse, Option<OwnedFd>) + Send + 'static,
) -> JoinHandle<Vec<&'static str>> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let asked = (0..questions).map(|_| {
            let (client, _) = listener.accept().unwrap();
            let (Request::Retained(question), _) = receive_message(&client).unwrap() else {
                panic!("another question")
            };
            let (answer, fd) = answer(&question);
            let fd = fd.as_ref().map(AsFd::as_fd);
            send_message(&client, &Response::Retained(answer), fd).unwrap();
            match question {
                RetainedRequest::Open { .. } => "open",
                RetainedRequest::Commit { .. } => "commit",
                RetainedRequest::Discard { lease: 7, .. } => "discard",
                other => panic!("{other:?}"),
            }
        });
        asked.collect()
    })
}

#[test]
fn lease_without_driver_memory_is_recreated() {
    run_in_subprocess(ONE_GPU, |_| {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let mut opens = 0;
        let agent = scripted_agent(&socket, 5, move |question| match question {
            RetainedRequest::Open { .. } if opens < 2 => {
                opens += 1;
                let ready = RetainedResponse::Ready {
                    lease: 7,
                    generation: 7,
                    bytes: 2 * MIB,
                    checksum: 1,
                };
                // The memory differs from what the GPU lost.
                (ready, Some(tempfile::tempfile().unwrap().into()))
            }
            RetainedRequest::Open { .. } => (RetainedResponse::Refused(RetainedRefusal::Off), None),
            _ => (RetainedResponse::Discarded, None),
        });
        let client = LeaseClient::with_socket(&context(), &socket);
        let lost = client.find("weights", &KEY, NO_WAIT).unwrap_err();
        assert!(matches!(lost, LeaseError::Lost { lease: 7, .. }), "{lost}");
        assert!(lost.retryable());
        let anew = client.open("weights", &KEY, 2 * MIB, PATIENCE).unwrap_err();
        assert!(
            matches!(&anew, LeaseError::Refused { reason, .. } if *reason == RetainedRefusal::Off),
            "{anew}"
        );
        let asked = agent.join().unwrap();
        assert_eq!(asked, ["open", "discard", "open", "discard", "open"]);
    });
}

#[test]
fn granted_lease_without_memory_is_discarded() {
    run_in_subprocess(ONE_GPU, |_| {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let agent = scripted_agent(&socket, 2, |question| match question {
            RetainedRequest::Open { bytes, .. } => {
                let write = RetainedResponse::Write {
                    lease: 7,
                    generation: 7,
                    bytes: *bytes,
                    token: 1,
                    expires_ms: 1,
                };
                (write, None)
            }
            _ => (RetainedResponse::Discarded, None),
        });
        let client = LeaseClient::with_socket(&context(), &socket);
        let confused = client.open("weights", &KEY, 4 * MIB, NO_WAIT).unwrap_err();
        assert!(
            matches!(confused, LeaseError::UnexpectedResponse),
            "{confused}"
        );
        assert_eq!(agent.join().unwrap(), ["open", "discard"]);
    });
}

#[test]
fn fenced_writer_does_not_discard_the_lease() {
    run_in_subprocess(ONE_GPU, |_| {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let agent = scripted_agent(&socket, 3, |question| match question {
            RetainedRequest::Open { bytes: 0, .. } => {
                (RetainedResponse::Refused(RetainedRefusal::Off), None)
            }
            RetainedRequest::Open { bytes, .. } => {
                let memory = Driver::get().unwrap().device(0).unwrap().create(*bytes);
                let fd = memory.unwrap().export().unwrap();
                let write = RetainedResponse::Write {
                    lease: 7,
                    generation: 7,
                    bytes: *bytes,
                    token: 1,
                    expires_ms: 1,
                };
                (write, Some(fd))
            }
            _ => (RetainedResponse::Refused(RetainedRefusal::Fenced), None),
        });
        let client = LeaseClient::with_socket(&context(), &socket);
        let error = writer(&client, 2 * MIB).commit().unwrap_err();
        assert!(
            matches!(&error, LeaseError::Refused { reason, .. } if *reason == RetainedRefusal::Fenced),
            "{error}"
        );
        assert!(client.find("weights", &KEY, NO_WAIT).is_err());
        assert_eq!(agent.join().unwrap(), ["open", "commit", "open"]);
    });
}

#[test]
fn commit_is_repeated_to_a_restarted_agent() {
    run_in_subprocess(ONE_GPU, |_| {
        let (fake_agent, folder) = (fake_agent(), tempfile::tempdir().unwrap());
        let (socket, dying) = (folder.path().join("agent"), folder.path().join("dying"));
        symlink(fake_agent.socket(), &socket).unwrap();
        let client = LeaseClient::with_socket(&context(), &socket);
        let writer = writer(&client, 2 * MIB);
        std::fs::remove_file(&socket).unwrap();
        let agent = UnixListener::bind(&dying).unwrap();
        symlink(&dying, &socket).unwrap();
        let successor = std::thread::spawn(move || {
            let (connection, _) = agent.accept().unwrap();
            let (asked, _) = receive_message::<Request>(&connection).unwrap();
            assert!(matches!(
                asked,
                Request::Retained(RetainedRequest::Commit { .. })
            ));
            drop((connection, agent));
            std::thread::sleep(Duration::from_millis(100));
            std::fs::remove_file(&socket).unwrap();
            symlink(fake_agent.socket(), &socket).unwrap();
            fake_agent
        });
        let retained = writer.commit().unwrap();
        let _keeper = successor.join().unwrap();
        let found = client.find("weights", &KEY, NO_WAIT).unwrap();
        assert_eq!(found.lease(), retained.lease());
    });
}

/// Rejects one request at `socket` as busy, and then leads the path to an agent.
fn reject_once(socket: &Path, agent: &Path) -> JoinHandle<()> {
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket).unwrap();
    let (socket, agent) = (socket.to_owned(), agent.to_owned());
    std::thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        receive_message::<Request>(&client).unwrap();
        std::fs::remove_file(&socket).unwrap();
        symlink(agent, socket).unwrap();
        let reason = RejectReason::Busy;
        send_message(&client, &Response::Rejected { reason }, None).unwrap();
    })
}

#[test]
fn request_is_repeated_to_a_busy_agent() {
    run_in_subprocess(ONE_GPU, |_| {
        let (fake_agent, folder) = (fake_agent(), tempfile::tempdir().unwrap());
        let socket = folder.path().join("agent");
        let client = LeaseClient::with_socket(&context(), &socket);
        let busy = || reject_once(&socket, &fake_agent.socket());
        let opening = busy();
        let writer = writer(&client, 2 * MIB);
        opening.join().unwrap();
        let committing = busy();
        let retained = writer.commit().unwrap();
        committing.join().unwrap();
        let finding = busy();
        let found = client.find("weights", &KEY, PATIENCE).unwrap();
        finding.join().unwrap();
        assert_eq!(found.lease(), retained.lease());
    });
}

#[test]
fn concurrent_threads_share_one_writers_lease() {
    run_in_subprocess(ONE_GPU, |_| {
        let fake_agent = fake_agent();
        let client = LeaseClient::with_socket(&context(), &fake_agent.socket());
        let first = writer(&client, 2 * MIB);
        let error = client.open("weights", &KEY, 4 * MIB, NO_WAIT).unwrap_err();
        assert!(error.retryable(), "{error}");
        let lease = std::thread::scope(|scope| {
            let second = scope.spawn(|| client.open("weights", &KEY, 2 * MIB, PATIENCE).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            let lease = first.commit().unwrap().lease();
            let LeaseState::Ready(retained) = second.join().unwrap() else {
                panic!("both write")
            };
            assert_eq!(retained.lease(), lease);
            lease
        });
        assert_eq!(
            client.find("weights", &KEY, NO_WAIT).unwrap().lease(),
            lease
        );
    });
}

#[test]
fn lease_arena_allocates_from_the_lease_and_commits() {
    run_in_subprocess(ONE_GPU, |_| {
        let fake_agent = fake_agent();
        let client = LeaseClient::with_socket(&context(), &fake_agent.socket());
        let arena = LeaseArena::new(writer(&client, 2 * MIB));
        let stream = client.context().default_stream();
        let layout = |bytes: usize| Layout::from_size_align(bytes, 512).unwrap();
        let first = arena.allocate(layout(1000), &stream, Tag("w1")).unwrap();
        let second = arena.allocate(layout(1 << 20), &stream, Tag("w2")).unwrap();
        assert_eq!(second.address(), first.address() + 1024);
        let full = arena
            .allocate(layout(2 << 20), &stream, Tag::default())
            .unwrap_err();
        assert!(matches!(full, ResourceError::OverBudget { .. }), "{full}");
        client.context().fill(second.address(), 3, 1 << 20).unwrap();
        let gone = first.as_ref();
        arena.deallocate(first, &stream).unwrap();
        let twice = arena.deallocate(Block::new(gone), &stream);
        assert!(matches!(twice, Err(FreeError::Refused { .. })), "{twice:?}");
        let third = arena.allocate(layout(512), &stream, Tag("w3")).unwrap();
        assert!(third.address() > second.address());
        assert_eq!(arena.bytes_outstanding().live, (1 << 20) + 512);
        let retained = arena.commit().unwrap();
        assert_eq!(bytes_of(&retained, 1024, 16), [3; 16]);
    });
}

#[test]
fn missing_agent_error_names_the_socket() {
    run_in_subprocess(ONE_GPU, |_| {
        let client = LeaseClient::with_socket(&context(), Path::new("/nowhere/agent.sock"));
        let error = client.find("weights", &KEY, NO_WAIT).unwrap_err();
        assert!(error.to_string().contains("/nowhere/agent.sock"), "{error}");
        let error = client.find("", &KEY, NO_WAIT).unwrap_err();
        assert!(matches!(error, LeaseError::InvalidName { .. }), "{error}");
    });
}

#[test]
fn open_does_not_wait_when_no_agent_can_come() {
    run_in_subprocess(ONE_GPU, |_| {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let other_version = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            receive_message::<Request>(&client).unwrap();
            client.write_all(&[0xff; 64]).unwrap();
        });
        for socket in [Path::new("/nowhere/agent.sock"), socket.as_path()] {
            let client = LeaseClient::with_socket(&context(), socket);
            let since = Instant::now();
            let error = client.find("weights", &KEY, PATIENCE).unwrap_err();
            let unreachable = matches!(error, LeaseError::AgentUnreachable { .. });
            assert!(unreachable && since.elapsed() < PATIENCE / 2, "{error}");
        }
        other_version.join().unwrap();
    });
}
