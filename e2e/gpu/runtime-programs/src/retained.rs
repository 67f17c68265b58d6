//! Measures retained memory for e2e/gpu/retained.py and recovery.py. Each mode prints lines of
//! JSON.
//!
//! ```text
//! retained lease SOCKET BYTES ROUNDS
//!                                   by turns: cuMemCreate and map, and a lease that is created
//!                                   and discarded unwritten; a scrub wait after each
//! retained wakes ROUNDS             the system's part of that: a connection, two wake-ups and back
//! retained image SOCKET BYTES [SINCE]
//!                                   finds or commits a lease, verifies it, and prints the time of
//!                                   each step since SINCE; then reads a command: kill, fault, trap
//!                                   or misaligned (then executes itself), or token (prints a
//!                                   token of the lease and one of its own memory, both redeemed)
//! retained restarted FILE BYTES TIMES
//!                                   main process of a container whose contexts are restarted in
//!                                   place: as image, and faults until FILE has TIMES lines
//! retained floor BYTES TIMES [LAUNCHED FAILED]
//!                                   the same without Bursar and without a lease: driver and kernel
//! retained tenant BYTES             for each input line: allocates, reads, fills and frees memory
//! retained neighbour BYTES          computes checksums of its own memory until its input ends
//! ```
//!
//! SOCKET is the socket of an agent or a fake agent; `-` is that of the container. Times are those
//! of CLOCK_MONOTONIC in nanoseconds, which all processes of a machine share.

#![allow(unsafe_code, reason = "launches kernels that fault")]

use std::error::Error;
use std::fs::OpenOptions;
use std::io::{BufRead, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_runtime::driver::{Access, Context, Driver, Grid, Mapping};
use bursar_runtime::error::CudaError;
use bursar_runtime::retained::{Key, LeaseClient, LeaseState, RetainedLease};
use bursar_runtime::{DeviceChecksum, TokenClient};
use raw::Raw as _;
use rustix::time::{ClockId, clock_gettime};

#[path = "../../../../device-plugin/runtime/tests/support/raw.rs"]
mod raw;

type Done = Result<(), Box<dyn Error>>;

const PATIENCE: Duration = Duration::from_secs(60);
const KEY: Key = [40; 32];
const GRANULARITY: u64 = 2 << 20;

/// Rate at which the driver scrubs freed memory (F6 in `docs/internals/facts.md`).
const SCRUBBED_PER_SECOND: f64 = 350e9;

/// Time to scrub 64 GiB.
const SCRUB_WAIT: Duration = Duration::from_millis(200);

/// Kernels that poison their context. The simulated driver has the first two.
const FAULTS: &std::ffi::CStr = c"
.version 6.0
.target sm_50
.address_size 64
.visible .entry fault(.param .u64 at) {
    .reg .b64 %a;
    mov.u64 %a, 16;
    st.global.u64 [%a], %a;
    ret;
}
.visible .entry trap(.param .u64 at) {
    trap;
    ret;
}
.visible .entry misaligned(.param .u64 at) {
    .reg .b64 %a, %b;
    .reg .pred %p;
    ld.param.u64 %a, [at];
    add.u64 %a, %a, 1;
    ld.global.u64 %b, [%a];
    setp.eq.u64 %p, %b, %a;
    @%p trap;
    ret;
}
";

const KINDS: [&str; 3] = ["fault", "trap", "misaligned"];

fn main() -> Done {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["lease", socket, bytes, rounds] => lease(socket, bytes.parse()?, rounds.parse()?),
        ["wakes", rounds] => wakes(rounds.parse()?),
        ["image", socket, bytes] => image(socket, bytes.parse()?, now()),
        ["image", socket, bytes, since] => image(socket, bytes.parse()?, since.parse()?),
        ["restarted", file, bytes, times] => restarted(file, bytes.parse()?, times.parse()?),
        ["floor", bytes, times] => floor(bytes.parse()?, times.parse()?, None),
        ["floor", bytes, times, launched, failed] => {
            let before = (launched.parse()?, failed.parse()?);
            floor(bytes.parse()?, times.parse()?, Some(before))
        }
        ["tenant", bytes] => tenant(bytes.parse()?),
        ["neighbour", bytes] => neighbour(bytes.parse()?),
        _ => Err("see the head of e2e/gpu/runtime-programs/src/retained.rs".into()),
    }
}

fn context() -> Result<Context, Box<dyn Error>> {
    Ok(Driver::get()?.device(0)?.primary_context()?)
}

fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn create_and_map(context: &Context, bytes: u64) -> Result<Mapping, CudaError> {
    let handle = context.device().create(bytes)?;
    let addresses = Arc::new(context.driver().reserve(bytes)?);
    addresses.map(0, &handle, Access::ReadWrite, context)
}

/// Waits until the driver has scrubbed freed memory, and makes the driver notice.
fn wait_for_scrub(context: &Context, bytes: u64) -> Result<(), CudaError> {
    std::thread::sleep(Duration::from_secs_f64(bytes as f64 / SCRUBBED_PER_SECOND));
    context.device().create(GRANULARITY).map(drop)
}

fn lease(socket: &str, bytes: u64, rounds: u32) -> Done {
    let context = context()?;
    let client = LeaseClient::with_socket(&context, Path::new(socket));
    wait_for_scrub(&context, bytes)?;
    for _ in 0..rounds {
        let since = Instant::now();
        let memory = create_and_map(&context, bytes)?;
        let bare = since.elapsed().as_nanos();
        drop(memory);
        wait_for_scrub(&context, bytes)?;
        let since = Instant::now();
        let opened = client.open("lease", &[1; 32], bytes, PATIENCE)?;
        let leased = since.elapsed().as_nanos();
        match opened {
            LeaseState::Writing(writer) => writer.discard()?,
            LeaseState::Ready(_) => return Err("the lease was there".into()),
        }
        println!(r#"{{"bare_ns": {bare}, "lease_ns": {leased}}}"#);
        // The provisioner releases its own handle only then.
        std::thread::sleep(Duration::from_millis(10));
        wait_for_scrub(&context, bytes)?;
    }
    Ok(())
}

/// Follows the path of a lease without memory, from the agent to the provisioner and back. All
/// parties sleep as long as a scrub takes. They are threads here, which wake up as fast as
/// processes.
fn wakes(rounds: u32) -> Done {
    let name = format!("retained wakes {}", std::process::id());
    let agent = SocketAddr::from_abstract_name(name)?;
    let listener = UnixListener::bind_addr(&agent)?;
    let (mut provisioner, mut its) = UnixStream::pair()?;
    std::thread::spawn(move || -> std::io::Result<()> {
        loop {
            its.read_exact(&mut [0])?;
            its.write_all(&[0])?;
        }
    });
    std::thread::spawn(move || -> std::io::Result<()> {
        loop {
            let (mut client, _) = listener.accept()?;
            client.read_exact(&mut [0])?;
            provisioner.write_all(&[0])?;
            provisioner.read_exact(&mut [0])?;
            client.write_all(&[0])?;
        }
    });
    for _ in 0..rounds {
        std::thread::sleep(SCRUB_WAIT);
        let since = Instant::now();
        let mut client = UnixStream::connect_addr(&agent)?;
        client.write_all(&[0])?;
        client.read_exact(&mut [0])?;
        println!(r#"{{"ns": {}}}"#, since.elapsed().as_nanos());
    }
    Ok(())
}

/// Finds or creates the lease, verifies it, and returns the time of each step.
fn reopen(
    client: impl FnOnce(&Context) -> LeaseClient,
    bytes: u64,
    since: u64,
) -> Result<RetainedLease, Box<dyn Error>> {
    let started = now();
    let driver = Driver::get()?;
    let initialised = now();
    let context = driver.device(0)?.primary_context()?;
    let context_created = now();
    let client = client(&context);
    // The open verifies the lease, which is the first correct kernel.
    let opened = client.open("image", &KEY, bytes, PATIENCE)?;
    let attached = now();
    let (found, retained) = match opened {
        LeaseState::Ready(retained) => (true, retained),
        LeaseState::Writing(writer) => {
            for at in (0..writer.bytes()).step_by(1 << 30) {
                let length = (writer.bytes() - at).min(1 << 30);
                context.fill(writer.address() + at, (at >> 30) as u8 + 1, length as usize)?;
            }
            (false, writer.commit()?)
        }
    };
    let checksum_started = now();
    let checksum = retained.checksum()?;
    let verified = now();
    println!(
        r#"{{"found": {found}, "checksum": {checksum}, "exec_ns": {}, "init_ns": {}, "context_ns": {}, "attach_ns": {}, "verify_ns": {}, "whole_ns": {}}}"#,
        started.saturating_sub(since),
        initialised - started,
        context_created - initialised,
        (attached - context_created).saturating_sub(verified - checksum_started),
        verified - checksum_started,
        attached.saturating_sub(since),
    );
    std::io::stdout().flush()?;
    Ok(retained)
}

fn image(socket: &str, bytes: u64, since: u64) -> Done {
    let client = |context: &Context| match socket {
        "-" => LeaseClient::new(context),
        socket => LeaseClient::with_socket(context, Path::new(socket)),
    };
    let retained = reopen(client, bytes, since)?;
    loop {
        let mut order = String::new();
        // Byte by byte, because the next image reads the bytes behind this line.
        while !order.ends_with('\n') {
            let mut byte = [0];
            if rustix::io::read(std::io::stdin(), &mut byte)? == 0 {
                return Ok(());
            }
            order.push(char::from(byte[0]));
        }
        match order.trim_end() {
            "token" => println!("{}", tokens(&retained, socket)?),
            "kill" => {
                let me = rustix::process::getpid();
                return Ok(rustix::process::kill_process(
                    me,
                    rustix::process::Signal::KILL,
                )?);
            }
            kernel => {
                let error = fault(retained.context(), retained.address(), kernel, || Ok(()))?;
                return reexec(error, socket, bytes);
            }
        }
    }
}

/// Returns a token of the lease and one of this process's own memory, as hexadecimal digits.
fn tokens(retained: &RetainedLease, socket: &str) -> Result<String, Box<dyn Error>> {
    let agent = match socket {
        "-" => TokenClient::in_container(),
        socket => TokenClient::with_socket(Path::new(socket)),
    };
    let tokens = [
        (agent.seal_retained(retained, 1)?, retained.lease()),
        (agent.seal_allocation(retained.context().uuid(), 2)?, 0),
    ];
    let mut hex_tokens = Vec::new();
    for (token, lease) in tokens {
        let id = agent.redeem(&token)?;
        if id.generations.lease != lease {
            return Err(format!("a token of lease {lease} names {id:?}").into());
        }
        let hex = token.as_bytes().iter().map(|byte| format!("{byte:02x}"));
        hex_tokens.push(hex.collect::<String>());
    }
    Ok(hex_tokens.join(" "))
}

/// Poisons the context that has memory at an address, after `note`; returns the driver's error.
fn fault(
    context: &Context,
    mut at: u64,
    kernel: &str,
    note: impl FnOnce() -> Done,
) -> Result<CudaError, Box<dyn Error>> {
    let name = std::ffi::CString::new(kernel)?;
    let function = context.load(FAULTS)?.function(&name)?;
    let stream = context.default_stream();
    note()?;
    // SAFETY: each of the kernels has one address as its parameter, and none writes host memory.
    unsafe { function.launch(&stream, Grid::linear(1, 1), &mut [(&raw mut at).cast()])? };
    match context.synchronize() {
        Err(error) => Ok(error),
        Ok(()) => Err("the kernel did not fault".into()),
    }
}

/// Executes the program again, as the shim does for a container's main process.
fn reexec(error: CudaError, socket: &str, bytes: u64) -> Done {
    let since = now();
    eprintln!("{error}");
    let me = std::env::current_exe()?;
    let arguments = ["image", socket, &bytes.to_string(), &since.to_string()];
    Err(Command::new(me).args(arguments).exec().into())
}

fn restarted(file: &str, bytes: u64, times: usize) -> Done {
    let before = std::fs::read_to_string(file).unwrap_or_default();
    let done = before.lines().count();
    let since = before.lines().last().map_or(Ok(now()), str::parse)?;
    let retained = reopen(LeaseClient::new, bytes, since)?;
    if done == times {
        return Ok(());
    }
    let mut file = OpenOptions::new().create(true).append(true).open(file)?;
    let note = || Ok(writeln!(file, "{}", now())?);
    let (kind, at) = (KINDS[done % KINDS.len()], retained.address());
    let error = fault(retained.context(), at, kind, note)?;
    Err(format!("the program saw its fault: {error}").into())
}

/// Measures from the launch of the faulting kernel in the image `before` to the first correct
/// kernel in this image.
fn floor(bytes: u64, times: usize, before: Option<(u64, u64)>) -> Done {
    let started = now();
    let driver = Driver::get()?;
    let initialised = now();
    let context = driver.device(0)?.primary_context()?;
    let context_created = now();
    let memory = create_and_map(&context, bytes)?;
    let allocated = now();
    let mut checksum = DeviceChecksum::new(&context)?;
    checksum.of(memory.address(), GRANULARITY, &context.default_stream())?;
    if let Some((launched, failed)) = before {
        println!(
            r#"{{"fault_ns": {}, "exec_ns": {}, "init_ns": {}, "context_ns": {}, "take_ns": {}, "whole_ns": {}}}"#,
            failed - launched,
            started - failed,
            initialised - started,
            context_created - initialised,
            allocated - context_created,
            now() - launched,
        );
    }
    let Some(left) = times.checked_sub(1) else {
        return Ok(());
    };
    let (kind, mut launched) = (KINDS[left % KINDS.len()], 0);
    fault(&context, memory.address(), kind, || {
        launched = now();
        Ok(())
    })?;
    let numbers = [bytes, left as u64, launched, now()];
    let again = Command::new(std::env::current_exe()?)
        .arg("floor")
        .args(numbers.map(|number| number.to_string()))
        .exec();
    Err(again.into())
}

fn tenant(bytes: u64) -> Done {
    let context = context()?;
    let mut checksum = DeviceChecksum::new(&context)?;
    let stream = context.default_stream();
    let clean = {
        let memory = create_and_map(&context, bytes)?;
        context.fill(memory.address(), 0, bytes as usize)?;
        checksum.of(memory.address(), bytes, &stream)?
    };
    println!(r#"{{"ready": true}}"#);
    for line in std::io::stdin().lock().lines() {
        line?;
        let memory = create_and_map(&context, bytes)?;
        let is_clean = checksum.of(memory.address(), bytes, &stream)? == clean;
        context.fill(memory.address(), 0xa5, bytes as usize)?;
        drop(memory);
        println!(r#"{{"clean": {is_clean}}}"#);
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn neighbour(bytes: u64) -> Done {
    let context = context()?;
    let mut checksum = DeviceChecksum::new(&context)?;
    let stream = context.default_stream();
    let memory = create_and_map(&context, bytes)?;
    context.fill(memory.address(), 3, bytes as usize)?;
    let expected = checksum.of(memory.address(), bytes, &stream)?;
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        ended.send(())
    });
    println!(r#"{{"ready": true}}"#);
    let (mut rounds, mut errors, mut slowest) = (0_u64, 0_u64, Duration::ZERO);
    while end.try_recv().is_err() {
        let since = Instant::now();
        let same = checksum.of(memory.address(), bytes, &stream);
        slowest = slowest.max(since.elapsed());
        rounds += 1;
        errors += u64::from(same.ok() != Some(expected));
    }
    println!(
        r#"{{"rounds": {rounds}, "errors": {errors}, "slowest_ns": {}}}"#,
        slowest.as_nanos()
    );
    Ok(())
}
