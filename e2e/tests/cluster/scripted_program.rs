//! Controls a program in a pod that allocates and frees by command.

use std::io;
use std::process::Stdio;

use libtest_mimic::Failed;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::quota::event_line;
use crate::shared_cluster::START_TIMEOUT;

/// A running program. Dropping this value ends the program.
pub(crate) struct ScriptedProgram {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    _child: Child,
}

impl ScriptedProgram {
    /// Starts the program by `command`, which is killed when this value is dropped.
    ///
    /// # Errors
    /// When the command cannot be started.
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

    /// Sends an order such as `take 4Gi`, and returns the answer: the bytes held, a refusal, and
    /// the device as the program sees it.
    ///
    /// # Errors
    /// When the program has exited or does not answer.
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
