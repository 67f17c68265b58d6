//! Runs the trials on a real cluster, which is started once and shared.
//!
//! With `KUBECONFIG` set the trials use that cluster. Trials that operate on the node itself are
//! ignored then.

mod agent_away;
mod attestation;
mod budget_enforcement;
mod budgets;
mod churn;
mod cluster_state;
mod console;
mod demo;
mod enforcement;
mod facts;
mod health;
mod input;
mod installation;
mod kubectl_bursar;
mod lifecycle;
mod maintenance;
mod managed;
mod memory_release;
mod monitoring;
mod nodes;
mod on_node;
mod operator;
mod placement;
mod pod_history;
mod poison;
mod quota;
mod registry;
mod relay;
mod resize;
mod restarts;
mod rights;
mod scripted_program;
mod shapes;
mod shared_cluster;
mod signatures;
mod status;
mod together;
mod upgrade;
mod versions;
mod waiters;

use std::path::PathBuf;
use std::process::ExitCode;

use bursar_e2e::verify;
use libtest_mimic::{Arguments, Trial};

/// Returns the program whose subcommand `node` is the node process.
fn harness() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_bursar-e2e"))
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let groups: [Vec<Trial>; 30] = [
        quota::trials(),
        placement::trials(),
        together::trials(),
        shapes::trials(),
        budgets::trials(),
        input::trials(),
        memory_release::trials(),
        churn::trials(),
        restarts::trials(),
        agent_away::trials(),
        relay::trials(),
        health::trials(),
        maintenance::trials(),
        enforcement::trials(),
        managed::trials(),
        rights::trials(),
        resize::trials(),
        waiters::trials(),
        attestation::trials(),
        poison::trials(),
        budget_enforcement::trials(),
        console::trials(),
        monitoring::trials(),
        kubectl_bursar::trials(),
        poison::last_trials(),
        installation::trials(),
        demo::trials(),
        nodes::trials(),
        facts::trials(),
        lifecycle::trials(),
    ];
    let trials: Vec<Trial> = groups.into_iter().flatten().collect();
    if !trials.iter().map(Trial::name).eq(verify::trials()) {
        eprintln!("the trials are not those that `cargo verify --list` names, or in another order");
        return ExitCode::FAILURE;
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    shared_cluster::take_down();
    conclusion.exit_code()
}
