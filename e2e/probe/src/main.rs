//! A small CUDA program for pods: says what it sees, takes memory, holds it.
//!
//! It prints one JSON object a line. Exit codes: 0 done or told to end, unless `--told` says another, 1 refused or
//! no GPU.

mod args;
mod commands;
mod cuda;
mod ending;
mod kept;
mod nvml;
mod parked;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    // Before anything else: as process 1 of a container, a signal without a handler is ignored.
    let ending = ending::exit_on_signals();
    let outcome = ending.map_err(anyhow::Error::from).and_then(|()| {
        let args = args::Args::parse();
        ending::set_exit_code(args.told);
        commands::run(&args)
    });
    match outcome {
        Ok(code) => code,
        Err(error) => {
            println!(
                "{}",
                serde_json::json!({ "event": "failed", "error": format!("{error:#}") })
            );
            ExitCode::FAILURE
        }
    }
}
