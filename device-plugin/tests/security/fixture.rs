//! Measures a neighbour's round trip and the agent's resources while a load runs.
//!
//! ```text
//! // The agent with two threads, and a neighbour's session.
//! let node = Node::start().await;
//! // A pod with a container, and its socket.
//! let tenant = node.tenant("hostile").await;
//! // A process in the container: hostile.c, which reads commands from its standard input.
//! let program = tenant.run(&node);
//! // Any future is a load. The neighbour sends a request every 2 ms until the load is over.
//! let ((program, pages), result) = node.run_load(program.load("hellos 8000")).await;
//! drop(program);
//! // Checks round trips, resident memory and descriptors.
//! node.check_unharmed(result).await;
//! ```
//!
//! The neighbour is this test's own process: in the `/proc` that the agent reads, it is in the
//! neighbour's container. A load that needs another kind of process adds a command to `hostile.c`,
//! or starts its own and shows it with [`Tenant::adopt`]. A load that needs many processes is a
//! [`Tenant::run_many`]. A load that needs none is a future over [`Node::machine`].

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bursar_protocol::connect;
use bursar_protocol::credit_page::CreditPage;
use bursar_protocol::fd_passing::receive_with_fd;
use bursar_protocol::messages::{Message, Request, Response};

use crate::api_server::FakeApiServer;
use crate::common::eventually;
use crate::common::kubelet::Pod;
use crate::machine::{GPU, Machine};

/// The limit of a neighbour's round trip under any load, at the 99th percentile.
const ROUND_TRIP_LIMIT: Duration = Duration::from_millis(100);

/// The limit is at least this many times the 99th percentile of a thread of the test that echoes a
/// byte under the same load: where that waits for a processor, so does the agent.
const MAX_BESIDE_ECHO: u32 = 20;

/// One part in this many of the neighbour's time may be spent on round trips beyond
/// the limit.
///
/// A stall is one round trip, however long, so the percentile does not show a few stalls. A machine
/// with other work has stalls of its own.
const MIN_TIME_PER_STALL: u32 = 3;

/// The most by which the agent's memory may grow during a load, and after it.
const MAX_GROWTH_KIB: u64 = 64 << 10;
const MAX_LASTING_GROWTH_KIB: u64 = 8 << 10;

/// The most by which the agent's shared memory may grow after a load: 128 credit pages.
const MAX_SHARED_GROWTH_KIB: u64 = 512;

/// Descriptors that come and go without a load.
const MAX_DESCRIPTOR_GROWTH: usize = 16;

/// The most credit pages of exited processes that the agent keeps for a container.
const MAX_PAGES: usize = 1024;
/// The containers of a load.
const CONTAINERS: usize = 2;

/// The pause between two requests of the neighbour.
const PAUSE: Duration = Duration::from_millis(2);

/// The fewest round trips from which a 99th percentile is meaningful.
const MIN_ROUND_TRIPS: usize = 500;

/// A running agent and its neighbour.
pub(crate) struct Node {
    pub(crate) machine: Machine,
    neighbour: Tenant,
    before: AgentUsage,
}

/// The agent's resources.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AgentUsage {
    resident_kib: u64,
    shared_kib: u64,
    /// The descriptors of credit pages, and all others.
    pages: usize,
    descriptors: usize,
}

/// The measurements during a load.
#[derive(Debug)]
pub(crate) struct LoadResult {
    /// The 99th percentile of the round trips, and its limit.
    pub(crate) p99: Duration,
    pub(crate) limit: Duration,
    trips: usize,
    /// The time of all round trips with their pauses, and of those beyond the limit.
    total: Duration,
    stalled: Duration,
    peak: AgentUsage,
}

/// A pod with a started container.
pub(crate) struct Tenant {
    pub(crate) pod: Pod,
    /// The agent's socket in its container.
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
        Self::start_on(Machine::new().await).await
    }

    /// Starts a node whose agent uses this API server.
    pub(crate) async fn start_with(api_server: &FakeApiServer) -> Node {
        let machine = Machine::new().await;
        api_server.configure(&machine);
        Self::start_on(machine).await
    }

    async fn start_on(mut machine: Machine) -> Node {
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
        let neighbour = Tenant::start(&machine, "neighbour").await;
        neighbour.adopt(&machine, std::process::id());
        // A first run lets the agent allocate what it needs once.
        measure_round_trips(&neighbour.socket, &AtomicBool::new(true));
        let before = agent_usage(&machine);
        Node {
            machine,
            neighbour,
            before,
        }
    }

    /// Starts another pod with its container.
    pub(crate) async fn tenant(&self, name: &str) -> Tenant {
        Tenant::start(&self.machine, name).await
    }

    /// Runs a load. Returns its result and the measurements.
    pub(crate) async fn run_load<T>(&self, load: impl Future<Output = T>) -> (T, LoadResult) {
        let over = Arc::new(AtomicBool::new(false));
        let (socket, until) = (self.neighbour.socket.clone(), Arc::clone(&over));
        let neighbour = tokio::task::spawn_blocking(move || measure_round_trips(&socket, &until));
        let mut most = agent_usage(&self.machine);
        let mut sample_tick = tokio::time::interval(Duration::from_millis(50));
        tokio::pin!(load);
        let output = loop {
            tokio::select! {
                output = &mut load => break output,
                _ = sample_tick.tick() => most = most.max(agent_usage(&self.machine)),
            }
        };
        over.store(true, Ordering::SeqCst);
        let times = neighbour.await.unwrap();
        most = most.max(agent_usage(&self.machine));
        let result = LoadResult::new(&times, most);
        (output, result)
    }

    /// Checks that the neighbour never waited, and that the agent's memory and descriptors are as
    /// before.
    pub(crate) async fn check_unharmed(&self, result: LoadResult) {
        let before = self.before;
        println!("{} trips: {result:?}", result.trips);
        eventually("the agent's descriptors as before", || {
            agent_usage(&self.machine).descriptors <= before.descriptors + MAX_DESCRIPTOR_GROWTH
        })
        .await;
        let after = agent_usage(&self.machine);
        println!("before {before:?}, after {after:?}");
        assert_eq!(violation(&result, before, after), None);
    }
}

impl LoadResult {
    /// Evaluates the neighbour's round trips.
    fn new(trips: &RoundTrips, most: AgentUsage) -> LoadResult {
        let times = &trips.agent;
        let limit = ROUND_TRIP_LIMIT.max(p99(&trips.echo) * MAX_BESIDE_ECHO);
        LoadResult {
            p99: p99(times),
            limit,
            trips: times.len(),
            total: times.iter().sum::<Duration>() + PAUSE * times.len() as u32,
            stalled: times.iter().filter(|time| **time >= limit).sum(),
            peak: most,
        }
    }
}

/// The 99th percentile of sorted times.
fn p99(times: &[Duration]) -> Duration {
    times[times.len() * 99 / 100]
}

/// Describes the first limit that a load exceeded for the neighbour or the agent.
pub(crate) fn violation(
    result: &LoadResult,
    before: AgentUsage,
    after: AgentUsage,
) -> Option<String> {
    let more = |has: AgentUsage| has.resident_kib.saturating_sub(before.resident_kib);
    let shared = after.shared_kib.saturating_sub(before.shared_kib);
    let exceeded = match () {
        () if result.p99 >= result.limit => "the neighbour waited",
        () if result.stalled * MIN_TIME_PER_STALL >= result.total => "the neighbour stood still",
        () if more(result.peak) >= MAX_GROWTH_KIB => "the agent's memory grew under the load",
        () if more(after) >= MAX_LASTING_GROWTH_KIB => "the agent's memory is still grown",
        () if shared >= MAX_SHARED_GROWTH_KIB => "the agent keeps shared memory",
        () if after.descriptors > before.descriptors + MAX_DESCRIPTOR_GROWTH => {
            "the agent keeps descriptors"
        }
        () if after.pages > before.pages + CONTAINERS * MAX_PAGES => "the agent keeps credit pages",
        () => return None,
    };
    Some(format!(
        "{exceeded}: {result:?}, before {before:?}, after {after:?}"
    ))
}

impl Tenant {
    async fn start(machine: &Machine, name: &str) -> Tenant {
        let pod = machine.admit(name, 4).await;
        let devices = machine.start(&pod).await.unwrap();
        let allocation = devices[0].strip_prefix("bursar.dev/gpu=").unwrap();
        let socket = machine.path(&format!("run/alloc/{allocation}/agent.sock"));
        Tenant { pod, socket }
    }

    /// The name of its container's allocation.
    pub(crate) fn allocation(&self) -> &str {
        let folder = self.socket.parent().unwrap().file_name();
        folder.unwrap().to_str().unwrap()
    }

    /// Shows a process in this container to the agent.
    pub(crate) fn adopt(&self, machine: &Machine, pid: u32) {
        machine.adopt(&self.pod, pid);
    }

    /// Starts a hostile process in this container, which waits for a command.
    pub(crate) fn run(&self, node: &Node) -> Program {
        let mut child = node
            .machine
            .lab
            .command(hostile_program())
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

    /// Starts `count` processes of this container. They wait for `go` and then act as `how` says.
    pub(crate) fn run_many(&self, node: &Node, count: u32, how: &str) -> Program {
        let mut program = self.run(node);
        let mut pid = program.call(&format!("crowd {count} {how}"));
        for _ in 1..count {
            self.adopt(&node.machine, pid.try_into().unwrap());
            pid = program.read_number();
        }
        self.adopt(&node.machine, pid.try_into().unwrap());
        program
    }

    /// Removes all processes of this container from the agent's view, because they have ended.
    pub(crate) fn remove_processes(&self, node: &Node) {
        let procs = node.machine.cgroup(&self.pod).join("main/cgroup.procs");
        for pid in std::fs::read_to_string(&procs).unwrap().lines() {
            let _ = std::fs::remove_dir_all(node.machine.path(&format!("proc/{pid}")));
        }
        std::fs::write(procs, "").unwrap();
    }
}

impl Program {
    /// Sends a command and returns the number in its answer. Blocks.
    pub(crate) fn call(&mut self, line: &str) -> u64 {
        writeln!(self.input, "{line}").unwrap();
        self.read_number()
    }

    /// Sends a command without waiting for an answer: the agent may have killed the process.
    pub(crate) fn send(&mut self, line: &str) {
        let _ = writeln!(self.input, "{line}");
    }

    /// Reads the next number that the program prints.
    pub(crate) fn read_number(&mut self) -> u64 {
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        answer.trim().parse().unwrap()
    }

    /// Runs a command as a load, outside the test's runtime.
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

impl AgentUsage {
    fn max(self, other: AgentUsage) -> AgentUsage {
        AgentUsage {
            resident_kib: self.resident_kib.max(other.resident_kib),
            shared_kib: self.shared_kib.max(other.shared_kib),
            pages: self.pages.max(other.pages),
            descriptors: self.descriptors.max(other.descriptors),
        }
    }
}

fn agent_usage(machine: &Machine) -> AgentUsage {
    let pid = machine.agent_pid();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let words = line.and_then(|line| line.split_whitespace().next());
        words.unwrap().parse().unwrap()
    };
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let (pages, others): (Vec<_>, Vec<_>) = descriptors
        .filter_map(|descriptor| std::fs::read_link(descriptor.unwrap().path()).ok())
        .partition(|file| file.starts_with("/memfd:bursar-credit (deleted)"));
    AgentUsage {
        // Without the program's own pages: the agent maps more of them the more of its code has
        // run, and the kernel drops those that it needs for other files.
        resident_kib: kib("RssAnon:") + kib("RssShmem:"),
        shared_kib: kib("RssShmem:"),
        pages: pages.len(),
        descriptors: others.len(),
    }
}

/// The neighbour's times until each answer of the agent, and of the echo, sorted.
struct RoundTrips {
    agent: Vec<Duration>,
    echo: Vec<Duration>,
}

/// Starts a thread that echoes each byte until the returned end is closed.
fn start_echo() -> UnixStream {
    let (near, mut far) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let mut byte = [0];
        while far.read_exact(&mut byte).is_ok() && far.write_all(&byte).is_ok() {}
    });
    near
}

/// Measures until the load is over. The echo is asked after each answer of the agent.
fn measure_round_trips(socket: &Path, over: &AtomicBool) -> RoundTrips {
    let mut echo = start_echo();
    let mut stream = UnixStream::connect(socket).unwrap();
    let limit = Some(Duration::from_secs(60));
    stream.set_read_timeout(limit).unwrap();
    let hello = Request::Hello {
        version: 1,
        image: 1,
        holdings: vec![],
    };
    stream.write_all(&hello.frame()).unwrap();
    let (_, page) = receive_with_fd(&stream, &mut [0; 4096]).unwrap();
    let _page = CreditPage::open(page.expect("the neighbour is welcome")).unwrap();
    let mut trips = RoundTrips {
        agent: Vec::new(),
        echo: Vec::new(),
    };
    while !over.load(Ordering::SeqCst) || trips.agent.len() < MIN_ROUND_TRIPS {
        let start = Instant::now();
        stream.write_all(&Request::Refresh.frame()).unwrap();
        assert_eq!(
            connect::read_message::<Response>(&mut stream).unwrap(),
            Response::Refreshed
        );
        trips.agent.push(start.elapsed());
        let start = Instant::now();
        echo.write_all(&[0]).unwrap();
        echo.read_exact(&mut [0]).unwrap();
        trips.echo.push(start.elapsed());
        std::thread::sleep(PAUSE);
    }
    trips.agent.sort();
    trips.echo.sort();
    trips
}

/// The path of the hostile program, compiled once.
fn hostile_program() -> &'static Path {
    static HOSTILE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, program) = HOSTILE.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("hostile");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/security/hostile.c");
        let compile = Command::new("cc")
            .args(["-Wall", "-Werror", "-O1", "-o"])
            .args([program.as_path(), Path::new(source)])
            .arg("-ldl")
            .status();
        assert!(compile.unwrap().success());
        (folder, program)
    });
    program
}

mod tests {
    use super::*;

    const BEFORE: AgentUsage = AgentUsage {
        resident_kib: 30 << 10,
        shared_kib: 1 << 10,
        pages: 3,
        descriptors: 40,
    };

    fn load_result(milliseconds: u64, most: AgentUsage) -> LoadResult {
        let agent = vec![Duration::from_millis(milliseconds); MIN_ROUND_TRIPS];
        LoadResult::new(&beside_idle_echo(agent), most)
    }

    fn beside_idle_echo(agent: Vec<Duration>) -> RoundTrips {
        RoundTrips {
            agent,
            echo: vec![Duration::from_micros(20); MIN_ROUND_TRIPS],
        }
    }

    #[test]
    fn agent_is_not_at_fault_where_an_echo_waits_as_well() {
        let trips = |agent, echo| RoundTrips {
            agent: vec![Duration::from_millis(agent); MIN_ROUND_TRIPS],
            echo: vec![Duration::from_millis(echo); MIN_ROUND_TRIPS],
        };
        let violates = |trips| {
            let result = LoadResult::new(&trips, BEFORE);
            violation(&result, BEFORE, BEFORE).is_some()
        };
        assert!(violates(trips(150, 1)));
        assert!(!violates(trips(150, 10)));
        assert!(violates(trips(200, 10)));
    }

    #[test]
    fn violation_is_none_when_agent_is_as_before() {
        assert_eq!(violation(&load_result(99, BEFORE), BEFORE, BEFORE), None);
    }

    #[test]
    fn violation_names_each_limit_that_a_load_exceeds() {
        let grown = AgentUsage {
            resident_kib: BEFORE.resident_kib + MAX_GROWTH_KIB,
            ..BEFORE
        };
        let stays = AgentUsage {
            resident_kib: BEFORE.resident_kib + MAX_LASTING_GROWTH_KIB,
            ..BEFORE
        };
        let shares = AgentUsage {
            shared_kib: BEFORE.shared_kib + MAX_SHARED_GROWTH_KIB,
            ..BEFORE
        };
        let holds = AgentUsage {
            descriptors: BEFORE.descriptors + MAX_DESCRIPTOR_GROWTH + 1,
            ..BEFORE
        };
        let keeps = AgentUsage {
            pages: BEFORE.pages + CONTAINERS * MAX_PAGES + 1,
            ..BEFORE
        };
        let mut stalls = vec![Duration::from_millis(1); 999];
        stalls.push(Duration::from_secs(2));
        let bad = [
            (
                LoadResult::new(&beside_idle_echo(stalls), BEFORE),
                BEFORE,
                "stood still",
            ),
            (load_result(100, BEFORE), BEFORE, "the neighbour waited"),
            (load_result(1, grown), BEFORE, "memory grew"),
            (load_result(1, stays), stays, "is still grown"),
            (load_result(1, BEFORE), shares, "shared memory"),
            (load_result(1, BEFORE), holds, "descriptors"),
            (load_result(1, BEFORE), keeps, "credit pages"),
        ];
        for (result, after, expected) in bad {
            let message = violation(&result, BEFORE, after);
            assert!(
                message
                    .as_ref()
                    .is_some_and(|message| message.contains(expected)),
                "{message:?}"
            );
        }
    }
}
