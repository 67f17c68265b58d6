//! Runs the trials on a real cluster, which is started once and shared.
//!
//! With `KUBECONFIG` set the trials use that cluster. Trials that operate on the node itself are
//! ignored then.

mod budgets;
mod churn;
mod covered;
mod enforcement;
mod health;
mod input;
mod lifecycle;
mod obedient;
mod on_node;
mod operator;
mod placement;
mod poison;
mod quota;
mod release;
mod resize;
mod restarts;
mod rights;
mod stage;
mod teams;
mod together;
mod told;
mod waiters;
mod witness;

use std::path::PathBuf;
use std::process::ExitCode;

use bursar_e2e::verify::TRIALS;
use libtest_mimic::{Arguments, Trial};

/// Returns the program whose subcommand `node` is the node process.
fn harness() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_bursar-e2e"))
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let groups: [Vec<Trial>; 18] = [
        quota::trials(),
        placement::trials(),
        together::trials(),
        budgets::trials(),
        input::trials(),
        release::trials(),
        churn::trials(),
        restarts::trials(),
        health::trials(),
        enforcement::trials(),
        rights::trials(),
        resize::trials(),
        waiters::trials(),
        covered::trials(),
        poison::trials(),
        teams::trials(),
        poison::last_trials(),
        lifecycle::trials(),
    ];
    let trials: Vec<Trial> = groups.into_iter().flatten().collect();
    let listed = TRIALS.iter().map(|(name, _)| *name);
    if !trials.iter().map(Trial::name).eq(listed) {
        eprintln!("the trials are not those that `cargo verify --list` names, or in another order");
        return ExitCode::FAILURE;
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    stage::take_down();
    conclusion.exit_code()
}
