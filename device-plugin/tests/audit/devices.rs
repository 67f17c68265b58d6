//! Tests containers that run as root, where `cuInit` creates the nodes of every GPU. The device
//! cgroup alone decides which ones they may open.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::kubelet::Pod;
use crate::container::{Container, machine};
use crate::findings::{
    metric_value, wait_for_log, wait_for_metric, wait_for_value, wait_until_not_enforced,
};
use crate::honest::check_no_findings;
use crate::machine::Machine;
use crate::programs::HonestPrograms;

const GIB: u64 = 1 << 30;
/// Two attestations of a container, which the agent repeats after 10 s.
const TWO_ATTESTATIONS: Duration = Duration::from_secs(22);

/// A real cgroup of a hierarchy that controls devices, mounted where the agent of a machine expects
/// it.
pub(crate) struct DeviceCgroups {
    folder: PathBuf,
    mount_point: PathBuf,
    pods: Vec<String>,
}

impl DeviceCgroups {
    /// A cgroup of the devices controller of v1.
    pub(crate) fn v1(machine: &Machine) -> DeviceCgroups {
        Self::mount_hierarchy(machine, Path::new("/sys/fs/cgroup/devices"), "devices")
    }

    /// A cgroup of v2, where BPF programs decide ([`DeviceCgroups::deny_gpus`]).
    fn v2(machine: &Machine) -> DeviceCgroups {
        let mounts = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(Path::new);
        let mut mounts = mounts.into_iter();
        let mount = mounts.find(|mount| mount.join("cgroup.controllers").exists());
        Self::mount_hierarchy(machine, mount.unwrap(), "unified")
    }

    fn mount_hierarchy(machine: &Machine, hierarchy: &Path, name: &str) -> DeviceCgroups {
        let unique = machine.root.path().file_name().unwrap().to_str().unwrap();
        let unique = unique.trim_start_matches('.').to_owned();
        let folder = hierarchy.join(format!("bursar-{unique}"));
        std::fs::create_dir(&folder).unwrap();
        let mount_point = machine.path("cgroup").join(name);
        std::fs::create_dir(&mount_point).unwrap();
        run_command("mount", &["--bind".as_ref(), &folder, &mount_point]);
        DeviceCgroups {
            folder,
            mount_point,
            pods: Vec::new(),
        }
    }

    /// Moves a container's process into a cgroup that may open the nodes of its device, as a
    /// runtime does.
    pub(crate) fn add_container(&mut self, machine: &Machine, pod: &Pod, container: &Container) {
        self.add_process(pod, container.pid());
        let main = self.container_cgroup(pod);
        let deny = std::fs::write(main.join("devices.deny"), "a");
        deny.unwrap();
        let dev = PathBuf::from(format!("/proc/{}/root/dev", container.pid()));
        let nodes = std::fs::read_dir(dev).unwrap().flatten();
        let mut allowed = vec!["c *:* m".to_owned(), "c 1:* rw".to_owned()];
        for node in nodes {
            let number = std::os::unix::fs::MetadataExt::rdev(&node.metadata().unwrap());
            let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
            allowed.push(format!("c {major}:{minor} rw"));
        }
        for rule in allowed {
            std::fs::write(main.join("devices.allow"), rule).unwrap();
        }
        assert!(machine.cgroup(pod).join("main").is_dir());
    }

    /// Attaches a BPF program that denies the node's GPUs to the pod's cgroup, which has no process
    /// yet.
    fn deny_gpus(&mut self, pod: &Pod) {
        self.create_cgroup(pod);
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("deny");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/audit/deny.c");
        run_command("cc", &["-o".as_ref(), &program, source.as_ref()]);
        run_command(program.to_str().unwrap(), &[&self.container_cgroup(pod)]);
    }

    fn create_cgroup(&mut self, pod: &Pod) {
        std::fs::create_dir_all(self.container_cgroup(pod)).unwrap();
        self.pods.push(pod.uid.to_string());
    }

    /// Moves a process into the pod's cgroup, which may open every device that is not denied.
    fn add_process(&mut self, pod: &Pod, pid: u32) {
        self.create_cgroup(pod);
        std::fs::write(
            self.container_cgroup(pod).join("cgroup.procs"),
            pid.to_string(),
        )
        .unwrap();
    }

    fn container_cgroup(&self, pod: &Pod) -> PathBuf {
        self.folder.join(format!("pod{}/main", pod.uid))
    }
}

impl Drop for DeviceCgroups {
    fn drop(&mut self) {
        run_command("umount", &["-l".as_ref(), &self.mount_point]);
        for pod in &self.pods {
            for below in [format!("pod{pod}/main"), format!("pod{pod}")] {
                let _ = std::fs::remove_dir(self.folder.join(below));
            }
        }
        let _ = std::fs::remove_dir(&self.folder);
    }
}

fn run_command(program: &str, arguments: &[&Path]) {
    let ended = Command::new(program).args(arguments).status();
    assert!(ended.unwrap().success(), "{program} {arguments:?}");
}

/// The GPU nodes in a container's `/dev`.
pub(crate) fn gpu_nodes(container: &Container) -> Vec<String> {
    let dev = format!("/proc/{}/root/dev", container.pid());
    let names = std::fs::read_dir(dev).unwrap().flatten();
    let names = names.map(|entry| entry.file_name().into_string().unwrap());
    let mut names: Vec<_> = names
        .filter(|name| ["nvidia0", "nvidia1"].contains(&name.as_str()))
        .collect();
    names.sort();
    names
}

async fn check_enforced(machine: &Machine, pod: &str) {
    let (_, text) = machine.get("/metrics").await;
    let of_pod = format!("pod=\"{pod}\"");
    let lines = text.lines().filter(|line| line.contains(&of_pod));
    let mut lines = lines.filter(|line| line.starts_with("bursar_container_enforced{"));
    let line = lines.next().unwrap_or("no attestation");
    assert!(line.ends_with(",reason=\"\"} 1"), "{pod}: {line}");
}

/// Runs honest programs of root on both GPUs for `long`, and checks that the agent reports no
/// finding.
async fn check_honest_programs(long: Duration) {
    let machine = machine("policy = \"kill\"\nkill-after = 1").await;
    let mut programs = HonestPrograms::start(&machine).await;
    let start = std::time::Instant::now();
    while start.elapsed() < long {
        programs.run_round().await;
    }
    check_no_findings(&machine).await;
    programs.check_alive();
    for name in ["a", "b", "c"] {
        check_enforced(&machine, name).await;
    }
    let log = machine.log();
    assert!(!log.contains("gap=\""), "a container was reported: {log}");
    let audits = metric_value(&machine, "bursar_agent_audit_seconds_count", "").await;
    println!("{} rounds, {audits:?} audits", programs.rounds());
}

#[tokio::test]
async fn honest_root_programs_cause_no_finding() {
    check_honest_programs(TWO_ATTESTATIONS).await;
}

#[tokio::test]
#[ignore = "ten minutes"]
async fn honest_programs_cause_no_finding_in_minutes() {
    check_honest_programs(Duration::from_secs(600)).await;
}

#[tokio::test]
async fn container_that_may_open_another_gpu_is_found() {
    let machine = machine("").await;
    let mut devices = DeviceCgroups::v1(&machine);
    let pod = machine.admit("a", 8).await;
    let container = Container::as_root(&machine, &pod, "").await;
    devices.add_process(&pod, container.pid());
    wait_until_not_enforced(&machine, "OtherGpus").await;
    wait_for_log(&machine, "nvidia").await;
}

#[tokio::test]
async fn container_is_attested_when_cgroup_v2_decides() {
    let machine = machine("").await;
    let mut devices = DeviceCgroups::v2(&machine);
    let (held, open) = (
        machine.admit("held", 8).await,
        machine.admit("open", 8).await,
    );
    devices.deny_gpus(&held);
    let mut add = |pod: &Pod, pid| devices.add_process(pod, pid);
    let _held = Container::as_root_prepared(&machine, &held, |pid| add(&held, pid)).await;
    let _open = Container::as_root_prepared(&machine, &open, |pid| add(&open, pid)).await;
    let found = "pod=\"open\" reason=\"OtherGpus\"";
    wait_for_value(&machine, "bursar_container_enforced", found, 0).await;
    let enforced = "pod=\"held\" reason=\"\"";
    wait_for_value(&machine, "bursar_container_enforced", enforced, 1).await;
}

#[tokio::test]
async fn container_is_reported_unattested_when_probe_fails() {
    let machine = machine("").await;
    let pod = machine.admit("a", 8).await;
    // The agent cannot probe this container's cgroup, which is a plain folder.
    let _container = Container::as_root(&machine, &pod, "").await;
    wait_until_not_enforced(&machine, "NotAttested").await;
}

#[tokio::test]
async fn container_that_may_change_its_timeslice_is_reported() {
    let machine = machine("policy = \"kill\"\nkill-after = 1").await;
    let mut devices = DeviceCgroups::v1(&machine);
    let pod = machine.admit("a", 8).await;
    let mut container = Container::as_root(&machine, &pod, ",+sys_nice").await;
    devices.add_container(&machine, &pod, &container);
    wait_until_not_enforced(&machine, "SysNice").await;
    container.ok("open libcuda.so.1");
    container.ok(&format!("alloc {GIB}"));
    let audits = "bursar_agent_audit_seconds_count";
    let before = metric_value(&machine, audits, "").await.unwrap();
    wait_for_metric(&machine, audits, "", |now| now >= before + 3).await;
    assert!(container.is_alive());
    let kills = metric_value(&machine, "bursar_agent_audit_kills_total", "").await;
    assert_eq!(kills, Some(0));
}
