//! Reads what `/proc` tells of a process, and never more of it than a bound: tenants shape most of it.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, ErrorKind, Read as _};
use std::path::Path;
use std::time::Duration;

use crate::units::PodUid;

/// The most that is read of a file that is small in every honest process: `stat`, `status`, `cgroup`.
const SMALL: u64 = 64 << 10;

/// The longest line that is read: a path of `PATH_MAX` bytes, each of them escaped, and what stands before it.
const LONGEST_LINE: usize = 32 << 10;

/// A small file of `/proc` as text. A process chooses its name, which may be any bytes: who has no name in UTF-8 must not
/// be who is not there.
///
/// # Errors
/// What the system answers; [`ErrorKind::FileTooLarge`] beyond 64 KiB.
pub fn read(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    let length = File::open(path)?.take(SMALL + 1).read_to_end(&mut bytes)?;
    if length as u64 > SMALL {
        return Err(ErrorKind::FileTooLarge.into());
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// How much is read of a file that grows with what a process does: `maps`, `mountinfo`.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// In all.
    pub bytes: u64,
    /// How many.
    pub lines: usize,
}

/// Passes the lines of a file to `see` one by one; how many bytes they were.
///
/// # Errors
/// What the system answers; [`ErrorKind::FileTooLarge`] beyond the bounds, after the lines within them.
pub fn lines(path: &Path, bounds: Bounds, mut see: impl FnMut(&str)) -> io::Result<u64> {
    let mut file = BufReader::with_capacity(64 << 10, File::open(path)?);
    let (mut read, mut line) = (0, Vec::new());
    for left in (0..=bounds.lines).rev() {
        line.clear();
        let most = LONGEST_LINE as u64 + 1;
        let length = file.by_ref().take(most).read_until(b'\n', &mut line)?;
        read += length as u64;
        if length == 0 {
            return Ok(read);
        }
        if left == 0 || length > LONGEST_LINE || read > bounds.bytes {
            break;
        }
        see(String::from_utf8_lossy(&line).trim_end_matches('\n'));
    }
    Err(ErrorKind::FileTooLarge.into())
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

    fn file(text: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn a_small_file_beyond_its_bound_is_too_large() {
        let whole = vec![b'a'; SMALL as usize];
        assert_eq!(read(file(&whole).path()).unwrap().len(), whole.len());
        let more = [whole, vec![b'a']].concat();
        let error = read(file(&more).path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
    }

    /// The lines that were seen, and whether that was all of the file.
    fn seen(text: &[u8], bytes: u64, count: usize) -> (Vec<String>, bool) {
        let mut seen = Vec::new();
        let bounds = Bounds {
            bytes,
            lines: count,
        };
        let all = lines(file(text).path(), bounds, |line| seen.push(line.to_owned()));
        match all {
            Ok(read) => assert_eq!(read, text.len() as u64),
            Err(ref error) => assert_eq!(error.kind(), ErrorKind::FileTooLarge),
        }
        (seen, all.is_ok())
    }

    #[test]
    fn lines_end_at_the_first_bound_that_they_pass() {
        let text = b"one\ntwo\n\xff";
        let all = ["one", "two", "\u{fffd}"].map(str::to_owned);
        assert_eq!(seen(text, 9, 3), (all.to_vec(), true));
        assert_eq!(seen(text, 8, 3), (all[..2].to_vec(), false));
        assert_eq!(seen(text, 9, 2), (all[..2].to_vec(), false));
        let long = [vec![b'a'; LONGEST_LINE + 1], b"\nb\n".to_vec()].concat();
        assert_eq!(seen(&long, u64::MAX, 9), (vec![], false));
    }

    /// The files that read others than those of tenants' processes, or with a bound of their own.
    const READERS: [&str; 15] = [
        "checkpoint.rs",
        "clock.rs",
        "config.rs",
        "enforcement/attestation/device_access.rs",
        "gpu/mig.rs",
        "kubelet/device_checkpoint.rs",
        "node/cdi/dir.rs",
        "node/pod_cgroups.rs",
        "node/shim_install.rs",
        "node/shim_install/symbols.rs",
        "procfs.rs",
        "retained/scrub_check.rs",
        "retained/tokens/key.rs",
        "sessions/checkpoint.rs",
        "sessions/context_size.rs",
    ];

    /// The sources below a folder, by their path in it, but for tests.
    fn sources(folder: &Path, into: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            match name.to_str().unwrap() {
                "tests" | "tests.rs" | "fixtures.rs" => {}
                _ if path.is_dir() => sources(&path, into),
                _ => into.push(path),
            }
        }
    }

    #[test]
    fn nothing_else_reads_files_without_being_listed_here() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut all = Vec::new();
        sources(&root, &mut all);
        assert!(all.len() > 50, "{}", all.len());
        for path in all {
            let name = path.strip_prefix(&root).unwrap().to_str().unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            let (code, _) = text
                .split_once("#[cfg(test)]\nmod tests")
                .unwrap_or((&text, ""));
            let (code, _) = code
                .split_once("#[cfg(test)]\npub(crate) mod tests")
                .unwrap_or((code, ""));
            let code = code.replace("procfs::", "");
            let reads = ["fs::read(", "read_to_string(", "File::open("];
            let reads = reads.iter().find(|call| code.contains(*call));
            assert!(
                reads.is_none() || READERS.contains(&name),
                "{name} calls {reads:?}: read a process's files by crate::procfs, or list it here"
            );
        }
    }
}
