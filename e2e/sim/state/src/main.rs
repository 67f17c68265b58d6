//! Runs `simgpu`, which lays out a simulated machine, shows its state and injects faults.

mod command;
mod ending;

use clap::Parser as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    match command::run(command::Args::parse()) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("simgpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}
