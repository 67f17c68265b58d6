//! Sends the harness's requests to the node process.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::components::Component;
use crate::node::{Reply, Request};

/// A connection to the node process.
#[derive(Debug)]
pub(super) struct ControlClient {
    stream: BufReader<UnixStream>,
}

impl ControlClient {
    pub(super) async fn connect(socket: &Path) -> io::Result<Self> {
        Ok(Self {
            stream: BufReader::new(UnixStream::connect(socket).await?),
        })
    }

    /// Sends a request and returns the reply.
    ///
    /// # Errors
    /// When the node process has exited or refuses the request, with its cause.
    pub(super) async fn call(&mut self, request: &Request) -> io::Result<Reply> {
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes()).await?;
        let mut answer = String::new();
        if self.stream.read_line(&mut answer).await? == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the node process is gone",
            ));
        }
        match serde_json::from_str(&answer)? {
            Reply::Failed { why } => Err(io::Error::other(why)),
            reply => Ok(reply),
        }
    }

    /// Starts a component.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub(super) async fn spawn(
        &mut self,
        component: &Component,
        path: &str,
        log: &Path,
    ) -> io::Result<()> {
        let environment = BTreeMap::from([("PATH".to_owned(), path.to_owned())]);
        self.call(&Request::Spawn {
            name: component.name.to_owned(),
            program: component.program.clone(),
            arguments: component.arguments.clone(),
            environment,
            log: log.to_path_buf(),
        })
        .await
        .map(drop)
    }

    /// Returns how a component exited, if it has.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub(super) async fn exit_description(&mut self, component: &str) -> io::Result<Option<String>> {
        match self
            .call(&Request::Status {
                name: component.to_owned(),
            })
            .await?
        {
            Reply::Ended { how } => Ok(Some(how)),
            _ => Ok(None),
        }
    }
}
