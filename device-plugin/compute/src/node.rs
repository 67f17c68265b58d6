//! What the holder asks of the node, and its answers from NVIDIA's kernel module.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bursar_gpu::channel_groups::{
    ChannelGroup, ClientGroups, ControlFile, ControlNode, NewClients, Overview, control_descriptors,
};
use bursar_gpu::rm::RmError;
use bursar_ledger::units::GpuUuid;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The most handles of clients whose process is unknown, and how long they are asked about: a
/// process is known a few seconds after its start.
const MAX_UNKNOWN: usize = 1024;
const UNKNOWN_FOR: Duration = Duration::from_secs(30);

/// The handles before the first look that may belong to processes that ran before it.
const EARLIER: u32 = 65_536;

/// The most clients of one process. A tenant makes as many as it likes.
const MAX_CLIENTS: usize = 64;

/// Why a call about a group failed.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The process has ended, or has closed the file.
    #[error("failed to duplicate a control file of the process: {0}")]
    Process(#[from] io::Error),
    /// The GPU's device node cannot be opened.
    #[error("failed to open {path}: {error}", path = .0.display(), error = .1)]
    Device(PathBuf, #[source] io::Error),
    /// The kernel module refused the call.
    #[error(transparent)]
    Rm(#[from] RmError),
}

/// A group and the process through which it can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The process.
    pub pid: u32,
    /// Its descriptor of the control file.
    pub descriptor: i32,
    /// The group.
    pub group: ChannelGroup,
}

/// The node's processes and the driver.
pub trait Node {
    /// Looks for the groups of `processes`, and for nobody's else. Returns the groups with kernels
    /// and the number of all groups.
    fn look(&mut self, processes: &BTreeSet<u32>) -> (Vec<Place>, usize);

    /// The number of groups on the GPU, whoever made them; none where the driver does not tell.
    fn groups_in_use(&mut self) -> Option<u32>;

    /// The slice that was last set.
    ///
    /// # Errors
    /// When the group or its process is gone.
    fn slice(&mut self, at: &Place) -> Result<Duration, NodeError>;

    /// Sets the slice.
    ///
    /// # Errors
    /// When the group or its process is gone.
    fn set_slice(&mut self, at: &Place, slice: Duration) -> Result<(), NodeError>;
}

/// A process with its clients of the resource manager.
struct Process {
    pidfd: OwnedFd,
    descriptors: BTreeSet<i32>,
    clients: BTreeMap<u32, (i32, ClientGroups)>,
    /// It may have clients that were made before the first look.
    is_earlier: bool,
}

impl Process {
    fn open(pid: u32, is_earlier: bool) -> io::Result<Self> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = raw.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            pidfd: pidfd_open(pid, PidfdFlags::empty())?,
            descriptors: BTreeSet::new(),
            clients: BTreeMap::new(),
            is_earlier,
        })
    }

    fn file(&self, control: &ControlNode, descriptor: i32) -> io::Result<Option<ControlFile>> {
        ControlFile::duplicate(control, self.pidfd.as_fd(), descriptor)
    }
}

/// The descriptors that may be control files; none of a process that has ended.
fn descriptors_of(pid: u32) -> BTreeSet<i32> {
    control_descriptors(pid).into_iter().flatten().collect()
}

/// The node itself.
pub struct DriverNode {
    /// Open, because the kernel module shows a GPU only to a process that has it open.
    _device: File,
    control: ControlNode,
    overview: Overview,
    new_clients: NewClients,
    /// Handles that nobody of the known processes has, the oldest first.
    unknown: VecDeque<(u32, Instant)>,
    earlier: Range<u32>,
    processes: BTreeMap<u32, Process>,
    /// The groups in use at the last look: without a change there is no new group.
    in_use: Option<u32>,
}

impl DriverNode {
    /// Opens the driver's view of a GPU, whose device node is `device`. The control node is beside it.
    ///
    /// # Errors
    /// When the kernel module refuses it, or the node cannot be opened.
    pub fn open(gpu: &GpuUuid, device: &Path) -> Result<Self, NodeError> {
        let control = ControlNode::beside(device)?;
        let opened = File::options().read(true).write(true).open(device);
        let device = opened.map_err(|error| NodeError::Device(device.to_owned(), error))?;
        let new_clients = NewClients::begin(&control)?;
        Ok(Self {
            _device: device,
            overview: Overview::open(&control, gpu)?,
            control,
            earlier: new_clients.earlier(EARLIER),
            new_clients,
            unknown: VecDeque::new(),
            processes: BTreeMap::new(),
            in_use: None,
        })
    }

    fn file(&self, at: &Place) -> Result<ControlFile, NodeError> {
        let process = self.processes.get(&at.pid).ok_or(io::ErrorKind::NotFound);
        let process = process.map_err(io::Error::from)?;
        let file = process.file(&self.control, at.descriptor)?;
        Ok(file.ok_or(io::Error::from(io::ErrorKind::NotFound))?)
    }

    /// Adds the handles of clients that were made since the last look.
    fn add_unknown(&mut self) {
        // Without an answer the next look has them.
        let now = Instant::now();
        for handle in self.new_clients.take(&self.control).into_iter().flatten() {
            self.unknown.push_back((handle, now));
        }
        let excess = self.unknown.len().saturating_sub(MAX_UNKNOWN);
        self.unknown.drain(..excess);
        self.unknown.retain(|(_, since)| now - *since < UNKNOWN_FOR);
    }

    /// Finds the clients of a process.
    fn find_clients(&mut self, pid: u32) {
        // A fork has its parent's files, and so the same clients.
        let others = self
            .processes
            .values()
            .flat_map(|process| process.clients.keys().copied());
        let others: BTreeSet<u32> = others.collect();
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        let descriptors = descriptors_of(pid);
        process
            .clients
            .retain(|_, (at, _)| descriptors.contains(at));
        process
            .descriptors
            .retain(|descriptor| descriptors.contains(descriptor));
        for descriptor in descriptors {
            let is_new = process.descriptors.insert(descriptor);
            let Ok(Some(file)) = process.file(&self.control, descriptor) else {
                continue;
            };
            let mut found = Vec::new();
            if is_new {
                let earlier = self.earlier.clone().filter(|_| process.is_earlier);
                let candidates = earlier.chain(others.iter().copied());
                found.extend(candidates.filter(|client| file.has_client(*client)));
            }
            self.unknown.retain(|(client, _)| {
                let is_own = file.has_client(*client);
                found.extend(is_own.then_some(*client));
                !is_own
            });
            let room = MAX_CLIENTS.saturating_sub(process.clients.len());
            for client in found.into_iter().take(room) {
                process
                    .clients
                    .entry(client)
                    .or_insert((descriptor, ClientGroups::default()));
            }
        }
    }
}

impl Node for DriverNode {
    fn look(&mut self, processes: &BTreeSet<u32>) -> (Vec<Place>, usize) {
        let is_first = self.in_use.is_none();
        let in_use = self.groups_in_use();
        // One context may end and another begin between two looks, so files count too.
        let is_known = |pid: &u32| {
            let process = self.processes.get(pid);
            process.is_some_and(|process| process.descriptors == descriptors_of(*pid))
        };
        let has_changed =
            in_use.is_none() || in_use != self.in_use || !processes.iter().all(is_known);
        self.in_use = in_use;
        self.processes.retain(|pid, _| processes.contains(pid));
        if has_changed {
            self.add_unknown();
            for pid in processes {
                if !self.processes.contains_key(pid)
                    && let Ok(process) = Process::open(*pid, is_first)
                {
                    self.processes.insert(*pid, process);
                }
                self.find_clients(*pid);
            }
            for process in self.processes.values_mut() {
                let Process { pidfd, clients, .. } = process;
                for (client, (descriptor, groups)) in clients {
                    if let Ok(Some(file)) =
                        ControlFile::duplicate(&self.control, pidfd.as_fd(), *descriptor)
                    {
                        *groups = file.groups(*client);
                    }
                }
            }
        }
        let mut places = BTreeMap::new();
        let mut count = BTreeMap::new();
        for (pid, process) in &self.processes {
            for (client, (descriptor, groups)) in &process.clients {
                // A fork has its parent's files, and so the same clients.
                count.insert(*client, groups.count);
                for group in &groups.computing {
                    let (pid, descriptor, group) = (*pid, *descriptor, *group);
                    places.entry(group).or_insert(Place {
                        pid,
                        descriptor,
                        group,
                    });
                }
            }
        }
        (places.into_values().collect(), count.values().sum())
    }

    fn groups_in_use(&mut self) -> Option<u32> {
        self.overview.groups_in_use().ok()
    }

    fn slice(&mut self, at: &Place) -> Result<Duration, NodeError> {
        Ok(self.file(at)?.slice(at.group)?)
    }

    fn set_slice(&mut self, at: &Place, slice: Duration) -> Result<(), NodeError> {
        Ok(self.file(at)?.set_slice(at.group, slice)?)
    }
}
