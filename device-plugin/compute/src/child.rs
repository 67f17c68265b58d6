//! Talks to the holder's process from the agent, and kills it when an answer is late.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use bursar_ledger::units::GpuUuid;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::holder::Report;
use crate::process::{Answer, Request, SUBCOMMAND};

/// The agent's own program. This path is valid even while the disk hangs.
const SELF_EXE: &str = "/proc/self/exe";

/// A process that answers later than this hangs in the driver. A look makes calls for 0.4 s at
/// most.
const ANSWER: Duration = Duration::from_secs(5);

/// A running holder; dropping it kills the process, which leaves all slices as they are.
#[derive(Debug)]
pub(crate) struct HolderProcess {
    child: Child,
    requests: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl HolderProcess {
    /// Starts the process for a GPU with this device node.
    pub(crate) fn start(gpu: &GpuUuid, device: &Path, round: Duration) -> io::Result<Self> {
        let mut child = Command::new(SELF_EXE)
            .arg0("bursar-agent")
            .args([SUBCOMMAND, gpu.as_str()])
            .arg(device)
            .arg(round.as_micros().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let no_pipe = || io::Error::other("the process has no pipe");
        Ok(Self {
            requests: child.stdin.take().ok_or_else(no_pipe)?,
            answers: BufReader::new(child.stdout.take().ok_or_else(no_pipe)?).lines(),
            child,
        })
    }

    /// Kills the process, and waits for its end however long the driver keeps it: the next one
    /// would hang beside it.
    pub(crate) async fn end(mut self) {
        // An error says that it has been waited for.
        let _ = self.child.kill().await;
    }

    /// Sends a request. Returns the report, if the request has one.
    pub(crate) async fn send(&mut self, request: &Request) -> io::Result<Option<Report>> {
        let exchange = async {
            let mut line = serde_json::to_vec(request)?;
            line.push(b'\n');
            self.requests.write_all(&line).await?;
            if let Request::Active { .. } = request {
                return Ok(None);
            }
            let answer = self.answers.next_line().await?;
            let answer = answer.ok_or(io::ErrorKind::UnexpectedEof)?;
            match serde_json::from_str(&answer)? {
                Answer::Report(report) => Ok(Some(report)),
                Answer::Failed(error) => Err(io::Error::other(error)),
            }
        };
        match timeout(ANSWER, exchange).await {
            Ok(answered) => answered,
            Err(_) => Err(io::Error::other(format!("no answer within {ANSWER:?}"))),
        }
    }
}
