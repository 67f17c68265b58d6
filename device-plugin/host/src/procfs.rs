//! Reads files of `/proc` with bounds: tenant processes shape most of their content.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, ErrorKind, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_ledger::units::PodUid;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The most bytes to read of `stat`, `status` and `cgroup`, which are small for honest processes.
const MAX_SMALL_FILE: u64 = 64 << 10;

/// The longest line to read: an escaped path of `PATH_MAX` bytes and the fields before it.
const MAX_LINE: usize = 32 << 10;

/// Reads a small file of `/proc` as text.
///
/// The name of a process may be any bytes. Invalid UTF-8 is replaced, so that no name hides a
/// process.
///
/// # Errors
/// The operating system's error; [`ErrorKind::FileTooLarge`] beyond 64 KiB.
pub fn read_small(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    let length = File::open(path)?
        .take(MAX_SMALL_FILE + 1)
        .read_to_end(&mut bytes)?;
    if length as u64 > MAX_SMALL_FILE {
        return Err(ErrorKind::FileTooLarge.into());
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Pins the process `pid`, so that a signal reaches no later process of this number. The caller
/// checks that it is the process which it means.
///
/// # Errors
/// When the process has ended, or is not called `program`.
pub fn pin_named(pid: Pid, program: &str) -> io::Result<OwnedFd> {
    let pinned = pidfd_open(pid, PidfdFlags::empty())?;
    let name = read_small(Path::new(&format!("/proc/{pid}/comm")))?;
    match name.trim_end() {
        name if name == program => Ok(pinned),
        name => Err(io::Error::other(format!("{name} is not {program}"))),
    }
}

/// Bounds for files that grow with a process's actions: `maps` and `mountinfo`.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The most bytes in all.
    pub bytes: u64,
    /// The most lines.
    pub lines: usize,
}

/// Passes the lines of a file to `visit` and returns the number of bytes read.
///
/// # Errors
/// The operating system's error; [`ErrorKind::FileTooLarge`] beyond the bounds, after the lines
/// within them.
pub fn for_each_line(path: &Path, bounds: Bounds, mut visit: impl FnMut(&str)) -> io::Result<u64> {
    let mut file = BufReader::with_capacity(64 << 10, File::open(path)?);
    let (mut read, mut line) = (0, Vec::new());
    for left in (0..=bounds.lines).rev() {
        line.clear();
        let most = MAX_LINE as u64 + 1;
        let length = file.by_ref().take(most).read_until(b'\n', &mut line)?;
        read += length as u64;
        if length == 0 {
            return Ok(read);
        }
        if left == 0 || length > MAX_LINE || read > bounds.bytes {
            break;
        }
        visit(String::from_utf8_lossy(&line).trim_end_matches('\n'));
    }
    Err(ErrorKind::FileTooLarge.into())
}

/// The fields of `/proc/<pid>/stat` (proc(5)) that the agent uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The pid of the parent process.
    pub parent: u32,
    /// Whether the first thread has exited or is exiting (`PF_EXITING`, linux/sched.h).
    pub(crate) exiting: bool,
    /// The number of threads, an exited thread group leader included.
    pub(crate) threads: u32,
    /// Whether the process has executed no program since its fork (`PF_FORKNOEXEC`, linux/sched.h).
    ///
    /// A process never regains this flag.
    pub forked: bool,
    /// The start time in clock ticks since boot, which tells the process from a later one with its
    /// pid.
    pub start_ticks: u64,
    /// The bytes of the address space. Every mapping of a file changes this number.
    pub size: u64,
    /// The address of the stack's beginning: the loader randomizes it at each exec.
    pub stack: u64,
}

const PF_FORKNOEXEC: u64 = 0x40;
const PF_EXITING: u64 = 0x4;

impl Stat {
    /// Reads the file of a process below `proc`; `None` where there is no such process.
    pub fn read(proc: &Path, pid: u32) -> Option<Self> {
        Self::parse(&read_small(&proc.join(pid.to_string()).join("stat")).ok()?)
    }

    /// Parses the file's text; `None` where the text is malformed.
    pub fn parse(text: &str) -> Option<Self> {
        // The second field, the name, may contain anything: the others follow its last parenthesis.
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
            exiting: flags & PF_EXITING != 0,
            threads,
            forked: flags & PF_FORKNOEXEC != 0,
            start_ticks: start,
            size,
            stack,
        })
    }

    /// Whether every thread has exited; the process may still be a zombie.
    pub fn has_exited(&self) -> bool {
        self.exiting && self.threads <= 1
    }

    /// Whether the thread group leader has exited or is exiting.
    pub fn is_ending(&self) -> bool {
        self.exiting
    }

    /// Whether the thread group leader has exited while other threads run.
    pub fn has_zombie_leader(&self) -> bool {
        self.exiting && self.threads > 1
    }

    /// The time from boot to the start of the process.
    pub fn start_time(&self) -> Duration {
        // The kernel shows ticks of 10 ms on every machine (`USER_HZ`).
        Duration::from_millis(self.start_ticks.saturating_mul(10))
    }
}

/// The pids of the processes below `proc`.
pub fn pids(proc: &Path) -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir(proc).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The folder below `proc` with the files of a process that lives: of another thread where the
/// first one has ended, because the kernel shows no memory, mounts or cgroup of an ended one. None
/// where no thread lives.
pub fn living_folder(proc: &Path, pid: u32, stat: &Stat) -> Option<PathBuf> {
    let folder = proc.join(pid.to_string());
    if !stat.has_zombie_leader() {
        return (!stat.has_exited()).then_some(folder);
    }
    let first = pid.to_string();
    let mut threads = std::fs::read_dir(folder.join("task")).ok()?.flatten();
    Some(threads.find(|thread| *thread.file_name() != *first)?.path())
}

/// The current time in clock ticks since boot, the unit of process start times.
pub fn now_ticks() -> u64 {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let since_boot = Duration::try_from(clock).unwrap_or_default();
    u64::try_from(since_boot.as_millis() / 10).unwrap_or(u64::MAX)
}

/// The owner of a process by its cgroup, whose path no tenant can choose.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProcessOwner {
    /// A container of a pod.
    Container {
        /// The pod.
        pod: PodUid,
        /// The name of the container's cgroup.
        cgroup: String,
    },
    /// The host: the cgroup belongs to no pod.
    Host,
    /// The host, by a program that the configuration allows to use GPUs.
    AllowedHost,
}

impl ProcessOwner {
    /// Parses `/proc/<pid>/cgroup`, whose lines are `<hierarchy>:<controllers>:<path>`.
    ///
    /// A pod's directory is `pod<uid>` with the cgroupfs driver, and `...-pod<uid with
    /// underscores>.slice` with systemd's (kubelet `cgroup_manager_linux.go`). The directory below
    /// is the container's.
    pub fn parse(text: &str) -> Self {
        let container = |line: &str| {
            let mut parts = line.splitn(3, ':').nth(2)?.split('/');
            let pod = parts.find_map(parse_pod_dir)?;
            let cgroup = parts.next().filter(|part| !part.is_empty())?.to_owned();
            Some(Self::Container { pod, cgroup })
        };
        text.lines().find_map(container).unwrap_or(Self::Host)
    }
}

/// The bytes of a program's name in `/proc/<pid>/comm` (`TASK_COMM_LEN` of linux/sched.h).
const COMM_BYTES: usize = 15;

/// Whether one of the programs has the name in `/proc/<pid>/comm`, which the kernel cuts.
pub fn is_named(comm: &str, programs: &BTreeSet<String>) -> bool {
    let comm = comm.trim_end_matches('\n');
    let name_length = |program: &str| program.floor_char_boundary(COMM_BYTES);
    !comm.is_empty()
        && programs
            .iter()
            .any(|program| program[..name_length(program)] == *comm)
}

/// The pod of a cgroup directory.
fn parse_pod_dir(folder: &str) -> Option<PodUid> {
    if let Some(uid) = folder.strip_prefix("pod") {
        return uid.parse().ok();
    }
    let (_, uid) = folder.strip_suffix(".slice")?.rsplit_once("-pod")?;
    uid.replace('_', "-").parse().ok()
}

/// The bounding set of capabilities (`CapBnd` in `/proc/<pid>/status`).
pub fn bounding_capabilities(status: &str) -> Option<u64> {
    let set = status
        .lines()
        .find_map(|line| line.strip_prefix("CapBnd:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const UID: &str = "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11";

    #[test]
    fn stat_is_parsed_with_parentheses_in_the_name() {
        let fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        let stat = Stat::parse(&format!("7 (a) R 1 (b) {}", fields.join(" ")));
        let expected = Stat {
            parent: 4,
            // Field 9 has the flags.
            exiting: false,
            threads: 20,
            forked: false,
            start_ticks: 22,
            size: 23,
            stack: 28,
        };
        assert_eq!(stat, Some(expected));
        assert_eq!(Stat::parse("7 (a"), None);
        assert_eq!(Stat::parse("7 (a) R 1 2"), None);
    }

    #[test]
    fn stat_tells_forked_from_executed_processes() {
        let mut shell = Command::new("sh");
        // The subshell is forked and executes no program itself.
        shell.args(["-c", "(sleep 2; :) & echo $!; wait"]);
        let mut shell = shell.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut pid_line = String::new();
        let mut lines = io::BufReader::new(shell.stdout.take().unwrap());
        io::BufRead::read_line(&mut lines, &mut pid_line).unwrap();
        let stat = |pid: &str| {
            let text = read_small(Path::new(&format!("/proc/{pid}/stat"))).unwrap();
            Stat::parse(&text).unwrap()
        };
        assert!(stat(pid_line.trim()).forked);
        assert!(!stat(&shell.id().to_string()).forked);
        shell.wait().unwrap();
    }

    #[test]
    fn own_process_can_be_read() {
        let text = std::fs::read_to_string("/proc/self/stat").unwrap();
        let stat = Stat::parse(&text).unwrap();
        assert!(stat.size > 1 << 20);
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        let age = uptime - stat.start_time().as_secs_f64();
        assert!((-0.1..3_600.0).contains(&age), "{age}");
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        assert!(bounding_capabilities(&status).is_some());
    }

    #[test]
    fn container_is_found_with_every_cgroup_driver_and_version() {
        let container = |cgroup: &str| ProcessOwner::Container {
            pod: UID.parse().unwrap(),
            cgroup: cgroup.to_owned(),
        };
        let v2 = format!("0::/kubepods/besteffort/pod{UID}/c0ffee\n");
        assert_eq!(ProcessOwner::parse(&v2), container("c0ffee"));
        let systemd = "0::/kubepods.slice/kubepods-burstable.slice/\
            kubepods-burstable-pod8b2e3f0a_1f5c_4c41_9d53_0a5f4f7a9d11.slice/cri-containerd-c0ffee.scope\n";
        assert_eq!(
            ProcessOwner::parse(systemd),
            container("cri-containerd-c0ffee.scope")
        );
        let hybrid = format!("12:memory:/kubepods/pod{UID}/c0ffee/inner\n0::/\n");
        assert_eq!(ProcessOwner::parse(&hybrid), container("c0ffee"));
        let namespaced = format!("0::/../../pod{UID}/c0ffee\n");
        assert_eq!(ProcessOwner::parse(&namespaced), container("c0ffee"));
    }

    #[test]
    fn process_outside_of_pods_belongs_to_the_host() {
        for cgroup in [
            "",
            "garbage",
            "0::/",
            "0::/system.slice/podman.service",
            "0::/podruntime.slice/kubelet.service",
            "0::/machine.slice/libpod-0123.scope",
            "0::/kubepods/pod8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11",
        ] {
            assert_eq!(ProcessOwner::parse(cgroup), ProcessOwner::Host, "{cgroup}");
        }
    }

    fn file(text: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn small_file_beyond_its_bound_is_too_large() {
        let whole = vec![b'a'; MAX_SMALL_FILE as usize];
        assert_eq!(read_small(file(&whole).path()).unwrap().len(), whole.len());
        let more = [whole, vec![b'a']].concat();
        let error = read_small(file(&more).path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
    }

    /// The lines within the bounds, and whether these are all lines of the file.
    fn read_lines(text: &[u8], bytes: u64, count: usize) -> (Vec<String>, bool) {
        let mut lines = Vec::new();
        let bounds = Bounds {
            bytes,
            lines: count,
        };
        let all = for_each_line(file(text).path(), bounds, |line| {
            lines.push(line.to_owned())
        });
        match all {
            Ok(read) => assert_eq!(read, text.len() as u64),
            Err(ref error) => assert_eq!(error.kind(), ErrorKind::FileTooLarge),
        }
        (lines, all.is_ok())
    }

    #[test]
    fn lines_end_at_the_first_bound() {
        let text = b"one\ntwo\n\xff";
        let all = ["one", "two", "\u{fffd}"].map(str::to_owned);
        assert_eq!(read_lines(text, 9, 3), (all.to_vec(), true));
        assert_eq!(read_lines(text, 8, 3), (all[..2].to_vec(), false));
        assert_eq!(read_lines(text, 9, 2), (all[..2].to_vec(), false));
        let long = [vec![b'a'; MAX_LINE + 1], b"\nb\n".to_vec()].concat();
        assert_eq!(read_lines(&long, u64::MAX, 9), (vec![], false));
    }

    /// The agent's crates below `device-plugin/`.
    const CRATES: [&str; 12] = [
        ".",
        "apiserver",
        "config",
        "enforcement",
        "gpu",
        "gpu-node",
        "host",
        "kubelet",
        "node",
        "retained",
        "sessions",
        "supervision",
    ];

    /// The source files that may read files directly: not of tenants' processes, or with bounds of
    /// their own.
    const READERS: [&str; 16] = [
        "config/src/lib.rs",
        "enforcement/src/attestation/device_access.rs",
        "gpu/src/mig.rs",
        "host/src/checkpoint.rs",
        "host/src/clock.rs",
        "host/src/driver_files.rs",
        "host/src/pod_cgroups.rs",
        "host/src/procfs.rs",
        "kubelet/src/device_checkpoint.rs",
        "node/src/cdi/dir.rs",
        "node/src/shim_install.rs",
        "node/src/shim_install/symbols.rs",
        "retained/src/tokens/key.rs",
        "sessions/src/checkpoint.rs",
        "sessions/src/context_size.rs",
        "sessions/src/peer.rs",
    ];

    /// Collects the source files below a directory, without tests.
    fn sources(folder: &Path, into: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            match name.to_str().unwrap() {
                "tests" | "tests.rs" | "testing.rs" | "fixtures.rs" => {}
                _ if path.is_dir() => sources(&path, into),
                _ => into.push(path),
            }
        }
    }

    #[test]
    fn only_listed_files_read_files_directly() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut all = Vec::new();
        for name in CRATES {
            sources(&root.join(name).join("src"), &mut all);
        }
        assert!(all.len() > 50, "{}", all.len());
        for path in all {
            let name = path.strip_prefix(root).unwrap().to_str().unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            let (code, _) = text
                .split_once("#[cfg(test)]\nmod tests")
                .unwrap_or((&text, ""));
            let (code, _) = code
                .split_once("#[cfg(test)]\npub(crate) mod tests")
                .unwrap_or((code, ""));
            let reads = [
                "fs::read(",
                "read_to_string(",
                "File::open(",
                "fs::metadata(",
            ];
            let begins = |at: usize| !code[..at].ends_with(char::is_alphanumeric);
            let calls = |call: &&&str| code.match_indices(**call).any(|(at, _)| begins(at));
            let reads = reads.iter().find(calls);
            assert!(
                reads.is_none() || READERS.contains(&name),
                "{name} calls {reads:?}: read a process's files by bursar_host::procfs, or list it here"
            );
        }
    }
}
