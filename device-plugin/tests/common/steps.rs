//! Lets a process die at one of its steps on disk or at the send of a message (`steps.c`).

use std::fs;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Command;
use std::time::Duration;

use tokio::time::{sleep, timeout};

/// The most time for the kubelet to see that a call failed, because the process is dead.
const CALL_ENDS_WITHIN: Duration = Duration::from_millis(500);

/// Compiles the library that counts steps.
pub fn library(folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common/steps.c");
    let library = folder.join("steps.so");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-shared", "-fPIC", "-o"]);
    let ended = compiler.arg(&library).arg(source).status().unwrap();
    assert!(ended.success());
    library
}

/// Lets the program of `command` die at this step of its own, 0 is never, and count its steps in
/// `file`.
pub fn die_at(command: &mut Command, library: &Path, file: &Path, step: usize) {
    drop(fs::remove_file(file));
    command.env("LD_PRELOAD", library);
    command.env("BURSAR_STEPS", file);
    command.env("BURSAR_STEP", step.to_string());
}

/// Acts until the process is dead. Returns whether it was.
pub async fn until_dead(
    mut is_running: impl FnMut() -> bool,
    act: impl Future<Output = Option<()>>,
) -> bool {
    let dies = async {
        while is_running() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    let mut act = pin!(act);
    tokio::select! {
        () = dies => {
            // A call of the kubelet that is under way fails, and is not cancelled.
            drop(timeout(CALL_ENDS_WITHIN, act).await);
            return true;
        }
        _ = &mut act => {}
    }
    !is_running()
}

/// Whether a process runs, though its parent may not have waited for its end.
pub fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").map(|(_, rest)| rest);
    state.is_some_and(|rest| !rest.starts_with('Z'))
}

/// The steps until now.
pub fn count(file: &Path) -> usize {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// The files below a folder that a write left behind.
pub fn temporary_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(temporary_files(&path));
        }
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_temporary = [".new", ".tmp"].iter().any(|end| name.ends_with(end));
        if is_temporary || name.starts_with(".tmp") {
            found.push(path);
        }
    }
    found
}
