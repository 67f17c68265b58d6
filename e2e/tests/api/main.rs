//! The operator against the real API server, and everything that can go wrong between them.
//!
//! One server for all trials: etcd, kube-apiserver and the controller manager, without nodes. Trials run at the same
//! time, each operator seeing one namespace and one node; those that take something from the server run alone.

mod case;
mod churn;
mod disturbed;
mod faults;
mod place;
mod server;
mod silent;
mod steering;
mod tours;

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Instant;

use bursar_e2e::progress::Progress;
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;
use tracing_subscriber::EnvFilter;

use server::Server;

/// The server, once the first trial has started it.
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

/// A trial; alone on the server where it has to be.
fn trial(
    name: &'static str,
    alone: bool,
    act: impl AsyncFnOnce(&'static Server) -> Result<String, Failed> + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        let (runtime, server) = server()?;
        runtime.block_on(async {
            let (_shared, _alone) = if alone {
                (None, Some(server.turns.write().await))
            } else {
                (Some(server.turns.read().await), None)
            };
            let begin = Instant::now();
            let said = act(server).await?;
            let took = begin.elapsed();
            server
                .progress
                .say(format_args!("{name}: {said} ({took:.1?})"));
            Ok(())
        })
    })
}

/// So many trials run side by side. Each that makes tours makes some forty at the same time.
const AT_ONCE: usize = 4;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    let filter = EnvFilter::try_from_env("BURSAR_LOG").unwrap_or_else(|_| EnvFilter::new("off"));
    let log = tracing_subscriber::fmt().with_env_filter(filter);
    log.with_ansi(false).with_writer(std::io::stderr).init();
    let together = vec![
        trial("undisturbed", false, disturbed::undisturbed),
        trial("crashes", false, disturbed::crashes),
        trial("failing-writes", false, disturbed::failing_writes),
        trial("unanswered-writes", false, disturbed::unanswered_writes),
        trial("watches", false, disturbed::watches),
        trial("two-operators", false, disturbed::two_operators),
        trial("silence", false, silent::silence),
        trial("steering", false, steering::steering),
    ];
    // They wait, mostly; all at once would starve each other of two cores.
    arguments.test_threads = Some(AT_ONCE);
    let alone = [
        trial("churn", true, churn::churn),
        trial(
            "no-controller-manager",
            true,
            disturbed::no_controller_manager,
        ),
    ];
    let trials = together.into_iter().chain(alone).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Some(Ok((runtime, server))) = SERVER.get() {
        runtime.block_on(server.plane.stop());
    }
    conclusion.exit_code()
}
