//! Finds the channel groups of other processes, and reads and sets their time slices.
//!
//! The driver lets channel groups take turns on a GPU, a group for each CUDA context. The kernel
//! module takes commands about a group from the file of its client alone. So the caller duplicates
//! a process's control file for a few calls. A duplicate that stays open keeps the memory of a
//! process that ended, and a call may take as long as the driver. So the calls are for a process of
//! their own, which may be ended.
//!
//! Nothing in the other process takes part. The resource manager numbers clients upwards, and
//! libcuda its objects. The driver confirms each candidate or refuses it: 3 us a call, on an H200
//! with driver 580. Groups with other handles stay hidden, and [`Overview::groups_in_use`] counts
//! them (`ctrl/ctrla06c.h`, `ctrl/ctrl0000/ctrl0000client.h`, `ctrl/ctrl2080/ctrl2080fifo.h`).

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_ledger::units::GpuUuid;
use rustix::fs::{AtFlags, FileType, StatxFlags};
use rustix::path::Arg;
use rustix::process::PidfdGetfdFlags;

use crate::rm::{self, RmClient, RmError, RmParams, SUBDEVICE, SUBDEVICE_HANDLE};

/// `RS_CLIENT_HANDLE_BASE` (`g_resserv_nvoc.h`).
const FIRST_CLIENT: u32 = 0xc1d0_0000;
/// The handles up to `RS_CLIENT_HANDLE_MAX`.
pub const CLIENTS: u32 = 0x10_0000;

/// The handles that libcuda gives to its objects, upwards. PyTorch's first context had the last of
/// its groups at 0x66 of them.
const FIRST_OBJECT: u32 = 0x5c00_0000;
const OBJECTS: u32 = 4096;

/// `NV01_ROOT_CLIENT`'s `CLIENT_GET_HANDLE_INFO`, and the questions that it answers.
const GET_HANDLE_INFO: u32 = 0xd02;
const PARENT: u32 = 1;
const CLASS: u32 = 2;

/// `KEPLER_CHANNEL_GROUP_A`, and the last byte of each class of compute objects, which only groups
/// with kernels have (`class/cl*c0.h`: Hopper's is 0xcbc0).
const CHANNEL_GROUP: u32 = 0xa06c;
const COMPUTE: u32 = 0xc0;

/// `NVA06C_CTRL_CMD_SET_TIMESLICE` and `NVA06C_CTRL_CMD_GET_TIMESLICE`.
const SET_TIMESLICE: u32 = 0xa06c_0103;
const GET_TIMESLICE: u32 = 0xa06c_0104;

/// `NV2080_CTRL_CMD_GPU_GET_GID_INFO`: a GPU's UUID as text.
const GET_GID_INFO: u32 = 0x2080_014a;

/// `NV2080_CTRL_CMD_FIFO_GET_INFO`, its index for the groups in use, and the engine of kernels.
const FIFO_GET_INFO: u32 = 0x2080_1109;
const GROUPS_IN_USE: u32 = 9;
const GRAPHICS: u32 = 1;

/// The name of the control node in the folder of device nodes.
const CONTROL_NAME: &str = "nvidiactl";

/// The most descriptors of one process that are looked at.
const MAX_DESCRIPTORS: usize = 4096;

/// `NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS`.
#[repr(C)]
struct HandleInfo {
    object: u32,
    index: u32,
    data: u64,
}

/// `NVA06C_CTRL_TIMESLICE_PARAMS`.
#[repr(C)]
struct Timeslice {
    micros: u64,
}

/// `NV2080_CTRL_GPU_GET_GID_INFO_PARAMS`.
#[repr(C)]
struct GidInfo {
    index: u32,
    flags: u32,
    length: u32,
    data: [u8; 256],
}

/// `NV2080_CTRL_FIFO_GET_INFO_PARAMS`.
#[repr(C)]
struct FifoInfo {
    count: u32,
    entries: [[u32; 2]; 256],
    engine: u32,
}

#[expect(unsafe_code, reason = "the kernel module writes into these values")]
mod layouts {
    use super::{FifoInfo, GidInfo, HandleInfo, RmParams, Timeslice};

    // SAFETY: integers alone, in the header's order.
    unsafe impl RmParams for HandleInfo {}
    // SAFETY: integers alone, in the header's order.
    unsafe impl RmParams for Timeslice {}
    // SAFETY: integers alone, in the header's order.
    unsafe impl RmParams for GidInfo {}
    // SAFETY: integers alone, in the header's order.
    unsafe impl RmParams for FifoInfo {}
}

/// The node that takes the kernel module's commands, beside the GPUs' device nodes.
#[derive(Debug)]
pub struct ControlNode {
    path: PathBuf,
    identity: FileIdentity,
}

impl ControlNode {
    /// Finds the control node of the folder that has `device`.
    ///
    /// # Errors
    /// When there is none.
    pub fn beside(device: &Path) -> Result<Self, RmError> {
        let path = device.with_file_name(CONTROL_NAME);
        let identity = FileIdentity::read(rustix::fs::CWD, &path, AtFlags::empty());
        match identity {
            Ok(identity) => Ok(Self { path, identity }),
            Err(error) => Err(RmError::Open(path, error)),
        }
    }
}

/// Which device a file is, or else which file.
#[derive(Debug, PartialEq, Eq)]
struct FileIdentity {
    kind: FileType,
    device: (u32, u32),
    inode: Option<u64>,
}

impl FileIdentity {
    /// A tenant's file system would answer a question that asks it, when it likes: the kernel's own
    /// note must do.
    fn read(at: impl AsFd, path: impl Arg, flags: AtFlags) -> io::Result<Self> {
        let (flags, wanted) = (
            flags | AtFlags::STATX_DONT_SYNC,
            StatxFlags::TYPE | StatxFlags::INO,
        );
        let about = rustix::fs::statx(at, path, flags, wanted)?;
        let kind = FileType::from_raw_mode(about.stx_mode.into());
        // A container has another node of the same device.
        let (device, inode) = match kind {
            FileType::CharacterDevice => ((about.stx_rdev_major, about.stx_rdev_minor), None),
            _ => (
                (about.stx_dev_major, about.stx_dev_minor),
                Some(about.stx_ino),
            ),
        };
        Ok(Self {
            kind,
            device,
            inode,
        })
    }
}

/// A channel group with kernels, by the handles of its client and of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChannelGroup {
    /// The client's handle, unique on the node.
    pub client: u32,
    /// The group's handle, unique among its client's objects.
    pub handle: u32,
}

/// The groups of one client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientGroups {
    /// Those that run kernels.
    pub computing: Vec<ChannelGroup>,
    /// The number of all groups, those of copy engines included.
    pub count: usize,
}

/// The driver's view of all clients of a GPU.
pub struct Overview {
    client: RmClient,
}

impl Overview {
    /// Opens a client of this process.
    ///
    /// # Errors
    /// When the kernel module refuses it.
    pub fn open(control: &ControlNode, gpu: &GpuUuid) -> Result<Self, RmError> {
        let client = RmClient::open(&control.path, gpu)?;
        Ok(Self { client })
    }

    /// The number of channel groups that the GPU has, whoever made them.
    ///
    /// # Errors
    /// When the kernel module refuses the question.
    pub fn groups_in_use(&self) -> Result<u32, RmError> {
        let mut info = FifoInfo {
            count: 1,
            entries: [[0; 2]; 256],
            engine: GRAPHICS,
        };
        info.entries[0][0] = GROUPS_IN_USE;
        self.client
            .control(SUBDEVICE_HANDLE, FIFO_GET_INFO, &mut info)?;
        Ok(info.entries[0][1])
    }
}

/// Tells the handles of new clients.
#[derive(Debug)]
pub struct NewClients {
    begun: u32,
    seen: u32,
}

impl NewClients {
    /// Begins with the clients that are made from now on.
    ///
    /// # Errors
    /// When the kernel module makes no client.
    pub fn begin(control: &ControlNode) -> Result<Self, RmError> {
        let seen = rm::newest_client(&control.path)?;
        Ok(Self { begun: seen, seen })
    }

    /// The handles that were given before the beginning, by their numbers from the last one back.
    pub fn earlier(&self, back: Range<u32>) -> impl Iterator<Item = u32> {
        let last = self.begun.saturating_sub(FIRST_CLIENT) + CLIENTS - 1;
        let back = back.start..back.end.min(CLIENTS);
        back.map(move |back| FIRST_CLIENT + (last - back) % CLIENTS)
    }

    /// The handles since the last call. They begin anew after the last one.
    ///
    /// # Errors
    /// When the kernel module makes no client.
    pub fn take(&mut self, control: &ControlNode) -> Result<Vec<u32>, RmError> {
        let newest = rm::newest_client(&control.path)?;
        let seen = std::mem::replace(&mut self.seen, newest);
        Ok(between(seen, newest))
    }
}

fn between(seen: u32, newest: u32) -> Vec<u32> {
    if seen <= newest {
        return (seen..newest).collect();
    }
    (seen..FIRST_CLIENT + CLIENTS)
        .chain(FIRST_CLIENT..newest)
        .collect()
}

/// The descriptors of a process that may be control files, by the names that they had when opened.
///
/// # Errors
/// When the process has ended.
pub fn control_descriptors(pid: u32) -> io::Result<Vec<i32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.take(MAX_DESCRIPTORS) {
        let entry = entry?;
        // A link's text asks no file system of the tenant's.
        let Ok(target) = fs::read_link(entry.path()) else {
            continue;
        };
        if target.file_name().is_some_and(|name| name == CONTROL_NAME) {
            found.extend(
                entry
                    .file_name()
                    .to_str()
                    .and_then(|name| name.parse::<i32>().ok()),
            );
        }
    }
    Ok(found)
}

/// A duplicate of another process's control file. It must be dropped after a few calls.
#[derive(Debug)]
pub struct ControlFile(OwnedFd);

impl ControlFile {
    /// Duplicates a descriptor of the process `pid`, which is behind `pidfd`. None if it is not the
    /// control node.
    ///
    /// # Errors
    /// When the process has ended, or has closed the descriptor.
    pub fn duplicate(
        control: &ControlNode,
        pid: u32,
        pidfd: BorrowedFd<'_>,
        descriptor: i32,
    ) -> io::Result<Option<Self>> {
        // The close of a duplicate asks a tenant's file system, which answers when it likes, and no
        // signal ends the wait (`fuse_flush`). So no file of one is duplicated.
        let path = format!("/proc/{pid}/fd/{descriptor}");
        if FileIdentity::read(rustix::fs::CWD, path, AtFlags::empty())? != control.identity {
            return Ok(None);
        }
        let file = rustix::process::pidfd_getfd(pidfd, descriptor, PidfdGetfdFlags::empty())?;
        // The descriptor may be another file's by now.
        let identity = FileIdentity::read(&file, c"", AtFlags::EMPTY_PATH)?;
        Ok((identity == control.identity).then_some(Self(file)))
    }

    /// The calls that [`groups`](Self::groups) makes at least.
    pub const GROUP_CALLS: usize = OBJECTS as usize;

    /// Whether the client belongs to this file.
    pub fn has_client(&self, client: u32) -> bool {
        self.info(client, client, CLASS).is_some()
    }

    /// Finds the groups on a GPU of a client that belongs to this file. A program that uses several
    /// GPUs has its groups on all of them in one client.
    pub fn groups(&self, client: u32, gpu: &GpuUuid) -> ClientGroups {
        let mut groups = ClientGroups::default();
        let (mut found, mut other_gpus) = (Vec::new(), BTreeSet::new());
        for handle in FIRST_OBJECT..FIRST_OBJECT + OBJECTS {
            let Some(class) = self.info(client, handle, CLASS) else {
                continue;
            };
            let parent = |of| self.info(client, of, PARENT);
            if class == SUBDEVICE && self.is_of_other_gpu(client, handle, gpu) {
                other_gpus.extend(parent(handle));
            } else if class == CHANNEL_GROUP {
                found.push((handle, parent(handle)));
            } else if class & 0xff == COMPUTE
                && class > 0xff
                && let Some(handle) = parent(handle).and_then(parent)
                && self.info(client, handle, CLASS) == Some(CHANNEL_GROUP)
            {
                groups.computing.push(ChannelGroup { client, handle });
            }
        }
        // The parent of a group is a device, and so is the parent of a subdevice.
        found.retain(|(_, device)| device.is_none_or(|device| !other_gpus.contains(&device)));
        groups.count = found.len();
        let is_found =
            |group: &ChannelGroup| found.iter().any(|(handle, _)| *handle == group.handle);
        groups.computing.retain(is_found);
        groups.computing.sort();
        groups.computing.dedup();
        groups
    }

    /// Whether the driver says that a subdevice is of another GPU.
    fn is_of_other_gpu(&self, client: u32, subdevice: u32, gpu: &GpuUuid) -> bool {
        let mut info = GidInfo {
            index: 0,
            flags: 0,
            length: 0,
            data: [0; 256],
        };
        let asked = rm::control(self.0.as_fd(), client, subdevice, GET_GID_INFO, &mut info);
        let uuid = info.data.get(..info.length as usize).unwrap_or_default();
        let uuid = uuid.strip_suffix(&[0]).unwrap_or(uuid);
        asked.is_ok() && uuid.starts_with(b"GPU-") && uuid != gpu.as_str().as_bytes()
    }

    /// The slice that was last set. The GPU may not keep to it.
    ///
    /// # Errors
    /// When the group is gone, or is not this file's.
    pub fn slice(&self, group: ChannelGroup) -> Result<Duration, RmError> {
        let mut slice = Timeslice { micros: 0 };
        rm::control(
            self.0.as_fd(),
            group.client,
            group.handle,
            GET_TIMESLICE,
            &mut slice,
        )?;
        Ok(Duration::from_micros(slice.micros))
    }

    /// Sets the slice, which takes the group off the GPU for a moment.
    ///
    /// # Errors
    /// When the group is gone, or is not this file's.
    pub fn set_slice(&self, group: ChannelGroup, slice: Duration) -> Result<(), RmError> {
        let mut slice = Timeslice {
            micros: u64::try_from(slice.as_micros()).unwrap_or(u64::MAX),
        };
        rm::control(
            self.0.as_fd(),
            group.client,
            group.handle,
            SET_TIMESLICE,
            &mut slice,
        )
    }

    fn info(&self, client: u32, object: u32, index: u32) -> Option<u32> {
        let mut info = HandleInfo {
            object,
            index,
            data: 0,
        };
        rm::control(self.0.as_fd(), client, client, GET_HANDLE_INFO, &mut info).ok()?;
        Some(info.data as u32)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd as _;

    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    use super::*;

    #[test]
    fn parameters_have_the_kernel_modules_sizes() {
        assert_eq!(size_of::<HandleInfo>(), 16);
        assert_eq!(size_of::<Timeslice>(), 8);
        assert_eq!(size_of::<GidInfo>(), 268);
        assert_eq!(size_of::<FifoInfo>(), 2056);
    }

    #[test]
    fn handles_of_new_clients_begin_anew_after_the_last() {
        let last = FIRST_CLIENT + CLIENTS - 1;
        let two = [FIRST_CLIENT + 5, FIRST_CLIENT + 6];
        assert_eq!(between(two[0], FIRST_CLIENT + 7), two);
        assert_eq!(between(last, FIRST_CLIENT + 1), [last, FIRST_CLIENT]);
        assert!(between(last, last).is_empty());
        let begun = FIRST_CLIENT + 2;
        let clients = NewClients { begun, seen: last };
        let earlier: Vec<u32> = clients.earlier(0..4).collect();
        assert_eq!(earlier, [begun - 1, begun - 2, last, last - 1]);
        assert_eq!(
            clients.earlier(CLIENTS - 1..u32::MAX).collect::<Vec<_>>(),
            [begun]
        );
    }

    #[test]
    fn only_the_agents_own_control_node_is_duplicated() {
        let [folder, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let create = |at: &Path| File::create(at.join(CONTROL_NAME)).unwrap();
        let [_own, _named_like_it] = [create(folder.path()), create(other.path())];
        let null = File::open("/dev/null").unwrap();
        let control = ControlNode::beside(&folder.path().join("nvidia0")).unwrap();
        let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let is_taken = |descriptor| {
            let pid = std::process::id();
            let file = ControlFile::duplicate(&control, pid, own.as_fd(), descriptor);
            file.unwrap().is_some()
        };
        let candidates = control_descriptors(std::process::id()).unwrap();
        let is_own = |descriptor: &i32| {
            let target = fs::read_link(format!("/proc/self/fd/{descriptor}")).unwrap();
            target.starts_with(folder.path())
        };
        assert!(candidates.iter().any(is_own) && !candidates.iter().all(is_own));
        for descriptor in candidates {
            assert_eq!(is_taken(descriptor), is_own(&descriptor));
        }
        assert!(!is_taken(null.as_raw_fd()));
    }

    #[test]
    fn device_is_known_by_its_number_under_any_name() {
        let read = |path: &str| FileIdentity::read(rustix::fs::CWD, path, AtFlags::empty());
        let inode = |path: &str| read(path).unwrap().inode;
        assert_eq!(inode("/dev/null"), None);
        assert!(inode("/dev") > None);
        assert_ne!(read("/dev/null").unwrap(), read("/dev/zero").unwrap());
        let open = File::open("/dev/null").unwrap();
        let opened = FileIdentity::read(&open, c"", AtFlags::EMPTY_PATH).unwrap();
        assert_eq!(opened, read("/dev/null").unwrap());
    }
}
