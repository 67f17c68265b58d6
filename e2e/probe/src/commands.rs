//! Runs the commands and prints their events.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{self, ExitCode};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::args::{AllocationArgs, Args, Command, StdinCommand, Then};
use crate::cuda::{self, Allocation, Gpu, Refusal};
use crate::nvml;
use crate::parked;
use crate::retained;

/// Runs a command. A command that holds memory does not return.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if !matches!(args.command, Command::Park { .. } | Command::Serve { .. }) {
        cuda::init()?;
    }
    match &args.command {
        Command::Report => report(),
        Command::Hold { bytes, take } => allocate_and_hold(*bytes, take),
        Command::Greedy { take } => allocate_until_refused(take),
        Command::Churn { bytes, chunk } => churn(*bytes, *chunk),
        Command::Fault {
            times,
            file,
            bytes,
            retain,
            after,
            blind,
        } => {
            let delay = Duration::from_secs(*after) + FAULT_DELAY;
            fault(*times, file, *bytes, *retain, delay, *blind)
        }
        Command::Retain { bytes } => {
            let (_lease, report) = retained::open_or_write_lease(*bytes)?;
            println!("{}", json!({ "event": "retained", "retained": report }));
            Ok(ExitCode::SUCCESS)
        }
        Command::Export { bytes, to } => {
            parked::send_descriptor(&Gpu::with_ordinal(0)?.export(*bytes)?, to)?;
            println!("{}", json!({ "event": "exported", "bytes": bytes }));
            Ok(ExitCode::SUCCESS)
        }
        Command::Park { socket } => parked::hold_descriptors(socket),
        Command::Serve { worker } => serve(worker),
        Command::Obey => run_stdin_commands(),
    }
}

fn report() -> anyhow::Result<ExitCode> {
    let count = cuda::device_count()?;
    let devices = (0..count)
        .map(cuda::describe)
        .collect::<Result<Vec<_>, _>>()?;
    // The variable that NVIDIA's container runtime reads.
    let visible = std::env::var("NVIDIA_VISIBLE_DEVICES").ok();
    println!(
        "{}",
        json!({ "event": "report", "count": count, "devices": devices, "visible": visible })
    );
    Ok(ExitCode::SUCCESS)
}

fn allocate_and_hold(bytes: u64, take: &AllocationArgs) -> anyhow::Result<ExitCode> {
    let gpu = Gpu::with_ordinal(take.device)?;
    let (mut held, mut got) = (Vec::new(), 0);
    while got < bytes {
        let chunk = take.chunk.min(bytes - got);
        match allocate(&gpu, chunk, take) {
            Ok(allocation) => held.push(allocation),
            Err(refusal) => {
                print_refusal(got, chunk, &refusal, take)?;
                return Ok(ExitCode::FAILURE);
            }
        }
        got += chunk;
    }
    let device = cuda::describe(take.device)?;
    let nvml = nvml::report_device(&device.uuid);
    println!(
        "{}",
        json!({ "event": "holding", "got": got, "device": device, "nvml": nvml })
    );
    Ok(exit_or_hold(take.then))
}

fn allocate(gpu: &Gpu, bytes: u64, take: &AllocationArgs) -> Result<Allocation, Refusal> {
    match take.managed {
        true => gpu.allocate_managed(bytes),
        false => gpu.allocate(bytes),
    }
}

fn allocate_until_refused(take: &AllocationArgs) -> anyhow::Result<ExitCode> {
    let gpu = Gpu::with_ordinal(take.device)?;
    let (mut held, mut got) = (Vec::new(), 0_u64);
    loop {
        match allocate(&gpu, take.chunk, take) {
            Ok(allocation) => {
                held.push(allocation);
                got = got.saturating_add(take.chunk);
            }
            Err(refusal) => {
                print_refusal(got, take.chunk, &refusal, take)?;
                return Ok(exit_or_hold(take.then));
            }
        }
    }
}

/// Interval of the `churning` events.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

fn churn(bytes: u64, chunk: u64) -> anyhow::Result<ExitCode> {
    let gpu = Gpu::with_ordinal(0)?;
    let (mut rounds, mut last_print) = (0_u64, Instant::now());
    loop {
        let mut allocations = Vec::new();
        let mut got = 0;
        while got < bytes {
            let size = chunk.min(bytes - got);
            match gpu.allocate(size) {
                Ok(allocation) => allocations.push(allocation),
                Err(refusal) => {
                    println!(
                        "{}",
                        json!({ "event": "refused", "got": got, "asked": size, "refused": refusal, "rounds": rounds })
                    );
                    return Ok(ExitCode::FAILURE);
                }
            }
            got += size;
        }
        for allocation in allocations {
            gpu.free(allocation)?;
        }
        rounds += 1;
        if rounds == 1 || last_print.elapsed() >= PROGRESS_INTERVAL {
            println!("{}", json!({ "event": "churning", "rounds": rounds }));
            last_print = Instant::now();
        }
    }
}

/// How long a lingering process keeps its memory: several of the kubelet's looks at containers.
const LINGER: Duration = Duration::from_secs(3);

/// Time for the driver to free the memory of the previous process image.
const FAULT_DELAY: Duration = Duration::from_millis(250);

fn fault(
    times: usize,
    file: &Path,
    bytes: u64,
    retain: Option<u64>,
    delay: Duration,
    blind: bool,
) -> anyhow::Result<ExitCode> {
    let mut starts = match std::fs::read_to_string(file) {
        Ok(text) => text
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<Vec<Value>, _>>()?,
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    let before = starts.len();
    let gpu = Gpu::with_ordinal(0)?;
    let allocation = gpu.allocate(bytes);
    // The mapping stays until the process image ends.
    let (_lease, report) = retain
        .map(retained::open_or_write_lease)
        .transpose()?
        .unzip();
    let start = json!({ "event": "started", "at": unix_millis()?, "faults": before, "refused": allocation.as_ref().err(), "retained": report,
        "pid": process::id() });
    println!("{start}");
    if before < times {
        let mut record = File::options().create(true).append(true).open(file)?;
        record.write_all(format!("{start}\n").as_bytes())?;
        std::thread::sleep(delay);
        println!("{}", json!({ "event": "faulting", "at": unix_millis()? }));
        let answer = gpu.fault()?;
        println!("{}", json!({ "event": "faulted", "answer": answer }));
        return Ok(if blind {
            exit_or_hold(Then::Hold)
        } else {
            ExitCode::FAILURE
        });
    }
    starts.push(start);
    println!(
        "{}",
        json!({ "event": "steady", "faults": before, "starts": starts })
    );
    Ok(exit_or_hold(Then::Hold))
}

fn serve(worker: &[String]) -> anyhow::Result<ExitCode> {
    println!("{}", json!({ "event": "serving" }));
    let program = std::env::current_exe()?;
    loop {
        let status = process::Command::new(&program).args(worker).status()?;
        println!(
            "{}",
            json!({ "event": "ended", "signal": status.signal(), "code": status.code() })
        );
    }
}

/// Milliseconds of the Unix epoch, to measure across two process images.
fn unix_millis() -> anyhow::Result<u64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    Ok(u64::try_from(now.as_millis())?)
}

/// The size of one allocation of `obey`.
const STDIN_CHUNK: u64 = 64 << 20;

fn run_stdin_commands() -> anyhow::Result<ExitCode> {
    let gpu = Gpu::with_ordinal(0)?;
    let mut allocations = Vec::new();
    for line in std::io::stdin().lines() {
        let order: StdinCommand = line?.parse().map_err(anyhow::Error::msg)?;
        let pieces =
            |bytes: u64| usize::try_from(bytes.div_ceil(STDIN_CHUNK)).unwrap_or(usize::MAX);
        let mut refused = None;
        match order {
            StdinCommand::Take(bytes) => {
                let wanted = allocations.len().saturating_add(pieces(bytes));
                while allocations.len() < wanted && refused.is_none() {
                    match gpu.allocate(STDIN_CHUNK) {
                        Ok(allocation) => allocations.push(allocation),
                        Err(refusal) => refused = Some(refusal),
                    }
                }
            }
            StdinCommand::Free(bytes) => {
                let left = allocations.len().saturating_sub(pieces(bytes));
                let mut freed = allocations.drain(left..);
                freed.try_for_each(|allocation| gpu.free(allocation))?;
            }
            StdinCommand::Report => {}
        }
        let device = cuda::describe(0)?;
        println!(
            "{}",
            json!({ "event": "holds", "held": allocations.len() as u64 * STDIN_CHUNK, "refused": refused, "device": device })
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn print_refusal(
    got: u64,
    asked: u64,
    refusal: &Refusal,
    take: &AllocationArgs,
) -> anyhow::Result<()> {
    let device = cuda::describe(take.device)?;
    println!(
        "{}",
        json!({ "event": "refused", "got": got, "asked": asked, "refused": refusal, "device": device })
    );
    Ok(())
}

fn exit_or_hold(then: Then) -> ExitCode {
    match then {
        Then::Exit => ExitCode::SUCCESS,
        Then::Linger => {
            std::thread::sleep(LINGER);
            ExitCode::SUCCESS
        }
        // The thread of the signal handlers ends the process.
        Then::Hold => loop {
            std::thread::park();
        },
    }
}
