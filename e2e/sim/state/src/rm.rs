//! Calls the simulated kernel module through the machine's control node, as libcuda does.
//!
//! `e2e/sim/kernel` serves the node. Numbers and layouts are those of `nvos.h`, `ctrl/` and
//! `class/` in NVIDIA/open-gpu-kernel-modules, but [`Work`] and [`Hold`] are the simulator's own.
//! Without a kernel module the node is `/dev/zero`, which knows no call.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};
use std::path::Path;

/// The type of every call's number, `NV_IOCTL_MAGIC`.
pub const MAGIC: u8 = b'F';
/// `NV_ESC_RM_FREE`, `NV_ESC_RM_CONTROL` and `NV_ESC_RM_ALLOC`.
pub const FREE: u8 = 0x29;
/// See [`FREE`].
pub const CONTROL: u8 = 0x2a;
/// See [`FREE`].
pub const ALLOC: u8 = 0x2b;
/// Calls of the simulator alone.
pub const WORK: u8 = 0xf0;
/// See [`WORK`].
pub const HOLD: u8 = 0xf1;
/// See [`WORK`].
pub const PROGRESS: u8 = 0xf2;

/// `NV01_ROOT_CLIENT`, `NV01_DEVICE_0`, `NV20_SUBDEVICE_0`, `KEPLER_CHANNEL_GROUP_A`,
/// `HOPPER_CHANNEL_GPFIFO_A`, `HOPPER_COMPUTE_A` and `HOPPER_DMA_COPY_A`.
pub const CLIENT_CLASS: u32 = 0x41;
/// See [`CLIENT_CLASS`].
pub const DEVICE_CLASS: u32 = 0x80;
/// See [`CLIENT_CLASS`].
pub const SUBDEVICE_CLASS: u32 = 0x2080;
/// See [`CLIENT_CLASS`].
pub const GROUP_CLASS: u32 = 0xa06c;
/// See [`CLIENT_CLASS`].
pub const CHANNEL_CLASS: u32 = 0xc86f;
/// See [`CLIENT_CLASS`].
pub const COMPUTE_CLASS: u32 = 0xcbc0;
/// See [`CLIENT_CLASS`].
pub const COPY_CLASS: u32 = 0xc8b5;

/// `NV0000_CTRL_CMD_GPU_GET_UUID_INFO` and `NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO`.
pub const GET_UUID_INFO: u32 = 0x274;
/// See [`GET_UUID_INFO`].
pub const GET_HANDLE_INFO: u32 = 0xd02;
/// `NVA06C_CTRL_CMD_GPFIFO_SCHEDULE`, `_SET_TIMESLICE` and `_GET_TIMESLICE`.
pub const SCHEDULE: u32 = 0xa06c_0101;
/// See [`SCHEDULE`].
pub const SET_TIMESLICE: u32 = 0xa06c_0103;
/// See [`SCHEDULE`].
pub const GET_TIMESLICE: u32 = 0xa06c_0104;
/// `NV2080_CTRL_CMD_GPU_GET_GID_INFO` and `NV2080_CTRL_CMD_FIFO_GET_INFO`.
pub const GET_GID_INFO: u32 = 0x2080_014a;
/// See [`GET_GID_INFO`].
pub const FIFO_GET_INFO: u32 = 0x2080_1109;

/// Sizes in bytes of the parameters of commands and of a device, which the module insists on.
pub const UUID_INFO_LEN: usize = 272;
/// See [`UUID_INFO_LEN`].
pub const HANDLE_INFO_LEN: usize = 16;
/// See [`UUID_INFO_LEN`].
pub const GID_INFO_LEN: usize = 268;
/// See [`UUID_INFO_LEN`].
pub const FIFO_INFO_LEN: usize = 2056;
/// See [`UUID_INFO_LEN`].
pub const DEVICE_LEN: usize = 56;

/// The slice that libcuda sets, in microseconds.
const LIBCUDA_SLICE: u64 = 2048;

/// The first handle that libcuda gives to its objects.
pub const FIRST_OBJECT: u32 = 0x5c00_0000;

/// Work without an end.
pub const ENDLESS: u64 = u64::MAX;

/// Arguments of calls: integers alone, without padding.
///
/// # Safety
/// Any bytes are a value of the type, and the type has no padding.
pub unsafe trait Plain: Copy {
    /// Reads a value; `None` if `bytes` have another length.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let fits = bytes.len() == size_of::<Self>();
        // SAFETY: by the trait's contract any bytes are a value, and there are enough.
        fits.then(|| unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }

    /// The value's bytes.
    fn bytes(&self) -> &[u8] {
        // SAFETY: by the trait's contract the value has no padding.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), size_of::<Self>()) }
    }
}

/// `NVOS64_PARAMETERS`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[expect(missing_docs, reason = "the header's names")]
pub struct Alloc {
    pub client: u32,
    pub parent: u32,
    pub object: u32,
    pub class: u32,
    pub params: u64,
    pub rights: u64,
    pub params_size: u32,
    pub flags: u32,
    pub status: u32,
    pub padding: u32,
}

/// `NVOS54_PARAMETERS`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[expect(missing_docs, reason = "the header's names")]
pub struct Control {
    pub client: u32,
    pub object: u32,
    pub command: u32,
    pub flags: u32,
    pub params: u64,
    pub params_size: u32,
    pub status: u32,
}

/// `NVOS00_PARAMETERS`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[expect(missing_docs, reason = "the header's names")]
pub struct Free {
    pub client: u32,
    pub parent: u32,
    pub object: u32,
    pub status: u32,
}

/// Gives a group work of so many nanoseconds of the GPU alone, beside what it has; 0 takes all of
/// its work away. The answer is the work that it has been given so far. [`PROGRESS`] has the same
/// argument, and its answer is the work that is done.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[expect(missing_docs, reason = "named like the others")]
pub struct Work {
    pub nanos: u64,
    pub client: u32,
    pub group: u32,
    pub status: u32,
    pub padding: u32,
}

/// Keeps a descriptor of the caller open as long as the control file is: that of the lock by which
/// the caller's memory lives.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[expect(missing_docs, reason = "named like the others")]
pub struct Hold {
    pub descriptor: i32,
    pub status: u32,
}

// SAFETY: integers alone, without padding.
unsafe impl Plain for Alloc {}
// SAFETY: integers alone, without padding.
unsafe impl Plain for Control {}
// SAFETY: integers alone, without padding.
unsafe impl Plain for Free {}
// SAFETY: integers alone, without padding.
unsafe impl Plain for Work {}
// SAFETY: integers alone, without padding.
unsafe impl Plain for Hold {}

/// Why the kernel module did not carry out a call.
#[derive(Debug, thiserror::Error)]
pub enum RmError {
    /// The system call failed: the node has no kernel module.
    #[error("failed to call the simulated kernel module: {0}")]
    Ioctl(#[from] io::Error),
    /// The kernel module refused the call (`nvstatuscodes.h`).
    #[error("the simulated kernel module refused the call with status {0:#x}")]
    Refused(u32),
}

fn checked(status: u32) -> Result<(), RmError> {
    match status {
        0 => Ok(()),
        status => Err(RmError::Refused(status)),
    }
}

/// The number of a call, `_IOWR(MAGIC, escape, T)`.
fn number<T>(escape: u8) -> libc::c_ulong {
    3 << 30
        | (size_of::<T>() as libc::c_ulong) << 16
        | libc::c_ulong::from(MAGIC) << 8
        | libc::c_ulong::from(escape)
}

fn call<T: Plain>(file: impl AsFd, escape: u8, argument: &mut T) -> io::Result<()> {
    let file = file.as_fd().as_raw_fd();
    // SAFETY: the number has the argument's size, and the server writes no other bytes than those
    // and the parameters that the argument names, which the caller borrows.
    match unsafe { libc::ioctl(file, number::<T>(escape), &raw mut *argument) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Sends a command about an object of `client`, which `file` has made.
///
/// # Errors
/// [`RmError`].
pub fn control(
    file: impl AsFd,
    client: u32,
    object: u32,
    command: u32,
    params: &mut [u8],
) -> Result<(), RmError> {
    let mut argument = Control {
        client,
        object,
        command,
        params: params.as_mut_ptr().addr() as u64,
        params_size: params.len() as u32,
        ..Control::default()
    };
    call(file, CONTROL, &mut argument)?;
    checked(argument.status)
}

/// A context's objects, of which one group runs kernels.
#[derive(Debug, Clone)]
pub struct ContextGroups {
    groups: Vec<u32>,
    /// The group that runs kernels.
    pub computing: u32,
}

/// A client of the kernel module, with objects numbered upwards.
#[derive(Debug)]
pub struct RmClient {
    file: File,
    root: u32,
    next_object: u32,
    devices: Vec<(String, u32)>,
}

impl RmClient {
    /// Opens a control node for a client whose objects have handles from `first_object` on.
    ///
    /// # Errors
    /// The node cannot be opened, or has no kernel module.
    pub fn open(node: &Path, first_object: u32) -> Result<RmClient, RmError> {
        let file = File::options().read(true).write(true).open(node)?;
        RmClient::over(file, first_object)
    }

    /// Makes a client of an open control file.
    ///
    /// # Errors
    /// The file's node has no kernel module.
    pub fn over(file: File, first_object: u32) -> Result<RmClient, RmError> {
        let mut client = RmClient {
            file,
            root: 0,
            next_object: first_object,
            devices: Vec::new(),
        };
        client.root = client.alloc(0, 0, CLIENT_CLASS, &mut [])?;
        Ok(client)
    }

    /// The client's handle.
    pub fn root(&self) -> u32 {
        self.root
    }

    fn alloc(
        &self,
        parent: u32,
        object: u32,
        class: u32,
        params: &mut [u8],
    ) -> Result<u32, RmError> {
        let mut argument = Alloc {
            client: self.root,
            parent,
            object,
            class,
            params: params.as_mut_ptr().addr() as u64,
            params_size: params.len() as u32,
            ..Alloc::default()
        };
        call(&self.file, ALLOC, &mut argument)?;
        checked(argument.status)?;
        Ok(argument.object)
    }

    fn create(&mut self, parent: u32, class: u32, params: &mut [u8]) -> Result<u32, RmError> {
        let object = self.next_object;
        self.next_object += 1;
        self.alloc(parent, object, class, params)
    }

    /// Sends a command about an object of this client.
    ///
    /// # Errors
    /// [`RmError`].
    pub fn control(&self, object: u32, command: u32, params: &mut [u8]) -> Result<(), RmError> {
        control(&self.file, self.root, object, command, params)
    }

    /// Keeps the file open as long as this client's control file is, also by a duplicate.
    ///
    /// # Errors
    /// [`RmError`].
    pub fn hold(&self, file: &File) -> Result<(), RmError> {
        let mut argument = Hold {
            descriptor: file.as_raw_fd(),
            status: 0,
        };
        call(&self.file, HOLD, &mut argument)?;
        checked(argument.status)
    }

    /// A device of the GPU, which the module makes only for a process that has the GPU's node open.
    fn device(&mut self, gpu: &str) -> Result<u32, RmError> {
        if let Some((_, device)) = self.devices.iter().find(|(known, _)| known == gpu) {
            return Ok(*device);
        }
        let mut info = [0; UUID_INFO_LEN];
        info.iter_mut()
            .zip(gpu.bytes())
            .for_each(|(to, from)| *to = from);
        self.control(self.root, GET_UUID_INFO, &mut info)?;
        let mut params = [0; DEVICE_LEN];
        params[..4].copy_from_slice(&info[264..268]);
        let device = self.create(self.root, DEVICE_CLASS, &mut params)?;
        self.create(device, SUBDEVICE_CLASS, &mut info[268..272])?;
        self.devices.push((gpu.to_owned(), device));
        Ok(device)
    }

    /// Makes the groups of a context: one for kernels and three for copies (seen on an H200 with
    /// driver 580). Each is scheduled, and then has libcuda's slice.
    ///
    /// # Errors
    /// [`RmError`].
    pub fn create_context(&mut self, gpu: &str) -> Result<ContextGroups, RmError> {
        let device = self.device(gpu)?;
        let mut groups = Vec::new();
        for engine in [COMPUTE_CLASS, COPY_CLASS, COPY_CLASS, COPY_CLASS] {
            let group = self.create(device, GROUP_CLASS, &mut [])?;
            let channel = self.create(group, CHANNEL_CLASS, &mut [])?;
            self.create(channel, engine, &mut [])?;
            self.control(group, SCHEDULE, &mut [1, 0, 0])?;
            let mut slice = LIBCUDA_SLICE.to_ne_bytes();
            self.control(group, SET_TIMESLICE, &mut slice)?;
            groups.push(group);
        }
        let computing = groups[0];
        Ok(ContextGroups { groups, computing })
    }

    /// Frees a context's groups, with the channels in them.
    ///
    /// # Errors
    /// [`RmError`].
    pub fn destroy_context(&self, context: &ContextGroups) -> Result<(), RmError> {
        for group in &context.groups {
            let mut argument = Free {
                client: self.root,
                object: *group,
                ..Free::default()
            };
            call(&self.file, FREE, &mut argument)?;
            checked(argument.status)?;
        }
        Ok(())
    }

    /// Gives a group work of this many nanoseconds, or [`ENDLESS`] work. Returns all that it has
    /// been given so far.
    ///
    /// # Errors
    /// [`RmError`].
    pub fn submit(&self, group: u32, nanos: u64) -> Result<u64, RmError> {
        self.work(WORK, group, nanos)
    }

    /// The nanoseconds of a group's work that are done.
    ///
    /// # Errors
    /// [`RmError`].
    pub fn progress(&self, group: u32) -> Result<u64, RmError> {
        self.work(PROGRESS, group, 0)
    }

    fn work(&self, escape: u8, group: u32, nanos: u64) -> Result<u64, RmError> {
        let mut argument = Work {
            nanos,
            client: self.root,
            group,
            ..Work::default()
        };
        call(&self.file, escape, &mut argument)?;
        checked(argument.status)?;
        Ok(argument.nanos)
    }
}
