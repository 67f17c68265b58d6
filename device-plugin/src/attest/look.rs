//! Reads `/proc` of the containers that have GPUs, as little of it as shows a change.
//!
//! Nothing here follows a path in a container's own file systems, which a tenant may have made to hang; the one
//! folder that is read there, `/dev`, is read only where the mount table says that it is the kernel's.
//!
//! What a process has mapped is read again when the size of its address space, its image or its start changed, and
//! after [`REREAD`] in any case. A container's mounts are read each time: nothing shows that they changed.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::maps;
use super::mounts::{Location, Mounts};
use super::verdict::{self, Expected, Installed, Lack, Uses};
use crate::cdi::CdiDir;
use crate::config::{Config, DriverConfig, PathsConfig};
use crate::pods::{container_folders, processes_in};
use crate::proc::{self, Stat, bounding_capabilities, variable};
use crate::units::{AllocationId, PodUid};

/// How old what is known of an unchanged process may become.
const REREAD: Duration = Duration::from_secs(10);

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
    /// Its processes, and whether each has the shim mapped.
    pub processes: BTreeMap<u32, bool>,
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
    /// What it lacks that does not change while its first process does not.
    lack: Option<Lack>,
    /// Whether that could be told in full.
    settled: bool,
    at: Instant,
}

/// What was read of a process.
#[derive(Debug)]
struct Seen {
    stat: Stat,
    uses: Uses,
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
}

impl Around {
    /// As it is now.
    pub fn read(paths: &PathsConfig) -> Self {
        let own = paths.proc.join("self");
        let mounts = proc::read(&own.join("mountinfo")).unwrap_or_default();
        let mounts = Mounts::parse(&mounts);
        Self {
            now: Instant::now(),
            uptime: uptime(),
            installed: installed(&paths.state_dir.join("shim"), &mounts),
            namespace: std::fs::read_link(own.join("ns/user")).ok(),
            own: mounts,
        }
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
        }
    }

    /// The running containers of ours in the pod.
    pub fn look(&mut self, Target { pod, cgroup }: &Target, around: &Around) -> Vec<Attested> {
        let (mut found, mut folders, mut alive) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        for folder in container_folders(cgroup) {
            let processes = self.stats(&folder);
            alive.extend(processes.iter().map(|(pid, _)| *pid));
            folders.insert(folder.clone());
            found.extend(self.container(pod, &folder, &processes, around));
        }
        self.containers.retain(|folder, _| folders.contains(folder));
        self.processes.retain(|pid, _| alive.contains(pid));
        let ours: BTreeSet<_> = found.iter().map(|attested| attested.allocation).collect();
        self.given.retain(|allocation, _| ours.contains(allocation));
        found
    }

    /// The processes of a cgroup, the oldest first.
    fn stats(&self, folder: &Path) -> Vec<(u32, Stat)> {
        let pids = processes_in(folder).into_iter();
        let mut stats: Vec<_> = pids
            .filter_map(|pid| Some((pid, Stat::parse(&self.text(pid, "stat")?)?)))
            .collect();
        stats.sort_unstable_by_key(|(pid, stat)| (stat.start, *pid));
        stats
    }

    fn container(
        &mut self,
        pod: &PodUid,
        folder: &Path,
        processes: &[(u32, Stat)],
        around: &Around,
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
        let (unchanged, mut allocation) = (
            unchanged.map(|known| known.lack.clone()),
            known.and_then(|known| known.allocation),
        );
        let mounts = Mounts::parse(&self.text(first, "mountinfo")?);
        // A process that ends has none any more.
        mounts.locate(Path::new("/"))?;
        // Once known for ours it stays so, also where it hides the mount that told it.
        allocation = allocation.or_else(|| self.identify(&mounts, &around.own));
        let given = allocation.and_then(|allocation| self.given(allocation, &around.own));
        let made = verdict::is_made(stat.forked, around.uptime.saturating_sub(stat.started()));
        let judged = given.as_ref().filter(|_| made);
        let fixed = match unchanged {
            Some(lack) => lack,
            None => {
                let lack = judged.and_then(|given| self.fixed_lack(first, &mounts, given, around));
                let container = Container {
                    first: (first, stat),
                    allocation,
                    lack: lack.clone(),
                    settled: made,
                    at: around.now,
                };
                self.containers.insert(folder.to_owned(), container);
                lack
            }
        };
        let of_mounts = judged.and_then(|given| verdict::of_mounts(&given.mounts, &mounts));
        let allocation = given.and(allocation)?;
        let (mut shims, mut uses) = (BTreeMap::new(), None);
        let namespace = self.link(first, "ns/mnt");
        for &(pid, stat) in processes {
            if let Some(seen) = self.process(pid, stat, (&namespace, &mounts), around) {
                shims.insert(pid, seen.shim);
                uses = uses.or_else(|| seen.lack.clone());
            }
        }
        Some(Attested {
            allocation,
            pod: pod.clone(),
            cgroup: name(folder),
            lack: fixed.or(of_mounts).or(uses),
            processes: shims,
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
            let of_admin = |extra: &crate::cdi::HostMount| {
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

    /// What a container lacks that does not change while its first process does not.
    fn fixed_lack(
        &self,
        first: u32,
        mounts: &Mounts,
        given: &Given,
        around: &Around,
    ) -> Option<Lack> {
        let bounding = bounding_capabilities(&self.text(first, "status")?)?;
        let namespace = self.link(first, "ns/user");
        let over_the_host = namespace.is_some() && namespace == around.namespace;
        verdict::of_rights(bounding, over_the_host).or_else(|| {
            let environ = std::fs::read(self.path(first, "environ")).unwrap_or_default();
            let visible = variable(&environ, "NVIDIA_VISIBLE_DEVICES");
            verdict::of_nodes(&given.nodes, &self.nodes(first, mounts), visible.as_deref())
        })
    }

    /// The names in a container's `/dev`.
    fn nodes(&self, pid: u32, mounts: &Mounts) -> Vec<String> {
        let of_the_kernel = |kind: &str| matches!(kind, "tmpfs" | "devtmpfs");
        let dev = mounts.locate(Path::new("/dev"));
        if !dev.is_some_and(|(mount, _)| of_the_kernel(&mount.kind)) {
            return Vec::new();
        }
        let entries = std::fs::read_dir(self.path(pid, "root/dev"));
        let entries = entries.into_iter().flatten().flatten();
        entries.map(|entry| name(&entry.path())).collect()
    }

    /// What a process does with the driver. `first` is the mount namespace of its container's first process.
    fn process(
        &mut self,
        pid: u32,
        stat: Stat,
        first: (&Option<PathBuf>, &Mounts),
        around: &Around,
    ) -> Option<&Uses> {
        let fresh = |seen: &Seen| seen.stat == stat && around.now.duration_since(seen.at) < REREAD;
        if !self.processes.get(&pid).is_some_and(fresh) {
            let uses = self.uses(pid, first, around)?;
            let at = around.now;
            self.processes.insert(pid, Seen { stat, uses, at });
        }
        self.processes.get(&pid).map(|seen| &seen.uses)
    }

    fn uses(&self, pid: u32, first: (&Option<PathBuf>, &Mounts), around: &Around) -> Option<Uses> {
        let files = maps::files(&self.text(pid, "maps")?);
        if files.is_empty() {
            return Some(Uses::default());
        }
        let installed = around.installed.as_ref()?;
        let (namespace, mounts) = first;
        if self.link(pid, "ns/mnt") == *namespace {
            return Some(verdict::of_process(&files, mounts, installed));
        }
        let mounts = Mounts::parse(&self.text(pid, "mountinfo")?);
        Some(verdict::of_process(&files, &mounts, installed))
    }

    fn path(&self, pid: impl std::fmt::Display, file: &str) -> PathBuf {
        self.paths.proc.join(pid.to_string()).join(file)
    }

    /// None where the process is gone.
    fn text(&self, pid: impl std::fmt::Display, file: &str) -> Option<String> {
        proc::read(&self.path(pid, file)).ok()
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
