//! Makes processes and their records for tests, and reads records of released versions.

use std::ffi::OsStr;
use std::fmt::Debug;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};

use bursar_protocol::testing::for_each_record;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::checkpoint::Checkpoint;
use crate::procfs::Stat;

/// Fails unless the golden checkpoint `name` of each version has this value.
pub fn assert_golden_checkpoint<T>(name: &str, expected: &T)
where
    T: Serialize + DeserializeOwned + Debug + PartialEq,
{
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = Checkpoint::new(folder.path().join(name));
    let today = || {
        file.save(expected).expect("the value can be saved");
        std::fs::read(file.path()).expect("the file was saved")
    };
    for_each_record(name, today, |golden| {
        std::fs::write(file.path(), golden).expect("a file in the directory");
        let read: Option<T> = file.load().expect("a checkpoint of an earlier version");
        assert_eq!(read.as_ref(), Some(expected), "{name}");
    });
}

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
