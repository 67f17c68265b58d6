//! Resolves the peer of a socket: its process, and the container that its cgroup names.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use bursar_host::procfs::{self, Stat};
use bursar_ledger::BootTime;
use bursar_ledger::units::PodUid;

/// A process of the host, distinct from a later one with the same pid.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct Process {
    /// The pid in the host's pid namespace, which is the agent's.
    pub pid: u32,
    /// The start time in clock ticks since boot (`/proc/<pid>/stat`, field 22).
    pub start: u64,
}

impl Process {
    /// When the process started, rounded down.
    pub(crate) fn start_moment(&self) -> BootTime {
        // Linux reports ticks of 10 ms to programs on every machine (`USER_HZ`).
        BootTime(self.start.saturating_mul(10))
    }
}

/// The most ancestors inside a container that the agent follows.
const MAX_ANCESTORS: u32 = 64;

/// Resolves the container of a process.
pub trait ContainerResolver: Send + Sync + 'static {
    /// The process behind a pid; `None` when it has exited.
    fn process(&self, pid: u32) -> Option<Process>;

    /// The name of the container of `pod` that the process runs in, equal for all of its processes.
    /// `None` when the process does not belong to the pod.
    fn container(&self, pid: u32, pod: &PodUid) -> Option<String>;

    /// The root process from which a process of a container of `pod` descends, and whose parent is
    /// outside of the container. This is the main process, or a process that the container runtime
    /// executed into the container. Returns the process itself where it has too many ancestors, and
    /// `None` when it has exited.
    fn root_process(&self, process: Process, pod: &PodUid) -> Option<Process> {
        let _ = pod;
        (self.process(process.pid)? == process).then_some(process)
    }

    /// Whether the parent of a process of a container of `pod` is outside of that container.
    fn is_container_root(&self, process: Process, pod: &PodUid) -> bool {
        self.root_process(process, pod) == Some(process)
    }

    /// The pids of a process in the agent's pid namespace and in each nested one, down to its own.
    /// Empty when the pids cannot be read.
    fn namespace_pids(&self, pid: u32) -> Vec<u32> {
        vec![pid]
    }

    /// The memory of the image that the process runs now; `None` when it cannot be read.
    fn image_memory(&self, pid: u32) -> Option<ImageMemory> {
        let _ = pid;
        None
    }
}

/// The memory of a process's image. An open `/proc/<pid>/maps` stays with the memory that the
/// process had (`proc_mem_open` in Linux's fs/proc/base.c), which an exec replaces. No process can
/// feign that, unlike the addresses in its memory (`PR_SET_MM_MAP` of prctl(2)).
#[derive(Debug)]
pub struct ImageMemory(File);

impl ImageMemory {
    /// Whether the process has replaced its image since. A child that shares the memory (`vfork`)
    /// keeps it in use.
    pub fn is_replaced(&self) -> bool {
        // A read of memory that nobody uses any more returns no bytes; of an exited process it
        // fails.
        matches!(self.0.read_at(&mut [0], 0), Ok(0))
    }
}

/// Resolves containers by `/proc/<pid>/cgroup`, whose path no tenant can choose.
#[derive(Clone, Debug)]
pub struct CgroupResolver {
    proc: PathBuf,
}

impl CgroupResolver {
    /// Reads below `proc`, the host's `/proc`.
    pub fn new(proc: PathBuf) -> CgroupResolver {
        CgroupResolver { proc }
    }
}

impl ContainerResolver for CgroupResolver {
    fn process(&self, pid: u32) -> Option<Process> {
        let start = Stat::read(&self.proc, pid)?.start_ticks;
        Some(Process { pid, start })
    }

    fn container(&self, pid: u32, pod: &PodUid) -> Option<String> {
        let cgroup = procfs::read_small(&self.proc.join(pid.to_string()).join("cgroup")).ok()?;
        parse_container(&cgroup, pod)
    }

    fn root_process(&self, process: Process, pod: &PodUid) -> Option<Process> {
        let container = self.container(process.pid, pod)?;
        let mut topmost = (self.process(process.pid)? == process).then_some(process)?;
        for _ in 0..MAX_ANCESTORS {
            match self.parent_in_container(topmost.pid, &container, pod)? {
                Some(parent) => topmost = self.process(parent)?,
                None => return Some(topmost),
            }
        }
        Some(process)
    }

    fn is_container_root(&self, process: Process, pod: &PodUid) -> bool {
        let parent = self
            .container(process.pid, pod)
            .and_then(|container| self.parent_in_container(process.pid, &container, pod));
        parent == Some(None) && self.process(process.pid) == Some(process)
    }

    fn namespace_pids(&self, pid: u32) -> Vec<u32> {
        procfs::read_small(&self.proc.join(pid.to_string()).join("status"))
            .map(|status| parse_namespace_pids(&status))
            .unwrap_or_default()
    }

    fn image_memory(&self, pid: u32) -> Option<ImageMemory> {
        let mut options = File::options();
        let options = options.read(true).custom_flags(libc::O_NONBLOCK);
        let maps = options.open(self.proc.join(pid.to_string()).join("maps"));
        maps.ok().map(ImageMemory)
    }
}

impl CgroupResolver {
    /// The parent of a process: `Some(None)` where the parent is outside of the container, `None`
    /// when the process has exited.
    fn parent_in_container(&self, pid: u32, container: &str, pod: &PodUid) -> Option<Option<u32>> {
        let status = self.proc.join(pid.to_string()).join("status");
        let parent = parse_parent(&procfs::read_small(&status).ok()?)?;
        let of_parent = self.container(parent, pod);
        Some((of_parent.as_deref() == Some(container)).then_some(parent))
    }
}

/// The container that `/proc/<pid>/cgroup` names, if it is one of the pod's. The outermost pod
/// folder counts: a container may create folders with any name below its own.
fn parse_container(cgroup: &str, pod: &PodUid) -> Option<String> {
    match procfs::ProcessOwner::parse(cgroup) {
        procfs::ProcessOwner::Container { pod: owner, cgroup } if owner == *pod => Some(cgroup),
        _ => None,
    }
}

/// Parses the line `NSpid:` of `/proc/<pid>/status` (proc(5), Linux 4.1). The process name is on an
/// earlier line, with its line breaks escaped.
fn parse_namespace_pids(status: &str) -> Vec<u32> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))
        .unwrap_or_default();
    line.split_whitespace()
        .map_while(|pid| pid.parse().ok())
        .collect()
}

/// Parses the line `PPid:`, which follows the process name with its escaped line breaks.
fn parse_parent(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::process::{Command, Stdio};

    use super::*;

    const UID: &str = "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11";

    fn container(cgroup: &str) -> Option<String> {
        parse_container(cgroup, &UID.parse().unwrap())
    }

    #[test]
    fn container_is_found_with_both_cgroup_drivers_and_versions() {
        let v2 = "0::/kubepods/besteffort/pod8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11/c0ffee\n";
        assert_eq!(container(v2).as_deref(), Some("c0ffee"));
        let systemd = "0::/kubepods.slice/kubepods-burstable.slice/\
            kubepods-burstable-pod8b2e3f0a_1f5c_4c41_9d53_0a5f4f7a9d11.slice/cri-containerd-c0ffee.scope\n";
        assert_eq!(
            container(systemd).as_deref(),
            Some("cri-containerd-c0ffee.scope")
        );
        let hybrid =
            "12:memory:/kubepods/pod8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11/c0ffee/inner\n0::/\n";
        assert_eq!(container(hybrid).as_deref(), Some("c0ffee"));
        let namespaced = "0::/../../pod8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11/c0ffee\n";
        assert_eq!(container(namespaced).as_deref(), Some("c0ffee"));
    }

    #[test]
    fn image_memory_is_replaced_by_an_exec_alone() {
        let resolver = CgroupResolver::new("/proc".into());
        let mut shell = Command::new("sh")
            .args(["-c", "read line; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut input, mut output) = (shell.stdin.take().unwrap(), shell.stdout.take().unwrap());
        let memory = resolver.image_memory(shell.id()).unwrap();
        assert!(!memory.is_replaced());
        // The shell reads the first line, and `cat` copies the second.
        input.write_all(b"go\n").unwrap();
        input.write_all(b"gone\n").unwrap();
        output.read_exact(&mut [0; 5]).unwrap();
        assert!(memory.is_replaced());
        assert!(!resolver.image_memory(shell.id()).unwrap().is_replaced());
        drop(input);
        shell.wait().unwrap();
    }

    #[test]
    fn container_is_none_for_other_cgroups() {
        for cgroup in [
            "",
            "garbage",
            "0::/",
            "0::/system.slice/containerd.service",
            "0::/kubepods/pod00000000-1f5c-4c41-9d53-0a5f4f7a9d11/c0ffee",
            "0::/kubepods/pod8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11",
            "0::/kubepods/xpod8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11/c0ffee",
            // A process of another pod may create this folder below its container's.
            "0::/kubepods/pod00000000-1f5c-4c41-9d53-0a5f4f7a9d11/c0ffee/pod8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11/x",
        ] {
            assert_eq!(container(cgroup), None, "{cgroup}");
        }
    }

    #[test]
    fn process_has_a_pid_in_each_namespace_around_it() {
        let status = "Name:\tNSpid:\\n9\nPid:\t4711\nNStgid:\t4711\t17\t1\nNSpid:\t4711\t17\t1\n";
        assert_eq!(parse_namespace_pids(status), [4711, 17, 1]);
        assert_eq!(parse_namespace_pids("Name:\tx\n"), Vec::<u32>::new());
    }

    #[test]
    fn root_process_is_the_topmost_ancestor_in_the_container() {
        let proc = tempfile::tempdir().unwrap();
        let stat = |pid: u32| {
            let fields: Vec<String> = (3..=52).map(|field| (field + pid).to_string()).collect();
            format!("{pid} (a) {}", fields.join(" "))
        };
        let process = |pid: u32, parent: u32, cgroup: &str| {
            let folder = proc.path().join(pid.to_string());
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("stat"), stat(pid)).unwrap();
            std::fs::write(
                folder.join("status"),
                format!("Name:\tPPid:\nPPid:\t{parent}\n"),
            )
            .unwrap();
            std::fs::write(folder.join("cgroup"), format!("0::/kubepods/{cgroup}\n")).unwrap();
        };
        let here = format!("pod{UID}/here");
        process(2, 1, "system");
        for (pid, parent) in [(10, 2), (11, 10), (12, 11), (20, 2), (21, 20)] {
            process(pid, parent, &here);
        }
        process(30, 12, &format!("pod{UID}/sidecar"));
        let cgroups = CgroupResolver::new(proc.path().to_owned());
        let pod = UID.parse().unwrap();
        let of = |pid: u32| cgroups.process(pid).unwrap();
        for (pid, first) in [(10, 10), (11, 10), (12, 10), (21, 20), (30, 30)] {
            assert_eq!(
                cgroups.root_process(of(pid), &pod),
                Some(of(first)),
                "{pid}"
            );
        }
        let outside: Vec<u32> = [10, 11, 12, 20, 21, 30]
            .into_iter()
            .filter(|pid| cgroups.is_container_root(of(*pid), &pod))
            .collect();
        assert_eq!(outside, [10, 20, 30]);
        for pid in 100..=100 + MAX_ANCESTORS {
            process(pid, if pid == 100 { 2 } else { pid - 1 }, &here);
        }
        let deepest = 100 + MAX_ANCESTORS;
        assert_eq!(cgroups.root_process(of(deepest - 1), &pod), Some(of(100)));
        assert_eq!(cgroups.root_process(of(deepest), &pod), Some(of(deepest)));
        let earlier = Process { start: 1, ..of(12) };
        assert!(!cgroups.is_container_root(Process { start: 1, ..of(10) }, &pod));
        assert_eq!(cgroups.root_process(earlier, &pod), None);
        assert_eq!(
            cgroups.root_process(of(2), &pod),
            None,
            "it is in no container"
        );
    }

    #[test]
    fn own_process_has_a_start_time_and_no_pod() {
        let cgroups = CgroupResolver::new("/proc".into());
        let me = std::process::id();
        assert_eq!(cgroups.namespace_pids(me).first(), Some(&me));
        assert_eq!(cgroups.process(me).map(|process| process.pid), Some(me));
        assert_eq!(cgroups.container(me, &UID.parse().unwrap()), None);
    }

    #[test]
    fn process_is_resolved_when_its_name_is_not_utf8() {
        let (mut child, _folder) = bursar_host::testing::process_with_non_utf8_name();
        let cgroups = CgroupResolver::new("/proc".into());
        let pid = child.id();
        assert_eq!(cgroups.process(pid).map(|process| process.pid), Some(pid));
        assert_eq!(cgroups.namespace_pids(pid).first(), Some(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
