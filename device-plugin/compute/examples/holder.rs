//! The holder's process alone, for measurements on a GPU: `holder GPU DEVICE MICROSECONDS`.

use std::process::ExitCode;

fn main() -> ExitCode {
    bursar_compute::process::run_child(std::env::args_os().skip(1))
}
