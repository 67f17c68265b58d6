//! Tests on a real cluster: one is started for all of them, and they run one after another.
//!
//! With `KUBECONFIG` set they use that cluster; those that operate on the node itself are ignored then.

mod lifecycle;

use std::path::PathBuf;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// The program whose subcommand `node` a cluster descends from.
fn harness() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_bursar-e2e"))
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trials: Vec<Trial> = lifecycle::trials();
    libtest_mimic::run(&arguments, trials).exit_code()
}
