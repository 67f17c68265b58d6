//! Runs one process that calls NVML, and kills it when an answer is late.
//!
//! A process gets one request at a time. A killed process may hang in the driver for longer. Its
//! task goes on until the kernel has ended it, so that a GPU never has two processes.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::calls;
use super::handle::Answer;
use super::protocol::{CallError, Request, Response, Scope};
use super::{ANSWER, FIRST_ANSWER, QueryError};
use crate::cgroup_limit::CgroupLimit;
use crate::memory_sample::GpuMemorySample;

/// The agent's own program. This path is valid even while the disk hangs.
const SELF_EXE: &str = "/proc/self/exe";

/// The number of a process among all that this agent has started.
pub(super) type ProcessNumber = u64;

/// A request to a process, with the channel of its answer.
#[derive(Debug)]
pub(super) enum Job {
    Probe,
    Sample(Request, Answer<GpuMemorySample>),
    Limit(Request, Answer<CgroupLimit>),
}

/// A report of a process's task.
#[derive(Debug)]
pub(super) enum ProcessReport {
    /// The answer to a probe.
    Probed(Response),
    /// XIDs of its GPU, at least one.
    Xids(Vec<u64>),
    /// A call did not return in time, and the process is being killed.
    TimedOut,
    Exited,
}

enum NoAnswer {
    TimedOut,
    Exited,
}

/// A running process with its pipes.
pub(super) struct NvmlProcess {
    child: Child,
    requests: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    /// The timeout of the next answer; the first is longer, since the driver has to open the GPU.
    answer_timeout: Duration,
}

impl NvmlProcess {
    pub(super) fn start(library: &Path, scope: Scope, hidden: &[PathBuf]) -> io::Result<Self> {
        let mut child = Command::new(SELF_EXE)
            .arg0("bursar-agent")
            .arg(calls::SUBCOMMAND)
            .arg(library)
            .arg(serde_json::to_string(&scope)?)
            .args(hidden)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let no_pipe = || io::Error::other("the process has no pipe");
        let requests = child.stdin.take().ok_or_else(no_pipe)?;
        let answers = child.stdout.take().ok_or_else(no_pipe)?;
        Ok(Self {
            child,
            requests,
            answers: BufReader::new(answers).lines(),
            answer_timeout: FIRST_ANSWER,
        })
    }

    async fn call(&mut self, request: &Request) -> Result<Response, NoAnswer> {
        let limit = std::mem::replace(&mut self.answer_timeout, ANSWER);
        match timeout(limit, self.exchange(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(_)) => Err(NoAnswer::Exited),
            Err(_) => Err(NoAnswer::TimedOut),
        }
    }

    async fn exchange(&mut self, request: &Request) -> io::Result<Response> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        self.requests.write_all(&line).await?;
        let answer = self.answers.next_line().await?;
        let answer = answer.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(serde_json::from_str(&answer)?)
    }

    /// Serves jobs and queries XIDs each `events`, until `stop`, the end of the jobs, or a call
    /// that hangs.
    pub(super) async fn run(
        mut self,
        id: ProcessNumber,
        mut jobs: mpsc::Receiver<Job>,
        reports: mpsc::UnboundedSender<(ProcessNumber, ProcessReport)>,
        events: Option<Duration>,
        stop: CancellationToken,
    ) {
        let work = self.serve(id, &mut jobs, &reports, events);
        if let Some(NoAnswer::TimedOut) = stop.run_until_cancelled(work).await {
            // The watcher may have ended with the agent.
            let _ = reports.send((id, ProcessReport::TimedOut));
        }
        // The callers of pending requests learn now that there is no answer.
        drop(jobs);
        let _ = self.child.start_kill();
        let _ = self.child.wait().await;
        let _ = reports.send((id, ProcessReport::Exited));
    }

    async fn serve(
        &mut self,
        id: ProcessNumber,
        jobs: &mut mpsc::Receiver<Job>,
        reports: &mpsc::UnboundedSender<(ProcessNumber, ProcessReport)>,
        events: Option<Duration>,
    ) -> NoAnswer {
        let mut tick = interval(events.unwrap_or(ANSWER));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut probed = false;
        loop {
            let done = tokio::select! {
                job = jobs.recv() => match job {
                    Some(job) => {
                        probed |= matches!(job, Job::Probe);
                        self.handle_job(job).await
                    }
                    None => return NoAnswer::Exited,
                },
                // The first probe registers for the GPU's events.
                _ = tick.tick(), if probed && events.is_some() => {
                    self.call(&Request::Xids).await.map(|response| match response {
                        Response::Xids(codes) if !codes.is_empty() => Some(ProcessReport::Xids(codes)),
                        _ => None,
                    })
                }
            };
            match done {
                Ok(Some(report)) => drop(reports.send((id, report))),
                Ok(None) => {}
                Err(why) => return why,
            }
        }
    }

    async fn handle_job(&mut self, job: Job) -> Result<Option<ProcessReport>, NoAnswer> {
        match job {
            Job::Probe => Ok(Some(ProcessReport::Probed(
                self.call(&Request::Probe).await?,
            ))),
            // The caller has stopped waiting, so NVML need not be asked.
            Job::Sample(_, answer) if answer.is_closed() => Ok(None),
            Job::Sample(request, answer) => {
                let sample = match self.call(&request).await? {
                    Response::Sample(sample) => sample.map_err(|why| query_error(&request, why)),
                    _ => Err(QueryError::NotAvailable),
                };
                let _ = answer.send(sample);
                Ok(None)
            }
            Job::Limit(request, answer) => {
                let limit = match self.call(&request).await? {
                    Response::Limit(limit) => limit.map_err(|why| query_error(&request, why)),
                    _ => Err(QueryError::NotAvailable),
                };
                let _ = answer.send(limit);
                Ok(None)
            }
        }
    }
}

fn query_error(request: &Request, why: CallError) -> QueryError {
    match request {
        Request::Sample { gpu, .. } | Request::Limit { gpu, .. } => QueryError::Nvml {
            gpu: gpu.clone(),
            source: why,
        },
        Request::Probe | Request::Xids => QueryError::NotAvailable,
    }
}
