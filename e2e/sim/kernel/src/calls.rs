//! Decodes calls of the kernel module, and reads and writes their parameters in the caller.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bursar_sim_state::rm::{
    ALLOC, Alloc, CONTROL, Control, FREE, Free, HOLD, Hold, MAGIC, PROGRESS, Plain, WORK, Work,
};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::fuse::Handler;
use crate::module::{Caller, Module, Refusal};

/// The longest parameters of a command, so that a caller chooses no amount of memory.
const MAX_PARAMS: u32 = 64 << 10;

/// A module whose time passes as the clock's does.
#[derive(Debug)]
pub struct Timed {
    state: Mutex<(Module, Instant)>,
    calls: AtomicU64,
}

impl Timed {
    /// A module whose time begins now.
    pub fn new(module: Module) -> Timed {
        Timed {
            state: Mutex::new((module, Instant::now())),
            calls: AtomicU64::new(0),
        }
    }

    /// The number of calls so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    /// Calls `function` with the module, whose time is now.
    pub fn with<T>(&self, function: impl FnOnce(&mut Module) -> T) -> T {
        let mut state: MutexGuard<'_, (Module, Instant)> =
            self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (module, until) = &mut *state;
        let now = Instant::now();
        module.advance(now - *until);
        *until = now;
        function(module)
    }
}

/// The calls of all processes.
#[derive(Debug)]
pub struct Calls<'a> {
    module: &'a Timed,
    /// The minor number of each GPU's device node.
    minors: Vec<u32>,
    /// Descriptors of callers that stay open as long as the control file of the caller does.
    held: BTreeMap<u64, Vec<OwnedFd>>,
}

impl<'a> Calls<'a> {
    /// Answers calls by `module`, for GPUs with these minor numbers.
    pub fn new(module: &'a Timed, minors: Vec<u32>) -> Calls<'a> {
        Calls {
            module,
            minors,
            held: BTreeMap::new(),
        }
    }

    fn alloc(&self, file: u64, thread: u32, call: &mut Alloc) -> io::Result<()> {
        let caller = Caller {
            file,
            pid: process_of(thread)?,
        };
        let params = read(thread, call.params, call.params_size)?;
        let minors = &self.minors;
        let has_open = |gpu: usize| minors.get(gpu).is_some_and(|minor| opened(thread, *minor));
        let made = self
            .module
            .with(|module| module.alloc(caller, call, &params, has_open));
        call.object = made.unwrap_or(call.object);
        call.status = status(made.map(|_| ()));
        Ok(())
    }

    fn control(&self, file: u64, thread: u32, call: &mut Control) -> io::Result<()> {
        let mut params = read(thread, call.params, call.params_size)?;
        let (client, object, command) = (call.client, call.object, call.command);
        let answer = self
            .module
            .with(|module| module.control(file, client, object, command, &mut params));
        if answer.is_ok() {
            write(thread, call.params, &params)?;
        }
        call.status = status(answer);
        Ok(())
    }

    fn free(&self, file: u64, call: &mut Free) {
        let (client, object) = (call.client, call.object);
        let freed = self.module.with(|module| module.free(file, client, object));
        call.status = status(freed);
    }

    fn work(&self, file: u64, call: &mut Work) {
        let (key, nanos) = ((call.client, call.group), call.nanos);
        let submitted = self.module.with(|module| module.submit(file, key, nanos));
        call.nanos = submitted.unwrap_or(0);
        call.status = status(submitted.map(|_| ()));
    }

    fn progress(&self, file: u64, call: &mut Work) {
        let key = (call.client, call.group);
        let done = self.module.with(|module| module.done(file, key));
        call.nanos = done.unwrap_or(0);
        call.status = status(done.map(|_| ()));
    }

    fn hold(&mut self, file: u64, thread: u32, call: &mut Hold) -> io::Result<()> {
        let pid = i32::try_from(process_of(thread)?)
            .ok()
            .and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::NotFound)?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let held = pidfd_getfd(process, call.descriptor, PidfdGetfdFlags::empty())?;
        self.held.entry(file).or_default().push(held);
        call.status = 0;
        Ok(())
    }
}

impl Handler for Calls<'_> {
    fn ioctl(
        &mut self,
        file: u64,
        thread: u32,
        number: u32,
        argument: &mut [u8],
    ) -> io::Result<()> {
        let unknown = || io::Error::from_raw_os_error(libc::ENOTTY);
        self.module.calls.fetch_add(1, Relaxed);
        let [_, _, magic, escape] = number.to_be_bytes();
        match (magic, escape) {
            (MAGIC, ALLOC) => change(argument, |call| self.alloc(file, thread, call)),
            (MAGIC, CONTROL) => change(argument, |call| self.control(file, thread, call)),
            (MAGIC, FREE) => change(argument, |call| {
                self.free(file, call);
                Ok(())
            }),
            (MAGIC, WORK) => change(argument, |call| {
                self.work(file, call);
                Ok(())
            }),
            (MAGIC, PROGRESS) => change(argument, |call| {
                self.progress(file, call);
                Ok(())
            }),
            (MAGIC, HOLD) => change(argument, |call| self.hold(file, thread, call)),
            _ => Err(unknown()),
        }
    }

    fn release(&mut self, file: u64) {
        self.module.with(|module| module.close(file));
        // The memory of the process is freed with these.
        self.held.remove(&file);
    }
}

/// Reads an argument, lets `function` change it, and writes it back.
fn change<T: Plain>(
    argument: &mut [u8],
    function: impl FnOnce(&mut T) -> io::Result<()>,
) -> io::Result<()> {
    let mut call = T::from_bytes(argument).ok_or(io::ErrorKind::InvalidInput)?;
    function(&mut call)?;
    argument.copy_from_slice(call.bytes());
    Ok(())
}

fn status(answer: Result<(), Refusal>) -> u32 {
    answer.map_or_else(|refusal| refusal as u32, |()| 0)
}

/// The process of a thread.
fn process_of(thread: u32) -> io::Result<u32> {
    let status = fs::read_to_string(format!("/proc/{thread}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    let pid = line.and_then(|line| line.trim().parse().ok());
    pid.ok_or(io::ErrorKind::NotFound.into())
}

/// Whether a thread's process has a GPU's device node open, by the node's name alone.
fn opened(thread: u32, minor: u32) -> bool {
    let name = format!("nvidia{minor}");
    let entries = fs::read_dir(format!("/proc/{thread}/fd"));
    let mut links = entries
        .into_iter()
        .flatten()
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links.any(|link| link.file_name().is_some_and(|file| file == name.as_str()))
}

/// Memory of a process for `process_vm_readv` and `process_vm_writev`.
fn remote(address: u64, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: address as *mut libc::c_void,
        iov_len: len,
    }
}

fn moved(count: isize, len: usize) -> io::Result<()> {
    match usize::try_from(count) {
        Ok(count) if count == len => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Reads parameters of a call from the thread that makes it.
fn read(thread: u32, address: u64, len: u32) -> io::Result<Vec<u8>> {
    if len > MAX_PARAMS {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut bytes = vec![0; len as usize];
    if bytes.is_empty() {
        return Ok(bytes);
    }
    let own = remote(bytes.as_mut_ptr().addr() as u64, bytes.len());
    let other = remote(address, bytes.len());
    // SAFETY: `own` is this process's `bytes`; the kernel checks the other process's range.
    let count = unsafe { libc::process_vm_readv(thread as i32, &own, 1, &other, 1, 0) };
    moved(count, bytes.len()).map(|()| bytes)
}

/// Writes parameters of a call back to the thread that makes it.
fn write(thread: u32, address: u64, bytes: &[u8]) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let own = remote(bytes.as_ptr().addr() as u64, bytes.len());
    let other = remote(address, bytes.len());
    // SAFETY: the kernel only reads `own`, which is `bytes`, and checks the other process's range.
    let count = unsafe { libc::process_vm_writev(thread as i32, &own, 1, &other, 1, 0) };
    moved(count, bytes.len())
}

/// The number of an ioctl of this escape, for tests.
#[cfg(test)]
fn number<T>(escape: u8) -> u32 {
    3 << 30 | (size_of::<T>() as u32) << 16 | u32::from(MAGIC) << 8 | u32::from(escape)
}

#[cfg(test)]
mod tests {
    use bursar_sim_state::rm;

    use super::*;

    fn alloc(calls: &mut Calls<'_>, mut call: Alloc) -> Alloc {
        let thread = std::process::id();
        let mut bytes = call.bytes().to_vec();
        calls
            .ioctl(1, thread, number::<Alloc>(ALLOC), &mut bytes)
            .unwrap();
        call = Alloc::from_bytes(&bytes).unwrap();
        call
    }

    #[test]
    fn calls_read_and_write_parameters_of_the_caller() {
        let module = Timed::new(Module::new(vec!["GPU-1".to_owned()]));
        let mut calls = Calls::new(&module, vec![0]);
        let client = alloc(
            &mut calls,
            Alloc {
                class: rm::CLIENT_CLASS,
                ..Alloc::default()
            },
        );
        let mut info = [0_u8; rm::UUID_INFO_LEN];
        info[..5].copy_from_slice(b"GPU-1");
        let mut call = Control {
            client: client.object,
            object: client.object,
            command: rm::GET_UUID_INFO,
            params: info.as_mut_ptr().addr() as u64,
            params_size: info.len() as u32,
            ..Control::default()
        };
        let ask = |calls: &mut Calls<'_>, call: &Control| {
            let mut bytes = call.bytes().to_vec();
            let number = number::<Control>(CONTROL);
            let asked = calls.ioctl(1, std::process::id(), number, &mut bytes);
            asked.map(|()| Control::from_bytes(&bytes).unwrap().status)
        };
        assert_eq!(ask(&mut calls, &call).unwrap(), 0);
        assert_eq!(info[260..264], 0x100_u32.to_ne_bytes());
        call.params_size = MAX_PARAMS + 1;
        assert!(ask(&mut calls, &call).is_err());
        (call.params, call.params_size) = (8, 16);
        assert!(ask(&mut calls, &call).is_err());
        assert!(calls.ioctl(1, 1, 0, &mut []).is_err());
    }

    #[test]
    fn device_is_for_a_process_with_the_gpus_node_open() {
        let folder = std::env::temp_dir().join(format!("sim-calls-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let thread = std::process::id();
        assert!(!opened(thread, 77));
        let node = fs::File::create(folder.join("nvidia77")).unwrap();
        assert!(opened(thread, 77) && !opened(thread, 7));
        drop(node);
        fs::remove_dir_all(&folder).unwrap();
    }
}
