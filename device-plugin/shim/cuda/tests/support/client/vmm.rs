//! Commands of virtual memory management and of memory that others can come to hold.
//!
//! ```text
//! create BYTES DEVICE HANDLES  -> ok HANDLE | err CODE
//! releasehandle HANDLE         -> ok | err CODE
//! reserve BYTES                -> ok ADDRESS | err CODE
//! map ADDRESS BYTES HANDLE     -> ok | err CODE
//! unmap ADDRESS BYTES          -> ok | err CODE
//! retainhandle ADDRESS         -> ok HANDLE | err CODE
//! exporthandle HANDLE KIND     -> ok DESCRIPTOR | err CODE
//! importhandle DESCRIPTOR      -> ok HANDLE | err CODE
//! close DESCRIPTOR             -> ok | err CODE
//! sendfd DESCRIPTOR NAME       -> ok                        (to the process that receives NAME)
//! recvfd NAME                  -> ok DESCRIPTOR
//! sleepwake N BYTES            -> ok | err CODE             (N times create, map, unmap, release)
//! ipcget POINTER               -> ok OBJECT | err CODE      (the handle's first 8 bytes)
//! ipcopen OBJECT               -> ok POINTER | err CODE
//! ipcclose POINTER             -> ok | err CODE
//! dmabuf POINTER BYTES         -> ok DESCRIPTOR | err CODE
//! multicast BYTES              -> ok OBJECT | err CODE
//! bind OBJECT HANDLE BYTES     -> ok | err CODE
//! bindat OBJECT ADDRESS BYTES  -> ok | err CODE
//! unbind OBJECT BYTES          -> ok | err CODE
//! tile ARRAY HANDLE            -> ok | err CODE             (the memory is the array's only tile)
//! untile ARRAY                 -> ok | err CODE
//! ```

use std::os::fd::IntoRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use bursar_protocol::fd_passing::{receive_with_fd, send_with_fd};

use super::{Cuda, answer, say};

pub(crate) fn run(cuda: &Cuda, words: &[&str]) -> Option<String> {
    let number = |index: usize| words[index].parse::<u64>().expect("a number");
    let done = |code| say(answer(code, String::new()));
    let (mut got, mut descriptor, mut handle) = (0_u64, 0_i32, [0_u64; 8]);
    let result = match words[0] {
        "create" => {
            let code = create(
                cuda,
                &mut got,
                number(1),
                number(2) as i32,
                number(3) as i32,
            );
            say(answer(code, got.to_string()))
        }
        "releasehandle" => done(release(cuda, number(1))),
        "reserve" => {
            let code = reserve(cuda, &mut got, number(1));
            say(answer(code, got.to_string()))
        }
        "map" => done(map(cuda, number(1), number(2), number(3))),
        "access" => {
            // `CUmemAccessDesc`: device 0, to read and to write.
            let access = [1_i32, 0, 3];
            done(call!(cuda, c"cuMemSetAccess", (
                number(1) => u64, number(2) as usize => usize, access.as_ptr() => *const i32, 1 => usize
            )))
        }
        "unmap" => done(unmap(cuda, number(1), number(2))),
        "retainhandle" => {
            let code = call!(cuda, c"cuMemRetainAllocationHandle", (&raw mut got => *mut u64, number(1) => u64));
            say(answer(code, got.to_string()))
        }
        "exporthandle" => {
            let code = call!(cuda, c"cuMemExportToShareableHandle", (
                &raw mut descriptor => *mut i32, number(1) => u64, number(2) as i32 => i32, 0 => u64
            ));
            say(answer(code, descriptor.to_string()))
        }
        "importhandle" => {
            let code = call!(cuda, c"cuMemImportFromShareableHandle", (
                &raw mut got => *mut u64, number(1) => u64, 1 => i32
            ));
            say(answer(code, got.to_string()))
        }
        "close" => {
            // SAFETY: the test passes a descriptor that an export made.
            done(unsafe { libc::close(number(1) as i32) })
        }
        "sendfd" => {
            // SAFETY: the test passes a descriptor that an export made.
            let given = unsafe { std::os::fd::BorrowedFd::borrow_raw(number(1) as i32) };
            let stream = loop {
                match UnixStream::connect_addr(&address(words[2])) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::sleep(std::time::Duration::from_millis(5)),
                }
            };
            send_with_fd(&stream, b"!", given).expect("the other listens");
            say(Ok(String::new()))
        }
        "recvfd" => {
            let listener = UnixListener::bind_addr(&address(words[1])).expect("a free name");
            let (stream, _) = listener.accept().expect("the other connects");
            let (_, taken) = receive_with_fd(&stream, &mut [0; 1]).expect("the other sends");
            let taken = taken.expect("a descriptor").into_raw_fd();
            say(Ok(taken.to_string()))
        }
        "sleepwake" => done(sleep_and_wake(cuda, number(1), number(2))),
        "ipcget" => {
            let code = call!(cuda, c"cuIpcGetMemHandle", (handle.as_mut_ptr() => *mut u64, number(1) => u64));
            say(answer(code, handle[0].to_string()))
        }
        "ipcopen" => {
            handle[0] = number(1);
            let code = call!(cuda, c"cuIpcOpenMemHandle_v2", (
                &raw mut got => *mut u64, Handle(handle) => Handle, 1 => u32
            ));
            say(answer(code, got.to_string()))
        }
        "ipcclose" => done(call!(cuda, c"cuIpcCloseMemHandle", (number(1) => u64))),
        "dmabuf" => {
            let code = call!(cuda, c"cuMemGetHandleForAddressRange", (
                &raw mut descriptor => *mut i32, number(1) => u64, number(2) => u64, 1 => i32, 0 => u64
            ));
            say(answer(code, descriptor.to_string()))
        }
        "multicast" => {
            // `CUmulticastObjectProp`: a device, the size.
            let properties = [1, number(1), 0, 0];
            let code = call!(cuda, c"cuMulticastCreate", (&raw mut got => *mut u64, properties.as_ptr() => *const u64));
            say(answer(code, got.to_string()))
        }
        "bind" => done(call!(cuda, c"cuMulticastBindMem", (
            number(1) => u64, 0 => u64, number(2) => u64, 0 => u64, number(3) => u64, 0 => u64
        ))),
        "bindat" => done(call!(cuda, c"cuMulticastBindAddr", (
            number(1) => u64, 0 => u64, number(2) => u64, number(3) => u64, 0 => u64
        ))),
        "unbind" => done(call!(cuda, c"cuMulticastUnbind", (
            number(1) => u64, 0 => i32, 0 => u64, number(2) => u64
        ))),
        "tile" => done(tile(cuda, number(1), 1, number(2))),
        "untile" => done(tile(cuda, number(1), 2, 0)),
        _ => return None,
    };
    Some(result)
}

/// Maps memory into a sparse array (operation 1), or unmaps it (2), by a `CUarrayMapInfo`.
fn tile(cuda: &Cuda, array: u64, operation: u64, handle: u64) -> i32 {
    let mut mapping = [0_u64; 12];
    mapping[1] = array;
    // A 32-bit field.
    mapping[7] = operation;
    mapping[8] = handle;
    call!(cuda, c"cuMemMapArrayAsync", (mapping.as_mut_ptr() => *mut u64, 1 => u32, 0 => u64))
}

/// Returns an abstract socket address of a name.
fn address(name: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(name).expect("a short name")
}

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
struct Handle([u64; 8]);

fn create(cuda: &Cuda, handle: &mut u64, bytes: u64, device: i32, handles: i32) -> i32 {
    let properties = [1, handles, 1, device, 0, 0, 0, 0];
    call!(cuda, c"cuMemCreate", (
        std::ptr::from_mut(handle) => *mut u64, bytes => u64, properties.as_ptr() => *const i32, 0 => u64
    ))
}

fn release(cuda: &Cuda, handle: u64) -> i32 {
    call!(cuda, c"cuMemRelease", (handle => u64))
}

fn reserve(cuda: &Cuda, address: &mut u64, bytes: u64) -> i32 {
    call!(cuda, c"cuMemAddressReserve", (
        std::ptr::from_mut(address) => *mut u64, bytes => u64, 0 => u64, 0 => u64, 0 => u64
    ))
}

fn map(cuda: &Cuda, address: u64, bytes: u64, handle: u64) -> i32 {
    call!(cuda, c"cuMemMap", (address => u64, bytes => u64, 0 => u64, handle => u64, 0 => u64))
}

fn unmap(cuda: &Cuda, address: u64, bytes: u64) -> i32 {
    call!(cuda, c"cuMemUnmap", (address => u64, bytes => u64))
}

/// Frees GPU memory and allocates it again at the same addresses, as a server does that sleeps.
fn sleep_and_wake(cuda: &Cuda, times: u64, bytes: u64) -> i32 {
    let (mut address, mut handle) = (0, 0);
    let mut code = reserve(cuda, &mut address, bytes);
    for _ in 0..times {
        let wake = |handle: &mut u64| match create(cuda, handle, bytes, 0, 0) {
            0 => map(cuda, address, bytes, *handle),
            code => code,
        };
        let sleep = |handle: u64| match unmap(cuda, address, bytes) {
            0 => release(cuda, handle),
            code => code,
        };
        if code == 0 {
            code = wake(&mut handle);
        }
        if code == 0 {
            code = sleep(handle);
        }
    }
    code
}
