//! Calls the resource manager of NVIDIA's kernel module through its control node.
//!
//! A client of the resource manager belongs to the open file that made it, and ends with the last
//! descriptor of that file. The kernel module takes a client's commands from this file alone.
//!
//! The commands are no stable interface (`nvos.h` and `ctrl/` in NVIDIA/open-gpu-kernel-modules).
//! The kernel module refuses parameters of another size. Each caller says by which part of an
//! answer it recognizes the known layout.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

use bursar_ledger::units::GpuUuid;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

/// `NV01_ROOT_CLIENT`, `NV01_DEVICE_0` and `NV20_SUBDEVICE_0`, each the next one's parent
/// (`class/`).
const CLIENT: u32 = 0x41;
const DEVICE: u32 = 0x80;
pub(crate) const SUBDEVICE: u32 = 0x2080;

/// The handles that this client chooses for its two objects.
const DEVICE_HANDLE: u32 = 0xb0b0_0080;
pub(crate) const SUBDEVICE_HANDLE: u32 = 0xb0b0_2080;

/// `NV0000_CTRL_CMD_GPU_GET_UUID_INFO` (`ctrl/ctrl0000/ctrl0000gpu.h`).
const GET_UUID_INFO: u32 = 0x274;

/// Why the kernel module did not carry out a command.
#[derive(Debug, thiserror::Error)]
pub enum RmError {
    /// The control node cannot be opened.
    #[error("failed to open {path}: {error}", path = .0.display(), error = .1)]
    Open(PathBuf, #[source] io::Error),
    /// The system call failed.
    #[error("failed to call the kernel module: {0}")]
    Ioctl(#[source] io::Error),
    /// The kernel module refused a command (`nvstatuscodes.h`).
    #[error("the kernel module answered {command:#x} with status {status:#x}")]
    Refused {
        /// The command, or the class of the object that was to be made.
        command: u32,
        /// The resource manager's answer.
        status: u32,
    },
}

/// The device node that takes the kernel module's commands, where no folder is configured.
pub(crate) const CONTROL_NODE: &str = "/dev/nvidiactl";

/// `NVOS64_PARAMETERS` of `NV_ESC_RM_ALLOC` (`nvos.h`).
#[repr(C)]
struct Alloc {
    root: u32,
    parent: u32,
    object: u32,
    class: u32,
    params: u64,
    rights: u64,
    params_size: u32,
    flags: u32,
    status: u32,
}

/// `NVOS54_PARAMETERS` of `NV_ESC_RM_CONTROL`.
#[repr(C)]
struct Control {
    client: u32,
    object: u32,
    command: u32,
    flags: u32,
    params: u64,
    params_size: u32,
    status: u32,
}

const ALLOC: Opcode = opcode::read_write::<Alloc>(b'F', 0x2b);
const CONTROL: Opcode = opcode::read_write::<Control>(b'F', 0x2a);

/// Parameters that the kernel module reads and writes in place.
///
/// # Safety
/// Any bytes are a value of the type, and the type has the layout of the command that takes it.
#[expect(unsafe_code, reason = "the kernel module writes into these values")]
pub(crate) unsafe trait RmParams {}

/// `NV0000_CTRL_GPU_GET_UUID_INFO_PARAMS`.
#[repr(C)]
struct UuidInfo {
    uuid: [u8; 256],
    flags: u32,
    gpu: u32,
    device: u32,
    subdevice: u32,
}

/// `NV0080_ALLOC_PARAMETERS`.
#[repr(C)]
#[derive(Default)]
struct DeviceParams {
    device: u32,
    shared_client: u32,
    target_client: u32,
    target_device: u32,
    flags: u32,
    space: [u64; 3],
    mode: u32,
}

/// `NV2080_ALLOC_PARAMETERS`.
#[repr(C)]
struct SubdeviceParams {
    subdevice: u32,
}

#[expect(unsafe_code, reason = "the kernel module writes into these values")]
mod layouts {
    use super::{DeviceParams, RmParams, SubdeviceParams, UuidInfo};

    // SAFETY: integers alone, in the header's order.
    unsafe impl RmParams for UuidInfo {}
    // SAFETY: integers alone, in the header's order.
    unsafe impl RmParams for DeviceParams {}
    // SAFETY: integers alone, in the header's order.
    unsafe impl RmParams for SubdeviceParams {}
}

/// A client of the resource manager with a subdevice of one GPU; closing the file frees it.
pub(crate) struct RmClient {
    file: File,
    root: u32,
}

impl RmClient {
    /// Opens a client without an object.
    fn connect(control_node: &Path) -> Result<RmClient, RmError> {
        let mut options = File::options();
        let file = options.read(true).write(true).open(control_node);
        let file = file.map_err(|error| RmError::Open(control_node.to_owned(), error))?;
        let mut client = RmClient { file, root: 0 };
        client.root = client.alloc::<SubdeviceParams>(0, 0, CLIENT, None)?;
        Ok(client)
    }

    /// Opens a client with a subdevice of `gpu`.
    pub(crate) fn open(control_node: &Path, gpu: &GpuUuid) -> Result<RmClient, RmError> {
        let client = Self::connect(control_node)?;
        let mut info = UuidInfo {
            uuid: [0; 256],
            flags: 0,
            gpu: 0,
            device: 0,
            subdevice: 0,
        };
        let name = gpu.as_str().bytes().take(info.uuid.len() - 1);
        info.uuid
            .iter_mut()
            .zip(name)
            .for_each(|(to, from)| *to = from);
        client.control(client.root, GET_UUID_INFO, &mut info)?;
        let mut device = DeviceParams {
            device: info.device,
            ..DeviceParams::default()
        };
        let root = client.root;
        let device = client.alloc(root, DEVICE_HANDLE, DEVICE, Some(&mut device))?;
        let mut subdevice = SubdeviceParams {
            subdevice: info.subdevice,
        };
        client.alloc(device, SUBDEVICE_HANDLE, SUBDEVICE, Some(&mut subdevice))?;
        Ok(client)
    }

    #[expect(unsafe_code, reason = "no library speaks to NVIDIA's kernel module")]
    fn alloc<P: RmParams>(
        &self,
        parent: u32,
        object: u32,
        class: u32,
        params: Option<&mut P>,
    ) -> Result<u32, RmError> {
        let params_size = params.as_ref().map_or(0, |_| size_of::<P>());
        let params = params.map_or(0, |params| std::ptr::from_mut(params).addr());
        let mut call = Alloc {
            root: self.root,
            parent,
            object,
            class,
            params: params as u64,
            rights: 0,
            params_size: params_size as u32,
            flags: 0,
            status: 0,
        };
        // SAFETY: the number has the size of `Alloc`. The kernel module writes to this value and to
        // `params_size` bytes at `params`, which the caller lends until the call returns.
        let called = unsafe { ioctl(self.file.as_fd(), Updater::<ALLOC, _>::new(&mut call)) };
        called.map_err(|error| RmError::Ioctl(error.into()))?;
        let (command, status) = (class, call.status);
        match status {
            0 => Ok(call.object),
            _ => Err(RmError::Refused { command, status }),
        }
    }

    /// Sends a command to an object of this client.
    pub(crate) fn control<P: RmParams>(
        &self,
        object: u32,
        command: u32,
        params: &mut P,
    ) -> Result<(), RmError> {
        control(self.file.as_fd(), self.root, object, command, params)
    }
}

/// The handle that the resource manager gives to a client now, the newest one.
pub(crate) fn newest_client(control_node: &Path) -> Result<u32, RmError> {
    RmClient::connect(control_node).map(|client| client.root)
}

/// Sends a command to an object of `client`, which `file` has made.
#[expect(unsafe_code, reason = "no library speaks to NVIDIA's kernel module")]
pub(crate) fn control<P: RmParams>(
    file: BorrowedFd<'_>,
    client: u32,
    object: u32,
    command: u32,
    params: &mut P,
) -> Result<(), RmError> {
    let mut call = Control {
        client,
        object,
        command,
        flags: 0,
        params: std::ptr::from_mut(params).addr() as u64,
        params_size: size_of::<P>() as u32,
        status: 0,
    };
    // SAFETY: the number has the size of `Control`. The kernel module writes to this value and to
    // `params_size` bytes at `params`, which is borrowed until the call returns.
    let called = unsafe { ioctl(file, Updater::<CONTROL, _>::new(&mut call)) };
    called.map_err(|error| RmError::Ioctl(error.into()))?;
    match call.status {
        0 => Ok(()),
        status => Err(RmError::Refused { command, status }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_the_kernel_modules_sizes() {
        assert_eq!(size_of::<Alloc>(), 48);
        assert_eq!(size_of::<Control>(), 32);
        assert_eq!(size_of::<UuidInfo>(), 272);
        assert_eq!(size_of::<DeviceParams>(), 56);
    }
}
