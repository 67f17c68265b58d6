//! Runs a hostile tenant that takes random steps: messages, page writes, descriptors, exits, kept
//! pages and false reports.
//!
//! The processes of two hostile containers draw their steps from a seed. Each is a copy of this
//! program that the agent sees in its container. A process writes each step to its trace before it
//! takes the step. Meanwhile and at the end, the test checks these promises
//! ([`oracles`](crate::oracles)):
//!
//! | promise | evidence |
//! |---|---|
//! | no container is charged more than its quota | the agent's records, read every 50 ms |
//! | the neighbour is answered | its round trips |
//! | the agent uses no more afterwards than before | resident memory, descriptors |
//! | no thread of the agent's runtime sleeps in a close | the kernel's stacks of its threads |
//! | no other process is killed, refused or reported | an honest process, and the findings |
//! | a hostile container has its whole quota again at the end | a process that requests all of it |
//!
//! `BURSAR_ADVERSARY_STEPS=1000000` sets a number of steps instead of a time.
//! `BURSAR_ADVERSARY_SEED` repeats the steps of an earlier run.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use bursar_protocol::connect;
use bursar_protocol::credit::CreditError;
use bursar_protocol::credit_page::{CreditPage, PAGE_BYTES};
use bursar_protocol::fd_passing::{receive_with_fd, send_with_fd};
use bursar_protocol::messages::retained::{LeaseName, RetainedRequest};
use bursar_protocol::messages::token::{GpuToken, TokenRequest};
use bursar_protocol::messages::{self, Account, HeldCredit, Message, Request, Response};
use bursar_protocol::units::Units;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Signal, getpid, kill_process};

use crate::fixture::{Node, Tenant};
use crate::oracles::{Invariants, QUOTA, false_finding, neighbour_violation};

/// How long the search runs without a number of steps.
const DEFAULT_TIME: Duration = Duration::from_secs(20);
/// Hostile containers, and the processes of each at a time.
const CONTAINERS: usize = 2;
const PROCESSES_PER_CONTAINER: usize = 2;
/// The most steps of one process.
const MAX_STEPS_PER_PROCESS: u32 = 2_000;
/// The most connections of a process.
const MAX_CONNECTIONS: usize = 64;
/// The number of steps of each process that a failed run prints.
const SHOWN_STEPS: usize = 30;

const ROLE: &str = "BURSAR_ADVERSARY_ROLE";
const SOCKET: &str = "BURSAR_ADVERSARY_SOCKET";
const DEAF: &str = "BURSAR_ADVERSARY_DEAF";
const SEED: &str = "BURSAR_ADVERSARY_SEED";
const STEPS: &str = "BURSAR_ADVERSARY_STEPS";
const TRACE: &str = "BURSAR_ADVERSARY_TRACE";

fn env_number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adversary_harms_nobody_but_itself() {
    match std::env::var(ROLE).as_deref() {
        Ok("hostile") => return Hostile::new().run(),
        Ok(role) => return run_honest(role == "greedy"),
        Err(_) => {}
    }
    let seed = env_number(SEED).unwrap_or_else(rand::random);
    println!("{SEED}={seed}");
    let node = Arc::new(Node::start().await);
    let neighbour = Arc::new(node.tenant("honest").await);
    let mut honest = RoleProcess::start(&node, &neighbour, "honest", 0);
    let mut hostile = Vec::new();
    for container in 0..CONTAINERS {
        hostile.push(Arc::new(node.tenant(&format!("hostile-{container}")).await));
    }
    let search = Search {
        seed,
        processes: AtomicU64::new(0),
        steps: AtomicU64::new(0),
        max_steps: env_number(STEPS),
        start: Instant::now(),
        is_stopped: AtomicBool::new(false),
        traces: Mutex::default(),
    };
    let search = Arc::new(search);
    let mut threads = Vec::new();
    for lane in 0..CONTAINERS * PROCESSES_PER_CONTAINER {
        let (search, node) = (Arc::clone(&search), Arc::clone(&node));
        let tenant = Arc::clone(&hostile[lane % CONTAINERS]);
        threads.push(std::thread::spawn(move || {
            search.run_processes(&node, &tenant)
        }));
    }
    let load = async {
        search.check_invariants(&node, &mut honest).await;
        while !threads.iter().all(std::thread::JoinHandle::is_finished) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let ((), result) = node.run_load(load).await;
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    println!(
        "{} hostile steps of {} processes",
        search.steps.load(Ordering::SeqCst),
        search.processes.load(Ordering::SeqCst)
    );
    honest.end();
    for tenant in &hostile {
        RoleProcess::start(&node, tenant, "greedy", 0).end();
    }
    let (_, metrics) = node.machine.get("/metrics").await;
    let names: Vec<&str> = hostile.iter().map(|tenant| tenant.allocation()).collect();
    assert_eq!(false_finding(&metrics, &node.machine.log(), &names), None);
    node.check_unharmed(result).await;
}

/// The state of one run of hostile processes.
struct Search {
    seed: u64,
    processes: AtomicU64,
    steps: AtomicU64,
    max_steps: Option<u64>,
    start: Instant,
    is_stopped: AtomicBool,
    /// The last steps of the processes that ended last, oldest first.
    traces: Mutex<Vec<String>>,
}

impl Search {
    fn is_over(&self) -> bool {
        let is_done = match self.max_steps {
            Some(most) => self.steps.load(Ordering::SeqCst) >= most,
            None => self.start.elapsed() >= DEFAULT_TIME,
        };
        is_done || self.is_stopped.load(Ordering::SeqCst)
    }

    /// Runs one process after the other.
    fn run_processes(&self, node: &Arc<Node>, tenant: &Arc<Tenant>) {
        while !self.is_over() {
            let life = self.processes.fetch_add(1, Ordering::SeqCst);
            let mut process =
                RoleProcess::start(node, tenant, "hostile", self.seed.wrapping_add(life));
            let end = Instant::now() + Duration::from_secs(120);
            while process.child.try_wait().unwrap().is_none() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
            // A panic is a fault of the test: the process would take no more hostile steps.
            let panicked = process
                .child
                .try_wait()
                .unwrap()
                .and_then(|status| status.code())
                == Some(101);
            let trace = process.trace();
            drop(process);
            let lines: Vec<&str> = trace.lines().collect();
            self.steps.fetch_add(lines.len() as u64, Ordering::SeqCst);
            let mut traces = self.traces.lock().unwrap();
            let last = lines[lines.len().saturating_sub(SHOWN_STEPS)..].join("\n");
            traces.push(format!("process with seed {} + {life}:\n{last}", self.seed));
            let excess = traces
                .len()
                .saturating_sub(2 * CONTAINERS * PROCESSES_PER_CONTAINER);
            traces.drain(..excess);
            if panicked {
                self.is_stopped.store(true, Ordering::SeqCst);
                let traces = traces.join("\n");
                panic!("a hostile process panicked\n{SEED}={}\n{traces}", self.seed);
            }
        }
    }

    /// Checks the promises that hold during the run.
    async fn check_invariants(&self, node: &Node, honest: &mut RoleProcess) {
        let mut watch = Invariants::default();
        while !self.is_over() {
            let broken = watch
                .check(node)
                .or_else(|| (!honest.is_alive()).then(|| "the honest process ended".to_owned()));
            if let Some(broken) = broken {
                self.is_stopped.store(true, Ordering::SeqCst);
                let traces = self.traces.lock().unwrap().join("\n");
                panic!("{broken}\n{SEED}={}\n{traces}", self.seed);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        println!("{} units charged at most", watch.max_charged);
        assert!(watch.max_charged > 0, "no record charged anything");
        assert!(
            watch.stacks_read > 0,
            "no stack of the agent's runtime was read"
        );
    }
}

/// A copy of this program in a container.
struct RoleProcess {
    child: Child,
    node: Arc<Node>,
    tenant: Arc<Tenant>,
    trace: PathBuf,
}

/// Serializes writes of the files that show processes to the agent.
static PROCESS_FILES_LOCK: Mutex<()> = Mutex::new(());

impl RoleProcess {
    fn start(node: &Arc<Node>, tenant: &Arc<Tenant>, role: &str, seed: u64) -> RoleProcess {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let trace = node.machine.path(&format!("trace-{role}-{seed}"));
        command
            .args([
                "--exact",
                "adversary::adversary_harms_nobody_but_itself",
                "--nocapture",
            ])
            .env(ROLE, role)
            .env(DEAF, deaf())
            .env(SOCKET, &tenant.socket)
            .env(SEED, seed.to_string())
            .env(TRACE, &trace)
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        if role == "hostile" {
            command.stderr(Stdio::null());
        }
        let mut child = command.spawn().unwrap();
        {
            let _showing = PROCESS_FILES_LOCK.lock().unwrap();
            tenant.adopt(&node.machine, child.id());
        }
        // The process may have been killed already, so a failed write is no error.
        let _ = child.stdin.as_mut().unwrap().write_all(b"go\n");
        RoleProcess {
            child,
            node: Arc::clone(node),
            tenant: Arc::clone(tenant),
            trace,
        }
    }

    fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    fn trace(&self) -> String {
        fs::read_to_string(&self.trace).unwrap_or_default()
    }

    /// Ends an honest process, which must have found no violation.
    fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(
            self.child.wait().unwrap().success(),
            "see its complaint above"
        );
    }
}

impl Drop for RoleProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.trace);
        let _showing = PROCESS_FILES_LOCK.lock().unwrap();
        let pid = self.child.id().to_string();
        let procs = self
            .node
            .machine
            .cgroup(&self.tenant.pod)
            .join("main/cgroup.procs");
        let text = fs::read_to_string(&procs).unwrap_or_default();
        let others = text.lines().filter(|line| *line != pid);
        let _ = fs::write(
            &procs,
            others.map(|pid| format!("{pid}\n")).collect::<String>(),
        );
        let _ = fs::remove_dir_all(self.node.machine.path(&format!("proc/{pid}")));
    }
}

/// Waits until the agent sees this process in its container.
fn wait_until_visible() {
    let mut line = String::new();
    io::stdin().read_line(&mut line).unwrap();
}

fn receive(stream: &mut UnixStream) -> Response {
    connect::read_message(stream).unwrap()
}

/// Runs an honest process: it uses a quarter of its quota until its standard input ends, then all.
/// With `greedy` it uses all at once.
fn run_honest(greedy: bool) {
    wait_until_visible();
    let mut stream = UnixStream::connect(std::env::var_os(SOCKET).unwrap()).unwrap();
    let hello = Request::Hello {
        version: bursar_protocol::VERSION,
        image: 1 << 40,
        holdings: vec![],
    };
    stream.write_all(&hello.frame()).unwrap();
    let (_, page) = receive_with_fd(&stream, &mut [0; 4096]).unwrap();
    let page = CreditPage::open(page.expect("it is welcome")).unwrap();
    let slot = page.slot(0).unwrap();
    let mut ask = |message: Request| {
        stream.write_all(&message.frame()).unwrap();
        receive(&mut stream)
    };
    let held = Units(QUOTA.0 / 4);
    let mut take = |units: Units| {
        let start = Instant::now();
        while let Err(CreditError::Short(missing)) = slot.charge(units) {
            let units = Units(missing);
            let answer = ask(Request::Credit { account: 0, units });
            // Memory of the container's former processes may be reclaimed a moment later.
            let may_wait = greedy && start.elapsed() < Duration::from_secs(20);
            let is_granted = matches!(answer, Response::Granted { .. });
            assert!(is_granted || may_wait, "{answer:?}");
            if !is_granted {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    };
    take(held);
    let input_ended = Arc::new(AtomicBool::new(greedy));
    let is_ended = Arc::clone(&input_ended);
    std::thread::spawn(move || {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        is_ended.store(true, Ordering::SeqCst);
    });
    while !input_ended.load(Ordering::SeqCst) {
        assert_eq!(neighbour_violation(&page, held), None);
        std::thread::sleep(Duration::from_millis(20));
    }
    take(Units(QUOTA.0 - held.0));
}

struct Peer {
    stream: UnixStream,
    page: Option<File>,
}

/// A process that takes random steps.
struct Hostile {
    random: StdRng,
    socket: PathBuf,
    trace: File,
    peers: Vec<Peer>,
    /// Pages of closed connections.
    closed_pages: Vec<File>,
    /// The memory tokens that the process received.
    tokens: Vec<GpuToken>,
}

/// A step of a hostile process.
#[derive(Clone, Copy, Debug)]
enum Step {
    Connect,
    Hello,
    Send,
    Receive,
    WritePage,
    PassDescriptor,
    Garbage,
    ShutDown,
    Close,
    OpenManySessions,
    Fork,
    Execute,
    Export,
    Die,
}

/// The steps with their relative frequency.
const STEP_WEIGHTS: &[(Step, u32)] = &[
    (Step::Connect, 60),
    (Step::Hello, 60),
    (Step::Send, 400),
    (Step::Receive, 150),
    (Step::WritePage, 250),
    (Step::PassDescriptor, 15),
    (Step::Garbage, 10),
    (Step::ShutDown, 5),
    (Step::Close, 45),
    (Step::OpenManySessions, 1),
    (Step::Fork, 1),
    (Step::Execute, 1),
    (Step::Export, 1),
    (Step::Die, 1),
];

impl Hostile {
    fn new() -> Hostile {
        let trace = std::env::var_os(TRACE).unwrap();
        let trace = File::options().create(true).append(true).open(trace);
        Hostile {
            random: StdRng::seed_from_u64(env_number(SEED).unwrap()),
            socket: std::env::var_os(SOCKET).unwrap().into(),
            trace: trace.unwrap(),
            peers: Vec::new(),
            closed_pages: Vec::new(),
            tokens: Vec::new(),
        }
    }

    fn run(mut self) {
        // After an exec the process prints this no more.
        if env_number(STEPS) != Some(0) {
            wait_until_visible();
        }
        let all: u32 = STEP_WEIGHTS.iter().map(|(_, weight)| weight).sum();
        for _ in 0..MAX_STEPS_PER_PROCESS {
            let mut left = self.random_below(all);
            let (step, _) = STEP_WEIGHTS
                .iter()
                .find(|(_, weight)| {
                    let is_it = left < *weight;
                    left = left.saturating_sub(*weight);
                    is_it
                })
                .unwrap();
            writeln!(self.trace, "{step:?}").unwrap();
            self.take_step(*step);
        }
    }

    fn random_below(&mut self, sides: u32) -> u32 {
        self.random.random_range(0..sides)
    }

    fn random_peer(&mut self) -> Option<&mut Peer> {
        let index = self.random.random_range(0..self.peers.len().max(1));
        self.peers.get_mut(index)
    }

    /// Takes one step. The agent may have closed the connection or stopped reading, so errors are
    /// ignored.
    fn take_step(&mut self, step: Step) {
        match step {
            Step::Connect => self.connect(),
            Step::Hello => {
                let hello = self.random_hello();
                self.send(&hello.frame());
            }
            Step::Send => {
                let message = self.random_message();
                self.send(&message.frame());
            }
            Step::Receive => self.receive(),
            Step::WritePage => self.write_page(),
            Step::PassDescriptor => self.pass_descriptor(),
            Step::Garbage => {
                let mut bytes = vec![0; self.random_below(100) as usize];
                self.random.fill(&mut bytes[..]);
                self.send(&bytes);
            }
            Step::ShutDown => {
                if let Some(peer) = self.random_peer() {
                    let _ = peer.stream.shutdown(std::net::Shutdown::Write);
                }
            }
            Step::Close => {
                let index = self.random.random_range(0..self.peers.len().max(1));
                if index < self.peers.len() {
                    let peer = self.peers.swap_remove(index);
                    self.closed_pages.extend(peer.page);
                }
            }
            Step::OpenManySessions => {
                for _ in 0..20 {
                    self.connect();
                    let hello = self.random_hello();
                    if let Some(peer) = self.peers.last_mut() {
                        let _ = peer.stream.write_all(&hello.frame());
                    }
                }
            }
            Step::Fork => {
                self.clear_cloexec();
                // The child forks without exec, with all connections and pages.
                let sleep = format!(
                    "(sleep 0.{}; :) & (sleep 0.1; :) & :",
                    1 + self.random_below(8)
                );
                let _ = Command::new("sh")
                    .args(["-c", &sleep])
                    .stdin(Stdio::null())
                    .status();
            }
            Step::Execute => {
                self.clear_cloexec();
                let seed = self.random.random::<u64>().to_string();
                let program = std::env::current_exe().unwrap();
                let mut command = Command::new(program);
                let arguments = std::env::args_os().skip(1);
                let _ = command
                    .args(arguments)
                    .env(SEED, seed)
                    .env(STEPS, "0")
                    .exec();
            }
            Step::Export => {
                let exported = self.random_units();
                if let Some(page) = self.peers.iter().find_map(|peer| peer.page.as_ref()) {
                    let _ = page.write_at(&exported.0.to_ne_bytes(), EXPORTED);
                }
                self.take_step(Step::Die);
            }
            Step::Die => {
                match self.random_below(3) {
                    0 => std::process::exit(0),
                    1 => std::process::abort(),
                    _ => {
                        let _ = kill_process(getpid(), Signal::KILL);
                    }
                };
            }
        }
    }

    fn connect(&mut self) {
        if self.peers.len() >= MAX_CONNECTIONS {
            return self.take_step(Step::Close);
        }
        if let Ok(stream) = UnixStream::connect(&self.socket) {
            stream.set_nonblocking(true).unwrap();
            self.peers.push(Peer { stream, page: None });
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        if let Some(peer) = self.random_peer() {
            let _ = peer.stream.write(bytes);
        }
    }

    fn receive(&mut self) {
        let mut bytes = [0; 4096];
        let Some(peer) = self.random_peer() else {
            return;
        };
        let Ok((length, descriptor)) = receive_with_fd(&peer.stream, &mut bytes) else {
            return;
        };
        if let Some(page) = descriptor {
            peer.page = Some(page.into());
        }
        let payload = bytes.get(messages::HEADER..length).unwrap_or_default();
        if let Ok(Response::Token(messages::token::TokenResponse::Sealed(token))) =
            Response::parse(payload)
        {
            self.tokens.push(token);
        }
    }

    /// Writes to any field: the magic number, the number of accounts, the fence, or one of the
    /// first accounts.
    fn write_page(&mut self) {
        let offsets = [0, 8, 12, 16];
        let offset = match self.random_below(4) {
            0 => offsets[self.random_below(4) as usize],
            1 => u64::from(self.random_below(PAGE_BYTES as u32 / 4)) * 4,
            _ => 64 + u64::from(self.random_below(2)) * 64 + u64::from(self.random_below(10)) * 4,
        };
        let word = u64::from(self.random_units().0) << 32 | u64::from(self.random_units().0);
        let bytes = match self.random_below(3) {
            0 => u64::MAX.to_ne_bytes(),
            1 => [0; 8],
            _ => word.to_ne_bytes(),
        };
        let length = if self.random_below(2) == 0 { 4 } else { 8 };
        let pages = self.peers.iter().filter_map(|peer| peer.page.as_ref());
        let pages: Vec<&File> = pages.chain(&self.closed_pages).collect();
        let index = self.random.random_range(0..pages.len().max(1));
        if let Some(page) = pages.get(index) {
            let _ = page.write_at(&bytes[..length], offset.min(PAGE_BYTES as u64 - 8));
        }
    }

    fn pass_descriptor(&mut self) {
        let lingers = match self.random_below(4) {
            0 => lingering_socket().ok(),
            _ => None,
        };
        let null = File::open("/dev/null").unwrap();
        let kind = self.random_below(3);
        let message = self.random_message().frame();
        let own = self
            .closed_pages
            .first()
            .map(|page| page.try_clone().unwrap());
        let Some(peer) = self.random_peer() else {
            return;
        };
        let descriptor: BorrowedFd<'_> = match (&lingers, &own, kind) {
            (Some(socket), ..) => socket.as_fd(),
            (_, Some(page), 0) => page.as_fd(),
            (_, _, 1) => peer.stream.as_fd(),
            _ => null.as_fd(),
        };
        let is_sent = send_with_fd(&peer.stream, &message, descriptor).is_ok();
        if let Some(socket) = lingers.filter(|_| !is_sent) {
            // Only this process would wait for the close.
            let _ = rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
        }
    }

    /// Clears close-on-exec on every connection, so that executed programs inherit them.
    fn clear_cloexec(&self) {
        for peer in &self.peers {
            let _ = rustix::io::fcntl_setfd(&peer.stream, rustix::io::FdFlags::empty());
        }
    }

    /// A random number of units, often at an edge of its range.
    fn random_units(&mut self) -> Units {
        let edges = [0, 1, 4096, QUOTA.0 / 2, QUOTA.0, u32::MAX];
        match self.random_below(2) {
            0 => Units(edges[self.random_below(6) as usize]),
            _ => Units(self.random_below(QUOTA.0 * 2)),
        }
    }

    fn random_account(&mut self) -> Account {
        match self.random_below(4) {
            0 => Account::Managed,
            1 => Account::Device("GPU-ffffffff-0000-0000-0000-000000000009".to_owned()),
            2 => Account::Device("GPU-00000000-0000-0000-0000-000000000001".to_owned()),
            _ => Account::Device("GPU-00000000-0000-0000-0000-000000000002".to_owned()),
        }
    }

    fn random_hello(&mut self) -> Request {
        let holdings = match self.random_below(3) {
            0 => (0..self.random_below(4))
                .map(|_| self.random_held_credit())
                .collect(),
            _ => vec![],
        };
        Request::Hello {
            version: self.random_below(5) as u16,
            image: self.random_below(6).into(),
            holdings,
        }
    }

    fn random_held_credit(&mut self) -> HeldCredit {
        HeldCredit {
            account: self.random_account(),
            granted: self.random_units().min(Units::MAX),
            used: self.random_units().min(Units::MAX),
        }
    }

    fn random_message(&mut self) -> Request {
        let index = match self.random_below(8) {
            0 => self.random_below(70) as u8,
            number => (number % 2) as u8,
        };
        match self.random_below(20) {
            0..8 => Request::Credit {
                account: index,
                units: self.random_units().min(Units::MAX),
            },
            8 => Request::Denied {
                account: index,
                bytes: u64::MAX,
                function: "x".repeat(self.random_below(96) as usize),
            },
            9..12 => Request::Refresh,
            12 => Request::ContextMade { account: index },
            13 => Request::Query {
                version: 3,
                account: self.random_account(),
            },
            14 | 15 => Request::Retained(self.random_retained_request()),
            16 | 17 => Request::Token(self.random_token_request()),
            18 => self.random_hello(),
            _ if self.random_below(20) == 0 => Request::Poisoned {
                account: index,
                code: [700, 719, 0, -1, i32::MAX][self.random_below(5) as usize],
                can_reexec: self.random_below(2) == 0,
            },
            _ => Request::Refresh,
        }
    }

    fn random_retained_request(&mut self) -> RetainedRequest {
        let (version, lease) = (3, self.random_below(4).into());
        match self.random_below(3) {
            0 => RetainedRequest::Open {
                version,
                image: self.random_below(6).into(),
                account: self.random_account(),
                name: LeaseName::try_from("w".repeat(1 + self.random_below(90) as usize)).unwrap(),
                key: [self.random_below(3) as u8; 32],
                bytes: self.random_units().bytes(),
            },
            1 => RetainedRequest::Commit {
                version,
                lease,
                token: self.random_below(9).into(),
                checksum: 0,
            },
            _ => RetainedRequest::Discard { version, lease },
        }
    }

    fn random_token_request(&mut self) -> TokenRequest {
        let version = 3;
        match self.tokens.last().cloned() {
            Some(token) if self.random_below(2) == 0 => {
                let mut bytes = token.as_bytes().to_vec();
                let position = self.random.random_range(0..bytes.len());
                bytes[position] ^= self.random_below(3) as u8;
                let token = GpuToken::try_from(bytes).unwrap();
                TokenRequest::Redeem { version, token }
            }
            _ => TokenRequest::Seal {
                version,
                account: self.random_account(),
                lease: self.random_below(4).into(),
                block: self.random_below(4).into(),
            },
        }
    }
}

/// The offset of the first account's exported amount.
const EXPORTED: u64 = 64 + 20;

/// A TCP socket whose close waits for a peer that never reads.
fn lingering_socket() -> io::Result<OwnedFd> {
    let mut stream = TcpStream::connect(std::env::var(DEAF).unwrap())?;
    stream.set_nonblocking(true)?;
    while stream.write(&[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(5)))?;
    Ok(stream.into())
}

/// The address of a listener that never reads. It outlives the processes that connect.
fn deaf() -> &'static str {
    static DEAF: OnceLock<String> = OnceLock::new();
    DEAF.get_or_init(|| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let mut held = VecDeque::new();
            for stream in listener.incoming().flatten() {
                held.push_back(stream);
                if held.len() > 256 {
                    held.pop_front();
                }
            }
        });
        address
    })
}
