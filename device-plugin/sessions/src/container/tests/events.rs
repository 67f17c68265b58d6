//! Shows how each event moves the process generation.
//!
//! `retained/src/leases/tests/generations.rs` shows it for the GPU generation and the lease id.

use bursar_host::clock::ClockReading;

use bursar_crds::context_policy::ContextAction;
use bursar_protocol::messages::Recovery;

use super::super::super::recovery::RecoveryPolicy;
use super::*;

/// The effect of an event on the process generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The value is unchanged.
    Same,
    /// The value grows by one.
    Next,
    /// The value grows by an unknown number.
    Later,
    /// The values start again.
    Anew,
}

use Outcome::{Anew, Later, Next, Same};

type Event = fn(&mut FakeNode);

const EVENTS: &[(&str, Event, Outcome)] = &[
    ("nothing", |_| {}, Same),
    // Events of the process.
    ("the process connects again", FakeNode::hello, Same),
    ("a fault poisons it", FakeNode::poison, Same),
    ("an XID names it", FakeNode::poison_by_xid, Same),
    ("exec", FakeNode::exec, Next),
    ("a restart in place", FakeNode::restart_in_place, Next),
    ("it dies, and another is started", FakeNode::restart, Next),
    ("it starts a child", |node| node.start(8), Next),
    (
        "its container is replaced",
        FakeNode::replace_container,
        Anew,
    ),
    // Events of the agent.
    (
        "the agent starts again",
        |node| node.start_agent(false),
        Same,
    ),
    (
        "the agent starts again without its checkpoint",
        |node| node.start_agent(true),
        Later,
    ),
];

#[test]
fn event_moves_the_process_generation_only_if_it_ends_the_image() {
    for (event, happens, expected) in EVENTS {
        let mut node = FakeNode::new();
        let before = node.generation();
        happens(&mut node);
        let after = node.generation();
        let found = match after {
            _ if after == before => Same,
            _ if after == before + 1 => Next,
            _ if after > before => Later,
            _ => Anew,
        };
        assert_eq!(found, *expected, "{event}: {before} then {after}");
    }
}

/// A container with one process.
struct FakeNode {
    fixture: Fixture,
    container: Container,
    process: Process,
    image: u64,
}

impl FakeNode {
    fn new() -> FakeNode {
        let fixture = Fixture::with_quota(Bytes::gib(1));
        let mut node = FakeNode {
            container: fixture.start(),
            fixture,
            process: Process { pid: 7, start: 1 },
            image: 1,
        };
        node.hello();
        node.exec();
        node
    }

    fn generation(&self) -> u64 {
        self.container
            .memory
            .image_of(self.process.pid)
            .unwrap()
            .generation
    }

    fn hello(&mut self) {
        let (process, image) = (self.process, self.image);
        self.container
            .handle_hello(process, image, VERSION, &[], &FakeHost)
            .unwrap();
    }

    fn exec(&mut self) {
        self.image += 1;
        self.hello();
    }

    fn start(&mut self, pid: u32) {
        self.process.pid = pid;
        self.exec();
    }

    fn restart(&mut self) {
        self.container.handle_exit(self.process, self.image);
        self.start(8);
    }

    fn poison(&mut self) {
        let pid = self.process.pid;
        self.container
            .handle_poisoned(pid, 0, 700, true, None, now());
        assert!(self.container.is_fenced(pid));
    }

    fn poison_by_xid(&mut self) {
        let pid = self.process.pid;
        let gpu = "GPU-aaaa".parse().unwrap();
        assert!(poisoned::xid(&mut self.container, pid, &[gpu]));
        assert!(self.container.is_fenced(pid));
    }

    fn restart_in_place(&mut self) {
        let policy = RecoveryPolicy::new(ContextAction::InPlace, 1, 600, 0);
        self.container.set_policy(policy);
        let pid = self.process.pid;
        let (verdict, _) = self
            .container
            .handle_poisoned(pid, 0, 700, true, None, now());
        assert_eq!(verdict, Response::Recovery(Recovery::Reexec));
        self.exec();
        assert!(!self.container.is_fenced(pid));
    }

    /// Replaces the container by another one.
    fn replace_container(&mut self) {
        self.fixture = Fixture::with_quota(Bytes::gib(1));
        self.container = self.fixture.start();
        self.start(8);
    }

    fn start_agent(&mut self, lose_record: bool) {
        if lose_record {
            std::fs::remove_file(self.fixture.folder.path().join("record.json")).unwrap();
            self.fixture.served_before = true;
        }
        self.container = self.fixture.start();
        self.hello();
    }
}

fn now() -> ClockReading {
    ClockReading {
        moment: BootTime(3_600_000),
        wall: jiff::Timestamp::UNIX_EPOCH,
    }
}
