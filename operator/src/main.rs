//! Runs the operator.

use std::process::ExitCode;

use anyhow::Context as _;
use bursar_http::Listeners;
use bursar_operator::api::client::client;
use bursar_operator::cli::{Args, LogFormat};
use bursar_operator::run;
use clap::Parser;
use k8s_openapi::jiff::Timestamp;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::error;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            error!(error = format!("{failure:#}"), "exiting with an error");
            eprintln!("bursar-operator: {failure:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(args: &Args) -> anyhow::Result<()> {
    log(args)?;
    let shutdown = CancellationToken::new();
    stop_on_signals(shutdown.clone())?;
    let listeners = Listeners::bind(args.listen, args.probes)
        .await
        .context("failed to listen; see --listen and --probes")?;
    let client = client().await.context(
        "failed to configure the API client: run in a pod with a service account, or set KUBECONFIG",
    )?;
    Ok(run::run(client, listeners, args.options(), Timestamp::now, shutdown).await?)
}

fn log(args: &Args) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&args.log).with_context(|| {
        format!(
            "--log={}: write directives such as info,kube=warn",
            args.log
        )
    })?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // Log collectors want no colours, whatever features other crates enable.
        .with_ansi(false)
        .with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Json => lines.json().init(),
        LogFormat::Text => lines.init(),
    }
    Ok(())
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
