//! Asks which device nodes a container may open: a process of the agent joins its cgroup and tries.
//!
//! The kernel checks device access (the devices controller of cgroup v1, BPF programs with v2) by
//! the cgroup of the opening process. access(2) does the same check as open(2) and does not reach
//! the driver (`inode_permission`, linux fs/namei.c).
//!
//! The process is in the tenant's cgroup while it tries. A tenant that freezes or kills its cgroup,
//! or uses up its memory, may prevent an answer. The agent never waits longer than [`LIMIT`].

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use bursar_host::pod_cgroups::visit_cgroups;
use rustix::fs::{Access, AtFlags, CWD, accessat, statfs};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The first argument with which the agent's program runs [`run_child`].
pub const SUBCOMMAND: &str = "may-open";

/// The timeout of an answer.
const LIMIT: Duration = Duration::from_secs(2);
/// How often the agent checks whether the process has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// `CGROUP_SUPER_MAGIC` and `CGROUP2_SUPER_MAGIC` (linux/magic.h).
const CGROUP_V1_MAGIC: u32 = 0x0027_e0eb;
const CGROUP_V2_MAGIC: u32 = 0x6367_7270;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceAccessError {
    /// The container is in no cgroup that decides about devices.
    #[error("{} is in no hierarchy of cgroups that decides about devices", .0.display())]
    NoCgroup(PathBuf),
    /// The process could not be started, or not be waited for.
    #[error("failed to start a process in the container's cgroup: {0}")]
    Start(#[from] io::Error),
    /// The process did not answer in time.
    #[error("no answer in {LIMIT:?}")]
    TimedOut,
    /// The process ended without an answer.
    #[error("the process in the container's cgroup ended with {0}")]
    Failed(ExitStatus),
}

/// The cgroup of a container, with the file systems through which it is reached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessQuery<'a> {
    /// The host's process file system.
    pub proc: &'a Path,
    /// The host's cgroup file system.
    pub cgroup_root: &'a Path,
    /// The container's cgroup, in any hierarchy.
    pub container_cgroup: &'a Path,
}

/// The names of the `nodes` that a process in the container's cgroup may open. `program` is the
/// agent's own.
///
/// # Errors
/// When the process cannot be started or gives no answer.
pub(crate) fn openable_nodes(
    program: &Path,
    query: AccessQuery<'_>,
    nodes: &BTreeMap<String, PathBuf>,
) -> Result<BTreeSet<String>, DeviceAccessError> {
    let folders = device_cgroups(query.cgroup_root, query.container_cgroup, fs_magic);
    if folders.is_empty() {
        return Err(DeviceAccessError::NoCgroup(
            query.container_cgroup.to_owned(),
        ));
    }
    let mut child = Command::new(program)
        .args([SUBCOMMAND.as_ref(), query.proc.as_os_str()])
        .arg(folders.len().to_string())
        .args(&folders)
        .args(nodes.values())
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let ended = wait_until(&mut child, Instant::now() + LIMIT);
    if !matches!(ended, Ok(Some(_))) {
        // SIGKILL ends a frozen process too.
        child.kill()?;
        child.wait()?;
    }
    let status = ended?.ok_or(DeviceAccessError::TimedOut)?;
    let mut answer = Vec::new();
    let output = child.stdout.take();
    let most = nodes.len() as u64 + 1;
    output.map_or(Ok(0), |output| output.take(most).read_to_end(&mut answer))?;
    if !status.success() || answer.len() != nodes.len() {
        return Err(DeviceAccessError::Failed(status));
    }
    let openable = nodes.keys().zip(answer).filter(|(_, digit)| *digit == b'1');
    Ok(openable.map(|(name, _)| name.clone()).collect())
}

fn wait_until(child: &mut Child, until: Instant) -> io::Result<Option<ExitStatus>> {
    loop {
        let ended = child.try_wait()?;
        if ended.is_some() || Instant::now() >= until {
            return Ok(ended);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The container's cgroups that decide about devices: in the devices controller of v1, and in v2.
/// `magic` returns a folder's file system type.
fn device_cgroups(
    root: &Path,
    container: &Path,
    magic: impl Fn(&Path) -> Option<u32>,
) -> BTreeSet<PathBuf> {
    let has_magic = |folder: &Path, kind: u32| magic(folder) == Some(kind);
    let mut folders = BTreeSet::new();
    if has_magic(container, CGROUP_V2_MAGIC) {
        folders.insert(container.to_owned());
    }
    // With v1 the first folder names the hierarchy, and the rest of the path is the same in each.
    let inside = container.strip_prefix(root).unwrap_or(container);
    let rest: PathBuf = inside.components().skip(1).collect();
    let others = [("devices", CGROUP_V1_MAGIC), ("unified", CGROUP_V2_MAGIC)];
    let others = others.map(|(hierarchy, kind)| (root.join(hierarchy).join(&rest), kind));
    let existing = others
        .into_iter()
        .filter(|(folder, kind)| has_magic(folder, *kind));
    folders.extend(existing.map(|(folder, _)| folder));
    folders
}

fn fs_magic(folder: &Path) -> Option<u32> {
    statfs(folder).ok().map(|stat| stat.f_type as u32)
}

/// Joins the cgroups and prints a digit for each node.
pub fn run_child(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let answer = check_nodes(arguments).and_then(|answer| io::stdout().write_all(&answer).ok());
    answer.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
}

fn check_nodes(mut arguments: impl Iterator<Item = OsString>) -> Option<Vec<u8>> {
    let proc = PathBuf::from(arguments.next()?);
    let folders: usize = arguments.next()?.to_str()?.parse().ok()?;
    // In a cgroup namespace of its own the agent could not join the cgroup (cgroups(7),
    // nsdelegate).
    if let Ok(host) = File::open(proc.join("1/ns/cgroup")) {
        let _ = move_into_link_name_space(host.as_fd(), Some(LinkNameSpaceType::ControlGroup));
    }
    for folder in arguments.by_ref().take(folders) {
        join_cgroup(Path::new(&folder)).then_some(())?;
    }
    arguments.map(|node| can_open(Path::new(&node))).collect()
}

/// Joins a cgroup, or the first one below it that accepts processes: a cgroup that distributes
/// resources to children accepts none.
fn join_cgroup(folder: &Path) -> bool {
    let mut joined = false;
    visit_cgroups(folder, |inside| {
        let procs = OpenOptions::new()
            .write(true)
            .open(inside.join("cgroup.procs"));
        // The kernel takes zero for the writing process.
        joined = procs.is_ok_and(|mut procs| procs.write_all(b"0").is_ok());
        joined
    });
    joined
}

/// None where the answer is neither yes nor no.
fn can_open(node: &Path) -> Option<u8> {
    match accessat(
        CWD,
        node,
        Access::READ_OK | Access::WRITE_OK,
        AtFlags::empty(),
    ) {
        Ok(()) => Some(b'1'),
        Err(Errno::PERM) => Some(b'0'),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_is_refused_when_folder_is_no_cgroup() {
        let root = tempfile::tempdir().unwrap();
        let container = root.path().join("devices/kubepods/pod1/main");
        std::fs::create_dir_all(&container).unwrap();
        std::fs::write(container.join("cgroup.procs"), "7\n").unwrap();
        let query = AccessQuery {
            proc: Path::new("/proc"),
            cgroup_root: root.path(),
            container_cgroup: &container,
        };
        let nodes = BTreeMap::from([("nvidia1".to_owned(), PathBuf::from("/dev/null"))]);
        let error = openable_nodes(Path::new("/bin/true"), query, &nodes).unwrap_err();
        assert!(matches!(error, DeviceAccessError::NoCgroup(_)), "{error}");
        let list = std::fs::read_to_string(container.join("cgroup.procs")).unwrap();
        assert_eq!(list, "7\n");
    }

    /// The container's cgroups on a node whose hierarchies are mounted at these folders.
    fn device_cgroups_on(mounts: &[(&str, u32)], container: &str) -> Vec<String> {
        let magic = |folder: &Path| {
            let mount = mounts.iter().find(|(mount, _)| folder.starts_with(mount));
            mount.map(|(_, kind)| *kind)
        };
        let found = device_cgroups(Path::new("/cgroup"), Path::new(container), magic);
        let names = found.iter().map(|folder| folder.display().to_string());
        names.collect()
    }

    #[test]
    fn container_of_v2_alone_has_one_cgroup() {
        let container = "/cgroup/kubepods.slice/pod1/main";
        let node = [("/cgroup/kubepods.slice", CGROUP_V2_MAGIC)];
        assert_eq!(device_cgroups_on(&node, container), [container]);
    }

    #[test]
    fn container_has_a_cgroup_of_devices_and_one_of_v2_beside_v1() {
        let hybrid = [
            ("/cgroup/devices", CGROUP_V1_MAGIC),
            ("/cgroup/pids", CGROUP_V1_MAGIC),
            ("/cgroup/unified", CGROUP_V2_MAGIC),
        ];
        let both = [
            "/cgroup/devices/kubepods/pod1/main",
            "/cgroup/unified/kubepods/pod1/main",
        ];
        for hierarchy in ["devices", "pids", "unified"] {
            let container = format!("/cgroup/{hierarchy}/kubepods/pod1/main");
            assert_eq!(device_cgroups_on(&hybrid, &container), both, "{hierarchy}");
        }
        let [_, pids, unified] = hybrid;
        let container = "/cgroup/pids/kubepods/pod1/main";
        assert_eq!(device_cgroups_on(&[pids, unified], container), both[1..]);
        assert!(device_cgroups_on(&[pids], container).is_empty());
    }

    #[test]
    fn first_cgroup_inside_that_takes_processes_is_joined() {
        let root = tempfile::tempdir().unwrap();
        let (divided, leaf) = (root.path().join("main"), root.path().join("main/leaf"));
        // A v2 cgroup with children accepts no process; in this fixture the file is missing
        // instead.
        std::fs::create_dir_all(&leaf).unwrap();
        assert!(!join_cgroup(&divided));
        std::fs::write(leaf.join("cgroup.procs"), "").unwrap();
        assert!(join_cgroup(&divided));
        assert_eq!(
            std::fs::read_to_string(leaf.join("cgroup.procs")).unwrap(),
            "0"
        );
    }

    #[test]
    fn wait_ends_when_the_child_does_not_answer() {
        let sleeps = Command::new("sleep").arg("60").spawn();
        let mut child = sleeps.unwrap();
        let started = Instant::now();
        let ended = wait_until(&mut child, started + Duration::from_millis(20)).unwrap();
        assert!(ended.is_none() && started.elapsed() < Duration::from_secs(20));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn can_open_is_unknown_when_the_node_is_missing() {
        assert_eq!(can_open(Path::new("/dev/null")), Some(b'1'));
        assert_eq!(can_open(Path::new("/dev/nothing-of-this-name")), None);
    }
}
