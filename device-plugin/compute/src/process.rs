//! Runs the holder in a process of its own, which the agent kills if the driver hangs.
//!
//! The agent writes a line for each request and reads a line for each report. Between requests the
//! process looks at slices.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bursar_ledger::units::GpuUuid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use crate::holder::{Holder, PodOrder, Report};
use crate::node::DriverNode;

/// The first argument with which the agent's program runs [`run_child`].
pub const SUBCOMMAND: &str = "compute";

/// The process name that `ps` shows.
const PROCESS_NAME: &std::ffi::CStr = c"bursar-compute";

/// How often some slices of busy groups on a contended GPU are looked at, and some of all groups.
const WATCH: Duration = Duration::from_millis(10);
const WATCH_ALL: Duration = Duration::from_millis(200);

/// The longest request: more pods than a node runs, each with many processes.
const MAX_REQUEST: usize = 4 << 20;

/// A request of the agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "request")]
pub enum Request {
    /// The pods of the GPU from now on. The answer is a [`Report`].
    Pods {
        /// The pods.
        pods: Vec<PodOrder>,
    },
    /// Processes that have launched work since the last such request. It has no answer.
    Active {
        /// The processes.
        processes: BTreeSet<u32>,
    },
}

/// A line of the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The answer to [`Request::Pods`].
    Report(Report),
    /// Why the process ends.
    Failed(String),
}

/// Serves requests from standard input until the agent closes it. The arguments are the GPU, its
/// device node and the microseconds of a round.
pub fn run_child(mut words: impl Iterator<Item = OsString>) -> ExitCode {
    // Neither call is needed: an agent that has ended closes the standard input too.
    let _ = rustix::thread::set_name(PROCESS_NAME);
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let mut word = || words.next()?.into_string().ok();
    let gpu = word().and_then(|word| word.parse::<GpuUuid>().ok());
    let device = word().map(PathBuf::from);
    let round = word().and_then(|word| word.parse().ok());
    let (Some(gpu), Some(device), Some(round)) = (gpu, device, round) else {
        return ExitCode::FAILURE;
    };
    // A node that refuses it has logged so for the agent, and its GPUs are served without.
    let _ = bursar_confine::restrict_compute_process();
    match serve(&gpu, &device, Duration::from_micros(round)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without a reader the agent has ended.
            let _ = write_line(&Answer::Failed(error.to_string()));
            ExitCode::FAILURE
        }
    }
}

fn write_line(answer: &Answer) -> io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    let mut output = io::stdout().lock();
    output.write_all(&line)?;
    output.flush()
}

fn serve(gpu: &GpuUuid, device: &Path, round: Duration) -> Result<(), Box<dyn std::error::Error>> {
    let mut node = DriverNode::open(gpu, device)?;
    let mut holder = Holder::new(round);
    let stdin = io::stdin();
    let (mut input, mut waiting) = (stdin.lock(), Vec::new());
    let mut watched_all = Instant::now();
    let mut chunk = [0; 65_536];
    loop {
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        let pause = match holder.is_contended() {
            true => WATCH,
            false => WATCH_ALL,
        };
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: pause.subsec_nanos().into(),
        };
        let has_input = poll(&mut fds, Some(&pause))? > 0;
        if has_input {
            let read = input.read(&mut chunk)?;
            waiting.extend_from_slice(chunk.get(..read).unwrap_or_default());
            if read == 0 || waiting.len() > MAX_REQUEST {
                return Ok(());
            }
        }
        while let Some(end) = waiting.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = waiting.drain(..=end).collect();
            let now = Instant::now();
            match serde_json::from_slice(&line)? {
                Request::Pods { pods } => {
                    holder.order(&mut node, pods, now);
                    write_line(&Answer::Report(holder.report(now)))?;
                }
                Request::Active { processes } => holder.mark_active(&mut node, &processes, now),
            }
        }
        let is_due = watched_all.elapsed() >= WATCH_ALL;
        if is_due {
            watched_all = Instant::now();
        }
        holder.watch(&mut node, is_due, Instant::now());
    }
}
