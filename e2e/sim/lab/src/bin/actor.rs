//! `sim-actor`: a CUDA and NVML program that executes requests of a test.
//!
//! The program reads a line from its standard input, a socket that also passes descriptors. It
//! replies `ok ...` or `error CODE`. Numbers are decimal; addresses and handles come from earlier
//! replies.
//!
//! | request | effect |
//! |---|---|
//! | `context DEVICE`, `reset DEVICE`, `sync`, `limit BYTES` | contexts |
//! | `info` | returns the used bytes |
//! | `alloc LEN`, `free AT`, `fill AT BYTE LEN`, `read AT` | linear memory; `read` returns a byte |
//! | `host LEN` | allocates ordinary host memory, which is never freed |
//! | `poolalloc LEN`, `poolfree AT`, `reserved` | the default pool |
//! | `launch KERNEL NUMBER...` | launches a kernel of the simulated driver |
//! | `create LEN`, `release H`, `reserve LEN`, `map AT LEN H` | VMM |
//! | `access AT LEN FLAGS`, `unmap AT LEN` | VMM |
//! | `attach H LEN` | VMM: reserves, maps and permits reads and writes |
//! | `export H`, `import` | sends a descriptor, imports a received one |
//! | `keep` | keeps a received descriptor open without importing it |
//! | `share AT`, `open OBJECT` | IPC handles |
//! | `cudarc` | a small program over cudarc's safe interface |
//! | `fork`, `exec`, `pid` | process control; the forked child only sleeps |
//! | `nvml-used GPU`, `nvml-count`, `nvml-wait MS` | NVML |
//! | `new-context DEVICE` | creates a context beside the others, which becomes the current one |
//! | `rm-groups HANDLE`, `rm-work NANOS` | the kernel module without libcuda: groups, their work |
//! | `rm-clients COUNT`, `rm-slice CLIENT GROUP MICROS` | clients without a group; sets a slice |
//! | `rm-file PATH` | opens a file and keeps it |
//! | `nvml-processes GPU` | NVML; returns `pid:bytes` for each process |

use anyhow::{Context as _, Result, bail};
use bursar_sim_lab::RmTenant;
use cudarc::driver::sys::{self, CUresult};
use nvml_wrapper::{
    Nvml, bitmasks::event::EventTypes, enums::device::UsedGpuMemory, error::NvmlError,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::collections::VecDeque;
use std::ffi::CString;
use std::io::{IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;

/// Calls the driver, and returns its error from the enclosing function.
macro_rules! cu {
    ($call:ident($($argument:expr),*)) => {{
        // SAFETY: the driver checks the numbers; the pointers are to locals that outlive the call.
        let result = unsafe { sys::$call($($argument),*) };
        if result != CUresult::CUDA_SUCCESS {
            return Ok(Err(result as i32));
        }
    }};
}

/// The reply to a request about another process's client, as the kernel module's status.
const NOT_ITS_CLIENT: i32 = 0x23;

/// The words of a reply, or the driver's error. The outer error is a mistake of the test.
type CommandResult = Result<Result<String, i32>>;

fn main() -> Result<()> {
    let mut client = Client {
        pending: Vec::new(),
        descriptors: VecDeque::new(),
        held_descriptors: Vec::new(),
        nvml: None,
        tenant: RmTenant::default(),
    };
    while let Some(line) = client.read_line()? {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = client
            .run_command(&words)
            .with_context(|| format!("`{line}`"))?;
        let mut out = std::io::stdout().lock();
        match answer {
            Ok(words) => writeln!(out, "ok {words}")?,
            Err(code) => writeln!(out, "error {code}")?,
        }
        out.flush()?;
    }
    Ok(())
}

struct Client {
    pending: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
    held_descriptors: Vec<OwnedFd>,
    nvml: Option<&'static Nvml>,
    tenant: RmTenant,
}

fn parse_number(words: &[&str], place: usize) -> Result<u64> {
    words
        .get(place)
        .context("a number is missing")?
        .parse()
        .context("not a number")
}

impl Client {
    /// Reads the next line; `None` at the end of the input.
    fn read_line(&mut self) -> Result<Option<String>> {
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                return Ok(Some(String::from_utf8(line)?.trim().to_owned()));
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            // Reads one byte at a time, because later bytes may be for the process image after an
            // `exec`.
            let mut bytes = [0; 1];
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let got = rustix::net::recvmsg(
                std::io::stdin(),
                &mut parts,
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            )?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    self.descriptors.extend(descriptors);
                }
            }
            if got.bytes == 0 {
                return Ok(None);
            }
            self.pending.extend(&bytes[..got.bytes]);
        }
    }

    fn run_command(&mut self, words: &[&str]) -> CommandResult {
        let n = |place| parse_number(words, place);
        match *words.first().context("an empty line")? {
            "context" => context(n(1)? as i32),
            "new-context" => new_context(n(1)? as i32),
            "reset" => {
                cu!(cuDevicePrimaryCtxReset_v2(n(1)? as i32));
                Ok(Ok(String::new()))
            }
            "sync" => {
                cu!(cuCtxSynchronize());
                Ok(Ok(String::new()))
            }
            "info" => info(),
            "limit" => {
                cu!(cuCtxSetLimit(
                    sys::CUlimit::CU_LIMIT_STACK_SIZE,
                    n(1)? as usize
                ));
                Ok(Ok(String::new()))
            }
            "alloc" => call_for_number(|at| {
                // SAFETY: `at` is a local of `call_for_number`.
                unsafe { sys::cuMemAlloc_v2(at, n(1).unwrap_or(0) as usize) }
            }),
            "free" => {
                cu!(cuMemFree_v2(n(1)?));
                Ok(Ok(String::new()))
            }
            "fill" => {
                cu!(cuMemsetD8_v2(n(1)?, n(2)? as u8, n(3)? as usize));
                Ok(Ok(String::new()))
            }
            "read" => {
                let mut byte = 0u8;
                cu!(cuMemcpyDtoH_v2((&raw mut byte).cast(), n(1)?, 1));
                Ok(Ok(byte.to_string()))
            }
            "host" => {
                let memory = vec![0_u8; n(1)? as usize].leak();
                Ok(Ok((memory.as_ptr() as u64).to_string()))
            }
            "poolalloc" => call_for_number(|at| {
                // SAFETY: `at` is a local of `call_for_number`.
                unsafe {
                    sys::cuMemAllocAsync(at, n(1).unwrap_or(0) as usize, std::ptr::null_mut())
                }
            }),
            "poolfree" => {
                cu!(cuMemFreeAsync(n(1)?, std::ptr::null_mut()));
                Ok(Ok(String::new()))
            }
            "reserved" => reserved(),
            "launch" => launch(words),
            "create" => create(n(1)?),
            "release" => {
                cu!(cuMemRelease(n(1)?));
                Ok(Ok(String::new()))
            }
            "reserve" => call_for_number(|at| {
                // SAFETY: `at` is a local of `call_for_number`.
                unsafe { sys::cuMemAddressReserve(at, n(1).unwrap_or(0) as usize, 0, 0, 0) }
            }),
            "map" => {
                cu!(cuMemMap(n(1)?, n(2)? as usize, 0, n(3)?, 0));
                Ok(Ok(String::new()))
            }
            "access" => access(n(1)?, n(2)?, n(3)?),
            "unmap" => {
                cu!(cuMemUnmap(n(1)?, n(2)? as usize));
                Ok(Ok(String::new()))
            }
            "attach" => attach(n(1)?, n(2)?),
            "export" => export(n(1)?),
            "import" => self.import(),
            "keep" => {
                self.held_descriptors
                    .push(self.descriptors.pop_front().context("no descriptor came")?);
                Ok(Ok(String::new()))
            }
            "share" => share(n(1)?),
            "open" => open(n(1)?),
            "fork" => fork(),
            "exec" => bail!(std::process::Command::new("/proc/self/exe").exec()),
            "cudarc" => cudarc(),
            "pid" => Ok(Ok(std::process::id().to_string())),
            other if other.starts_with("rm-") => self.tenant(other, words),
            other => self.nvml(other, words),
        }
    }

    fn import(&mut self) -> CommandResult {
        let descriptor = self.descriptors.pop_front().context("no descriptor came")?;
        let mut handle = 0;
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        cu!(cuMemImportFromShareableHandle(
            &mut handle,
            descriptor.as_raw_fd() as *mut _,
            kind
        ));
        Ok(Ok(handle.to_string()))
    }

    fn tenant(&mut self, command: &str, words: &[&str]) -> CommandResult {
        let n = |place| parse_number(words, place);
        let tenant = &mut self.tenant;
        match command {
            "rm-groups" => {
                let (client, group) = tenant.create_groups(u32::try_from(n(1)?)?)?;
                return Ok(Ok(format!("{client} {group}")));
            }
            "rm-work" => tenant.submit(n(1)?)?,
            "rm-file" => tenant.open_file(words.get(1).context("a path is missing")?)?,
            "rm-clients" => tenant.open_clients(n(1)?)?,
            "rm-slice" => {
                let (client, group) = (u32::try_from(n(1)?)?, u32::try_from(n(2)?)?);
                if !tenant.set_slice(client, group, n(3)?)? {
                    return Ok(Err(NOT_ITS_CLIENT));
                }
            }
            other => bail!("unknown command {other}"),
        }
        Ok(Ok(String::new()))
    }

    fn nvml(&mut self, command: &str, words: &[&str]) -> CommandResult {
        let nvml = match self.nvml {
            Some(nvml) => nvml,
            None => {
                let nvml = Nvml::builder()
                    .lib_path("libnvidia-ml.so.1".as_ref())
                    .init()?;
                *self.nvml.insert(Box::leak(Box::new(nvml)))
            }
        };
        let device = || {
            nvml.device_by_index(parse_number(words, 1)? as u32)
                .context("no such GPU")
        };
        let outcome = match command {
            "nvml-count" => nvml.device_count().map(|count| count.to_string()),
            "nvml-used" => device()?
                .memory_info()
                .map(|memory| memory.used.to_string()),
            "nvml-processes" => device()?.running_compute_processes().map(|processes| {
                let shown = processes
                    .iter()
                    .map(|process| match process.used_gpu_memory {
                        UsedGpuMemory::Used(bytes) => format!("{}:{bytes}", process.pid),
                        UsedGpuMemory::Unavailable => format!("{}:?", process.pid),
                    });
                shown.collect::<Vec<_>>().join(" ")
            }),
            "nvml-wait" => {
                let set = nvml.create_event_set()?;
                let set = (0..nvml.device_count()?).try_fold(set, |set, gpu| {
                    let device = nvml
                        .device_by_index(gpu)
                        .context("a GPU that was counted is gone")?;
                    device
                        .register_events(EventTypes::CRITICAL_XID_ERROR, set)
                        .map_err(|error| anyhow::anyhow!(error.error))
                })?;
                println!("ok waiting");
                set.wait(parse_number(words, 1)? as u32)
                    .map(|event| format!("{:?}", event.event_data))
            }
            other => bail!("unknown command {other}"),
        };
        match outcome {
            Ok(words) => Ok(Ok(words)),
            Err(NvmlError::GpuLost) => Ok(Err(15)),
            Err(NvmlError::Timeout) => Ok(Err(10)),
            Err(error) => Err(error.into()),
        }
    }
}

/// Calls a function that writes one number, and replies with it.
fn call_for_number(call: impl FnOnce(*mut u64) -> CUresult) -> CommandResult {
    let mut value = 0;
    match call(&mut value) {
        CUresult::CUDA_SUCCESS => Ok(Ok(value.to_string())),
        error => Ok(Err(error as i32)),
    }
}

fn context(device: i32) -> CommandResult {
    let mut context = std::ptr::null_mut();
    cu!(cuInit(0));
    cu!(cuDevicePrimaryCtxRetain(&mut context, device));
    cu!(cuCtxSetCurrent(context));
    Ok(Ok(String::new()))
}

fn new_context(device: i32) -> CommandResult {
    let mut context = std::ptr::null_mut();
    cu!(cuInit(0));
    cu!(cuCtxCreate_v2(&mut context, 0, device));
    Ok(Ok(String::new()))
}

fn info() -> CommandResult {
    let (mut free, mut total) = (0, 0);
    cu!(cuMemGetInfo_v2(&mut free, &mut total));
    Ok(Ok((total - free).to_string()))
}

fn reserved() -> CommandResult {
    let (mut pool, mut bytes) = (std::ptr::null_mut(), 0u64);
    cu!(cuDeviceGetDefaultMemPool(&mut pool, 0));
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
    cu!(cuMemPoolGetAttribute(
        pool,
        attribute,
        (&raw mut bytes).cast()
    ));
    Ok(Ok(bytes.to_string()))
}

fn launch(words: &[&str]) -> CommandResult {
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    let name = CString::new(*words.get(1).context("which kernel?")?)?;
    cu!(cuModuleLoadData(&mut module, c"any".as_ptr().cast()));
    cu!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
    let mut values = (2..words.len())
        .map(|place| parse_number(words, place))
        .collect::<Result<Vec<u64>>>()?;
    let mut arguments: Vec<*mut std::ffi::c_void> = values
        .iter_mut()
        .map(|value| (value as *mut u64).cast())
        .collect();
    let (stream, extra) = (std::ptr::null_mut(), std::ptr::null_mut());
    cu!(cuLaunchKernel(
        function,
        1,
        1,
        1,
        1,
        1,
        1,
        0,
        stream,
        arguments.as_mut_ptr(),
        extra
    ));
    Ok(Ok(String::new()))
}

fn location() -> sys::CUmemLocation {
    // SAFETY: plain data, for which zero is a valid value.
    let mut location: sys::CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    location
}

fn create(len: u64) -> CommandResult {
    cu!(cuInit(0));
    let mut handle = 0;
    let properties = sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes:
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: location(),
        win32HandleMetaData: std::ptr::null_mut(),
        // SAFETY: plain data, for which zero is a valid value.
        allocFlags: unsafe { std::mem::zeroed() },
    };
    cu!(cuMemCreate(&mut handle, len as usize, &properties, 0));
    Ok(Ok(handle.to_string()))
}

fn access(at: u64, len: u64, flags: u64) -> CommandResult {
    use sys::CUmemAccess_flags as Flags;
    let flags = match flags {
        0 => Flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
        1 => Flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
        _ => Flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let wanted = sys::CUmemAccessDesc {
        location: location(),
        flags,
    };
    cu!(cuMemSetAccess(at, len as usize, &wanted, 1));
    Ok(Ok(String::new()))
}

fn attach(handle: u64, len: u64) -> CommandResult {
    let mut at = 0;
    cu!(cuMemAddressReserve(&mut at, len as usize, 0, 0, 0));
    cu!(cuMemMap(at, len as usize, 0, handle, 0));
    Ok(access(at, len, 3)?.map(|_| at.to_string()))
}

fn export(handle: u64) -> CommandResult {
    let mut descriptor = -1i32;
    let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    cu!(cuMemExportToShareableHandle(
        (&raw mut descriptor).cast(),
        handle,
        kind,
        0
    ));
    // SAFETY: the driver has just opened the descriptor for this process.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    bursar_sim_lab::send_with_fd(&socket.into(), b"!", Some(descriptor.as_fd()))?;
    Ok(Ok(String::new()))
}

/// Replies with the object's id, which is the first number of the IPC handle.
fn share(at: u64) -> CommandResult {
    // SAFETY: plain data, for which zero is a valid value.
    let mut handle: sys::CUipcMemHandle = unsafe { std::mem::zeroed() };
    cu!(cuIpcGetMemHandle(&mut handle, at));
    let name: [u8; 8] = std::array::from_fn(|place| handle.reserved[place] as u8);
    Ok(Ok(u64::from_ne_bytes(name).to_string()))
}

fn open(object: u64) -> CommandResult {
    // SAFETY: plain data, for which zero is a valid value.
    let mut handle: sys::CUipcMemHandle = unsafe { std::mem::zeroed() };
    for (place, byte) in handle.reserved.iter_mut().zip(object.to_ne_bytes()) {
        *place = byte as _;
    }
    let mut at = 0;
    cu!(cuIpcOpenMemHandle_v2(&mut at, handle, 1));
    Ok(Ok(at.to_string()))
}

fn fork() -> CommandResult {
    // SAFETY: the process has one thread, and the child calls nothing but `sleep`.
    match unsafe { libc::fork() } {
        -1 => bail!(std::io::Error::last_os_error()),
        0 => loop {
            std::thread::sleep(std::time::Duration::from_secs(60));
        },
        child => Ok(Ok(child.to_string())),
    }
}

/// Replies with the sum of memory copied to the device and back, and with the bytes in use.
fn cudarc() -> CommandResult {
    let context = cudarc::driver::CudaContext::new(0)?;
    let stream = context.default_stream();
    let data = stream.clone_htod(&(0u64..128).collect::<Vec<_>>())?;
    let copy = stream.clone_dtod(&data)?;
    let back = stream.clone_dtoh(&copy)?;
    let (free, total) = context.mem_get_info()?;
    drop((data, copy));
    context.synchronize()?;
    Ok(Ok(format!(
        "sum {} used {}",
        back.iter().sum::<u64>(),
        total - free
    )))
}
