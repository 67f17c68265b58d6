//! Measures the pool against the driver's own pool, and checks properties that only a GPU can show.
//!
//! ```text
//! runtime-bench random                         RMM's random allocations, one thread and eight
//! runtime-bench turns PERCENT                  each input line "ALLOCATIONS MIB": that cell once,
//!                                              from this part of the GPU
//! runtime-bench native                         the cells from the driver's pool, one thread
//! runtime-bench pair                           one allocation and its free, one thread and eight
//! runtime-bench steal                          two streams and one block, its data checked
//! runtime-bench planted direct|guarded|canary  writes past a block's end, for compute-sanitizer
//! ```
//!
//! Prints one JSON object for each row. Exits with 1 if a row is wrong.
#![allow(
    unsafe_code,
    reason = "calls the driver's pool itself, and launches kernels"
)]

mod measure;
mod minstd;
mod native;
mod planted;
mod random;
#[path = "../../../../../device-plugin/runtime/tests/support/raw.rs"]
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

/// Returns whether every row was right.
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
