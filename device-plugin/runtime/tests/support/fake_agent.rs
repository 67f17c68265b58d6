//! Starts a fd store, a provisioner for each GPU and a fake agent on this machine.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

/// GPU of `bursar_sim_lab::ONE_GPU`.
pub(crate) const GPU: &str = "GPU-00000000-0000-0000-0000-000000000001";

pub(crate) struct FakeAgent {
    folder: tempfile::TempDir,
    _agent: Process,
    _fdstore: Process,
}

impl FakeAgent {
    /// Starts the processes; `command` creates each one, so that it finds a driver.
    pub(crate) fn start(command: impl Fn(&Path) -> Command) -> FakeAgent {
        let programs = programs();
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("fdstore");
        let mut fdstore = command(&programs.join("bursar-fdstore"));
        // Otherwise a failed test waits for the process that holds its output open.
        fdstore
            .arg(&place)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let fdstore = Process(fdstore.spawn().unwrap());
        while UnixStream::connect(place.join("fdstore.sock")).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut agent = command(&programs.join("examples/fake_agent"));
        let agent = agent
            .arg(folder.path().join("agent.sock"))
            .arg(&place)
            .arg(programs.join("bursar-provisioner"))
            .arg(GPU)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut agent = Process(agent);
        let mut line = String::new();
        let mut stdout = BufReader::new(agent.0.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        FakeAgent {
            folder,
            _fdstore: fdstore,
            _agent: agent,
        }
    }

    /// Returns the socket for clients.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("agent.sock")
    }
}

/// Process that is killed at the end of the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Builds the programs once and returns cargo's output folder.
fn programs() -> &'static Path {
    static PROGRAMS: OnceLock<PathBuf> = OnceLock::new();
    let packages = ["bursar-fdstore", "bursar-provisioner"];
    let targets = ["--bins", "--example", "fake_agent"];
    PROGRAMS.get_or_init(|| bursar_sim_lab::build(&packages, &targets).unwrap())
}
