//! What the program does.
#![forbid(unsafe_code)]

use std::process::ExitCode;

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
            Ok(()) => got = got.saturating_add(take.chunk),
            Err(refusal) => {
                refused(got, take.chunk, &refusal, take)?;
                return Ok(finish(take.then));
            }
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
