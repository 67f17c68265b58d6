//! Runs one process that calls NVML, and ends it when an answer is late.
//!
//! A process is asked one thing at a time. A killed process may hang in the driver for longer: its
//! task goes on until the kernel has ended it, so that there is never a second one for the same
//! GPU.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::calls;
use super::protocol::{Refusal, Request, Response, Scope};
use super::{ANSWER, QueryError, START};
use crate::sessions::Look;

/// The program of this process, which needs no look at a disk that may hang.
const PROGRAM: &str = "/proc/self/exe";

/// The number of a process among all that this agent has started.
pub(super) type Id = u64;

/// A question to a process, and where its answer goes.
#[derive(Debug)]
pub(super) enum Job {
    Probe,
    Look(Request, oneshot::Sender<Result<Look, QueryError>>),
    Limit(Request, oneshot::Sender<Result<(), QueryError>>),
}

/// What a process's task tells.
#[derive(Debug)]
pub(super) enum Report {
    /// The answer to a probe.
    Probed(Response),
    /// XIDs of its GPU, at least one.
    Xids(Vec<u64>),
    /// A call did not return in time: the process is being killed.
    Hung,
    /// The process has ended.
    Ended,
}

/// Why a process did not answer.
enum Unanswered {
    Late,
    Died,
}

/// A running process.
pub(super) struct Process {
    child: Child,
    requests: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    /// How long its next answer may take: the first waits for the driver to open the GPU.
    patience: Duration,
}

impl Process {
    pub(super) fn start(library: &Path, scope: Scope) -> io::Result<Self> {
        let mut child = Command::new(PROGRAM)
            .arg0("bursar-agent")
            .arg(calls::WORD)
            .arg(library)
            .arg(serde_json::to_string(&scope)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let lacks = || io::Error::other("the process has no pipe");
        let requests = child.stdin.take().ok_or_else(lacks)?;
        let answers = child.stdout.take().ok_or_else(lacks)?;
        Ok(Self {
            child,
            requests,
            answers: BufReader::new(answers).lines(),
            patience: START,
        })
    }

    async fn ask(&mut self, request: &Request) -> Result<Response, Unanswered> {
        let patience = std::mem::replace(&mut self.patience, ANSWER);
        match timeout(patience, self.exchange(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(_)) => Err(Unanswered::Died),
            Err(_) => Err(Unanswered::Late),
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

    /// Answers jobs and asks for XIDs each `events` until `stop`, the end of the jobs, or a call
    /// that hangs.
    pub(super) async fn run(
        mut self,
        id: Id,
        mut jobs: mpsc::Receiver<Job>,
        reports: mpsc::UnboundedSender<(Id, Report)>,
        events: Option<Duration>,
        stop: CancellationToken,
    ) {
        let work = self.work(id, &mut jobs, &reports, events);
        if let Some(Unanswered::Late) = stop.run_until_cancelled(work).await {
            // The watcher has ended with the agent.
            let _ = reports.send((id, Report::Hung));
        }
        // The callers of pending questions learn now that there is no answer.
        drop(jobs);
        let _ = self.child.start_kill();
        let _ = self.child.wait().await;
        let _ = reports.send((id, Report::Ended));
    }

    async fn work(
        &mut self,
        id: Id,
        jobs: &mut mpsc::Receiver<Job>,
        reports: &mpsc::UnboundedSender<(Id, Report)>,
        events: Option<Duration>,
    ) -> Unanswered {
        let mut tick = interval(events.unwrap_or(ANSWER));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut probed = false;
        loop {
            let done = tokio::select! {
                job = jobs.recv() => match job {
                    Some(job) => {
                        probed |= matches!(job, Job::Probe);
                        self.take(job).await
                    }
                    None => return Unanswered::Died,
                },
                // The GPU's events are registered for by the first probe.
                _ = tick.tick(), if probed && events.is_some() => {
                    self.ask(&Request::Xids).await.map(|response| match response {
                        Response::Xids(codes) if !codes.is_empty() => Some(Report::Xids(codes)),
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

    async fn take(&mut self, job: Job) -> Result<Option<Report>, Unanswered> {
        match job {
            Job::Probe => Ok(Some(Report::Probed(self.ask(&Request::Probe).await?))),
            // The caller has stopped waiting, so NVML need not be asked.
            Job::Look(_, answer) if answer.is_closed() => Ok(None),
            Job::Look(request, answer) => {
                let look = match self.ask(&request).await? {
                    Response::Look(look) => look.map_err(|why| refused(&request, why)),
                    _ => Err(QueryError::NotAvailable),
                };
                let _ = answer.send(look);
                Ok(None)
            }
            Job::Limit(request, answer) => {
                let set = match self.ask(&request).await? {
                    Response::Limit(set) => set.map_err(|why| refused(&request, why)),
                    _ => Err(QueryError::NotAvailable),
                };
                let _ = answer.send(set);
                Ok(None)
            }
        }
    }
}

fn refused(request: &Request, why: Refusal) -> QueryError {
    match request {
        Request::Look(gpu) | Request::Limit { gpu, .. } => QueryError::Nvml {
            gpu: gpu.clone(),
            source: why,
        },
        Request::Probe | Request::Xids => QueryError::NotAvailable,
    }
}
