//! Runs a process that serves the sessions of the crowd's container and of its neighbour's, and
//! watches its records.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_ledger::units::{AllocationId, Bytes};
use bursar_sessions::{SessionSpec, Sessions};

use crate::support::{Everyone, GPU, SimCharges};

/// The first argument of such a process; its folder and the crowd's quota follow.
pub(crate) const ROLE: &str = "serve-sessions";

pub(crate) const CROWD: AllocationId = AllocationId::from_bits(1);

pub(crate) const NEIGHBOUR: AllocationId = AllocationId::from_bits(2);

pub(crate) const NEIGHBOURS_QUOTA: u64 = 4 << 30;

/// How often the agent reads its own records.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The crowd's account, as the agent records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CrowdAccount {
    pub(crate) quota: u64,
    pub(crate) granted: u64,
    pub(crate) used: u64,
    pub(crate) exited: u64,
    pub(crate) processes: u64,
    /// How many reads of this agent found a sum above the quota.
    pub(crate) over: u64,
    /// How many reads this agent made.
    pub(crate) reads: u64,
    /// Open descriptors of the agent.
    pub(crate) descriptors: u64,
}

/// Serves until the process is killed or its input ends. Answers every line with the crowd's
/// account.
pub(crate) fn serve(folder: &Path, quota: u64) -> ! {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let charges = Arc::new(SimCharges::of(&folder.join("sim")));
    let sessions = Arc::new(Sessions::new(
        folder.join("run"),
        charges,
        Arc::new(Everyone::here()),
    ));
    for (allocation, quota) in [(CROWD, quota), (NEIGHBOUR, NEIGHBOURS_QUOTA)] {
        let served = SessionSpec {
            allocation,
            pod: "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap(),
            gpus: vec![(GPU.parse().unwrap(), Bytes(quota))],
            managed: Bytes::ZERO,
            device_ids: None,
        };
        runtime.block_on(sessions.serve(served)).unwrap();
    }
    let (sender, requests) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        for _ in std::io::stdin().lines().map_while(Result::ok) {
            let _ = sender.send(());
        }
        std::process::exit(0);
    });
    let (mut over, mut reads) = (0, 0);
    loop {
        let usage = sessions.container_usage();
        reads += 1;
        let above = |usage: &&_| above_quota(usage);
        over += usage.iter().filter(above).count() as u64;
        let crowd = usage
            .iter()
            .find(|usage| usage.allocation == CROWD)
            .unwrap();
        if requests.recv_timeout(LOOK_EVERY).is_ok() {
            let account = &crowd.accounts[0];
            let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
            println!(
                "{} {} {} {} {} {over} {reads} {descriptors}",
                account.quota.0,
                account.granted.0,
                account.used.0,
                account.exited.0,
                crowd.processes.len(),
            );
        }
        for usage in usage.iter().filter(above) {
            eprintln!("above its quota: {usage:?}");
        }
    }
}

fn above_quota(usage: &bursar_sessions::ContainerUsage) -> bool {
    let mut accounts = usage.accounts.iter();
    accounts.any(|account| account.granted.0 + account.exited.0 > account.quota.0)
}

/// The agent's process.
#[derive(Debug)]
pub(crate) struct Agent {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// When the agent was started.
    pub(crate) since: Instant,
}

impl Agent {
    /// Starts an agent over a room's folder. The process runs when this returns, and may not serve
    /// yet.
    pub(crate) fn start(folder: &Path, quota: u64) -> Agent {
        let me: PathBuf = std::env::current_exe().unwrap();
        let mut child = Command::new(me)
            .arg(ROLE)
            .arg(folder)
            .arg(quota.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Agent {
            child,
            input,
            output,
            since: Instant::now(),
        }
    }

    /// Returns the agent's record of the crowd's account.
    pub(crate) fn account(&mut self) -> CrowdAccount {
        writeln!(self.input).unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let mut numbers = line.split_whitespace().map(|word| word.parse().unwrap());
        let mut next = || numbers.next().unwrap();
        CrowdAccount {
            quota: next(),
            granted: next(),
            used: next(),
            exited: next(),
            processes: next(),
            over: next(),
            reads: next(),
            descriptors: next(),
        }
    }

    /// Kills the agent by SIGKILL.
    pub(crate) fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
