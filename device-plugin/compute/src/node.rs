//! Finds the groups of processes for the holder, and asks NVIDIA's kernel module.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bursar_gpu::channel_groups::{
    CLIENTS, ChannelGroup, ClientGroups, ControlFile, ControlNode, NewClients, Overview,
    control_descriptors,
};
use bursar_gpu::rm::RmError;
use bursar_host::procfs::{self, Stat};
use bursar_ledger::units::GpuUuid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The most handles of clients whose process is unknown, and how long they are asked about: a
/// process is known a few seconds after its start.
const MAX_UNKNOWN: usize = 1024;
const UNKNOWN_FOR: Duration = Duration::from_secs(30);

/// The most control files of one process.
const MAX_FILES: usize = 16;

/// The handles that a look tries on all files of a process that ran before the holder, and on each.
const EARLIER: u32 = 32_768;
const EARLIER_OF_FILE: u32 = 8_192;

/// The most processes whose open files a look without a change reads.
const MAX_FILE_LOOKS: usize = 16;

/// The most calls of one look that search for clients, and as many for groups, 3 us each. A search
/// that needs more goes on in the next look, by turns among the processes, whose number and files
/// are the tenants'.
const MAX_CALLS: u32 = 0x1_0000;

/// The looks, a second apart, that may have no end of the search before the groups that are not
/// found yet count as hidden: a tenant could keep the search going.
const MAX_INCOMPLETE_LOOKS: u32 = 600;

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

    /// The number of groups on the GPU, whoever made them; none where the driver does not tell, and
    /// while the search for groups goes on.
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
    pid: u32,
    pidfd: OwnedFd,
    descriptors: BTreeSet<i32>,
    clients: BTreeMap<u32, Client>,
    /// The handles of clients that are to be tried, by their numbers from the holder's beginning
    /// back. Empty for a process that started after it.
    earlier: Range<u32>,
}

/// A client of the resource manager.
struct Client {
    /// The descriptor of its file.
    descriptor: i32,
    /// Its groups, as far as they were searched for.
    groups: Option<ClientGroups>,
    /// The groups were searched for since the last change on the GPU.
    is_scanned: bool,
}

/// The calls that a look has left.
struct Budget(u32);

impl Budget {
    /// Takes calls from a budget that has enough left; a whole one has enough for any search.
    fn take(&mut self, calls: usize) -> bool {
        let calls = u32::try_from(calls).unwrap_or(MAX_CALLS).min(MAX_CALLS);
        let left = self.0.checked_sub(calls);
        self.0 = left.unwrap_or(0);
        left.is_some()
    }
}

impl Process {
    fn open(pid: u32, begun: u64) -> io::Result<Self> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pidfd = pidfd_open(raw.ok_or(io::ErrorKind::InvalidInput)?, PidfdFlags::empty())?;
        let stat = Stat::read(Path::new("/proc"), pid);
        let is_earlier = stat.is_none_or(|stat| stat.start_ticks <= begun);
        let earlier = 0..if is_earlier { CLIENTS } else { 0 };
        Ok(Self {
            pid,
            pidfd,
            descriptors: BTreeSet::new(),
            clients: BTreeMap::new(),
            earlier,
        })
    }

    /// The handles that the next look tries in each of the process's files.
    fn next_earlier(&self, files: usize) -> Range<u32> {
        let most = EARLIER / files.clamp(1, MAX_FILES) as u32;
        let most = most.min(EARLIER_OF_FILE);
        self.earlier.start..self.earlier.end.min(self.earlier.start + most)
    }

    /// Whether the search goes on. A program's groups are in one client, so that others have no
    /// part in its finding.
    fn is_searched(&self) -> bool {
        let has_groups = |client: &Client| {
            let groups = client.groups.as_ref();
            groups.is_some_and(|groups| !groups.computing.is_empty())
        };
        let is_left = !self.earlier.is_empty() && !self.descriptors.is_empty();
        is_left && !self.clients.values().any(has_groups)
    }

    /// Whether the process is gone, so that its pid may be another one's.
    fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    fn file(&self, control: &ControlNode, descriptor: i32) -> io::Result<Option<ControlFile>> {
        ControlFile::duplicate(control, self.pid, self.pidfd.as_fd(), descriptor)
    }

    /// Searches for the groups of its clients, of those that have been searched before or of the
    /// others. Returns false where the budget does not suffice.
    fn scan(
        &mut self,
        control: &ControlNode,
        gpu: &GpuUuid,
        is_known: bool,
        budget: &mut Budget,
    ) -> bool {
        let Self {
            pid,
            pidfd,
            clients,
            ..
        } = self;
        let due = |client: &Client| !client.is_scanned && client.groups.is_some() == is_known;
        for (handle, client) in clients.iter_mut().filter(|(_, client)| due(client)) {
            if !budget.take(ControlFile::GROUP_CALLS) {
                return false;
            }
            let file = ControlFile::duplicate(control, *pid, pidfd.as_fd(), client.descriptor);
            if let Ok(Some(file)) = file {
                client.groups = Some(file.groups(*handle, gpu));
            }
            client.is_scanned = true;
        }
        true
    }
}

/// The descriptors that may be control files; none of a process that has ended.
fn descriptors_of(pid: u32) -> BTreeSet<i32> {
    let all = control_descriptors(pid).into_iter().flatten();
    all.take(MAX_FILES).collect()
}

/// The node itself.
pub struct DriverNode {
    /// Open, because the kernel module shows a GPU only to a process that has it open.
    _device: File,
    gpu: GpuUuid,
    control: ControlNode,
    overview: Overview,
    new_clients: NewClients,
    /// Handles that nobody of the known processes has, the oldest first.
    unknown: VecDeque<(u32, Instant)>,
    processes: BTreeMap<u32, Process>,
    /// The clock ticks since boot at which the holder began.
    begun: u64,
    /// The number of processes whose turn has been.
    turn: usize,
    /// The last look had too few calls for its search, and so many looks before it.
    is_incomplete: bool,
    incomplete_looks: u32,
    /// The groups in use at the last look: without a change there is no new group.
    in_use: Option<u32>,
}

impl DriverNode {
    /// Opens the driver's view of a GPU, whose device node is `device`. The control node is beside
    /// it.
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
            gpu: gpu.clone(),
            overview: Overview::open(&control, gpu)?,
            control,
            new_clients,
            unknown: VecDeque::new(),
            processes: BTreeMap::new(),
            begun: procfs::now_ticks(),
            turn: 0,
            is_incomplete: false,
            incomplete_looks: 0,
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

    /// Finds clients of a process. Returns false where the budget does not suffice.
    fn find_clients(&mut self, pid: u32, budget: &mut Budget) -> bool {
        // A fork has its parent's files, and so the same clients.
        let others = self
            .processes
            .values()
            .flat_map(|process| process.clients.keys().copied());
        let others: BTreeSet<u32> = others.collect();
        let Some(process) = self.processes.get_mut(&pid) else {
            return true;
        };
        let descriptors = descriptors_of(pid);
        process
            .clients
            .retain(|_, client| descriptors.contains(&client.descriptor));
        process
            .descriptors
            .retain(|descriptor| descriptors.contains(descriptor));
        let start = process.earlier.start;
        let earlier = match process.is_searched() || process.descriptors.is_empty() {
            true => process.next_earlier(descriptors.len()),
            false => start..start,
        };
        let tried: Vec<u32> = self.new_clients.earlier(earlier.clone()).collect();
        for descriptor in descriptors {
            let is_new = !process.descriptors.contains(&descriptor);
            let others = others.iter().copied().filter(|_| is_new);
            let mut found: Vec<u32> = tried.iter().copied().chain(others).collect();
            if !budget.take(found.len() + self.unknown.len()) {
                return false;
            }
            process.descriptors.insert(descriptor);
            let Ok(Some(file)) = process.file(&self.control, descriptor) else {
                continue;
            };
            found.retain(|client| file.has_client(*client));
            self.unknown.retain(|(client, _)| {
                let is_own = file.has_client(*client);
                found.extend(is_own.then_some(*client));
                !is_own
            });
            let room = MAX_CLIENTS.saturating_sub(process.clients.len());
            for client in found.into_iter().take(room) {
                process.clients.entry(client).or_insert(Client {
                    descriptor,
                    groups: None,
                    is_scanned: false,
                });
            }
        }
        if !process.descriptors.is_empty() {
            process.earlier.start = earlier.end;
        }
        true
    }
}

impl Node for DriverNode {
    fn look(&mut self, processes: &BTreeSet<u32>) -> (Vec<Place>, usize) {
        let in_use = self.overview.groups_in_use().ok();
        // One context may end and another begin between two looks, so files count too: those of
        // some processes by turns, because their number is the tenants'.
        let has_same_files = |pid: &u32| {
            let process = self.processes.get(pid);
            process.is_some_and(|process| process.descriptors == descriptors_of(*pid))
        };
        let by_turns = processes.iter().cycle();
        let by_turns = by_turns.skip(self.turn % processes.len().max(1));
        let by_turns: Vec<u32> = by_turns.take(processes.len()).copied().collect();
        let mut turn = by_turns.iter().take(MAX_FILE_LOOKS);
        let is_change = in_use.is_none()
            || in_use != self.in_use
            || !processes.iter().all(|pid| self.processes.contains_key(pid))
            || !turn.all(has_same_files);
        self.turn = self.turn.wrapping_add(1);
        self.in_use = in_use;
        let is_current = |pid: &u32, of: &Process| processes.contains(pid) && !of.has_ended();
        self.processes.retain(|pid, of| is_current(pid, of));
        if is_change || self.is_incomplete {
            self.add_unknown();
            let mut budget = Budget(MAX_CALLS);
            self.is_incomplete = false;
            if is_change {
                let clients = self
                    .processes
                    .values_mut()
                    .flat_map(|of| of.clients.values_mut());
                clients.for_each(|client| client.is_scanned = false);
            }
            for pid in &by_turns {
                if !self.processes.contains_key(pid)
                    && let Ok(process) = Process::open(*pid, self.begun)
                {
                    self.processes.insert(*pid, process);
                }
                self.is_incomplete |= !self.find_clients(*pid, &mut budget);
            }
            // Groups of new clients first: the slices of the others are held meanwhile.
            let mut budget = Budget(MAX_CALLS);
            for is_known in [false, true] {
                for pid in &by_turns {
                    if let Some(process) = self.processes.get_mut(pid) {
                        let scanned = process.scan(&self.control, &self.gpu, is_known, &mut budget);
                        self.is_incomplete |= !scanned;
                    }
                }
            }
        }
        self.is_incomplete |= self.processes.values().any(Process::is_searched);
        self.incomplete_looks = match self.is_incomplete {
            true => self.incomplete_looks.saturating_add(1),
            false => 0,
        };
        let mut places = BTreeMap::new();
        let mut count = BTreeMap::new();
        for (pid, process) in &self.processes {
            for (handle, client) in &process.clients {
                let Some(groups) = &client.groups else {
                    continue;
                };
                // A fork has its parent's files, and so the same clients.
                count.insert(*handle, groups.count);
                for group in &groups.computing {
                    let (pid, descriptor, group) = (*pid, client.descriptor, *group);
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
        let in_use = self.overview.groups_in_use().ok();
        let is_late = self.incomplete_looks > MAX_INCOMPLETE_LOOKS;
        in_use.filter(|_| !self.is_incomplete || is_late)
    }

    fn slice(&mut self, at: &Place) -> Result<Duration, NodeError> {
        Ok(self.file(at)?.slice(at.group)?)
    }

    fn set_slice(&mut self, at: &Place, slice: Duration) -> Result<(), NodeError> {
        Ok(self.file(at)?.set_slice(at.group, slice)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_beyond_the_budget_waits_for_a_look_of_its_own() {
        let mut budget = Budget(MAX_CALLS);
        assert!(budget.take(1) && !budget.take(MAX_CALLS as usize));
        // No smaller search gets the rest: the larger one would wait for ever.
        assert!(!budget.take(1));
        assert!(Budget(MAX_CALLS).take(usize::MAX));
    }
}
