//! What the program does.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::args::{Args, Command, Take, Then};
use crate::cuda::{self, Refusal};
use crate::nvml;

/// Runs the command; returns only when nothing is held.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    cuda::init()?;
    match &args.command {
        Command::Report => report(),
        Command::Hold { bytes, take } => hold(*bytes, take),
        Command::Greedy { take } => greedy(take),
        Command::Churn { bytes, chunk } => churn(*bytes, *chunk),
    }
}

fn report() -> anyhow::Result<ExitCode> {
    let count = cuda::device_count()?;
    let devices = (0..count)
        .map(cuda::describe)
        .collect::<Result<Vec<_>, _>>()?;
    println!(
        "{}",
        json!({ "event": "report", "count": count, "devices": devices })
    );
    Ok(ExitCode::SUCCESS)
}

fn hold(bytes: u64, take: &Take) -> anyhow::Result<ExitCode> {
    cuda::use_device(take.device)?;
    let mut got = 0;
    while got < bytes {
        let chunk = take.chunk.min(bytes - got);
        if let Err(refusal) = cuda::allocate(chunk) {
            refused(got, chunk, &refusal, take)?;
            return Ok(ExitCode::FAILURE);
        }
        got += chunk;
    }
    let device = cuda::describe(take.device)?;
    let nvml = nvml::look(&device.uuid);
    println!(
        "{}",
        json!({ "event": "holding", "got": got, "device": device, "nvml": nvml })
    );
    Ok(finish(take.then))
}

fn greedy(take: &Take) -> anyhow::Result<ExitCode> {
    cuda::use_device(take.device)?;
    let mut got: u64 = 0;
    loop {
        match cuda::allocate(take.chunk) {
            Ok(_) => got = got.saturating_add(take.chunk),
            Err(refusal) => {
                refused(got, take.chunk, &refusal, take)?;
                return Ok(finish(take.then));
            }
        }
    }
}

/// How often a program that churns says that it does.
const TELL: Duration = Duration::from_millis(500);

fn churn(bytes: u64, chunk: u64) -> anyhow::Result<ExitCode> {
    cuda::use_device(0)?;
    let (mut rounds, mut told) = (0_u64, Instant::now());
    loop {
        let mut held = Vec::new();
        let mut got = 0;
        while got < bytes {
            let asked = chunk.min(bytes - got);
            match cuda::allocate(asked) {
                Ok(allocation) => held.push(allocation),
                Err(refusal) => {
                    println!(
                        "{}",
                        json!({ "event": "refused", "got": got, "asked": asked, "refused": refusal, "rounds": rounds })
                    );
                    return Ok(ExitCode::FAILURE);
                }
            }
            got += asked;
        }
        for allocation in held {
            cuda::free(allocation)?;
        }
        rounds += 1;
        if rounds == 1 || told.elapsed() >= TELL {
            println!("{}", json!({ "event": "churning", "rounds": rounds }));
            told = Instant::now();
        }
    }
}

fn refused(got: u64, asked: u64, refusal: &Refusal, take: &Take) -> anyhow::Result<()> {
    let device = cuda::describe(take.device)?;
    println!(
        "{}",
        json!({ "event": "refused", "got": got, "asked": asked, "refused": refusal, "device": device })
    );
    Ok(())
}

fn finish(then: Then) -> ExitCode {
    match then {
        Then::Exit => ExitCode::SUCCESS,
        // The signals' thread ends the process.
        Then::Hold => loop {
            std::thread::park();
        },
    }
}
