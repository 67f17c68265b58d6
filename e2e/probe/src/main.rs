//! A small CUDA program for pods: reports devices, allocates memory and holds it.
//!
//! The program allocates through the allocator runtime. Programs that call the driver themselves
//! run under a quota too. They are `quota-client`, which opens `libcuda.so.1`, in the tests of the
//! shim and of the audit, and PyTorch on real GPUs (`e2e/gpu`).
//!
//! The program prints one JSON object a line.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | done, or ended by a signal without `--told` |
//! | `--told` | ended by SIGTERM or SIGINT |
//! | 1 | the driver refused, or there is no GPU |

mod args;
mod commands;
mod cuda;
mod ending;
mod nvml;
mod parked;
mod retained;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    // The handlers come first: the kernel ignores a signal without a handler in a container's
    // process 1.
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
