//! Tests an agent whose disk is full or fails, and one that has no descriptors left: it says so,
//! loses nothing, and goes on once there is room.

use std::cell::Cell;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use crate::common::steps::library;
use crate::common::{PATIENCE, eventually};
use crate::machine::{GPU, Machine};

/// The size of a [`SmallDisk`].
const BYTES: usize = 256 << 10;

/// A file system of its own, so small that a test can fill it.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn at(path: PathBuf) -> Self {
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={BYTES}"), "tmpfs"])
            .arg(&path)
            .status();
        assert!(mounted.unwrap().success());
        Self(path)
    }

    /// Takes all space that is left.
    fn fill(&self) {
        let mut filler = fs::File::create(self.0.join("filler")).unwrap();
        filler.write_all(&[1; BYTES]).unwrap_err();
    }

    fn free(&self) {
        fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The agent may be running, and the mount ends with its last file.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// Runs a pod, lets the node fail, and checks that the next pod is refused with these words, while
/// nothing is lost. Then a repaired node starts it.
async fn refuses_and_goes_on(
    machine: &mut Machine,
    fail: impl FnOnce(&Machine),
    words: &str,
    repair: impl FnOnce(&Machine),
) {
    machine.kubelet.until_allocatable(GPU, 32).await;
    let kept = machine.run("kept", 10).await;
    let before = machine.devices();
    fail(machine);
    let pod = machine.admit("refused", 4).await;
    let error = machine.start(&pod).await.unwrap_err();
    assert!(error.contains(words), "{error}");
    assert_eq!(machine.devices(), before, "a refused pod has no device");
    assert!(machine.is_agent_alive());
    repair(machine);
    machine.until_started(&pod).await;
    assert_eq!(machine.devices().len(), 2);
    machine.end(&kept);
    machine.end(&pod);
    eventually("all memory is free", || machine.devices().is_empty()).await;
    machine.run("whole", 16).await;
}

#[tokio::test]
async fn full_disk_refuses_new_pods_and_loses_none() {
    let mut machine = Machine::new().await;
    let disk = SmallDisk::at(machine.path("run"));
    machine.start_agent();
    let (fill, free) = (|_: &Machine| disk.fill(), |_: &Machine| disk.free());
    refuses_and_goes_on(&mut machine, fill, "No space left", free).await;
}

#[tokio::test]
async fn next_agent_on_a_full_disk_keeps_the_pods() {
    let mut machine = Machine::new().await;
    let disk = SmallDisk::at(machine.path("run"));
    machine.start_agent();
    machine.kubelet.until_allocatable(GPU, 32).await;
    let kept = machine.run("kept", 10).await;
    let left = machine.devices();
    let ends = machine.run("ends", 12).await;
    disk.fill();
    machine.kill_agent();
    machine.end(&ends);
    machine.start_successor().await;
    let refused = machine.admit("refused", 2).await;
    let error = machine.start(&refused).await.unwrap_err();
    assert!(error.contains("No space left"), "{error}");
    let devices = machine.devices();
    assert!(left.keys().all(|name| devices.contains_key(name)));
    disk.free();
    machine.until_started(&refused).await;
    machine.end(&refused);
    eventually("the ended pods are gone", || machine.devices() == left).await;
    assert_eq!(machine.sockets(), 1);
    machine.run("other", 16).await;
    machine.end(&kept);
    machine.run("third", 12).await;
}

#[tokio::test]
async fn disk_that_fails_to_sync_is_told_and_written_again() {
    let mut machine = Machine::new().await;
    let fails = machine.path("sync-fails");
    fs::write(&fails, "").unwrap();
    let mut command = machine.command();
    command.env("LD_PRELOAD", library(machine.root.path()));
    command.env("BURSAR_SYNC_FAILS", &fails);
    machine.start_agent_with(command);
    machine.kubelet.until_allocatable(GPU, 32).await;
    let pod = machine.admit("refused", 10).await;
    let error = machine.start(&pod).await.unwrap_err();
    assert!(error.contains("failed to install the shim"), "{error}");
    let told = || {
        machine
            .log()
            .contains("generations.json: Input/output error")
    };
    eventually("the failure is in the log", told).await;
    assert!(machine.is_agent_alive());
    let recorded = || machine.path("state/generations.json").exists();
    assert!(!recorded());
    fs::remove_file(&fails).unwrap();
    machine.until_started(&pod).await;
    eventually("the generations are on record", recorded).await;
}

/// Sets the most descriptors of a process, and returns how many it might have before.
fn limit(pid: u32, descriptors: Option<u64>) -> Option<u64> {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    // The agent has raised its limit to the maximum, which it has of this process.
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: descriptors,
        maximum,
    };
    prlimit(pid, Resource::Nofile, limit).unwrap().current
}

#[tokio::test]
async fn agent_without_descriptors_refuses_new_pods_and_loses_none() {
    let mut machine = Machine::started().await;
    let pid = machine.agent_pid();
    // Standard input, output and errors are open, so that no number is free.
    let before = Cell::new(None);
    let fail = |_: &Machine| before.set(limit(pid, Some(3)));
    let repair = |_: &Machine| {
        limit(pid, before.get());
    };
    refuses_and_goes_on(&mut machine, fail, "Too many open files", repair).await;
    let answers = async {
        while machine.get("/healthz").await.0 != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, answers).await.unwrap();
}
