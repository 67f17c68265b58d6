//! The fd store: `bursar-fdstore [FOLDER [BYTES]]` stores the descriptors of retained memory and
//! serves them below FOLDER. BYTES is the memory limit of its container and bounds how many leases
//! it takes.
//!
//! Retained memory lives while a descriptor of it is open (F4 in docs/internals/facts.md), so it
//! lives as long as this process. The process therefore uses no CUDA, starts nothing, reads nothing
//! that a tenant writes, and is replaced only when an administrator deletes its pod. A new agent
//! gets the leases of the previous one.
//!
//! * `fd_store` stores the descriptors
//! * `request_handler` answers messages
//! * `listener` owns the socket
//! * `poll_loop` serves the connections

mod fd_store;
mod listener;
mod poll_loop;
mod request_handler;

use std::ffi::OsString;
use std::fmt::Arguments;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use bursar_protocol::fdstore::RUN_DIR;
use fd_store::FdStore;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let folder = arguments.next();
    let folder = folder.map_or_else(|| PathBuf::from(RUN_DIR), PathBuf::from);
    let memory = match arguments.next().map(parse_memory_limit).transpose() {
        Ok(memory) => memory,
        Err(given) => {
            log(format_args!(
                "failed to parse the memory limit: {given:?} is not a number of bytes; for example 419430400"
            ));
            return ExitCode::FAILURE;
        }
    };
    let mut store = FdStore::with_capacity(fd_store::capacity(raise_open_file_limit(), memory));
    let ended = listener::Listener::bind(&folder)
        .map_err(Into::into)
        .and_then(|listener| poll_loop::serve(&listener, &mut store));
    let Err(error): Result<std::convert::Infallible, Box<dyn std::error::Error>> = ended;
    log(format_args!("{error}"));
    ExitCode::FAILURE
}

/// Parses a number of bytes; returns the argument if it is none.
fn parse_memory_limit(given: OsString) -> Result<u64, OsString> {
    let bytes = given.to_str().and_then(|text| text.parse().ok());
    bytes.ok_or(given)
}

/// Logs a line. `eprintln` would panic after the log's reader has exited, and lose all retained
/// memory.
fn log(text: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "bursar-fdstore: {text}");
}

/// Raises the limit of open files to the hard limit; returns the limit in force.
fn raise_open_file_limit() -> Option<u64> {
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
