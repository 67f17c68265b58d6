//! The vault: `bursar-vault [FOLDER]` holds the descriptors of kept memory and serves them below FOLDER.
//!
//! Kept memory lives as long as its descriptor is open somewhere (design F4), so it lives as long as this process: it
//! has no CUDA, starts nothing, reads nothing that a tenant writes, and is replaced only when somebody deletes it. What
//! it keeps of one agent it hands to the next.
//!
//! * `held` is what it holds
//! * `answer` is what it answers
//! * `place` is its socket, of which there is one
//! * `serve` is its loop

mod answer;
mod held;
mod place;
mod serve;

use std::fmt::Arguments;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use bursar_protocol::vault::RUN_DIR;
use held::Held;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn main() -> ExitCode {
    let folder = std::env::args_os().nth(1);
    let folder = folder.map_or_else(|| PathBuf::from(RUN_DIR), PathBuf::from);
    let mut held = Held::with_room(held::room(open_files()));
    let ended = place::Place::take(&folder)
        .map_err(Into::into)
        .and_then(|place| serve::serve(&place, &mut held));
    let Err(error): Result<std::convert::Infallible, Box<dyn std::error::Error>> = ended;
    log(format_args!("{error}"));
    ExitCode::FAILURE
}

/// A line for whoever reads them. Where nobody does, what is kept matters more: `eprintln` would panic.
fn log(text: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "bursar-vault: {text}");
}

/// Raises the limit of open files to the most that is allowed; what it is then.
fn open_files() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    }
}
