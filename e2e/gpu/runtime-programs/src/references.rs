//! Checks typed memory and checksums on a GPU, and measures the checksum.
//!
//! `cargo run --release --package bursar-gpu-programs --bin references [GIB]` checks each line that
//! it prints; the last lines are times of checksums over GIB (8) GiB, none if it is 0. With `watch`
//! the program reads lines, and answers each with what the agent has told the runtime, for tests of
//! the agent.

mod slow_add;

use std::error::Error;
use std::time::{Duration, Instant};

use bursar_runtime::driver::{Advice, Attach, Location};
use bursar_runtime::{
    DeviceChecksum, DeviceRuntime, Direct, GpuRef, Launch, Managed, ManagedRef, Tag, TrackedSlice,
    checksum, memory::peer_copy,
};

use crate::slow_add::{GRID, ITEMS, slow_add};

type Done<T> = Result<T, Box<dyn Error>>;

fn main() -> Done<()> {
    if std::env::args().nth(1).as_deref() == Some("watch") {
        return watch(&*DeviceRuntime::for_ordinal(0)?);
    }
    let gibibytes: usize = std::env::args().nth(1).map_or(Ok(8), |word| word.parse())?;
    let runtime = DeviceRuntime::for_ordinal(0)?;
    println!("{} {}", runtime.context().device().name()?, runtime.uuid());
    lengths(&runtime)?;
    streams(&runtime)?;
    managed(&runtime)?;
    match gibibytes {
        0 => Ok(()),
        _ => speed(&runtime, gibibytes << 30),
    }
}

/// Prints for each line of standard input the limit of the budget, the process generation, or
/// whether a reference is valid.
fn watch(runtime: &DeviceRuntime) -> Done<()> {
    let stream = runtime.stream()?;
    let slice = TrackedSlice::<u8>::allocate(runtime, ITEMS, &stream, Tag("watched"))?;
    let shared = GpuRef::from(slice);
    for line in std::io::stdin().lines() {
        match (&*line?, shared.access()) {
            ("limit", _) => println!("{}", runtime.budget().limit),
            ("generation", _) => println!("{}", runtime.generation().process),
            (_, Ok(_)) => println!("good"),
            (_, Err(reason)) => println!("{reason:?}"),
        }
    }
    Ok(())
}

/// Compares the kernel with its definition at lengths around all its special cases.
fn lengths(runtime: &DeviceRuntime) -> Done<()> {
    let stream = runtime.stream()?;
    let bytes: Vec<u8> = (0..(33u64 << 20) + 13)
        .map(|n| (n.wrapping_mul(STEP) >> 56) as u8)
        .collect();
    let mut slice = TrackedSlice::<u8>::allocate(runtime, bytes.len(), &stream, Tag("bytes"))?;
    slice.copy_from_host(&bytes)?;
    let mut kernel = DeviceChecksum::new(runtime.context())?;
    let around = [4096, 1 << 20, 1 << 25, bytes.len()].map(|len| len - 40..=len);
    let all = (0..=100).chain(around.into_iter().flatten());
    let mut count = 0;
    for len in all {
        let found = kernel.of(slice.address(), len as u64, &stream)?;
        let expected = checksum::of(&bytes[..len]);
        if found != expected {
            return Err(format!("{len} bytes: {found:#x}, not {expected:#x}").into());
        }
        count += 1;
    }
    println!("checksums of {count} lengths are those of the definition");
    Ok(())
}

/// Odd, with bits in all bytes.
const STEP: u64 = 0x2545_f491_4f6c_dd1d;

/// Adds in two streams in turn and copies in a third, each behind the previous work.
fn streams(runtime: &DeviceRuntime) -> Done<()> {
    let (one, other) = (runtime.stream()?, runtime.stream()?);
    let kernel = slow_add(runtime)?;
    let mut slice = TrackedSlice::<u32>::allocate(runtime, ITEMS, &one, Tag("shared"))?;
    slice.copy_from_host(&[0; ITEMS])?;
    let mut copy = TrackedSlice::<u32>::allocate(runtime, ITEMS, &runtime.stream()?, Tag("copy"))?;
    Launch::new(&kernel, &one, GRID)
        .arg(slice.arg_mut())
        .arg(1000u32)
        .arg(ITEMS as u64)
        .submit()?;
    peer_copy::copy(&slice, &mut copy)?;
    let shared = GpuRef::from(slice);
    let token = shared.begin_write(Instant::now(), Duration::from_secs(60))?;
    for number in 1..=10u32 {
        let stream = if number % 2 == 0 { &one } else { &other };
        Launch::new(&kernel, stream, GRID)
            .arg(shared.arg_mut(&token)?)
            .arg(number)
            .arg(ITEMS as u64)
            .submit()?;
    }
    shared.commit(token, Instant::now())?;
    let reading = runtime.stream()?;
    // Orders the stream behind the additions, for foreign work that is submitted by hand.
    let address = shared.read_in(&reading, |address| address)?;
    let mut checksum = DeviceChecksum::new(runtime.context())?;
    let found = checksum.of(address, shared.bytes(), &reading)?;
    let mut items = [0; ITEMS];
    copy.copy_to_host(&mut items)?;
    let expected: Vec<u8> = [1055u32; ITEMS]
        .iter()
        .flat_map(|item| item.to_le_bytes())
        .collect();
    if items != [1000; ITEMS] || found != checksum::of(&expected) {
        return Err("streams did not wait for each other".into());
    }
    println!("11 additions in two streams, a copy and a read in a third came in order");
    Ok(())
}

fn managed(runtime: &DeviceRuntime) -> Done<()> {
    let runtime =
        runtime.with_resource(|_| Managed::with_allocator(runtime.context(), Attach::Global));
    let stream = runtime.stream()?;
    let (attach, tag) = (Attach::Global, Tag("managed"));
    let mut memory = ManagedRef::<u32>::allocate(&runtime, ITEMS, attach, &stream, tag)?;
    memory.write()?.fill(5);
    let device = Location::Device(runtime.ordinal());
    memory.prefetch(0..ITEMS, device, &stream)?;
    memory.advise(0..ITEMS, Advice::SetPreferredLocation, device)?;
    memory.advise(0..ITEMS, Advice::SetAccessedBy, Location::Host)?;
    let kernel = slow_add(&runtime)?;
    Launch::new(&kernel, &stream, GRID)
        .arg(memory.arg_mut()?)
        .arg(37u32)
        .arg(ITEMS as u64)
        .submit()?;
    if memory.read()? != [42; ITEMS] {
        return Err("the host did not wait for the kernel".into());
    }
    let residency = memory.residency(0..ITEMS)?;
    if residency.preferred != Some(device)
        || residency.prefetched != Some(device)
        || residency.accessed_by != [Location::Host]
    {
        return Err(format!("another place than was named: {residency:?}").into());
    }
    println!("managed memory: the host waited for the kernel; the driver says {residency:?}");
    Ok(())
}

fn speed(runtime: &DeviceRuntime, bytes: usize) -> Done<()> {
    let runtime = runtime.with_resource(|_| Direct::new(runtime.context()));
    let stream = runtime.stream()?;
    let start = Instant::now();
    let mut kernel = DeviceChecksum::new(runtime.context())?;
    println!(
        "loading the kernel took {:.1} ms",
        start.elapsed().as_secs_f64() * 1e3
    );
    let slice = TrackedSlice::<u8>::allocate(&runtime, bytes, &stream, Tag("speed"))?;
    for part in [bytes, bytes / 64, bytes / 4096] {
        let mut times = Vec::new();
        for _ in 0..10 {
            let start = Instant::now();
            kernel.of(slice.address(), part as u64, &stream)?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        println!(
            "{:>8} MiB: median {:.3} ms, best {:.3} ms, {:.0} GB/s",
            part >> 20,
            times[5] * 1e3,
            times[0] * 1e3,
            part as f64 / times[5] / 1e9
        );
    }
    Ok(())
}
