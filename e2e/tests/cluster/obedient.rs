//! A program in a pod that takes and frees memory as it is told.

use std::io;
use std::process::Stdio;

use libtest_mimic::Failed;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::quota::event_line;
use crate::stage::START_TIMEOUT;

/// A running one. It ends when this is dropped.
pub(crate) struct ScriptedProgram {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    _child: Child,
}

impl ScriptedProgram {
    /// Starts it by `command`, which ends with this process's hand on it.
    ///
    /// # Errors
    /// When the command does not run.
    pub(crate) fn start(mut command: Command) -> io::Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("no pipes"));
        };
        Ok(Self {
            input,
            output: BufReader::new(output).lines(),
            _child: child,
        })
    }

    /// Tells it `order`, such as `take 4Gi`; what it holds then, whether it was refused, and the device as it sees it.
    ///
    /// # Errors
    /// When it ended, or does not answer.
    pub(crate) async fn execute(&mut self, order: &str) -> Result<Value, Failed> {
        self.input
            .write_all(format!("{order}\n").as_bytes())
            .await?;
        let answered = async {
            while let Some(line) = self.output.next_line().await? {
                if let Some(answer) = event_line("holds")(&line) {
                    return Ok(answer);
                }
            }
            Err(Failed::from(format!("it ended when told to {order}")))
        };
        tokio::time::timeout(START_TIMEOUT, answered).await?
    }
}
