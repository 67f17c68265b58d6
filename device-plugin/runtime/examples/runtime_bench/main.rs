//! Measures the pool against the driver's own, and tries what only a GPU can show.
//!
//! usage: runtime-bench random                         RMM's random allocations, one thread and eight
//!        runtime-bench turns PERCENT                  for each line "ALLOCATIONS MIB" it reads, that cell once, from so much of the GPU
//!        runtime-bench native                         the cells from the driver's pool, one thread
//!        runtime-bench pair                           one allocation and its free, one thread and eight
//!        runtime-bench steal                          two streams and one block, its data checked
//!        runtime-bench planted direct|guarded|canary  writes past a block's end, for compute-sanitizer to find
//!
//! Prints one JSON object for each row. Exits with 1 where a row is not as it must be.
#![allow(
    unsafe_code,
    reason = "calls the driver's pool itself, and launches kernels"
)]

mod measure;
mod minstd;
mod native;
mod planted;
mod random;
#[path = "../../tests/support/raw.rs"]
mod raw;
mod steal;

use std::process::ExitCode;

use anyhow::{Result, bail};
use bursar_runtime::driver::{Context, Driver};

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::from(2)
        }
    }
}

fn context() -> Result<Context> {
    Ok(Driver::get()?.device(0)?.primary_context()?)
}

/// Whether every row was as it must be.
fn run() -> Result<bool> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["random"] => measure::random(&context()?),
        ["turns", percent] => measure::turns(&context()?, percent.parse()?),
        ["native"] => measure::native(&context()?),
        ["pair"] => measure::pair(&context()?),
        ["steal"] => steal::run(&context()?),
        ["planted", how] => planted::run(&context()?, how),
        _ => {
            bail!(
                "usage: runtime-bench random | turns PERCENT | native | pair | steal | planted direct|guarded|canary"
            )
        }
    }
}
