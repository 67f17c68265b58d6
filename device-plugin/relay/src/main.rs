//! Starts the plugin relay.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use bursar_relay::agent::AWAY_TIMEOUT;
use bursar_relay::{RelayOptions, watchdog};
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::error;

/// The time for the log of a relay that hangs.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Keeps the node's GPU memory registered with the kubelet while no agent runs.
#[derive(Debug, Parser)]
struct Args {
    /// The kubelet's plugin directory.
    #[arg(long, default_value = "/var/lib/kubelet/device-plugins")]
    kubelet_dir: PathBuf,
    /// The directory in which the agent registers; only root may enter it.
    #[arg(long, default_value = bursar_relay::DIR)]
    dir: PathBuf,
    /// The seconds without an agent after which a resource is withdrawn.
    #[arg(long, default_value_t = 300)]
    withdraw_after: u64,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .json()
        .with_writer(std::io::stderr)
        .init();
    match run(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!(%error, "plugin relay failed");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), Box<dyn std::error::Error>> {
    watchdog::start(watchdog::PACE, || {
        // The main thread may hang in a write to the log, with its lock.
        std::thread::spawn(|| {
            error!("the plugin relay hangs and ends; the kubelet starts it again")
        });
        std::thread::sleep(LAST_WORDS);
        std::process::abort();
    })?;
    let shutdown = CancellationToken::new();
    let (mut term, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    let stop = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
    });
    let options = RelayOptions {
        kubelet_dir: args.kubelet_dir,
        dir: args.dir,
        away_timeout: AWAY_TIMEOUT,
        withdraw_after: Duration::from_secs(args.withdraw_after),
    };
    Ok(bursar_relay::run(options, shutdown).await?)
}
