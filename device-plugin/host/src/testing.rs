//! Makes processes and their records for tests.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};

use crate::procfs::Stat;

/// Starts a process whose name is not UTF-8; the directory holds its program.
pub fn process_with_non_utf8_name() -> (Child, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let program = folder.path().join(OsStr::from_bytes(b"\xff\xfe"));
    symlink("/bin/sleep", &program).expect("a link in the directory");
    let child = Command::new(program).arg0("sleep").arg("60").spawn();
    (child.expect("sleep starts"), folder)
}

/// The stat of a process with one thread.
pub fn stat(start: u64, ended: bool) -> Stat {
    Stat {
        parent: 1,
        exiting: ended,
        threads: 1,
        forked: false,
        start_ticks: start,
        size: 0,
        stack: 0,
    }
}
