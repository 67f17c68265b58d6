//! Starts the node agent, or one of its helper processes.

use std::process::ExitCode;
use std::time::Duration;

use bursar_compute::process as compute;
use bursar_config::{Args, Config, LogFormat};
use bursar_confine::ConfineError;
use bursar_device_plugin::RunOptions;
use bursar_enforcement::attestation::device_access;
use bursar_gpu::nvml;
use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};
use tracing_subscriber::EnvFilter;

/// The time for which `main` waits for threads that may hang in the kernel.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    match words.next() {
        Some(word) if word == device_access::SUBCOMMAND => return device_access::run_child(words),
        Some(word) if word == nvml::SUBCOMMAND => return nvml::run_child(words),
        Some(word) if word == compute::SUBCOMMAND => return compute::run_child(words),
        _ => {}
    }
    let args = Args::parse();
    // Threads inherit capabilities and seccomp filters, so the agent drops rights before it starts
    // any.
    let confined = bursar_confine::restrict_agent();
    let ended = Runtime::new()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| {
            let ended = runtime.block_on(run(&args, confined));
            runtime.shutdown_timeout(SHUTDOWN_GRACE);
            ended
        });
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            error!(error = format!("{failure:#}"), "agent failed");
            eprintln!("bursar-agent: {failure:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args, confined: Result<(), ConfineError>) -> anyhow::Result<()> {
    init_logging(args)?;
    if let Err(error) = confined {
        warn!(%error, "failed to drop capabilities: the agent has more rights than necessary");
    }
    if !bursar_confine::hides_files() {
        warn!("the kernel has no Landlock: processes that call NVML can read the agent's token");
    }
    raise_open_file_limit();
    let config = Config::of(args)?;
    if !config.unknown_keys.is_empty() {
        let keys = config.unknown_keys.join(", ");
        warn!(
            keys,
            "the configuration has keys that this version does not know"
        );
    }
    let shutdown = CancellationToken::new();
    stop_on_signals(shutdown.clone())?;
    let client = bursar_device_plugin::connect_api_server().await;
    let options = RunOptions::new(args.node_name.clone(), client);
    Ok(bursar_device_plugin::run(config, options, shutdown).await?)
}

fn init_logging(args: &Args) -> anyhow::Result<()> {
    let lines = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_new(&args.log)?)
        // Terminal colours would disturb log collectors, and features of other crates may enable
        // them.
        .with_ansi(false)
        .with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Json => lines.json().init(),
        LogFormat::Text => lines.init(),
    }
    Ok(())
}

/// Raises the soft limit of open files to the hard limit: every tenant process takes descriptors.
fn raise_open_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        warn!(%error, limit = limit.current, "failed to raise the limit of open files");
    }
}

fn stop_on_signals(shutdown: CancellationToken) -> std::io::Result<()> {
    let (mut term, mut int) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    tokio::spawn(async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        shutdown.cancel();
    });
    Ok(())
}
