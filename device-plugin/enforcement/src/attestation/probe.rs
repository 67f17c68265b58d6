//! Reads `/proc` of the containers that have GPUs, and rereads only what may have changed.
//!
//! The agent follows no path in a container's own file systems, since a tenant may make them hang.
//! It reads one folder there, `/dev`, and only if the mount table shows a file system of the
//! kernel.
//!
//! The agent rereads a process's memory map when the process's size, image or start time has
//! changed, and after [`MAX_AGE`] in any case. It rereads the mounts each time, since nothing
//! indicates a change.
//!
//! Tenants control the size of these files, so each read has a bound. A container whose files are
//! too large counts as not attested. One probe of a pod reads [`MAPS_BYTES_PER_PROBE`] of memory
//! maps, and the next one starts with the processes that have waited longest.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bursar_config::{Config, DriverConfig, PathsConfig};
use bursar_host::pod_cgroups::{MAX_PROCESSES, container_cgroups, list_processes};
use bursar_host::procfs::{self, Bounds, Stat, bounding_capabilities};
use bursar_ledger::units::{AllocationId, PodUid};
use bursar_node::cdi::CdiDir;
use tracing::warn;

use super::device_access::{self, openable_nodes};
use super::evaluate::{self, DriverUse, EnforcementGap, ExpectedMount, InstalledShim};
use super::maps::{self, DriverFiles};
use super::mounts::{Location, MountTable};

/// The longest time before an unchanged process is read again.
const MAX_AGE: Duration = Duration::from_secs(10);

/// The largest memory map that is read: four times the mappings of `vm.max_map_count`.
const MAPS_BOUNDS: Bounds = Bounds {
    bytes: 16 << 20,
    lines: 1 << 18,
};
/// The largest mount table of a container that is read.
const MOUNTS_BOUNDS: Bounds = Bounds {
    bytes: 4 << 20,
    lines: 4_096,
};
/// The largest mount table of the agent, which has every pod's mounts.
const OWN_MOUNTS_BOUNDS: Bounds = Bounds {
    bytes: 256 << 20,
    lines: 1 << 20,
};
/// The bytes of memory maps that one probe of a pod reads; the last process may exceed them.
const MAPS_BYTES_PER_PROBE: u64 = MAPS_BOUNDS.bytes;
/// How long a process may wait to be read before its container counts as not attested.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// The most names in a container's `/dev`.
const MAX_DEV_NAMES: usize = 16_384;

/// The agent's own program, even after its file was replaced.
const SELF_EXE: &str = "/proc/self/exe";

/// The mount points of the allocation's own folder; the image may have a link at `/run`.
const RUN_DIR_MOUNT_POINTS: [&str; 2] = ["/run/bursar", "/var/run/bursar"];

/// A pod with containers that have GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttestationTarget {
    /// The pod's UID.
    pub pod: PodUid,
    /// The pod's cgroup.
    pub cgroup: PathBuf,
}

/// A running container with a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttestedContainer {
    /// The container's allocation.
    pub allocation: AllocationId,
    /// The container's pod.
    pub pod: PodUid,
    /// The name of the container's cgroup.
    pub cgroup: String,
    /// The gap in its enforcement; none where it has none.
    pub gap: Option<EnforcementGap>,
    /// The container's processes, by pid.
    pub processes: BTreeMap<u32, AttestedProcess>,
}

/// A process of a container with a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttestedProcess {
    /// The start time, in clock ticks since boot.
    pub start: u64,
    /// Whether the process has executed no program since it was forked.
    pub forked: bool,
    /// Whether the process has the shim mapped.
    pub has_shim: bool,
    /// The addresses at which the process has device nodes of the driver mapped.
    pub device_mappings: BTreeSet<u64>,
    /// The bytes of its mappings of managed memory, which no process can have more of.
    pub managed_mapped: u64,
}

/// Attests the containers of a pod, and caches what it has read.
#[derive(Debug)]
pub(crate) struct PodAttestor {
    paths: PathsConfig,
    driver: DriverConfig,
    cdi: CdiDir,
    /// The mounts and nodes in each allocation's CDI file.
    given: BTreeMap<AllocationId, ContainerGrant>,
    /// The containers by their cgroup.
    containers: BTreeMap<PathBuf, ContainerRecord>,
    processes: BTreeMap<u32, ProcessRecord>,
    /// The processes that have changed and were not reread, each with the time of the change.
    waiting_since: BTreeMap<u32, Instant>,
}

/// The mounts and device nodes that an allocation's container was given.
#[derive(Clone, Debug)]
struct ContainerGrant {
    mounts: Vec<ExpectedMount>,
    nodes: BTreeSet<String>,
}

/// A container, identified by its first process.
#[derive(Debug)]
struct ContainerRecord {
    first_process: (u32, Stat),
    /// None for a container without a GPU.
    allocation: Option<AllocationId>,
    /// The rights of its first process.
    rights: RightsRecord,
    /// Whether the record needs no second read: its runtime has set the container up.
    is_final: bool,
    read_at: Instant,
}

/// The result that changes only with a container's first process.
#[derive(Clone, Debug, Default)]
struct RightsRecord {
    gap: Option<EnforcementGap>,
    /// The gap that is reported only if the container has no other.
    minor_gap: Option<EnforcementGap>,
    device_check: Option<DeviceCheck>,
}

/// The GPUs that a container was checked for, and those that it may open.
#[derive(Clone, Debug)]
struct DeviceCheck {
    other_gpus: BTreeMap<String, PathBuf>,
    /// The GPU nodes in the container's `/dev`.
    visible_gpus: BTreeSet<String>,
    /// None where the check gave no answer.
    openable: Option<BTreeSet<String>>,
    /// Since when the check gives no answer.
    unanswered_since: Option<Instant>,
}

/// What was read of a process.
#[derive(Debug)]
struct ProcessRecord {
    stat: Stat,
    /// None where the memory map was too large.
    driver_use: Option<DriverUse>,
    read_at: Instant,
}

/// The host's state, read once for all pods of an audit.
#[derive(Debug)]
pub struct HostView {
    now: Instant,
    uptime: Duration,
    own_mounts: MountTable,
    shim: Option<InstalledShim>,
    user_namespace: Option<PathBuf>,
    /// The device nodes of the node's GPUs, each with its device number.
    gpu_nodes: BTreeMap<String, (u64, PathBuf)>,
}

impl HostView {
    /// Reads the present state.
    pub fn read(paths: &PathsConfig, driver: &DriverConfig) -> Self {
        let own = paths.proc.join("self");
        let mut mounts = MountTable::default();
        let table = own.join("mountinfo");
        if let Err(error) =
            procfs::for_each_line(&table, OWN_MOUNTS_BOUNDS, |line| mounts.add_line(line))
        {
            warn!(%error, "failed to read the agent's mount table to its end");
        }
        Self {
            now: Instant::now(),
            uptime: uptime(),
            shim: installed_shim(&paths.state_dir.join("shim"), &mounts),
            user_namespace: std::fs::read_link(own.join("ns/user")).ok(),
            own_mounts: mounts,
            gpu_nodes: gpu_nodes_in(&driver.dev_root),
        }
    }

    /// The nodes of GPUs that are not `given`; other names of a given device are left out.
    fn other_gpu_nodes(&self, given: &BTreeSet<String>) -> BTreeMap<String, PathBuf> {
        let numbers = given.iter().filter_map(|name| self.gpu_nodes.get(name));
        let numbers: BTreeSet<u64> = numbers.map(|(number, _)| *number).collect();
        let other_gpus = self.gpu_nodes.iter();
        let other_gpus = other_gpus
            .filter(|(name, (number, _))| !given.contains(*name) && !numbers.contains(number));
        other_gpus
            .map(|(name, (_, path))| (name.clone(), path.clone()))
            .collect()
    }
}

impl PodAttestor {
    /// An attestor with an empty cache.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            paths: config.paths.clone(),
            driver: config.driver.clone(),
            cdi: CdiDir::new(config.paths.cdi_dir.clone()),
            given: BTreeMap::new(),
            containers: BTreeMap::new(),
            processes: BTreeMap::new(),
            waiting_since: BTreeMap::new(),
        }
    }

    /// Attests the running containers with GPUs in the pod.
    pub(crate) fn probe(
        &mut self,
        AttestationTarget { pod, cgroup }: &AttestationTarget,
        host: &HostView,
    ) -> Vec<AttestedContainer> {
        let (mut found, mut folders, mut alive) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        let mut room = MAPS_BYTES_PER_PROBE;
        for folder in container_cgroups(cgroup) {
            let (processes, all) = self.processes_of(&folder);
            alive.extend(processes.iter().map(|(pid, _)| *pid));
            folders.insert(folder.clone());
            let mut attested = self.attest_container(pod, &folder, &processes, host, &mut room);
            if let Some(attested) = attested.as_mut().filter(|_| !all) {
                let why = format!("it has more than {MAX_PROCESSES} processes");
                attested
                    .gap
                    .get_or_insert(EnforcementGap::not_attested(why));
            }
            found.extend(attested);
        }
        self.containers.retain(|folder, _| folders.contains(folder));
        self.processes.retain(|pid, _| alive.contains(pid));
        self.waiting_since.retain(|pid, _| alive.contains(pid));
        let ours: BTreeSet<_> = found.iter().map(|attested| attested.allocation).collect();
        self.given.retain(|allocation, _| ours.contains(allocation));
        found
    }

    /// The processes of a cgroup, the oldest first, and whether the list is complete.
    fn processes_of(&self, folder: &Path) -> (Vec<(u32, Stat)>, bool) {
        let (pids, all) = list_processes(folder);
        let stat = |pid: u32| Stat::parse(&self.read_text(pid, "stat").ok()?);
        let mut stats: Vec<_> = pids
            .into_iter()
            .filter_map(|pid| Some((pid, stat(pid)?)))
            .collect();
        stats.sort_unstable_by_key(|(pid, stat)| (stat.start_ticks, *pid));
        (stats, all)
    }

    fn attest_container(
        &mut self,
        pod: &PodUid,
        folder: &Path,
        processes: &[(u32, Stat)],
        host: &HostView,
        room: &mut u64,
    ) -> Option<AttestedContainer> {
        let &(first, stat) = processes.first()?;
        let known = self.containers.get(folder);
        let known = known.filter(|known| {
            (known.first_process.0, known.first_process.1.start_ticks) == (first, stat.start_ticks)
        });
        let unchanged = known.filter(|known| {
            known.is_final
                && known.first_process.1.stack == stat.stack
                && host.now.duration_since(known.read_at) < MAX_AGE
        });
        if unchanged.is_some_and(|known| known.allocation.is_none()) {
            return None;
        }
        let (unchanged, mut allocation, asked) = (
            unchanged.map(|known| known.rights.clone()),
            known.and_then(|known| known.allocation),
            known.and_then(|known| known.rights.device_check.clone()),
        );
        let mut mounts = MountTable::default();
        let table = self.proc_path(first, "mountinfo");
        let read = procfs::for_each_line(&table, MOUNTS_BOUNDS, |line| mounts.add_line(line));
        let too_many = match read {
            Err(error) if error.kind() != ErrorKind::FileTooLarge => return None,
            // The runtime's mounts come first, so a truncated table still identifies the container.
            read => read.is_err(),
        };
        // A process that is ending has no mounts.
        mounts.resolve(Path::new("/"))?;
        // A container that hides the identifying mount later keeps its allocation.
        allocation = allocation.or_else(|| self.allocation_of(&mounts, &host.own_mounts));
        let given = allocation.and_then(|allocation| self.grant_of(allocation, &host.own_mounts));
        let made = evaluate::is_set_up(stat.forked, host.uptime.saturating_sub(stat.start_time()));
        let judged = given.as_ref().filter(|_| made);
        let rights = match unchanged {
            Some(rights) => rights,
            None => {
                let judge =
                    |given| self.check_rights(folder, (first, stat), &mounts, given, asked, host);
                let rights = judged.map(judge).unwrap_or_default();
                let container = ContainerRecord {
                    first_process: (first, stat),
                    allocation,
                    rights: rights.clone(),
                    is_final: made,
                    read_at: host.now,
                };
                self.containers.insert(folder.to_owned(), container);
                rights
            }
        };
        let of_mounts = match too_many {
            true => {
                judged.map(|_| EnforcementGap::not_attested("it has too many mounts to be read"))
            }
            false => judged.and_then(|given| evaluate::check_mounts(&given.mounts, &mounts)),
        };
        let allocation = given.and(allocation)?;
        let namespace = self.read_link(first, "ns/mnt");
        let (running, uses) = self.probe_processes(processes, (&namespace, &mounts), host, room);
        let RightsRecord { gap, minor_gap, .. } = rights;
        Some(AttestedContainer {
            allocation,
            pod: pod.clone(),
            cgroup: file_name(folder),
            gap: gap.or(of_mounts).or(uses).or(minor_gap),
            processes: running,
        })
    }

    /// The allocation whose folder is mounted in a container.
    fn allocation_of(&self, mounts: &MountTable, own: &MountTable) -> Option<AllocationId> {
        let folder = self.paths.run_dir.join("alloc").canonicalize().ok()?;
        let (_, alloc) = own.resolve(&folder)?;
        mounts
            .iter()
            .filter(|mount| {
                RUN_DIR_MOUNT_POINTS
                    .iter()
                    .any(|point| mount.mount_point == Path::new(point))
            })
            .filter(|mount| mount.source.device == alloc.device)
            .find_map(|mount| {
                let id = mount.source.path.strip_prefix(&alloc.path).ok()?;
                id.to_str()?.parse().ok()
            })
    }

    /// The mounts and nodes in an allocation's CDI file; none where it cannot be read.
    fn grant_of(&mut self, allocation: AllocationId, own: &MountTable) -> Option<ContainerGrant> {
        if let Some(given) = self.given.get(&allocation) {
            return Some(given.clone());
        }
        let edits = self.cdi.read_edits(&allocation)?;
        let mounts = edits.mounts.iter().filter_map(|mount| {
            let of_admin = |extra: &bursar_config::HostMount| {
                (&extra.host_path, &extra.container_path)
                    == (&mount.host_path, &mount.container_path)
            };
            if self.driver.extra_mounts.iter().any(of_admin) {
                return None;
            }
            let (_, source) =
                own.resolve(&self.agent_path(&mount.host_path).canonicalize().ok()?)?;
            let point = mount.container_path.clone();
            Some(ExpectedMount {
                mount_point: point,
                source,
            })
        });
        let nodes = edits.device_nodes.iter();
        let given = ContainerGrant {
            mounts: mounts.collect(),
            nodes: nodes.map(|node| file_name(&node.path)).collect(),
        };
        self.given.insert(allocation, given.clone());
        Some(given)
    }

    /// The path at which the agent sees a path of the host.
    fn agent_path(&self, host_path: &Path) -> PathBuf {
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

    /// Checks the rights of a container's first process, which limit those of all its processes.
    fn check_rights(
        &self,
        folder: &Path,
        first: (u32, Stat),
        mounts: &MountTable,
        given: &ContainerGrant,
        before: Option<DeviceCheck>,
        host: &HostView,
    ) -> RightsRecord {
        let asked = before.clone();
        let of = |gap: EnforcementGap| RightsRecord {
            gap: Some(gap),
            device_check: asked,
            ..RightsRecord::default()
        };
        let (pid, _) = first;
        let bounding = match self.read_text(pid, "status") {
            Ok(status) => bounding_capabilities(&status),
            Err(error) if error.kind() == ErrorKind::FileTooLarge => {
                return of(EnforcementGap::not_attested(
                    "its first process belongs to too many groups",
                ));
            }
            Err(_) => None,
        };
        // The process has ended.
        let Some(bounding) = bounding else {
            return RightsRecord::default();
        };
        let namespace = self.read_link(pid, "ns/user");
        let over_the_host = namespace.is_some() && namespace == host.user_namespace;
        if let Some(gap) = evaluate::check_capabilities(bounding, over_the_host) {
            return of(gap);
        }
        let Some(seen) = self.visible_gpu_nodes(pid, mounts) else {
            return of(EnforcementGap::not_attested(
                "its /dev has too many names to be read",
            ));
        };
        let (mut gap, mut asked) = (None, before);
        let other_gpus = host.other_gpu_nodes(&given.nodes);
        let asks = evaluate::needs_device_check(&given.nodes, &seen, bounding, over_the_host);
        if asks && !other_gpus.is_empty() {
            let now = self.check_devices(folder, (other_gpus, seen), asked, host);
            gap = match &now {
                DeviceCheck {
                    openable: Some(openable),
                    ..
                } => evaluate::check_openable(openable),
                // A container that just ended gives no answer either.
                DeviceCheck {
                    unanswered_since: silent,
                    ..
                } => silent
                    .filter(|since| host.now.duration_since(*since) >= MAX_AGE)
                    .map(|_| {
                        EnforcementGap::not_attested(
                            "its cgroup prevents the check of device access",
                        )
                    }),
            };
            asked = Some(now);
        }
        RightsRecord {
            gap,
            minor_gap: evaluate::check_scheduling(bounding, over_the_host),
            device_check: asked,
        }
    }

    /// Checks which of `other_gpus` a container may open, where `seen` are the GPU nodes in its
    /// `/dev`. A result is reused until either changes.
    fn check_devices(
        &self,
        folder: &Path,
        (other_gpus, seen): (BTreeMap<String, PathBuf>, BTreeSet<String>),
        before: Option<DeviceCheck>,
        host: &HostView,
    ) -> DeviceCheck {
        let same = |before: &DeviceCheck| {
            (&before.other_gpus, &before.visible_gpus) == (&other_gpus, &seen)
        };
        let answered = |before: &DeviceCheck| before.openable.is_some();
        if let Some(before) = before.as_ref().filter(|it| same(it) && answered(it)) {
            return before.clone();
        }
        let asked = device_access::AccessQuery {
            proc: &self.paths.proc,
            cgroup_root: &self.paths.cgroup_root,
            container_cgroup: folder,
        };
        let openable = openable_nodes(Path::new(SELF_EXE), asked, &other_gpus);
        let openable =
            openable.inspect_err(|error| warn!(%error, ?folder, "failed to check device access"));
        let openable = openable.ok();
        let silent = before.and_then(|before| before.unanswered_since);
        DeviceCheck {
            other_gpus,
            visible_gpus: seen,
            unanswered_since: openable.is_none().then(|| silent.unwrap_or(host.now)),
            openable,
        }
    }

    /// The names of GPU nodes in a container's `/dev`; none where `/dev` has too many names.
    fn visible_gpu_nodes(&self, pid: u32, mounts: &MountTable) -> Option<BTreeSet<String>> {
        let of_the_kernel = |kind: &str| matches!(kind, "tmpfs" | "devtmpfs");
        let dev = mounts.resolve(Path::new("/dev"));
        if !dev.is_some_and(|(mount, _)| of_the_kernel(&mount.fs_type)) {
            return Some(BTreeSet::new());
        }
        let entries = std::fs::read_dir(self.proc_path(pid, "root/dev"));
        let (mut count, mut found) = (0, BTreeSet::new());
        for entry in entries.into_iter().flatten().flatten() {
            count += 1;
            let name = file_name(&entry.path());
            if evaluate::is_gpu_node(&name) {
                found.insert(name);
            }
            if count > MAX_DEV_NAMES {
                return None;
            }
        }
        Some(found)
    }

    /// Probes each process of a container, and returns the first gap. `first` is the mount
    /// namespace of the container's first process.
    fn probe_processes(
        &mut self,
        processes: &[(u32, Stat)],
        first: (&Option<PathBuf>, &MountTable),
        host: &HostView,
        room: &mut u64,
    ) -> (BTreeMap<u32, AttestedProcess>, Option<EnforcementGap>) {
        let mut due = Vec::new();
        for &(pid, stat) in processes {
            if self.needs_reading((pid, stat), host.now) {
                self.waiting_since.entry(pid).or_insert(host.now);
                due.push((pid, stat));
            } else {
                self.waiting_since.remove(&pid);
            }
        }
        due.sort_by_key(|(pid, _)| self.waiting_since.get(pid).copied());
        for (pid, stat) in due {
            if *room == 0 {
                break;
            }
            self.waiting_since.remove(&pid);
            let (uses, read) = match self.probe_process(pid, first, host) {
                Ok(Some((uses, read))) => (Some(uses), read),
                Ok(None) => continue,
                Err(error) if error.kind() == ErrorKind::FileTooLarge => (None, MAPS_BOUNDS.bytes),
                Err(_) => {
                    self.processes.remove(&pid);
                    continue;
                }
            };
            *room = room.saturating_sub(read);
            let at = host.now;
            self.processes.insert(
                pid,
                ProcessRecord {
                    stat,
                    driver_use: uses,
                    read_at: at,
                },
            );
        }
        let (mut running, mut gap) = (BTreeMap::new(), None);
        for (pid, stat) in processes {
            let waits = self.waiting_since.get(pid);
            if waits.is_some_and(|since| host.now.duration_since(*since) >= MAX_WAIT) {
                let why = "its processes have more mapped than can be read";
                gap = gap.or_else(|| Some(EnforcementGap::not_attested(why)));
            }
            let seen = self.processes.get(pid);
            let Some(seen) = seen.filter(|seen| seen.stat.start_ticks == stat.start_ticks) else {
                continue;
            };
            match &seen.driver_use {
                Some(uses) => {
                    let process = AttestedProcess {
                        start: stat.start_ticks,
                        forked: stat.forked,
                        has_shim: uses.has_shim,
                        device_mappings: uses.device_mappings.clone(),
                        managed_mapped: uses.managed_mapped,
                    };
                    running.insert(*pid, process);
                    gap = gap.or_else(|| uses.gap.clone());
                }
                None => {
                    let why = "a process has more mapped than can be read";
                    gap = gap.or_else(|| Some(EnforcementGap::not_attested(why)));
                }
            }
        }
        (running, gap)
    }

    /// Whether a process has to be reread. A process whose map was too large is reread after
    /// [`MAX_AGE`] alone.
    fn needs_reading(&self, (pid, stat): (u32, Stat), now: Instant) -> bool {
        let fresh = |seen: &ProcessRecord| {
            let same = match seen.driver_use {
                Some(_) => seen.stat == stat,
                None => seen.stat.start_ticks == stat.start_ticks,
            };
            same && now.duration_since(seen.read_at) < MAX_AGE
        };
        !self.processes.get(&pid).is_some_and(fresh)
    }

    /// How a process uses the driver, and how many bytes were read; none where the shim is not
    /// installed.
    fn probe_process(
        &self,
        pid: u32,
        first: (&Option<PathBuf>, &MountTable),
        host: &HostView,
    ) -> io::Result<Option<(DriverUse, u64)>> {
        let mut files = DriverFiles::default();
        let (mut devices, mut managed) = (BTreeSet::new(), 0_u64);
        let read = procfs::for_each_line(&self.proc_path(pid, "maps"), MAPS_BOUNDS, |line| {
            files.add_line(line);
            maps::add_device_mapping(line, &mut devices);
            managed = managed.saturating_add(maps::managed_bytes(line).unwrap_or_default());
        })?;
        let files = files.get().ok_or(ErrorKind::FileTooLarge)?;
        let of_process = |mounts: &MountTable, installed: &InstalledShim| DriverUse {
            device_mappings: devices.clone(),
            managed_mapped: managed,
            ..evaluate::check_process(files, mounts, installed)
        };
        if files.is_empty() {
            return Ok(Some((DriverUse::default(), read)));
        }
        let Some(installed) = host.shim.as_ref() else {
            return Ok(None);
        };
        let (namespace, mounts) = first;
        if self.read_link(pid, "ns/mnt") == *namespace {
            return Ok(Some((of_process(mounts, installed), read)));
        }
        let mut own = MountTable::default();
        let table = self.proc_path(pid, "mountinfo");
        let more = procfs::for_each_line(&table, MOUNTS_BOUNDS, |line| own.add_line(line))?;
        Ok(Some((of_process(&own, installed), read + more)))
    }

    fn proc_path(&self, pid: impl std::fmt::Display, file: &str) -> PathBuf {
        self.paths.proc.join(pid.to_string()).join(file)
    }

    fn read_text(&self, pid: impl std::fmt::Display, file: &str) -> io::Result<String> {
        procfs::read_small(&self.proc_path(pid, file))
    }

    fn read_link(&self, pid: impl std::fmt::Display, file: &str) -> Option<PathBuf> {
        std::fs::read_link(self.proc_path(pid, file)).ok()
    }
}

/// The time since boot, suspend included, like the start times of processes.
fn uptime() -> Duration {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(clock).unwrap_or_default()
}

/// The GPU nodes in a folder, each with its device number.
fn gpu_nodes_in(dev: &Path) -> BTreeMap<String, (u64, PathBuf)> {
    let entries = std::fs::read_dir(dev).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let gpu = |path: PathBuf| {
        let name = Some(file_name(&path)).filter(|name| evaluate::is_gpu_node(name))?;
        let node = path.symlink_metadata().ok()?;
        let is_device = node.file_type().is_char_device();
        is_device.then(|| (name, (node.rdev(), path)))
    };
    paths.filter_map(gpu).collect()
}

/// The shim's files in the folder of builds; none before the first build is installed.
fn installed_shim(builds: &Path, own: &MountTable) -> Option<InstalledShim> {
    let folder = builds.canonicalize().ok()?;
    let (_, location) = own.resolve(&folder)?;
    let list = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = list(&folder).flat_map(|build| list(&build.path()));
    let number = |file: std::fs::DirEntry| {
        let inside = file.path().strip_prefix(&folder).ok()?.to_owned();
        Some((inside, file.path().symlink_metadata().ok()?.ino()))
    };
    Some(InstalledShim {
        builds: Location { ..location },
        files: files.filter_map(number).collect(),
    })
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use bursar_host::testing::stat;

    use super::*;
    use crate::attestation::GapReason;

    /// An attestor over a `/proc` of plain files, in which each process has one page mapped.
    fn attestor(pids: &[u32]) -> (PodAttestor, tempfile::TempDir) {
        let proc = tempfile::tempdir().unwrap();
        for pid in pids {
            let folder = proc.path().join(pid.to_string());
            std::fs::create_dir(&folder).unwrap();
            let line = "7f0000000000-7f0000001000 r--p 00000000 00:00 0 /lib/a\n";
            std::fs::write(folder.join("maps"), line).unwrap();
        }
        let config = Config::parse(Path::new("agent.toml"), "").unwrap();
        let mut attestor = PodAttestor::new(&config);
        attestor.paths.proc = proc.path().to_owned();
        (attestor, proc)
    }

    fn host_view() -> HostView {
        HostView {
            now: Instant::now(),
            uptime: Duration::ZERO,
            own_mounts: MountTable::default(),
            shim: None,
            user_namespace: None,
            gpu_nodes: BTreeMap::new(),
        }
    }

    /// The processes that a probe with this bound has read, and why the container is not attested.
    fn probe(
        attestor: &mut PodAttestor,
        pids: &[u32],
        now: Instant,
        mut room: u64,
    ) -> (Vec<u32>, Option<GapReason>) {
        let host = HostView { now, ..host_view() };
        let stats: Vec<_> = pids.iter().map(|pid| (*pid, stat(1, false))).collect();
        let first = (&None, &MountTable::default());
        let (running, gap) = attestor.probe_processes(&stats, first, &host, &mut room);
        let read = running.into_keys().collect();
        (read, gap.map(|gap| gap.reason))
    }

    #[test]
    fn container_is_not_attested_when_a_process_waits_for_60_s() {
        let (mut attestor, _proc) = attestor(&[1, 2]);
        let (begun, pids) = (Instant::now(), [1, 2]);
        let minute = Duration::from_secs(60);
        let mut probe = |after, room| probe(&mut attestor, &pids, begun + after, room);
        assert_eq!(probe(Duration::ZERO, 0), (vec![], None));
        assert_eq!(probe(minute - Duration::from_millis(1), 0), (vec![], None));
        // One of both processes is read, and the other still waits.
        let (read, reason) = probe(minute, 1);
        assert_eq!((read.len(), reason), (1, Some(GapReason::NotAttested)));
        assert_eq!(probe(minute, MAPS_BYTES_PER_PROBE), (vec![1, 2], None));
    }

    #[test]
    fn process_that_waited_longest_is_read_first() {
        let (mut attestor, _proc) = attestor(&[1, 2]);
        let begun = Instant::now();
        let later = begun + Duration::from_secs(1);
        assert_eq!(probe(&mut attestor, &[2], begun, 0), (vec![], None));
        assert_eq!(probe(&mut attestor, &[1, 2], later, 1), (vec![2], None));
    }
}
