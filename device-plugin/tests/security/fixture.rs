//! Measures a neighbour's round trip, and what the agent has, while a load runs.
//!
//! ```text
//! let node = Node::start().await;                   the agent with two threads, and a neighbour's session
//! let tenant = node.tenant("hostile").await;        a pod with a container, and its socket
//! let mut program = tenant.run(&node);              a process in it: hostile.c, commands on its standard input
//! let load = async { program.ok("hellos 8000") };   any future is a load
//! let (kept, seen) = node.under(load).await;        the neighbour asks every 2 ms until the load is over
//! drop(program);
//! node.holds(seen).await;                           p99, resident memory, descriptors
//! ```
//!
//! The neighbour is this test's own process: `/proc` as the agent sees it says that it is in the neighbour's
//! container. A load that needs another kind of process adds a command to `hostile.c`, or starts its own and has it
//! shown by [`Tenant::adopt`]. A load that needs no process (connections to the agent's HTTP port, events) is a future
//! over [`Node::machine`].

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bursar_protocol::page::CreditPage;
use bursar_protocol::socket::receive_with_fd;
use bursar_protocol::wire::{self, Message, ToAgent, ToShim};

use crate::common::eventually;
use crate::common::kubelet::Pod;
use crate::machine::{GPU, Machine};

/// What a neighbour's round trip takes under any load, all but one time in a hundred.
pub(crate) const WITHIN: Duration = Duration::from_millis(100);

/// What the agent may have more of memory while a load runs, and after it.
const MORE_KIB: u64 = 64 << 10;

/// Descriptors that come and go without a load, and 64 pages of processes that died, for those that come.
const MORE_DESCRIPTORS: usize = 16 + 64;

/// From one question of the neighbour to the next.
const PAUSE: Duration = Duration::from_millis(2);

/// The fewest round trips that say something of the hundredth.
const LEAST_TRIPS: usize = 500;

/// A running agent and its neighbour.
pub(crate) struct Node {
    pub(crate) machine: Machine,
    neighbour: Tenant,
    before: Has,
}

/// What the agent has.
#[derive(Clone, Copy, Debug)]
struct Has {
    resident_kib: u64,
    shared_kib: u64,
    descriptors: usize,
}

/// What was seen while a load ran.
#[derive(Debug)]
pub(crate) struct Seen {
    /// All round trips but one in a hundred took at most this.
    pub(crate) p99: Duration,
    trips: usize,
    most: Has,
}

/// A pod whose container started.
pub(crate) struct Tenant {
    pub(crate) pod: Pod,
    /// The agent's socket, as its container has it.
    pub(crate) socket: PathBuf,
}

/// A hostile process in a tenant's container.
pub(crate) struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Node {
    pub(crate) async fn start() -> Node {
        let mut machine = Machine::new().await;
        let proc = machine.path("proc");
        std::fs::create_dir_all(&proc).unwrap();
        std::os::unix::fs::symlink("/proc/self", proc.join("self")).unwrap();
        let config = machine.path("agent.toml");
        let text = std::fs::read_to_string(&config).unwrap();
        let text = text.replace(
            "[paths]",
            &format!("[paths]\nproc = \"{}\"", proc.display()),
        );
        std::fs::write(config, text).unwrap();
        machine.start_agent();
        machine.kubelet.until_allocatable(GPU, 32).await;
        let neighbour = Tenant::of(&machine, "neighbour").await;
        neighbour.adopt(&machine, std::process::id());
        // Warm: what the agent has once and for all is there.
        let first = ask(&neighbour.socket, &AtomicBool::new(true));
        println!("alone: {:?} of {}", first.0, first.1);
        let before = has(&machine);
        Node {
            machine,
            neighbour,
            before,
        }
    }

    /// Another pod, with its container.
    pub(crate) async fn tenant(&self, name: &str) -> Tenant {
        Tenant::of(&self.machine, name).await
    }

    /// Runs a load; what it came to, and what was seen meanwhile.
    pub(crate) async fn under<T>(&self, load: impl Future<Output = T>) -> (T, Seen) {
        let over = Arc::new(AtomicBool::new(false));
        let (socket, until) = (self.neighbour.socket.clone(), Arc::clone(&over));
        let neighbour = tokio::task::spawn_blocking(move || ask(&socket, &until));
        let mut most = has(&self.machine);
        let mut look = tokio::time::interval(Duration::from_millis(50));
        tokio::pin!(load);
        let came_to = loop {
            tokio::select! {
                came_to = &mut load => break came_to,
                _ = look.tick() => most = most.or_more(has(&self.machine)),
            }
        };
        over.store(true, Ordering::SeqCst);
        let (p99, trips) = neighbour.await.unwrap();
        most = most.or_more(has(&self.machine));
        (came_to, Seen { p99, trips, most })
    }

    /// The neighbour waited for nobody, the agent's memory is what it was, and its descriptors are again.
    pub(crate) async fn holds(&self, seen: Seen) {
        let before = self.before;
        println!("{} trips: {seen:?}", seen.trips);
        eventually("the agent's descriptors as before", || {
            has(&self.machine).descriptors <= before.descriptors + MORE_DESCRIPTORS
        })
        .await;
        let after = has(&self.machine);
        println!("before {before:?}, after {after:?}");
        assert!(seen.p99 < WITHIN, "the neighbour waited: {seen:?}");
        for has in [seen.most, after] {
            let more = has.resident_kib.saturating_sub(before.resident_kib);
            assert!(more < MORE_KIB, "{has:?}, before {before:?}");
        }
    }
}

impl Tenant {
    async fn of(machine: &Machine, name: &str) -> Tenant {
        let pod = machine.admit(name, 4).await;
        let devices = machine.start(&pod).await.unwrap();
        let allocation = devices[0].strip_prefix("bursar.dev/gpu=").unwrap();
        let socket = machine.path(&format!("run/alloc/{allocation}/agent.sock"));
        Tenant { pod, socket }
    }

    /// Has the agent see a process in this container.
    pub(crate) fn adopt(&self, machine: &Machine, pid: u32) {
        machine.adopt(&self.pod, pid);
    }

    /// A hostile process in this container, that waits for a command.
    pub(crate) fn run(&self, node: &Node) -> Program {
        let mut child = Command::new(hostile())
            .arg(&self.socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        self.adopt(&node.machine, child.id());
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Program {
            child,
            input,
            output,
        }
    }
}

impl Program {
    /// A command, and the number that it is answered with. It blocks.
    pub(crate) fn call(&mut self, line: &str) -> u64 {
        writeln!(self.input, "{line}").unwrap();
        self.number()
    }

    /// The next number that it says.
    pub(crate) fn number(&mut self) -> u64 {
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        answer.trim().parse().unwrap()
    }

    /// A command as a load, beside the runtime of the test.
    pub(crate) async fn load(mut self, line: &str) -> (Program, u64) {
        let line = line.to_owned();
        let call = move || {
            let number = self.call(&line);
            (self, number)
        };
        tokio::task::spawn_blocking(call).await.unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Has {
    fn or_more(self, other: Has) -> Has {
        Has {
            resident_kib: self.resident_kib.max(other.resident_kib),
            shared_kib: self.shared_kib.max(other.shared_kib),
            descriptors: self.descriptors.max(other.descriptors),
        }
    }
}

fn has(machine: &Machine) -> Has {
    let pid = machine.agent_pid();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let words = line.and_then(|line| line.split_whitespace().next());
        words.unwrap().parse().unwrap()
    };
    Has {
        resident_kib: kib("VmRSS:"),
        shared_kib: kib("RssShmem:"),
        descriptors: std::fs::read_dir(format!("/proc/{pid}/fd"))
            .unwrap()
            .count(),
    }
}

/// What a neighbour waits for an answer, but one time in a hundred, and how many times it asked.
fn ask(socket: &Path, over: &AtomicBool) -> (Duration, usize) {
    let mut stream = UnixStream::connect(socket).unwrap();
    let patience = Some(Duration::from_secs(60));
    stream.set_read_timeout(patience).unwrap();
    let hello = ToAgent::Hello {
        version: 1,
        image: 1,
        holdings: vec![],
    };
    stream.write_all(&hello.frame()).unwrap();
    let (_, page) = receive_with_fd(&stream, &mut [0; 4096]).unwrap();
    let _page = CreditPage::open(page.expect("the neighbour is welcome")).unwrap();
    let mut times = Vec::new();
    while !over.load(Ordering::SeqCst) || times.len() < LEAST_TRIPS {
        let begun = Instant::now();
        stream.write_all(&ToAgent::Refresh.frame()).unwrap();
        let mut header = [0; wire::HEADER];
        stream.read_exact(&mut header).unwrap();
        let mut payload = vec![0; wire::payload_length(header).unwrap()];
        stream.read_exact(&mut payload).unwrap();
        assert_eq!(ToShim::parse(&payload).unwrap(), ToShim::Refreshed);
        times.push(begun.elapsed());
        std::thread::sleep(PAUSE);
    }
    times.sort();
    (times[times.len() * 99 / 100], times.len())
}

/// The program, compiled once.
fn hostile() -> &'static Path {
    static HOSTILE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, program) = HOSTILE.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("hostile");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/security/hostile.c");
        let compile = Command::new("cc")
            .args(["-Wall", "-Werror", "-O1", "-o"])
            .args([program.as_path(), Path::new(source)])
            .status();
        assert!(compile.unwrap().success());
        (folder, program)
    });
    program
}
