//! Starts a registry that a release is published to.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use bursar_e2e::progress::Progress;
use bursar_e2e::release::{self, Destination, Release, ReleaseOptions};
use bursar_e2e::tools;
use bursar_e2e::wait::{self, Poll};
use bursar_e2e::workspace::Binaries;
use libtest_mimic::Failed;
use serde_json::json;
use tokio::process::{Child, Command};

/// The timeout of the registry's start, on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(240);
const PAUSE: Duration = Duration::from_millis(200);

/// A registry on the host's loopback.
pub(crate) struct Registry {
    pub(crate) port: u16,
    _process: Child,
    _folder: tempfile::TempDir,
}

impl Registry {
    pub(crate) async fn start() -> Result<Self, Failed> {
        let program = tools::registry()?;
        let folder = tempfile::tempdir()?;
        // Another process could take the port before the registry does, which then fails to start.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
            .local_addr()?
            .port();
        let config = json!({
            "version": "0.1", "log": {"level": "error", "accesslog": {"disabled": true}},
            "storage": {"filesystem": {"rootdirectory": folder.path().join("data")}},
            "http": {"addr": format!("127.0.0.1:{port}")},
        });
        let path = folder.path().join("config.yml");
        fs::write(&path, config.to_string())?;
        let mut process = Command::new(program)
            .arg("serve")
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let answers =
            async || match tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
                Ok(_) => Poll::Ready(()),
                Err(error) => match process.try_wait() {
                    Ok(None) => Poll::Pending(error.to_string()),
                    ended => Poll::Failed(format!("the registry ended: {ended:?}")),
                },
            };
        wait::poll_until("the registry", TIMEOUT, PAUSE, answers).await?;
        Ok(Self {
            port,
            _process: process,
            _folder: folder,
        })
    }

    /// Returns the registry's address, with the path of a release's repositories.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}/bursar", self.port)
    }

    /// Makes a release of these programs into the registry and a folder.
    pub(crate) fn release(
        &self,
        programs: &Binaries,
        version: &str,
        folder: PathBuf,
        key: Option<String>,
        progress: &Progress,
    ) -> Result<Release, Failed> {
        let options = ReleaseOptions {
            version: version.parse()?,
            destinations: vec![
                Destination::Registry(self.address()),
                Destination::Folder(folder),
            ],
            parts: Vec::new(),
            key,
        };
        Ok(release::make(&options, Some(programs), progress)?)
    }
}
