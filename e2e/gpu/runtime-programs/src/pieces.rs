//! Measures the steps of creating a large memory allocation, whole and in several pieces.
//!
//! The steps are `cuMemCreate`, `cuMemMap` and `cuMemSetAccess`. They run in one thread, in several
//! threads, and in two processes of which one creates and exports and the other imports and maps.
//!
//! usage: pieces GIB ROUNDS
//!
//! Prints a line of JSON for each way, with medians in microseconds. Between rounds the program
//! waits until the driver has scrubbed freed memory.
#![allow(
    unsafe_code,
    reason = "calls the driver itself, to time each call alone"
)]

use std::error::Error;
use std::ffi::{c_int, c_void};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bursar_protocol::fd_passing::{receive_with_fd, send_with_fd};
use bursar_runtime::driver::Driver;
use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemLocation, CUmemLocationType,
};
use libloading::Library;

type Answer<T> = Result<T, Box<dyn Error + Send + Sync>>;

const GIB: u64 = 1 << 30;
const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
/// Rate at which the driver scrubs freed memory (F6 in `docs/internals/facts.md`).
const SCRUBBED_PER_SECOND: f64 = 350e9;

/// Driver functions with their prototypes in cuda.h.
struct DriverCalls {
    create: unsafe extern "C" fn(*mut u64, usize, *const CUmemAllocationProp, u64) -> c_int,
    release: unsafe extern "C" fn(u64) -> c_int,
    export: unsafe extern "C" fn(*mut c_int, u64, CUmemAllocationHandleType, u64) -> c_int,
    import: unsafe extern "C" fn(*mut u64, *mut c_void, CUmemAllocationHandleType) -> c_int,
    reserve: unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> c_int,
    unreserve: unsafe extern "C" fn(u64, usize) -> c_int,
    map: unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int,
    unmap: unsafe extern "C" fn(u64, usize) -> c_int,
    access: unsafe extern "C" fn(u64, usize, *const CUmemAccessDesc, usize) -> c_int,
    _library: Library,
}

fn ok(call: &str, code: c_int) -> Answer<()> {
    match code {
        0 => Ok(()),
        code => Err(format!("{call} answered {code}").into()),
    }
}

fn location() -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: 0,
    }
}

impl DriverCalls {
    fn new() -> Answer<DriverCalls> {
        // SAFETY: the prototypes are those of cuda.h.
        unsafe {
            let library = Library::new("libcuda.so.1")?;
            Ok(DriverCalls {
                create: *library.get("cuMemCreate\0")?,
                release: *library.get("cuMemRelease\0")?,
                export: *library.get("cuMemExportToShareableHandle\0")?,
                import: *library.get("cuMemImportFromShareableHandle\0")?,
                reserve: *library.get("cuMemAddressReserve\0")?,
                unreserve: *library.get("cuMemAddressFree\0")?,
                map: *library.get("cuMemMap\0")?,
                unmap: *library.get("cuMemUnmap\0")?,
                access: *library.get("cuMemSetAccess\0")?,
                _library: library,
            })
        }
    }

    fn create(&self, bytes: u64) -> Answer<u64> {
        // SAFETY: the struct consists of integers and a nullable pointer.
        let mut wanted: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        wanted.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.requestedHandleTypes = DESCRIPTOR;
        wanted.location = location();
        let mut handle = 0;
        // SAFETY: the pointers are valid for the call.
        let code = unsafe { (self.create)(&raw mut handle, bytes as usize, &raw const wanted, 0) };
        ok("cuMemCreate", code).map(|()| handle)
    }

    fn release(&self, handle: u64) -> Answer<()> {
        // SAFETY: see `create`.
        ok("cuMemRelease", unsafe { (self.release)(handle) })
    }

    fn export(&self, handle: u64) -> Answer<OwnedFd> {
        let mut fd = -1;
        // SAFETY: see `create`.
        let code = unsafe { (self.export)(&raw mut fd, handle, DESCRIPTOR, 0) };
        // SAFETY: the driver returns a new descriptor.
        ok("cuMemExportToShareableHandle", code).map(|()| unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn import(&self, fd: &OwnedFd) -> Answer<u64> {
        let (mut handle, fd) = (0, fd.as_raw_fd() as usize as *mut c_void);
        // SAFETY: see `create`.
        let code = unsafe { (self.import)(&raw mut handle, fd, DESCRIPTOR) };
        ok("cuMemImportFromShareableHandle", code).map(|()| handle)
    }

    fn reserve(&self, bytes: u64, align: u64) -> Answer<u64> {
        let mut address = 0;
        // SAFETY: see `create`.
        let code =
            unsafe { (self.reserve)(&raw mut address, bytes as usize, align as usize, 0, 0) };
        ok("cuMemAddressReserve", code).map(|()| address)
    }

    fn map(&self, address: u64, bytes: u64, handle: u64) -> Answer<()> {
        // SAFETY: the addresses are reserved, and no reference to them exists.
        ok("cuMemMap", unsafe {
            (self.map)(address, bytes as usize, 0, handle, 0)
        })
    }

    fn access(&self, address: u64, bytes: u64) -> Answer<()> {
        let wanted = CUmemAccessDesc {
            location: location(),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: see `create`.
        ok("cuMemSetAccess", unsafe {
            (self.access)(address, bytes as usize, &raw const wanted, 1)
        })
    }

    /// Unmaps and frees the memory of a round.
    fn end(&self, address: u64, bytes: u64, handles: &[u64]) -> Answer<()> {
        // SAFETY: the range was mapped as a whole, and no reference to it exists.
        let codes = unsafe {
            [
                (self.unmap)(address, bytes as usize),
                (self.unreserve)(address, bytes as usize),
            ]
        };
        ok("cuMemUnmap", codes[0])?;
        ok("cuMemAddressFree", codes[1])?;
        handles.iter().try_for_each(|&handle| self.release(handle))
    }

    /// Waits until the driver has scrubbed freed memory, and makes the driver notice.
    fn wait_for_scrub(&self, bytes: u64) -> Answer<()> {
        std::thread::sleep(Duration::from_secs_f64(bytes as f64 / SCRUBBED_PER_SECOND) * 2);
        self.release(self.create(2 << 20)?)
    }
}

/// Returns the microseconds since `since`, and restarts the clock.
fn lap(since: &mut Instant) -> f64 {
    let now = Instant::now();
    let took = now - std::mem::replace(since, now);
    took.as_secs_f64() * 1e6
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Time of each step of a round, with the address and handles to release.
type Round = (Vec<(&'static str, f64)>, u64, Vec<u64>);

/// Runs the rounds of one way and prints the medians of its steps.
fn measure(
    calls: &DriverCalls,
    way: &str,
    pieces: u64,
    bytes: u64,
    rounds: u32,
    round: impl Fn() -> Answer<Round>,
) -> Answer<()> {
    let mut steps: Vec<(&'static str, Vec<f64>)> = Vec::new();
    for _ in 0..rounds {
        let (times, address, handles) = round()?;
        calls.end(address, bytes, &handles)?;
        calls.wait_for_scrub(bytes)?;
        steps.resize_with(times.len(), Default::default);
        for (step, (name, time)) in steps.iter_mut().zip(times) {
            step.0 = name;
            step.1.push(time);
        }
    }
    let steps: Vec<_> = steps
        .into_iter()
        .map(|(name, times)| format!(r#""{name}_us": {:.0}"#, median(times)))
        .collect();
    println!(
        r#"{{"way": "{way}", "pieces": {pieces}, {}}}"#,
        steps.join(", ")
    );
    Ok(())
}

/// Creates all pieces in `makers` threads, maps all, and then makes all accessible at once.
fn create_then_map(
    calls: &DriverCalls,
    bytes: u64,
    pieces: u64,
    makers: u64,
    align: u64,
) -> Answer<Round> {
    let (start, mut since) = (Instant::now(), Instant::now());
    let piece = bytes / pieces;
    let handles: Vec<u64> = if makers == 1 {
        (0..pieces)
            .map(|_| calls.create(piece))
            .collect::<Answer<_>>()?
    } else {
        std::thread::scope(|scope| {
            let make = || {
                let handles = (0..pieces / makers).map(|_| calls.create(piece));
                handles.collect::<Answer<Vec<_>>>()
            };
            let threads: Vec<_> = (0..makers).map(|_| scope.spawn(make)).collect();
            let handles = threads
                .into_iter()
                .map(|thread| thread.join().expect("a maker ends"));
            handles.collect::<Answer<Vec<_>>>()
        })?
        .concat()
    };
    let create = lap(&mut since);
    let address = calls.reserve(bytes, align)?;
    let reserve = lap(&mut since);
    for (at, &handle) in (address..).step_by(piece as usize).zip(&handles) {
        calls.map(at, piece, handle)?;
    }
    let map = lap(&mut since);
    calls.access(address, bytes)?;
    let access = lap(&mut since);
    let times = vec![
        ("create", create),
        ("reserve", reserve),
        ("map", map),
        ("access", access),
        ("whole", start.elapsed().as_secs_f64() * 1e6),
    ];
    Ok((times, address, handles))
}

/// Creates and maps the pieces, and then makes them accessible in parallel.
fn access_by_threads(calls: &DriverCalls, bytes: u64, pieces: u64) -> Answer<Round> {
    let piece = bytes / pieces;
    let handles: Vec<u64> = (0..pieces)
        .map(|_| calls.create(piece))
        .collect::<Answer<_>>()?;
    let address = calls.reserve(bytes, 0)?;
    let places = (address..).step_by(piece as usize);
    for (at, &handle) in places.clone().zip(&handles) {
        calls.map(at, piece, handle)?;
    }
    let mut since = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = places
            .take(pieces as usize)
            .map(|at| scope.spawn(move || calls.access(at, piece)))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("it ends"))
    })?;
    Ok((vec![("access", lap(&mut since))], address, handles))
}

/// Maps each piece and makes it accessible as it arrives; returns the time of both steps.
fn map_each(
    calls: &DriverCalls,
    address: u64,
    piece: u64,
    handles: impl Iterator<Item = Answer<u64>>,
) -> Answer<(Vec<u64>, f64, f64)> {
    let (mut mapped, mut map, mut access) = (Vec::new(), 0.0, 0.0);
    for (at, handle) in (address..).step_by(piece as usize).zip(handles) {
        let (handle, mut since) = (handle?, Instant::now());
        calls.map(at, piece, handle)?;
        map += lap(&mut since);
        calls.access(at, piece)?;
        access += lap(&mut since);
        mapped.push(handle);
    }
    Ok((mapped, map, access))
}

/// Creates the next piece in a thread while this thread maps the previous one.
fn pipelined(calls: &DriverCalls, bytes: u64, pieces: u64) -> Answer<Round> {
    let start = Instant::now();
    let piece = bytes / pieces;
    std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        scope.spawn(move || {
            for _ in 0..pieces {
                // Fails only if the receiver has given up.
                let _ = sender.send(calls.create(piece));
            }
        });
        let address = calls.reserve(bytes, 0)?;
        let (handles, map, access) = map_each(calls, address, piece, receiver.into_iter())?;
        let whole = start.elapsed().as_secs_f64() * 1e6;
        let times = vec![("map", map), ("access", access), ("whole", whole)];
        Ok((times, address, handles))
    })
}

/// Runs the creating process: sends a descriptor for each number of bytes that it reads; 0 ends the
/// round.
fn run_creator(socket: &UnixStream) -> Answer<()> {
    let calls = DriverCalls::new()?;
    let mut order = [0; 16];
    let mut kept = Vec::new();
    while (&*socket).read_exact(&mut order).is_ok() {
        let [bytes, pieces] = [&order[..8], &order[8..]]
            .map(|word| u64::from_le_bytes(word.try_into().expect("it has eight bytes")));
        if bytes == 0 {
            kept.drain(..)
                .try_for_each(|handle| calls.release(handle))?;
            (&*socket).write_all(&[0])?;
            continue;
        }
        for _ in 0..pieces {
            let handle = calls.create(bytes / pieces)?;
            send_with_fd(socket, &[1], calls.export(handle)?)?;
            kept.push(handle);
        }
    }
    Ok(())
}

fn request_handle(socket: &UnixStream, bytes: u64, pieces: u64) -> Answer<()> {
    let words = [bytes, pieces].map(u64::to_le_bytes).concat();
    Ok((&*socket).write_all(&words)?)
}

/// Another process creates the next piece while this one imports and maps the previous one.
fn two_processes(
    calls: &DriverCalls,
    socket: &UnixStream,
    bytes: u64,
    pieces: u64,
) -> Answer<Round> {
    // Makes the creating process notice that the driver has scrubbed freed memory.
    request_handle(socket, 2 << 20, 1)?;
    receive_with_fd(socket, &mut [0])?;
    let start = Instant::now();
    let piece = bytes / pieces;
    request_handle(socket, bytes, pieces)?;
    let address = calls.reserve(bytes, 0)?;
    let (mut waited, mut import) = (0.0, 0.0);
    let imported = (0..pieces).map(|_| {
        let mut since = Instant::now();
        let (_, fd) = receive_with_fd(socket, &mut [0])?;
        waited += lap(&mut since);
        let handle = calls.import(&fd.ok_or("no descriptor came")?);
        import += lap(&mut since);
        handle
    });
    let (handles, map, access) = map_each(calls, address, piece, imported)?;
    let whole = start.elapsed().as_secs_f64() * 1e6;
    request_handle(socket, 0, 0)?;
    (&*socket).read_exact(&mut [0])?;
    let times = vec![
        ("waited", waited),
        ("import", import),
        ("map", map),
        ("access", access),
        ("whole", whole),
    ];
    Ok((times, address, handles))
}

fn main() -> Answer<()> {
    let device = Driver::get()?.device(0)?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let (bytes, rounds) = match arguments[..] {
        ["maker"] => {
            let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
            return run_creator(&UnixStream::from(socket));
        }
        [gib, rounds] => (gib.parse::<u64>()? * GIB, rounds.parse()?),
        _ => return Err("usage: pieces GIB ROUNDS".into()),
    };
    let context = device.primary_context()?;
    let _current = context.enter()?;
    let calls = DriverCalls::new()?;
    calls.wait_for_scrub(bytes)?;
    for (pieces, makers) in [(1, 1), (2, 1), (8, 1), (32, 1), (2, 2), (4, 4), (16, 4)] {
        let way = format!("{makers} maker, then map");
        measure(&calls, &way, pieces, bytes, rounds, || {
            create_then_map(&calls, bytes, pieces, makers, 0)
        })?;
    }
    for align in [64 << 20, 512 << 20, 1 << 30, 64 << 30] {
        let way = format!("addresses at multiples of {} MiB", align >> 20);
        measure(&calls, &way, 1, bytes, rounds, || {
            create_then_map(&calls, bytes, 1, 1, align)
        })?;
    }
    for pieces in [1, 2, 4] {
        let way = "a thread makes each accessible";
        measure(&calls, way, pieces, bytes, rounds, || {
            access_by_threads(&calls, bytes, pieces)
        })?;
    }
    for pieces in [2, 4, 8, 16, 32] {
        measure(&calls, "two threads", pieces, bytes, rounds, || {
            pipelined(&calls, bytes, pieces)
        })?;
    }
    let (here, there) = UnixStream::pair()?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg("maker")
        .stdin(Stdio::from(OwnedFd::from(there)))
        .spawn()?;
    for pieces in [1, 2, 4, 8, 16, 32] {
        measure(&calls, "two processes", pieces, bytes, rounds, || {
            two_processes(&calls, &here, bytes, pieces)
        })?;
    }
    drop(here);
    child.wait()?;
    Ok(())
}
