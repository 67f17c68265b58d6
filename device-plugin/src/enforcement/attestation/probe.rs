//! Reads `/proc` of the containers that have GPUs, as little of it as shows a change.
//!
//! Nothing here follows a path in a container's own file systems, which a tenant may have made to hang; the one
//! folder that is read there, `/dev`, is read only where the mount table says that it is the kernel's.
//!
//! What a process has mapped is read again when the size of its address space, its image or its start changed, and
//! after [`REREAD`] in any case. A container's mounts are read each time: nothing shows that they changed.
//!
//! A tenant shapes all of it, so nothing is read without a bound: what is too large makes its container one that is not
//! attested. One look at a pod reads [`PER_LOOK`] of memory maps, and the next one those that waited longest.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tracing::warn;

use super::device_access::{self, openable};
use super::evaluate::{self, Expected, Installed, Lack, Uses};
use super::maps::{self, Files};
use super::mounts::{Location, Mounts};
use crate::config::{Config, DriverConfig, PathsConfig};
use crate::node::cdi::CdiDir;
use crate::node::pod_cgroups::{MOST_PROCESSES, container_folders, processes_in};
use crate::procfs::{self, Bounds, Stat, bounding_capabilities};
use crate::units::{AllocationId, PodUid};

/// How old what is known of an unchanged process may become.
const REREAD: Duration = Duration::from_secs(10);

/// The largest memory map that is read: as many mappings as a process may have (`vm.max_map_count`), and four times that.
const MAPS: Bounds = Bounds {
    bytes: 16 << 20,
    lines: 1 << 18,
};
/// The largest mount table of a container that is read.
const MOUNTS: Bounds = Bounds {
    bytes: 4 << 20,
    lines: 4_096,
};
/// The agent's own has every pod's mounts.
const OWN_MOUNTS: Bounds = Bounds {
    bytes: 256 << 20,
    lines: 1 << 20,
};
/// Of how many bytes of memory maps one look at a pod reads, but for the last process's.
const PER_LOOK: u64 = MAPS.bytes;
/// How long a process may wait to be read before its container counts as not attested.
const OVERDUE: Duration = Duration::from_secs(60);
/// The most names in a container's `/dev`.
const MOST_NODES: usize = 16_384;

/// The agent's own program, also where its file was replaced.
const PROGRAM: &str = "/proc/self/exe";

/// Where the allocation's own folder is mounted, however the image's `/run` is linked.
const RUN_POINTS: [&str; 2] = ["/run/bursar", "/var/run/bursar"];

/// A pod with containers of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The pod.
    pub pod: PodUid,
    /// Its cgroup's folder.
    pub cgroup: PathBuf,
}

/// A container of ours that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attested {
    /// What it was given.
    pub allocation: AllocationId,
    /// Its pod.
    pub pod: PodUid,
    /// The name of its cgroup.
    pub cgroup: String,
    /// Why it is not held to its quota; none where it is.
    pub lack: Option<Lack>,
    /// Its processes.
    pub processes: BTreeMap<u32, Running>,
}

/// A process of a container of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// When it started, in clock ticks since boot.
    pub start: u64,
    /// Whether it has executed no program since it was forked.
    pub forked: bool,
    /// Whether it has the shim mapped.
    pub shim: bool,
    /// Where it has device nodes of the driver mapped.
    pub devices: BTreeSet<u64>,
}

/// Looks at the containers of a pod; keeps what it read.
#[derive(Debug)]
pub struct Attestor {
    paths: PathsConfig,
    driver: DriverConfig,
    cdi: CdiDir,
    /// What each allocation's CDI file gave.
    given: BTreeMap<AllocationId, Given>,
    /// The containers by their cgroup's folder.
    containers: BTreeMap<PathBuf, Container>,
    processes: BTreeMap<u32, Seen>,
    /// The processes that have changed and were not read since, each with since when.
    waiting: BTreeMap<u32, Instant>,
}

/// What an allocation's container was given.
#[derive(Clone, Debug)]
struct Given {
    mounts: Vec<Expected>,
    nodes: BTreeSet<String>,
}

/// A container by its first process.
#[derive(Debug)]
struct Container {
    first: (u32, Stat),
    /// None where it is none of ours.
    allocation: Option<AllocationId>,
    /// What its first process's rights come to.
    rights: Rights,
    /// Whether that could be told in full.
    settled: bool,
    at: Instant,
}

/// What does not change of a container while its first process does not.
#[derive(Clone, Debug, Default)]
struct Rights {
    lack: Option<Lack>,
    /// Counts where it lacks nothing else.
    least: Option<Lack>,
    asked: Option<Asked>,
}

/// What a container was asked, and what it may open.
#[derive(Clone, Debug)]
struct Asked {
    others: BTreeMap<String, PathBuf>,
    /// The GPUs' nodes in its `/dev`.
    seen: BTreeSet<String>,
    /// None where there was no answer.
    openable: Option<BTreeSet<String>>,
    /// Since when there was none.
    silent: Option<Instant>,
}

/// What was read of a process.
#[derive(Debug)]
struct Seen {
    stat: Stat,
    /// None where it was too large to be read.
    uses: Option<Uses>,
    at: Instant,
}

/// What looks at pods at the same time have in common.
#[derive(Debug)]
pub struct Around {
    now: Instant,
    uptime: Duration,
    own: Mounts,
    installed: Option<Installed>,
    namespace: Option<PathBuf>,
    /// The device nodes of the node's GPUs, each with its device's number.
    gpus: BTreeMap<String, (u64, PathBuf)>,
}

impl Around {
    /// As it is now.
    pub fn read(paths: &PathsConfig, driver: &DriverConfig) -> Self {
        let own = paths.proc.join("self");
        let mut mounts = Mounts::default();
        let table = own.join("mountinfo");
        if let Err(error) = procfs::lines(&table, OWN_MOUNTS, |line| mounts.see(line)) {
            warn!(%error, "own mounts not read to their end");
        }
        Self {
            now: Instant::now(),
            uptime: uptime(),
            installed: installed(&paths.state_dir.join("shim"), &mounts),
            namespace: std::fs::read_link(own.join("ns/user")).ok(),
            own: mounts,
            gpus: gpus(&driver.dev_root),
        }
    }

    /// The nodes of GPUs that are none of those `given`, by another name neither.
    fn others(&self, given: &BTreeSet<String>) -> BTreeMap<String, PathBuf> {
        let numbers = given.iter().filter_map(|name| self.gpus.get(name));
        let numbers: BTreeSet<u64> = numbers.map(|(number, _)| *number).collect();
        let others = self.gpus.iter();
        let others = others
            .filter(|(name, (number, _))| !given.contains(*name) && !numbers.contains(number));
        others
            .map(|(name, (_, path))| (name.clone(), path.clone()))
            .collect()
    }
}

impl Attestor {
    /// Has seen nothing yet.
    pub fn new(config: &Config) -> Self {
        Self {
            paths: config.paths.clone(),
            driver: config.driver.clone(),
            cdi: CdiDir::new(config.paths.cdi_dir.clone()),
            given: BTreeMap::new(),
            containers: BTreeMap::new(),
            processes: BTreeMap::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// The running containers of ours in the pod.
    pub fn look(&mut self, Target { pod, cgroup }: &Target, around: &Around) -> Vec<Attested> {
        let (mut found, mut folders, mut alive) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        let mut room = PER_LOOK;
        for folder in container_folders(cgroup) {
            let (processes, all) = self.stats(&folder);
            alive.extend(processes.iter().map(|(pid, _)| *pid));
            folders.insert(folder.clone());
            let mut attested = self.container(pod, &folder, &processes, around, &mut room);
            if let Some(attested) = attested.as_mut().filter(|_| !all) {
                let why = format!("it has more than {MOST_PROCESSES} processes");
                attested.lack.get_or_insert(Lack::not_attested(why));
            }
            found.extend(attested);
        }
        self.containers.retain(|folder, _| folders.contains(folder));
        self.processes.retain(|pid, _| alive.contains(pid));
        self.waiting.retain(|pid, _| alive.contains(pid));
        let ours: BTreeSet<_> = found.iter().map(|attested| attested.allocation).collect();
        self.given.retain(|allocation, _| ours.contains(allocation));
        found
    }

    /// The processes of a cgroup, the oldest first, and whether they are all.
    fn stats(&self, folder: &Path) -> (Vec<(u32, Stat)>, bool) {
        let (pids, all) = processes_in(folder);
        let stat = |pid: u32| Stat::parse(&self.text(pid, "stat").ok()?);
        let mut stats: Vec<_> = pids
            .into_iter()
            .filter_map(|pid| Some((pid, stat(pid)?)))
            .collect();
        stats.sort_unstable_by_key(|(pid, stat)| (stat.start, *pid));
        (stats, all)
    }

    fn container(
        &mut self,
        pod: &PodUid,
        folder: &Path,
        processes: &[(u32, Stat)],
        around: &Around,
        room: &mut u64,
    ) -> Option<Attested> {
        let &(first, stat) = processes.first()?;
        let known = self.containers.get(folder);
        let known =
            known.filter(|known| (known.first.0, known.first.1.start) == (first, stat.start));
        let unchanged = known.filter(|known| {
            known.settled
                && known.first.1.stack == stat.stack
                && around.now.duration_since(known.at) < REREAD
        });
        if unchanged.is_some_and(|known| known.allocation.is_none()) {
            return None;
        }
        let (unchanged, mut allocation, asked) = (
            unchanged.map(|known| known.rights.clone()),
            known.and_then(|known| known.allocation),
            known.and_then(|known| known.rights.asked.clone()),
        );
        let mut mounts = Mounts::default();
        let table = self.path(first, "mountinfo");
        let read = procfs::lines(&table, MOUNTS, |line| mounts.see(line));
        let too_many = match read {
            Err(error) if error.kind() != ErrorKind::FileTooLarge => return None,
            // The runtime's mounts are the first of them: enough to tell whose container it is.
            read => read.is_err(),
        };
        // A process that ends has none any more.
        mounts.locate(Path::new("/"))?;
        // Once known for ours it stays so, also where it hides the mount that told it.
        allocation = allocation.or_else(|| self.identify(&mounts, &around.own));
        let given = allocation.and_then(|allocation| self.given(allocation, &around.own));
        let made = evaluate::is_made(stat.forked, around.uptime.saturating_sub(stat.started()));
        let judged = given.as_ref().filter(|_| made);
        let rights = match unchanged {
            Some(rights) => rights,
            None => {
                let judge =
                    |given| self.rights(folder, (first, stat), &mounts, given, asked, around);
                let rights = judged.map(judge).unwrap_or_default();
                let container = Container {
                    first: (first, stat),
                    allocation,
                    rights: rights.clone(),
                    settled: made,
                    at: around.now,
                };
                self.containers.insert(folder.to_owned(), container);
                rights
            }
        };
        let of_mounts = match too_many {
            true => judged.map(|_| Lack::not_attested("it has too many mounts to be read")),
            false => judged.and_then(|given| evaluate::of_mounts(&given.mounts, &mounts)),
        };
        let allocation = given.and(allocation)?;
        let namespace = self.link(first, "ns/mnt");
        let (running, uses) = self.uses_of(processes, (&namespace, &mounts), around, room);
        let Rights { lack, least, .. } = rights;
        Some(Attested {
            allocation,
            pod: pod.clone(),
            cgroup: name(folder),
            lack: lack.or(of_mounts).or(uses).or(least),
            processes: running,
        })
    }

    /// The allocation whose folder a container has.
    fn identify(&self, mounts: &Mounts, own: &Mounts) -> Option<AllocationId> {
        let folder = self.paths.run_dir.join("alloc").canonicalize().ok()?;
        let (_, alloc) = own.locate(&folder)?;
        mounts
            .iter()
            .filter(|mount| {
                RUN_POINTS
                    .iter()
                    .any(|point| mount.point == Path::new(point))
            })
            .filter(|mount| mount.source.device == alloc.device)
            .find_map(|mount| {
                let id = mount.source.path.strip_prefix(&alloc.path).ok()?;
                id.to_str()?.parse().ok()
            })
    }

    /// What the container of an allocation was given, by its CDI file; none where it cannot be read.
    fn given(&mut self, allocation: AllocationId, own: &Mounts) -> Option<Given> {
        if let Some(given) = self.given.get(&allocation) {
            return Some(given.clone());
        }
        let edits = self.cdi.edits(&allocation)?;
        let mounts = edits.mounts.iter().filter_map(|mount| {
            let of_admin = |extra: &crate::node::cdi::HostMount| {
                (&extra.host_path, &extra.container_path)
                    == (&mount.host_path, &mount.container_path)
            };
            if self.driver.extra_mounts.iter().any(of_admin) {
                return None;
            }
            let (_, source) = own.locate(&self.here(&mount.host_path).canonicalize().ok()?)?;
            let point = mount.container_path.clone();
            Some(Expected { point, source })
        });
        let nodes = edits.device_nodes.iter();
        let given = Given {
            mounts: mounts.collect(),
            nodes: nodes.map(|node| name(&node.path)).collect(),
        };
        self.given.insert(allocation, given.clone());
        Some(given)
    }

    /// A path of the host as the agent sees it.
    fn here(&self, host_path: &Path) -> PathBuf {
        let PathsConfig {
            state_dir, run_dir, ..
        } = &self.paths;
        if host_path.starts_with(state_dir) || host_path.starts_with(run_dir) {
            return host_path.to_owned();
        }
        match host_path.strip_prefix(&self.driver.host_root) {
            Ok(inside) => self.driver.root.join(inside),
            Err(_) => host_path.to_owned(),
        }
    }

    /// What a container's first process, and so all of its, may do.
    fn rights(
        &self,
        folder: &Path,
        first: (u32, Stat),
        mounts: &Mounts,
        given: &Given,
        before: Option<Asked>,
        around: &Around,
    ) -> Rights {
        let asked = before.clone();
        let of = |lack: Lack| Rights {
            lack: Some(lack),
            asked,
            ..Rights::default()
        };
        let (pid, _) = first;
        let bounding = match self.text(pid, "status") {
            Ok(status) => bounding_capabilities(&status),
            Err(error) if error.kind() == ErrorKind::FileTooLarge => {
                return of(Lack::not_attested(
                    "its first process belongs to too many groups",
                ));
            }
            Err(_) => None,
        };
        // It is gone.
        let Some(bounding) = bounding else {
            return Rights::default();
        };
        let namespace = self.link(pid, "ns/user");
        let over_the_host = namespace.is_some() && namespace == around.namespace;
        if let Some(lack) = evaluate::of_rights(bounding, over_the_host) {
            return of(lack);
        }
        let Some(seen) = self.nodes(pid, mounts) else {
            return of(Lack::not_attested("its /dev has too many names to be read"));
        };
        let (mut lack, mut asked) = (None, before);
        let others = around.others(&given.nodes);
        let asks = evaluate::is_asked(&given.nodes, &seen, bounding, over_the_host);
        if asks && !others.is_empty() {
            let now = self.ask(folder, (others, seen), asked, around);
            lack = match &now {
                Asked {
                    openable: Some(openable),
                    ..
                } => evaluate::of_nodes(openable),
                // A container that just ended does not answer either.
                Asked { silent, .. } => silent
                    .filter(|since| around.now.duration_since(*since) >= REREAD)
                    .map(|_| Lack::not_attested("it keeps its cgroup from being asked for GPUs")),
            };
            asked = Some(now);
        }
        Rights {
            lack,
            least: evaluate::of_scheduling(bounding, over_the_host),
            asked,
        }
    }

    /// Which of `others` a container may open, where `seen` are the GPUs in its `/dev`: asked once, and when either
    /// changes.
    fn ask(
        &self,
        folder: &Path,
        (others, seen): (BTreeMap<String, PathBuf>, BTreeSet<String>),
        before: Option<Asked>,
        around: &Around,
    ) -> Asked {
        let same = |before: &Asked| (&before.others, &before.seen) == (&others, &seen);
        let answered = |before: &Asked| before.openable.is_some();
        if let Some(before) = before.as_ref().filter(|it| same(it) && answered(it)) {
            return before.clone();
        }
        let asked = device_access::Asked {
            proc: &self.paths.proc,
            root: &self.paths.cgroup_root,
            container: folder,
        };
        let openable = openable(Path::new(PROGRAM), asked, &others);
        let openable = openable.inspect_err(|error| warn!(%error, ?folder, "not asked for GPUs"));
        let openable = openable.ok();
        let silent = before.and_then(|before| before.silent);
        Asked {
            others,
            seen,
            silent: openable.is_none().then(|| silent.unwrap_or(around.now)),
            openable,
        }
    }

    /// The names of GPUs in a container's `/dev`; none where there are too many names.
    fn nodes(&self, pid: u32, mounts: &Mounts) -> Option<BTreeSet<String>> {
        let of_the_kernel = |kind: &str| matches!(kind, "tmpfs" | "devtmpfs");
        let dev = mounts.locate(Path::new("/dev"));
        if !dev.is_some_and(|(mount, _)| of_the_kernel(&mount.kind)) {
            return Some(BTreeSet::new());
        }
        let entries = std::fs::read_dir(self.path(pid, "root/dev"));
        let (mut count, mut found) = (0, BTreeSet::new());
        for entry in entries.into_iter().flatten().flatten() {
            count += 1;
            let name = name(&entry.path());
            if evaluate::is_gpu(&name) {
                found.insert(name);
            }
            if count > MOST_NODES {
                return None;
            }
        }
        Some(found)
    }

    /// What each process of a container does, as far as that is known, and the first lack that one of them is. `first` is the mount namespace of its first process.
    fn uses_of(
        &mut self,
        processes: &[(u32, Stat)],
        first: (&Option<PathBuf>, &Mounts),
        around: &Around,
        room: &mut u64,
    ) -> (BTreeMap<u32, Running>, Option<Lack>) {
        let mut due = Vec::new();
        for &(pid, stat) in processes {
            if self.is_due((pid, stat), around.now) {
                self.waiting.entry(pid).or_insert(around.now);
                due.push((pid, stat));
            } else {
                self.waiting.remove(&pid);
            }
        }
        due.sort_by_key(|(pid, _)| self.waiting.get(pid).copied());
        for (pid, stat) in due {
            if *room == 0 {
                break;
            }
            self.waiting.remove(&pid);
            let (uses, read) = match self.uses(pid, first, around) {
                Ok(Some((uses, read))) => (Some(uses), read),
                Ok(None) => continue,
                Err(error) if error.kind() == ErrorKind::FileTooLarge => (None, MAPS.bytes),
                Err(_) => {
                    self.processes.remove(&pid);
                    continue;
                }
            };
            *room = room.saturating_sub(read);
            let at = around.now;
            self.processes.insert(pid, Seen { stat, uses, at });
        }
        let (mut running, mut lack) = (BTreeMap::new(), None);
        for (pid, stat) in processes {
            let waits = self.waiting.get(pid);
            if waits.is_some_and(|since| around.now.duration_since(*since) >= OVERDUE) {
                let why = "its processes have more mapped than can be read";
                lack = lack.or_else(|| Some(Lack::not_attested(why)));
            }
            let seen = self.processes.get(pid);
            let Some(seen) = seen.filter(|seen| seen.stat.start == stat.start) else {
                continue;
            };
            match &seen.uses {
                Some(uses) => {
                    let process = Running {
                        start: stat.start,
                        forked: stat.forked,
                        shim: uses.shim,
                        devices: uses.devices.clone(),
                    };
                    running.insert(*pid, process);
                    lack = lack.or_else(|| uses.lack.clone());
                }
                None => {
                    let why = "a process has more mapped than can be read";
                    lack = lack.or_else(|| Some(Lack::not_attested(why)));
                }
            }
        }
        (running, lack)
    }

    /// Whether a process has to be read again. What was too large is left alone for a while, whatever it does.
    fn is_due(&self, (pid, stat): (u32, Stat), now: Instant) -> bool {
        let fresh = |seen: &Seen| {
            let same = match seen.uses {
                Some(_) => seen.stat == stat,
                None => seen.stat.start == stat.start,
            };
            same && now.duration_since(seen.at) < REREAD
        };
        !self.processes.get(&pid).is_some_and(fresh)
    }

    /// What a process does with the driver, and how many bytes were read for that; none where the shim is not installed.
    fn uses(
        &self,
        pid: u32,
        first: (&Option<PathBuf>, &Mounts),
        around: &Around,
    ) -> io::Result<Option<(Uses, u64)>> {
        let mut files = Files::default();
        let mut devices = BTreeSet::new();
        let read = procfs::lines(&self.path(pid, "maps"), MAPS, |line| {
            files.see(line);
            maps::see_device(line, &mut devices);
        })?;
        let files = files.all().ok_or(ErrorKind::FileTooLarge)?;
        let of_process = |mounts: &Mounts, installed: &Installed| Uses {
            devices: devices.clone(),
            ..evaluate::of_process(files, mounts, installed)
        };
        if files.is_empty() {
            return Ok(Some((Uses::default(), read)));
        }
        let Some(installed) = around.installed.as_ref() else {
            return Ok(None);
        };
        let (namespace, mounts) = first;
        if self.link(pid, "ns/mnt") == *namespace {
            return Ok(Some((of_process(mounts, installed), read)));
        }
        let mut own = Mounts::default();
        let table = self.path(pid, "mountinfo");
        let more = procfs::lines(&table, MOUNTS, |line| own.see(line))?;
        Ok(Some((of_process(&own, installed), read + more)))
    }

    fn path(&self, pid: impl std::fmt::Display, file: &str) -> PathBuf {
        self.paths.proc.join(pid.to_string()).join(file)
    }

    fn text(&self, pid: impl std::fmt::Display, file: &str) -> io::Result<String> {
        procfs::read(&self.path(pid, file))
    }

    fn link(&self, pid: impl std::fmt::Display, file: &str) -> Option<PathBuf> {
        std::fs::read_link(self.path(pid, file)).ok()
    }
}

/// How long the machine has been up, sleep included: what processes' starts are told by.
fn uptime() -> Duration {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(clock).unwrap_or_default()
}

/// The device nodes of GPUs in a folder, each with its device's number.
fn gpus(dev: &Path) -> BTreeMap<String, (u64, PathBuf)> {
    let entries = std::fs::read_dir(dev).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let gpu = |path: PathBuf| {
        let name = Some(name(&path)).filter(|name| evaluate::is_gpu(name))?;
        let node = path.symlink_metadata().ok()?;
        let is_device = node.file_type().is_char_device();
        is_device.then(|| (name, (node.rdev(), path)))
    };
    paths.filter_map(gpu).collect()
}

/// The shim's files in the folder of builds; none before there is one.
fn installed(builds: &Path, own: &Mounts) -> Option<Installed> {
    let folder = builds.canonicalize().ok()?;
    let (_, location) = own.locate(&folder)?;
    let list = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = list(&folder).flat_map(|build| list(&build.path()));
    let number = |file: std::fs::DirEntry| {
        let inside = file.path().strip_prefix(&folder).ok()?.to_owned();
        Some((inside, file.path().symlink_metadata().ok()?.ino()))
    };
    Some(Installed {
        builds: Location { ..location },
        files: files.filter_map(number).collect(),
    })
}

fn name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::enforcement::attestation::Reason;
    use crate::procfs::tests::stat;

    /// An attestor over a `/proc` of plain files, in which each of these processes has one page mapped.
    fn attestor(pids: &[u32]) -> (Attestor, tempfile::TempDir) {
        let proc = tempfile::tempdir().unwrap();
        for pid in pids {
            let folder = proc.path().join(pid.to_string());
            std::fs::create_dir(&folder).unwrap();
            let line = "7f0000000000-7f0000001000 r--p 00000000 00:00 0 /lib/a\n";
            std::fs::write(folder.join("maps"), line).unwrap();
        }
        let config = Config::parse(Path::new("agent.toml"), "").unwrap();
        let mut attestor = Attestor::new(&config);
        attestor.paths.proc = proc.path().to_owned();
        (attestor, proc)
    }

    fn around() -> Around {
        Around {
            now: Instant::now(),
            uptime: Duration::ZERO,
            own: Mounts::default(),
            installed: None,
            namespace: None,
            gpus: BTreeMap::new(),
        }
    }

    /// What a look with so much room to read tells of these processes, and why they are not attested.
    fn look(
        attestor: &mut Attestor,
        pids: &[u32],
        now: Instant,
        mut room: u64,
    ) -> (Vec<u32>, Option<Reason>) {
        let around = Around { now, ..around() };
        let stats: Vec<_> = pids.iter().map(|pid| (*pid, stat(1, false))).collect();
        let first = (&None, &Mounts::default());
        let (running, lack) = attestor.uses_of(&stats, first, &around, &mut room);
        let read = running.into_keys().collect();
        (read, lack.map(|lack| lack.reason))
    }

    #[test]
    fn container_is_not_attested_when_a_process_waits_for_60_s() {
        let (mut attestor, _proc) = attestor(&[1, 2]);
        let (begun, pids) = (Instant::now(), [1, 2]);
        let minute = Duration::from_secs(60);
        let mut look = |after, room| look(&mut attestor, &pids, begun + after, room);
        assert_eq!(look(Duration::ZERO, 0), (vec![], None));
        assert_eq!(look(minute - Duration::from_millis(1), 0), (vec![], None));
        // One of them is read, and the other still waits.
        let (read, reason) = look(minute, 1);
        assert_eq!((read.len(), reason), (1, Some(Reason::NotAttested)));
        assert_eq!(look(minute, PER_LOOK), (vec![1, 2], None));
    }

    #[test]
    fn process_that_waited_longest_is_read_first() {
        let (mut attestor, _proc) = attestor(&[1, 2]);
        let begun = Instant::now();
        let later = begun + Duration::from_secs(1);
        assert_eq!(look(&mut attestor, &[2], begun, 0), (vec![], None));
        assert_eq!(look(&mut attestor, &[1, 2], later, 1), (vec![2], None));
    }
}
