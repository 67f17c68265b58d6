//! Tests the operator against the real API server, with faults between both.
//!
//! All trials share one server: etcd, kube-apiserver and the controller manager, without nodes.
//! Trials run concurrently, and each operator watches one namespace and one node. Trials that
//! impair the server run alone and first, so that their final quiet minute overlaps with the other
//! trials. `silence-long` waits for a minute, and runs beside all others in the long tier.

mod absent_agents;
mod churn;
mod fault_injection;
mod half_open;
mod hostile;
mod isolated_scope;
mod leader;
mod policies;
mod quota_race;
mod restored;
mod rights;
mod scenarios;
mod server;
mod steering;
mod streamed_lists;
mod surface;
mod test_case;

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Instant;

use bursar_e2e::progress::Progress;
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::{Builder, Runtime};
use tracing_subscriber::EnvFilter;

use server::{Permit, Server, acquire_all_permits, is_long};

/// The server, after the first trial has started it.
static SERVER: OnceLock<Result<(Runtime, Server), String>> = OnceLock::new();

fn server() -> Result<&'static (Runtime, Server), Failed> {
    let start = || {
        let runtime = Runtime::new().map_err(|error| error.to_string())?;
        let server = runtime.block_on(Server::start(Progress::start()));
        let server = server.map_err(|error| error.to_string())?;
        Ok((runtime, server))
    };
    let server = SERVER.get_or_init(start);
    server.as_ref().map_err(|why| Failed::from(why.clone()))
}

/// Makes a trial whose cases share the server.
fn trial(
    name: &'static str,
    act: impl AsyncFnOnce(&'static Server) -> Result<String, Failed> + Send + 'static,
) -> Trial {
    Trial::test(name, move || run(name, act))
}

/// Makes a trial that has the server alone until its final quiet period.
fn alone(
    name: &'static str,
    act: impl AsyncFnOnce(&'static Server, Permit) -> Result<String, Failed> + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        // The trial acquires all permits before the server exists, ahead of the other trials.
        let permit = Builder::new_current_thread()
            .build()?
            .block_on(acquire_all_permits());
        run(name, async |server| act(server, permit).await)
    })
}

fn run(
    name: &str,
    act: impl AsyncFnOnce(&'static Server) -> Result<String, Failed>,
) -> Result<(), Failed> {
    let (runtime, server) = server()?;
    runtime.block_on(async {
        let begin = Instant::now();
        // Large futures overflow the stack of a test thread.
        let summary = Box::pin(act(server)).await?;
        let took = begin.elapsed();
        server
            .progress
            .report(format_args!("{name}: {summary} ({took:.1?})"));
        Ok(())
    })
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    let filter = EnvFilter::try_from_env("BURSAR_LOG").unwrap_or_else(|_| EnvFilter::new("off"));
    let log = tracing_subscriber::fmt().with_env_filter(filter);
    log.with_ansi(false).with_writer(std::io::stderr).init();
    let mut trials = vec![
        alone("churn", churn::churn),
        alone("quota-race", quota_race::quota_race),
        alone(
            "no-controller-manager",
            fault_injection::no_controller_manager,
        ),
        alone("restored", restored::etcd_restored),
        trial("silence", half_open::silence),
        trial("watches", fault_injection::watches),
        trial("undisturbed", fault_injection::undisturbed),
        trial("crashes", fault_injection::crashes),
        trial("failing-writes", fault_injection::failing_writes),
        trial("unanswered-writes", fault_injection::unanswered_writes),
        trial("two-operators", fault_injection::two_operators),
        trial("absent-agents", absent_agents::absent_agents),
        trial("leader", leader::leader),
        trial("steering", steering::steering),
        trial("streamed-lists", streamed_lists::streamed_lists),
        trial("policies", policies::policies),
        trial("managed-memory", policies::managed_memory),
        trial("hostile", hostile::hostile),
        trial("rights", rights::rights),
        trial("surface", surface::surface),
    ];
    if is_long() {
        let silence = half_open::silence_with_production_timeouts;
        trials.insert(0, trial("silence-long", silence));
    }
    // Each trial waits for its own permit.
    arguments.test_threads = Some(trials.len());
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Some(Ok((runtime, server))) = SERVER.get() {
        runtime.block_on(server.control_plane.stop());
    }
    conclusion.exit_code()
}
