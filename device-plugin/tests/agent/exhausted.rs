//! Tests an agent whose disk is full or fails, and one that has no descriptors left: it says so,
//! loses nothing, and goes on once there is room.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use crate::common::eventually;
use crate::crash_points::library;
use crate::machine::{GPU, Machine};

/// A file system of its own, so small that a test can fill it.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn at(path: PathBuf) -> Self {
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"])
            .arg(&path)
            .status();
        assert!(mounted.unwrap().success());
        Self(path)
    }

    /// Takes all space that is left.
    fn fill(&self) {
        let filler = self.0.join("filler");
        let mut bytes = 256 << 10;
        while bytes > 0 {
            let whole = fs::read(&filler).unwrap_or_default();
            let longer = [whole.clone(), vec![1; bytes]].concat();
            if fs::write(&filler, longer).is_err() {
                fs::write(&filler, whole).unwrap();
                bytes /= 2;
            }
        }
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
    let ends = machine.run("ends", 12).await;
    disk.fill();
    machine.kill_agent();
    machine.end(&ends);
    machine.start_successor().await;
    assert!(machine.devices().len() <= 2 && machine.is_agent_alive());
    disk.free();
    eventually("the ended pod is gone", || machine.devices().len() == 1).await;
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
    fs::remove_file(&fails).unwrap();
    machine.until_started(&pod).await;
    let recorded = || machine.path("state/generations.json").exists();
    eventually("the generations are on record", recorded).await;
}

/// Sets the most descriptors of a process.
fn limit(pid: u32, descriptors: u64) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    let maximum = prlimit(pid, Resource::Nofile, getrlimit(Resource::Nofile))
        .unwrap()
        .maximum;
    let limit = Rlimit {
        current: Some(descriptors),
        maximum,
    };
    prlimit(pid, Resource::Nofile, limit).unwrap();
}

#[tokio::test]
async fn agent_without_descriptors_refuses_new_pods_and_loses_none() {
    let mut machine = Machine::started().await;
    let pid = machine.agent_pid();
    // Standard input, output and errors are open, so that no number is free.
    let fail = |_: &Machine| limit(pid, 3);
    let repair = |_: &Machine| limit(pid, 4096);
    refuses_and_goes_on(&mut machine, fail, "Too many open files", repair).await;
    // The agent answers its probes again.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(machine.get("/healthz").await.0, 200);
}
