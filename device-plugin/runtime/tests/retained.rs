//! Kept memory from Rust: clients that crash, fault, wait for each other and find what they left, over the real vault
//! and worker and the simulated driver.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

#[path = "support/fake_agent.rs"]
mod fake_agent;
#[path = "support/raw.rs"]
mod raw;

use std::alloc::Layout;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bursar_protocol::socket::{receive_message, send_message};
use bursar_protocol::wire::kept::{KeptAnswer, KeptQuestion, KeptRefusal};
use bursar_protocol::wire::{ToAgent, ToShim};
use bursar_runtime::driver::{Context, Driver};
use bursar_runtime::error::{ErrorClass, ResourceError};
use bursar_runtime::retained::{Arena, Kept, KeptError, Key, Opened, Shelf, Writing};
use bursar_runtime::{Block, DeviceMemoryResource, FreeError, Tag};
use bursar_sim_lab::{ONE_GPU, inside};
use bursar_sim_state::Sim;
use fake_agent::Keeper;
use raw::Raw as _;

const KEY: Key = [7; 32];
const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);
const NOW: Duration = Duration::ZERO;

fn context() -> Context {
    let device = Driver::get().unwrap().device(0).unwrap();
    device.primary_context().unwrap()
}

fn keeper() -> Keeper {
    Keeper::start(|program| Command::new(program))
}

fn writing(shelf: &Shelf, bytes: u64) -> Writing {
    match shelf.open("weights", &KEY, bytes, PATIENCE).unwrap() {
        Opened::Writing(writing) => writing,
        Opened::Ready(kept) => panic!("{kept:?} was there"),
    }
}

fn bytes_of(kept: &Kept, at: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    kept.context()
        .copy_from_device(&mut bytes, kept.address() + at)
        .unwrap();
    bytes
}

/// What tells a process that a test starts what to be, and where the keeper is.
const ROLE: &str = "KEPT_TEST_ROLE";
const SOCKET: &str = "KEPT_TEST_SOCKET";

/// The test that calls, run again as another process.
fn process(test: &str, role: &str, socket: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(ROLE, role)
        .env(SOCKET, socket);
    command
}

/// Run by tests below in processes of their own.
#[test]
fn a_client() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let shelf = Shelf::at(
        &context(),
        &PathBuf::from(std::env::var_os(SOCKET).unwrap()),
    );
    match role.as_str() {
        "commits and is killed" => {
            let writing = writing(&shelf, 8 * MIB);
            let context = shelf.context();
            context.fill(writing.address(), 42, 8 << 20).unwrap();
            let kept = writing.commit().unwrap();
            assert_eq!(bytes_of(&kept, 0, 8), [42; 8]);
            kill_myself();
        }
        "is killed while it writes" => {
            let writing = writing(&shelf, 8 * MIB);
            shelf.context().fill(writing.address(), 13, 4096).unwrap();
            kill_myself();
        }
        "writes to what is kept" => {
            let kept = shelf.find("weights", &KEY, NOW).unwrap();
            let fill = shelf.context().fill(kept.address(), 1, 4096);
            assert!(fill.is_err(), "kept memory can be written");
        }
        "takes its time" => {
            let writing = writing(&shelf, 2 * MIB);
            println!("writing");
            // Until it is told to go on.
            std::io::stdin().read_line(&mut String::new()).unwrap();
            shelf.context().fill(writing.address(), 9, 4096).unwrap();
            writing.commit().unwrap();
        }
        other => panic!("{other}"),
    }
}

fn kill_myself() -> ! {
    let me = rustix::process::getpid();
    rustix::process::kill_process(me, rustix::process::Signal::KILL).unwrap();
    loop {
        std::thread::park();
    }
}

/// Waits until no more is used: a worker closes its own descriptor of what it made a moment after it said so.
fn assert_falls_to(machine: &Sim, bytes: u64) {
    let since = Instant::now();
    while machine.used(0) != bytes && since.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(machine.used(0), bytes);
}

fn run(role: &str, keeper: &Keeper) -> ExitStatus {
    process("a_client", role, &keeper.socket())
        .status()
        .unwrap()
}

#[test]
fn what_was_committed_is_found_and_verified_after_a_kill() {
    inside(ONE_GPU, |_| {
        let keeper = keeper();
        assert!(!run("commits and is killed", &keeper).success());
        let shelf = Shelf::at(&context(), &keeper.socket());
        let kept = shelf.find("weights", &KEY, NOW).unwrap();
        assert_eq!(bytes_of(&kept, kept.bytes() - 4096, 4096), [42; 4096]);
        let again = shelf.open("weights", &KEY, MIB, NOW).unwrap();
        let Opened::Ready(again) = again else {
            panic!("{again:?}")
        };
        assert_eq!((again.lease(), again.bytes()), (kept.lease(), 8 * MIB));
    });
}

#[test]
fn a_writer_that_is_killed_leaves_nothing_to_the_next() {
    inside(ONE_GPU, |machine| {
        let keeper = keeper();
        let shelf = Shelf::at(&context(), &keeper.socket());
        // What the first checksum takes stays with the context.
        let first = writing(&shelf, 2 * MIB).commit().unwrap();
        let before = machine.used(0) - 2 * MIB;
        first.discard().unwrap();
        assert_falls_to(machine, before);
        assert!(!run("is killed while it writes", &keeper).success());
        let error = shelf.find("weights", &KEY, NOW).unwrap_err();
        let why = KeptRefusal::Missing;
        assert!(
            matches!(&error, KeptError::Refused { why: said, .. } if *said == why),
            "{error}"
        );
        let kept = writing(&shelf, 8 * MIB).commit().unwrap();
        assert_eq!(bytes_of(&kept, 0, 4096), [0; 4096]);
        kept.discard().unwrap();
        assert_falls_to(machine, before);
    });
}

#[test]
fn another_process_waits_for_the_writer_and_finds_what_it_wrote() {
    inside(ONE_GPU, |_| {
        let keeper = keeper();
        let shelf = Shelf::at(&context(), &keeper.socket());
        let mut writer = process("a_client", "takes its time", &keeper.socket());
        writer.stdin(std::process::Stdio::piped());
        let mut writer = writer.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let said = std::io::BufReader::new(writer.stdout.take().unwrap());
        let mut lines = std::io::BufRead::lines(said);
        assert!(lines.any(|line| line.unwrap() == "writing"));

        let error = shelf.find("weights", &KEY, NOW).unwrap_err();
        assert!(error.retryable() && error.class() == ErrorClass::NotReady);
        let opened = std::thread::scope(|scope| {
            let opening = scope.spawn(|| shelf.open("weights", &KEY, 2 * MIB, PATIENCE));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!opening.is_finished());
            drop(writer.stdin.take());
            opening.join().unwrap().unwrap()
        });
        let Opened::Ready(kept) = opened else {
            panic!("{opened:?}")
        };
        assert_eq!(bytes_of(&kept, 0, 4096), [9; 4096]);
        lines.for_each(drop);
        assert!(writer.wait().unwrap().success());
    });
}

#[test]
fn who_writes_to_kept_memory_fails_alone() {
    inside(ONE_GPU, |_| {
        let keeper = keeper();
        let shelf = Shelf::at(&context(), &keeper.socket());
        let writing = writing(&shelf, 2 * MIB);
        shelf.context().fill(writing.address(), 5, 4096).unwrap();
        let kept = writing.commit().unwrap();
        assert!(run("writes to what is kept", &keeper).success());
        assert_eq!(bytes_of(&kept, 0, 8), [5; 8]);
        shelf.find("weights", &KEY, NOW).unwrap();
    });
}

#[test]
fn content_that_is_not_what_was_committed_is_found_and_begun_anew() {
    inside(ONE_GPU, |_| {
        let keeper = keeper();
        let shelf = Shelf::at(&context(), &keeper.socket());
        let first = spoilt(&shelf, &keeper);
        let error = shelf.find("weights", &KEY, NOW).unwrap_err();
        assert!(
            matches!(error, KeptError::Corrupt { lease, .. } if lease == first),
            "{error}"
        );
        let second = spoilt(&shelf, &keeper);
        let opened = shelf.open("weights", &KEY, 2 * MIB, PATIENCE).unwrap();
        let Opened::Writing(writing) = opened else {
            panic!("{opened:?}")
        };
        let kept = writing.commit().unwrap();
        assert!(first < second && second < kept.generation());
    });
}

/// Commits a lease, and changes one byte of it as a process that means to can: an importer may map it to write (F6).
fn spoilt(shelf: &Shelf, keeper: &Keeper) -> u64 {
    use bursar_protocol::wire::Account;
    use bursar_protocol::wire::kept::LeaseName;
    use bursar_runtime::driver::Access;

    let kept = writing(shelf, 2 * MIB).commit().unwrap();
    let stream = bursar_protocol::dial::dial_at(&keeper.socket(), PATIENCE).unwrap();
    let question = ToAgent::Kept(KeptQuestion::Open {
        version: 1,
        image: 1,
        account: Account::Device(fake_agent::GPU.to_owned()),
        name: LeaseName::try_from("weights".to_owned()).unwrap(),
        key: KEY,
        bytes: 0,
    });
    send_message(&stream, &question, None).unwrap();
    let (answer, fd) = receive_message(&stream).unwrap();
    let ToShim::Kept(KeptAnswer::Ready { bytes, .. }) = answer else {
        panic!("{answer:?}")
    };
    let driver = Driver::get().unwrap();
    let handle = driver.import(fd.unwrap().as_fd(), bytes).unwrap();
    let room = std::sync::Arc::new(driver.reserve(bytes).unwrap());
    let mapping = room
        .map(0, &handle, Access::ReadWrite, shelf.context())
        .unwrap();
    shelf
        .context()
        .fill(mapping.address() + 12_345, 1, 1)
        .unwrap();
    kept.lease()
}

#[test]
fn a_lease_that_is_dropped_before_its_commit_is_discarded() {
    inside(ONE_GPU, |machine| {
        let keeper = keeper();
        let shelf = Shelf::at(&context(), &keeper.socket());
        let before = machine.used(0);
        drop(writing(&shelf, 64 * MIB));
        assert_falls_to(machine, before);
        writing(&shelf, 2 * MIB).discard().unwrap();
        assert_falls_to(machine, before);
    });
}

/// An agent that makes a lease, and then says `answer` or dies.
fn opens_at_an_agent_that(answer: Option<KeptAnswer>, machine: &Sim) -> KeptError {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let context = context();
    let before = machine.used(0);
    let agent = std::thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let (question, _) = receive_message::<ToAgent>(&client).unwrap();
        let ToAgent::Kept(KeptQuestion::Open { bytes, .. }) = question else {
            panic!("{question:?}")
        };
        let memory = Driver::get().unwrap().device(0).unwrap().create(bytes);
        let fd = memory.unwrap().export().unwrap();
        let made = ToShim::Kept(KeptAnswer::Made { bytes });
        send_message(&client, &made, Some(fd.as_fd())).unwrap();
        if let Some(answer) = answer {
            send_message(&client, &ToShim::Kept(answer), None).unwrap();
        }
    });
    let opened = Shelf::at(&context, &socket).open("weights", &KEY, 4 * MIB, NOW);
    agent.join().unwrap();
    assert_eq!(machine.used(0), before, "it is still mapped");
    opened.unwrap_err()
}

#[test]
fn memory_that_nobody_said_is_kept_is_unmapped_again() {
    inside(ONE_GPU, |machine| {
        let dies = opens_at_an_agent_that(None, machine);
        assert!(matches!(dies, KeptError::Agent { .. }), "{dies}");
        assert!(dies.retryable());
        let why = KeptRefusal::Unavailable;
        let refuses = opens_at_an_agent_that(Some(KeptAnswer::Refused(why)), machine);
        assert!(
            matches!(&refuses, KeptError::Refused { why: said, .. } if *said == why),
            "{refuses}"
        );
        let other = KeptAnswer::Write {
            lease: 1,
            generation: 1,
            bytes: 2 * MIB,
            token: 1,
            expires_ms: 1,
        };
        let confused = opens_at_an_agent_that(Some(other), machine);
        assert!(matches!(confused, KeptError::Unexpected), "{confused}");
    });
}

/// An agent that is asked so often, and answers what `answer` says; the kinds of questions.
fn scripted(
    socket: &Path,
    questions: usize,
    mut answer: impl FnMut(&UnixStream, &KeptQuestion) -> (KeptAnswer, Option<OwnedFd>) + Send + 'static,
) -> JoinHandle<Vec<&'static str>> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let asked = (0..questions).map(|_| {
            let (client, _) = listener.accept().unwrap();
            let (ToAgent::Kept(question), _) = receive_message(&client).unwrap() else {
                panic!("another question")
            };
            let (answer, fd) = answer(&client, &question);
            let fd = fd.as_ref().map(AsFd::as_fd);
            send_message(&client, &ToShim::Kept(answer), fd).unwrap();
            match question {
                KeptQuestion::Open { .. } => "open",
                KeptQuestion::Commit { .. } => "commit",
                KeptQuestion::Discard { lease: 7, .. } => "discard",
                other => panic!("{other:?}"),
            }
        });
        asked.collect()
    })
}

#[test]
fn a_lease_whose_memory_the_driver_does_not_know_is_discarded_and_begun_anew() {
    inside(ONE_GPU, |_| {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let mut opens = 0;
        let agent = scripted(&socket, 5, move |_, question| match question {
            KeptQuestion::Open { .. } if opens < 2 => {
                opens += 1;
                let ready = KeptAnswer::Ready {
                    lease: 7,
                    generation: 7,
                    bytes: 2 * MIB,
                    checksum: 1,
                };
                // What the GPU lost is not what it was.
                (ready, Some(tempfile::tempfile().unwrap().into()))
            }
            KeptQuestion::Open { .. } => (KeptAnswer::Refused(KeptRefusal::Off), None),
            _ => (KeptAnswer::Discarded, None),
        });
        let shelf = Shelf::at(&context(), &socket);
        let lost = shelf.find("weights", &KEY, NOW).unwrap_err();
        assert!(matches!(lost, KeptError::Lost { lease: 7, .. }), "{lost}");
        assert!(lost.retryable());
        let anew = shelf.open("weights", &KEY, 2 * MIB, PATIENCE).unwrap_err();
        assert!(
            matches!(&anew, KeptError::Refused { why, .. } if *why == KeptRefusal::Off),
            "{anew}"
        );
        let asked = agent.join().unwrap();
        assert_eq!(asked, ["open", "discard", "open", "discard", "open"]);
    });
}

#[test]
fn who_lost_the_right_to_commit_does_not_discard_what_another_may_have_committed() {
    inside(ONE_GPU, |_| {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let agent = scripted(&socket, 3, |client, question| match question {
            KeptQuestion::Open { bytes: 0, .. } => (KeptAnswer::Refused(KeptRefusal::Off), None),
            KeptQuestion::Open { bytes, .. } => {
                let memory = Driver::get().unwrap().device(0).unwrap().create(*bytes);
                let fd = memory.unwrap().export().unwrap();
                let made = ToShim::Kept(KeptAnswer::Made { bytes: *bytes });
                send_message(client, &made, Some(fd.as_fd())).unwrap();
                let write = KeptAnswer::Write {
                    lease: 7,
                    generation: 7,
                    bytes: *bytes,
                    token: 1,
                    expires_ms: 1,
                };
                (write, None)
            }
            _ => (KeptAnswer::Refused(KeptRefusal::Fenced), None),
        });
        let shelf = Shelf::at(&context(), &socket);
        let error = writing(&shelf, 2 * MIB).commit().unwrap_err();
        assert!(
            matches!(&error, KeptError::Refused { why, .. } if *why == KeptRefusal::Fenced),
            "{error}"
        );
        assert!(shelf.find("weights", &KEY, NOW).is_err());
        assert_eq!(agent.join().unwrap(), ["open", "commit", "open"]);
    });
}

#[test]
fn a_commit_that_an_agent_did_not_live_to_hear_is_said_to_the_next() {
    inside(ONE_GPU, |_| {
        let (keeper, folder) = (keeper(), tempfile::tempdir().unwrap());
        let (socket, dying) = (folder.path().join("agent"), folder.path().join("dying"));
        symlink(keeper.socket(), &socket).unwrap();
        let shelf = Shelf::at(&context(), &socket);
        let writing = writing(&shelf, 2 * MIB);
        std::fs::remove_file(&socket).unwrap();
        let agent = UnixListener::bind(&dying).unwrap();
        symlink(&dying, &socket).unwrap();
        let successor = std::thread::spawn(move || {
            let (client, _) = agent.accept().unwrap();
            let (asked, _) = receive_message::<ToAgent>(&client).unwrap();
            assert!(matches!(asked, ToAgent::Kept(KeptQuestion::Commit { .. })));
            drop((client, agent));
            std::thread::sleep(Duration::from_millis(100));
            std::fs::remove_file(&socket).unwrap();
            symlink(keeper.socket(), &socket).unwrap();
            keeper
        });
        let kept = writing.commit().unwrap();
        let _keeper = successor.join().unwrap();
        let found = shelf.find("weights", &KEY, NOW).unwrap();
        assert_eq!(found.lease(), kept.lease());
    });
}

#[test]
fn of_threads_that_begin_the_same_one_writes_and_the_others_have_what_it_commits() {
    inside(ONE_GPU, |_| {
        let keeper = keeper();
        let shelf = Shelf::at(&context(), &keeper.socket());
        let first = writing(&shelf, 2 * MIB);
        let error = shelf.open("weights", &KEY, 4 * MIB, NOW).unwrap_err();
        assert!(error.retryable(), "{error}");
        let lease = std::thread::scope(|scope| {
            let second = scope.spawn(|| shelf.open("weights", &KEY, 2 * MIB, PATIENCE).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            let lease = first.commit().unwrap().lease();
            let Opened::Ready(kept) = second.join().unwrap() else {
                panic!("both write")
            };
            assert_eq!(kept.lease(), lease);
            lease
        });
        assert_eq!(shelf.find("weights", &KEY, NOW).unwrap().lease(), lease);
    });
}

#[test]
fn an_arena_hands_out_the_lease_and_commits_it() {
    inside(ONE_GPU, |_| {
        let keeper = keeper();
        let shelf = Shelf::at(&context(), &keeper.socket());
        let arena = Arena::new(writing(&shelf, 2 * MIB));
        let stream = shelf.context().default_stream();
        let layout = |bytes: usize| Layout::from_size_align(bytes, 512).unwrap();
        let first = arena.allocate(layout(1000), &stream, Tag("w1")).unwrap();
        let second = arena.allocate(layout(1 << 20), &stream, Tag("w2")).unwrap();
        assert_eq!(second.address(), first.address() + 1024);
        let full = arena
            .allocate(layout(2 << 20), &stream, Tag::default())
            .unwrap_err();
        assert!(matches!(full, ResourceError::OverBudget { .. }), "{full}");
        shelf.context().fill(second.address(), 3, 1 << 20).unwrap();
        let gone = first.as_ref();
        arena.deallocate(first, &stream).unwrap();
        let twice = arena.deallocate(Block::new(gone), &stream);
        assert!(matches!(twice, Err(FreeError::Refused { .. })), "{twice:?}");
        let third = arena.allocate(layout(512), &stream, Tag("w3")).unwrap();
        assert!(third.address() > second.address());
        assert_eq!(arena.bytes_outstanding().live, (1 << 20) + 512);
        let kept = arena.commit().unwrap();
        assert_eq!(bytes_of(&kept, 1024, 16), [3; 16]);
    });
}

#[test]
fn without_an_agent_the_answer_is_an_error_that_says_where_it_was_looked_for() {
    inside(ONE_GPU, |_| {
        let shelf = Shelf::at(&context(), Path::new("/nowhere/agent.sock"));
        let since = Instant::now();
        let patience = Duration::from_millis(100);
        let error = shelf.find("weights", &KEY, patience).unwrap_err();
        assert!(error.to_string().contains("/nowhere/agent.sock"), "{error}");
        assert!(since.elapsed() < Duration::from_secs(5));
        let error = shelf.find("", &KEY, NOW).unwrap_err();
        assert!(matches!(error, KeptError::Name { .. }), "{error}");
    });
}
