//! What `/proc` tells of a process.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::units::PodUid;

/// A file of `/proc` as text. A process chooses its name, which may be any bytes: who has no name in UTF-8 must not be
/// who is not there.
///
/// # Errors
/// What the system answers.
pub fn read(path: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&std::fs::read(path)?).into_owned())
}

/// What `/proc/<pid>/stat` tells (proc(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The process that started it, or took it over.
    pub parent: u32,
    /// Whether its first thread has ended, or is about to (`PF_EXITING`, linux/sched.h).
    exiting: bool,
    /// Its threads, one that ended and leads others included.
    threads: u32,
    /// Whether it has executed no program since it was forked (`PF_FORKNOEXEC`, linux/sched.h). No process gets that back.
    pub forked: bool,
    /// When the process started, in clock ticks since boot: tells it from a later one with its pid.
    pub start: u64,
    /// Bytes of its address space: no file is mapped without a change of it.
    pub size: u64,
    /// Where its stack begins: the loader draws another place at each exec.
    pub stack: u64,
}

/// `PF_FORKNOEXEC`.
const FORKED: u64 = 0x40;
/// `PF_EXITING`.
const EXITING: u64 = 0x4;

impl Stat {
    /// Reads the file's text; none where it is no such text.
    pub fn parse(text: &str) -> Option<Self> {
        // The second field, the name, may hold anything: what counts stands after its last parenthesis.
        let (_, rest) = text.rsplit_once(')')?;
        let mut fields = rest.split_whitespace().skip(1);
        let parent = fields.next()?.parse().ok()?;
        let flags: u64 = fields.nth(4)?.parse().ok()?;
        let threads = fields.nth(10)?.parse().ok()?;
        let start = fields.nth(1)?.parse().ok()?;
        let size = fields.next()?.parse().ok()?;
        let stack = fields.nth(4)?.parse().ok()?;
        Some(Self {
            parent,
            exiting: flags & EXITING != 0,
            threads,
            forked: flags & FORKED != 0,
            start,
            size,
            stack,
        })
    }

    /// Whether no thread of it runs a program any more; it may not be reaped yet.
    pub fn has_ended(&self) -> bool {
        self.exiting && self.threads <= 1
    }

    /// Whether its first thread has ended and others go on.
    pub fn is_led_by_the_dead(&self) -> bool {
        self.exiting && self.threads > 1
    }

    /// How long the machine had been up when the process started.
    pub fn started(&self) -> Duration {
        // Programs are shown ticks of 10 ms on every machine (`USER_HZ`).
        Duration::from_millis(self.start.saturating_mul(10))
    }
}

/// Now, in clock ticks since boot, as processes' starts are told.
pub fn now() -> u64 {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let since_boot = Duration::try_from(clock).unwrap_or_default();
    u64::try_from(since_boot.as_millis() / 10).unwrap_or(u64::MAX)
}

/// Whose a process is, by its cgroup, whose path no tenant can choose.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// A container of a pod.
    Container {
        /// The pod.
        pod: PodUid,
        /// The name of the container's cgroup.
        cgroup: String,
    },
    /// No pod's: a process of the host.
    Host,
}

impl Owner {
    /// Reads `/proc/<pid>/cgroup`: `<hierarchy>:<controllers>:<path>` a line. A pod's folder is `pod<uid>` with the
    /// cgroupfs driver and `...-pod<uid with underscores>.slice` with systemd's (kubelet
    /// `cgroup_manager_linux.go`); the folder in it is the container's.
    pub fn parse(text: &str) -> Self {
        let container = |line: &str| {
            let mut parts = line.splitn(3, ':').nth(2)?.split('/');
            let pod = parts.find_map(pod)?;
            let cgroup = parts.next().filter(|part| !part.is_empty())?.to_owned();
            Some(Self::Container { pod, cgroup })
        };
        text.lines().find_map(container).unwrap_or(Self::Host)
    }
}

/// The pod that a cgroup folder is named after.
fn pod(folder: &str) -> Option<PodUid> {
    if let Some(uid) = folder.strip_prefix("pod") {
        return uid.parse().ok();
    }
    let (_, uid) = folder.strip_suffix(".slice")?.rsplit_once("-pod")?;
    uid.replace('_', "-").parse().ok()
}

/// The capabilities that a process and what it executes may ever have (`CapBnd` in `/proc/<pid>/status`).
pub fn bounding_capabilities(status: &str) -> Option<u64> {
    let set = status
        .lines()
        .find_map(|line| line.strip_prefix("CapBnd:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

/// The first value of a variable in `/proc/<pid>/environ`.
pub fn variable<'a>(environ: &'a [u8], name: &str) -> Option<std::borrow::Cow<'a, str>> {
    environ.split(|byte| *byte == 0).find_map(|entry| {
        let value = entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        Some(String::from_utf8_lossy(value))
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::symlink;
    use std::os::unix::process::CommandExt as _;
    use std::process::{Child, Command};

    use super::*;

    /// A process whose name is no UTF-8, and the folder of its program.
    pub(crate) fn nameless() -> (Child, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(OsStr::from_bytes(b"\xff\xfe"));
        symlink("/bin/sleep", &program).unwrap();
        let child = Command::new(program).arg0("sleep").arg("60").spawn();
        (child.unwrap(), folder)
    }

    /// Of a process with one thread.
    pub(crate) fn stat(start: u64, ended: bool) -> Stat {
        Stat {
            parent: 1,
            exiting: ended,
            threads: 1,
            forked: false,
            start,
            size: 0,
            stack: 0,
        }
    }

    const UID: &str = "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11";

    #[test]
    fn a_process_name_with_parentheses_moves_no_field() {
        let fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        let stat = Stat::parse(&format!("7 (a) R 1 (b) {}", fields.join(" ")));
        let expected = Stat {
            parent: 4,
            // 9 are the flags.
            exiting: false,
            threads: 20,
            forked: false,
            start: 22,
            size: 23,
            stack: 28,
        };
        assert_eq!(stat, Some(expected));
        assert_eq!(Stat::parse("7 (a"), None);
        assert_eq!(Stat::parse("7 (a) R 1 2"), None);
    }

    #[test]
    fn who_was_forked_and_has_executed_nothing_is_told_from_who_has() {
        let mut shell = Command::new("sh");
        // A subshell is forked; it executes nothing but what it waits for.
        shell.args(["-c", "(sleep 2; :) & echo $!; wait"]);
        let mut shell = shell.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        let mut lines = io::BufReader::new(shell.stdout.take().unwrap());
        io::BufRead::read_line(&mut lines, &mut said).unwrap();
        let stat = |pid: &str| {
            let text = read(Path::new(&format!("/proc/{pid}/stat"))).unwrap();
            Stat::parse(&text).unwrap()
        };
        assert!(stat(said.trim()).forked);
        assert!(!stat(&shell.id().to_string()).forked);
        shell.wait().unwrap();
    }

    #[test]
    fn this_process_can_be_read() {
        let text = std::fs::read_to_string("/proc/self/stat").unwrap();
        let stat = Stat::parse(&text).unwrap();
        assert!(stat.size > 1 << 20);
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        let age = uptime - stat.started().as_secs_f64();
        assert!((-0.1..3_600.0).contains(&age), "{age}");
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        assert!(bounding_capabilities(&status).is_some());
    }

    #[test]
    fn a_pods_container_is_found_with_both_cgroup_drivers_and_versions() {
        let container = |cgroup: &str| Owner::Container {
            pod: UID.parse().unwrap(),
            cgroup: cgroup.to_owned(),
        };
        let v2 = format!("0::/kubepods/besteffort/pod{UID}/c0ffee\n");
        assert_eq!(Owner::parse(&v2), container("c0ffee"));
        let systemd = "0::/kubepods.slice/kubepods-burstable.slice/\
            kubepods-burstable-pod8b2e3f0a_1f5c_4c41_9d53_0a5f4f7a9d11.slice/cri-containerd-c0ffee.scope\n";
        assert_eq!(
            Owner::parse(systemd),
            container("cri-containerd-c0ffee.scope")
        );
        let hybrid = format!("12:memory:/kubepods/pod{UID}/c0ffee/inner\n0::/\n");
        assert_eq!(Owner::parse(&hybrid), container("c0ffee"));
        let namespaced = format!("0::/../../pod{UID}/c0ffee\n");
        assert_eq!(Owner::parse(&namespaced), container("c0ffee"));
    }

    #[test]
    fn what_is_in_no_pods_container_is_the_hosts() {
        for cgroup in [
            "",
            "garbage",
            "0::/",
            "0::/system.slice/podman.service",
            "0::/podruntime.slice/kubelet.service",
            "0::/machine.slice/libpod-0123.scope",
            "0::/kubepods/pod8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11",
        ] {
            assert_eq!(Owner::parse(cgroup), Owner::Host, "{cgroup}");
        }
    }

    #[test]
    fn a_variable_is_found_by_its_whole_name() {
        let environ = b"XNVIDIA=1\0NVIDIA=all\0NVIDIA=void\0";
        assert_eq!(variable(environ, "NVIDIA").as_deref(), Some("all"));
        assert_eq!(variable(environ, "NVIDI"), None);
    }
}
