//! Checks every source of memory, and the adaptors that call the driver, on this machine's first
//! GPU.
//!
//! `sources` prints a line for each check and fails if one does. The program also runs over the
//! simulated driver, and `compute-sanitizer --tool memcheck` finds no error in it.

use std::alloc::Layout;
use std::error::Error;
use std::os::fd::AsFd as _;
use std::process::{Command, ExitCode};
use std::time::Instant;

#[path = "../../../../device-plugin/runtime/tests/support/raw.rs"]
mod raw;

use bursar_runtime::driver::{Access, Advice, Attach, Context, Driver, Location, Stream};
use bursar_runtime::{
    Budget, DebugGuard, DeviceChecksum, DeviceMemoryResource, DeviceRuntime, Direct, Exportable,
    FreeError, Managed, PhysicalMemoryResource as _, StreamOrdered, Tag, checksum, source::vmm,
};
use raw::Raw as _;

type Outcome = Result<String, Box<dyn Error>>;
type Trial = fn() -> Outcome;

const MIB: usize = 1 << 20;

fn main() -> ExitCode {
    if std::env::args().nth(1).is_some() {
        return match import() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("importer: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let trials: [(&str, Trial); 10] = [
        // First, while the process has no context.
        ("without a context", without_context),
        ("direct", || of(|context| Ok(Direct::new(context)))),
        ("managed", || {
            of(|context| Ok(Managed::with_allocator(context, Attach::Global)))
        }),
        ("async", || of(|context| Ok(StreamOrdered::new(context)))),
        ("exportable", || of(|context| Ok(Exportable::new(context)?))),
        ("runtime", runtime),
        ("two processes", two_processes),
        ("guards", guards),
        ("uses in two streams", uses),
        ("checksum", checksums),
    ];
    let mut failed = false;
    for (name, trial) in trials {
        match trial() {
            Ok(result) => println!("ok      {name}: {result}"),
            Err(error) => {
                failed = true;
                println!("FAILED  {name}: {error}");
            }
        }
    }
    ExitCode::from(u8::from(failed))
}

fn context() -> Result<Context, Box<dyn Error>> {
    Ok(Driver::get()?.device(0)?.primary_context()?)
}

fn ensure(is_so: bool, what: &str) -> Result<(), Box<dyn Error>> {
    if is_so { Ok(()) } else { Err(what.into()) }
}

/// Writes, reads and frees a block, and checks that the device's free memory is unchanged.
fn of<R: DeviceMemoryResource>(make: fn(&Context) -> Result<R, Box<dyn Error>>) -> Outcome {
    let context = context()?;
    let (memory, stream) = (make(&context)?, context.stream()?);
    round(&memory, &context, &stream)?;
    let (before, _) = context.memory_info()?;
    let start = Instant::now();
    for _ in 0..64 {
        round(&memory, &context, &stream)?;
    }
    let each = start.elapsed() / 64;
    context.synchronize()?;
    memory.reap_pending()?;
    ensure(
        memory.bytes_outstanding().total() == 0,
        "bytes are outstanding",
    )?;
    let (after, _) = context.memory_info()?;
    ensure(
        after >= before,
        &format!("{before} bytes were free, {after} are"),
    )?;
    Ok(format!("{each:?} to allocate, fill, read and free 2 MiB"))
}

fn round(
    memory: &impl DeviceMemoryResource,
    context: &Context,
    stream: &Stream,
) -> Result<(), Box<dyn Error>> {
    let block = memory.allocate(Layout::from_size_align(2 * MIB, 256)?, stream, Tag("round"))?;
    context.fill_async(block.address(), 7, 2 * MIB, stream)?;
    stream.synchronize()?;
    let mut back = [0; 64];
    context.copy_from_device(&mut back, block.address() + (2 * MIB - 64) as u64)?;
    ensure(back == [7; 64], "what was written is not what is read")?;
    memory.deallocate(block, stream)?;
    Ok(())
}

/// Checks the GPU's shared runtime with a budget over it.
fn runtime() -> Outcome {
    let uuid = Driver::get()?.device(0)?.uuid()?;
    let runtime = DeviceRuntime::for_gpu(uuid)?;
    let held = runtime.with_resource(|resource| Budget::new(resource, 4 << 20));
    let stream = held.stream()?;
    for _ in 0..64 {
        round(held.resource(), held.context(), &stream)?;
    }
    let refused =
        held.resource()
            .allocate(Layout::from_size_align(5 * MIB, 1)?, &stream, Tag("much"));
    ensure(
        refused.is_err_and(|error| error.reason() == "OverBudget"),
        "5 of 4 MiB were allocated",
    )?;
    Ok(uuid.to_string())
}

/// Creates and exports memory without a context, and maps it with one.
fn without_context() -> Outcome {
    let uuid = Driver::get()?.device(0)?.uuid()?;
    let runtime = bursar_runtime::NoContextRuntime::start(uuid)?;
    let memory = runtime.physical();
    let bytes = memory.round_up(1)?;
    let block = memory.create(bytes, Tag("physical"))?;
    let descriptor = block.export()?;
    memory.release(block)?;
    ensure(
        runtime.budget().used == 0,
        "a released block is in the budget",
    )?;
    let context = context()?;
    let mapping = vmm::import(&context, descriptor.as_fd(), bytes, Access::ReadWrite)?;
    mapping.fill(&context, 0, 7, 4096)?;
    let mut back = [0; 4096];
    mapping.read(&context, 0, &mut back)?;
    ensure(back == [7; 4096], "the memory does not read back")?;
    Ok(format!("{bytes} bytes were mapped by their descriptor"))
}

/// Lets another process import and write a block.
fn two_processes() -> Outcome {
    let context = context()?;
    let (memory, stream) = (Exportable::new(&context)?, context.stream()?);
    let block = memory.allocate(Layout::from_size_align(2 * MIB, 1)?, &stream, Tag("shared"))?;
    context.copy_to_device(block.address(), b"bursar")?;
    let descriptor = memory.export(block.as_ref())?;
    let status = Command::new(std::env::current_exe()?)
        .arg("import")
        .stdin(descriptor)
        .status()?;
    ensure(status.success(), "the importer failed")?;
    let mut answer = [0; 6];
    context.copy_from_device(&mut answer, block.address())?;
    ensure(&answer == b"answer", "the importer's answer is not there")?;
    memory.deallocate(block, &stream)?;
    Ok("what either writes the other reads".to_owned())
}

fn import() -> Result<(), Box<dyn Error>> {
    let context = context()?;
    let mapping = vmm::import(
        &context,
        std::io::stdin().as_fd(),
        2 << 20,
        Access::ReadWrite,
    )?;
    let mut found = [0; 6];
    context.copy_from_device(&mut found, mapping.address())?;
    ensure(&found == b"bursar", "what was written is not there")?;
    Ok(context.copy_to_device(mapping.address(), b"answer")?)
}

/// Checks that writes past both ends and after the free are found, and that a guarded block has
/// unmapped neighbours.
fn guards() -> Outcome {
    let context = context()?;
    let stream = context.stream()?;
    let guard = DebugGuard::new(Direct::new(&context), 1 << 20);
    let layout = Layout::from_size_align(1000, 256)?;
    let block = guard.allocate(layout, &stream, Tag("guarded"))?;
    stream.synchronize()?;
    context.fill(block.address() + 1000, 0, 1)?;
    let Err(FreeError::Refused { block, reason }) = guard.deallocate(block, &stream) else {
        return Err("an overflow was not found".into());
    };
    context.fill(block.address() + 1000, 0xCA, 1)?;
    let freed = block.address();
    guard.deallocate(block, &stream)?;
    context.fill(freed, 1, 1)?;
    guard.reap_pending()?;
    ensure(
        guard.take_violations().len() == 1,
        "a write after the free was not found",
    )?;

    let pages = Exportable::guarded(&context, 4)?;
    let block = pages.allocate(layout, &stream, Tag("guarded"))?;
    let (start, end) = (block.address(), block.address() + 1024);
    context.fill(start, 1, 1000)?;
    ensure(
        context.fill(end, 1, 1).is_err(),
        "behind the block something is mapped",
    )?;
    pages.deallocate(block, &stream)?;
    stream.synchronize()?;
    pages.reap_pending()?;
    ensure(
        context.fill(start, 1, 1).is_err(),
        "a freed block is mapped",
    )?;
    Ok(reason.to_string())
}

/// Passes a block from stream to stream, and checks that its free waits for all of them.
fn uses() -> Outcome {
    let context = context()?;
    let (alloc_stream, other) = (context.stream()?, context.stream()?);
    let memory = StreamOrdered::new(&context);
    for value in 0..16 {
        let block = memory.allocate(
            Layout::from_size_align(64 * MIB, 1)?,
            &alloc_stream,
            Tag("used"),
        )?;
        context.fill_async(block.address(), value, 64 * MIB, &alloc_stream)?;
        let used = memory.prepare_block_use(block.as_ref(), &other, Access::ReadWrite)?;
        context.fill_async(block.address(), value + 1, 64 * MIB, &other)?;
        memory.finish_block_use(used, &other)?;
        // The next block may reuse this memory, so its fill must follow the other stream's work.
        memory.deallocate(block, &alloc_stream)?;
        let next = memory.allocate(
            Layout::from_size_align(64 * MIB, 1)?,
            &alloc_stream,
            Tag("next"),
        )?;
        context.fill_async(next.address(), 0xAB, 64 * MIB, &alloc_stream)?;
        alloc_stream.synchronize()?;
        let mut back = vec![0; 64 * MIB];
        context.copy_from_device(&mut back, next.address())?;
        ensure(
            back.iter().all(|byte| *byte == 0xAB),
            "a use came after the free",
        )?;
        memory.deallocate(next, &alloc_stream)?;
    }
    let managed = Managed::with_allocator(&context, Attach::Global);
    let block = managed.allocate(
        Layout::from_size_align(2 * MIB, 1)?,
        &alloc_stream,
        Tag("advised"),
    )?;
    for (advice, of) in [
        (Advice::SetPreferredLocation, Location::Host),
        (Advice::SetAccessedBy, Location::Device(0)),
    ] {
        context.advise(block.address(), 2 * MIB, advice, of)?;
    }
    for to in [Location::Device(0), Location::Host] {
        context.prefetch(block.address(), 2 * MIB, to, &alloc_stream)?;
    }
    alloc_stream.synchronize()?;
    managed.deallocate(block, &alloc_stream)?;
    Ok("16 blocks of 64 MiB, every byte in order".to_owned())
}

/// Compares the checksum kernel with its definition.
fn checksums() -> Outcome {
    let context = context()?;
    let (memory, stream) = (Direct::new(&context), context.stream()?);
    let mut kernel = DeviceChecksum::new(&context)?;
    let bytes: Vec<u8> = (0..MIB as u32)
        .map(|place| (place.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let large = context.memory_info()?.0.min(8 << 30) as usize / 2;
    let block = memory.allocate(Layout::from_size_align(large, 1)?, &stream, Tag("summed"))?;
    context.copy_to_device(block.address(), &bytes)?;
    for len in [0, 1, 7, 8, 4095, 65_537, MIB] {
        let found = kernel.of(block.address(), len as u64, &stream)?;
        ensure(
            found == checksum::of(&bytes[..len]),
            &format!("{len} bytes"),
        )?;
    }
    context.fill(block.address(), 0, large)?;
    let mut best = f64::INFINITY;
    for _ in 0..10 {
        let start = Instant::now();
        kernel.of(block.address(), large as u64, &stream)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    let rate = large as f64 / best / 1e9;
    memory.deallocate(block, &stream)?;
    Ok(format!("{rate:.0} GB/s over {} MiB", large / MIB))
}
