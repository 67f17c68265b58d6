//! Runs the demo: pods of two teams on the GPUs of a cluster.
//!
//! ```text
//! budgets -> large pods, one a GPU -> small pods (one fills its quota) -> a pod that no GPU fits
//!         -> probe output of each, and why that pod waits -> a large pod is deleted
//!         -> the pending pod runs -> the table, and the same pods by `kubectl bursar top`
//! ```

mod probe_output;
mod table;
mod workloads;

use std::time::{Duration, Instant};

use bursar_cli::args::Cli;
use bursar_cli::run::Session;
use bursar_cli::table::Terminal;
use bursar_crds::GpuMemoryBudget;
use clap::Parser as _;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use self::probe_output::ProbeOutput;
use self::table::Row;
use self::workloads::{Workload, Workloads};
use crate::environment::{Environment, EnvironmentError};
use crate::pods::{PodError, Pods};
use crate::progress::Progress;

/// The timeout of one pod's start, for images on the node or pulled once.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The error of a demo that did not complete.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// A pod could not be created, or did not reach its expected state.
    #[error(transparent)]
    Pod(#[from] PodError),
    /// The environment did not answer.
    #[error(transparent)]
    Scene(#[from] EnvironmentError),
    /// The API server refused a budget.
    #[error("budget of {namespace}: {source}")]
    Budget {
        /// Its namespace.
        namespace: String,
        /// The API server's error.
        source: Box<kube::Error>,
    },
    /// A command of `kubectl bursar` failed.
    #[error("kubectl bursar {line}: {cause:#}")]
    Command {
        /// The command line.
        line: String,
        /// The cause.
        cause: anyhow::Error,
    },
    /// The GPUs are too small.
    #[error("the demo needs a node with at least 8 GiB on a GPU; the nodes offer {0}")]
    TooSmall(String),
}

/// The demo's namespaces.
pub const NAMESPACES: [&str; 2] = ["team-a", "team-b"];

/// Deletes the demo's namespaces, with everything in them.
///
/// # Errors
/// When the API server refuses.
pub async fn clean_up(environment: &Environment) -> Result<(), DemoError> {
    for namespace in NAMESPACES {
        Pods::delete_namespace(&environment.cluster.client(), namespace).await?;
    }
    Ok(())
}

/// Runs a command of `kubectl bursar`, and returns the command line with its output.
async fn kubectl_bursar(client: &Client, line: &str) -> Result<String, DemoError> {
    let failed = |cause| DemoError::Command {
        line: line.to_owned(),
        cause,
    };
    let words = std::iter::once("kubectl-bursar").chain(line.split(' '));
    let cli = Cli::try_parse_from(words).map_err(|error| failed(error.into()))?;
    let mut out = Vec::new();
    let mut session = Session {
        client: client.clone(),
        global: &cli.global,
        terminal: Terminal::default(),
        out: &mut out,
    };
    session.run(&cli.command).await.map_err(failed)?;
    let out = String::from_utf8_lossy(&out);
    Ok(format!("$ kubectl bursar {line}\n{out}"))
}

/// Runs the demo. Returns its table, and what `kubectl bursar top` shows of the same pods.
///
/// # Errors
/// When a pod does not reach its expected state in time.
pub async fn run(environment: &Environment, progress: &Progress) -> Result<String, DemoError> {
    let workloads = Workloads::for_environment(environment).await?;
    let client = environment.cluster.client();
    for (namespace, gib) in workloads.budgets() {
        Pods::in_namespace(&client, namespace).await?;
        apply_budget(environment, namespace, gib).await?;
        progress.report(format_args!(
            "namespace {namespace} has a budget of {gib} GiB"
        ));
    }
    let mut rows = Vec::new();
    for workload in &workloads.initial {
        let pods = Pods::in_namespace(&client, workload.namespace).await?;
        pods.create(&workload.pod(&environment.probe_image)).await?;
        pods.wait_until_running(&workload.name, TIMEOUT).await?;
        let output = pods
            .wait_for_log_line(&workload.name, TIMEOUT, ProbeOutput::parse)
            .await?;
        progress.report(format_args!(
            "{}/{} asked for {} GiB and {}",
            workload.namespace,
            workload.name,
            workload.gib,
            output.summary()
        ));
        rows.push(Row::new(
            workload,
            &pods.node(&workload.name).await?,
            &output,
        ));
    }
    rows.push(run_pending_pod(environment, &workloads, progress).await?);
    rows[workloads.deleted].note = "was deleted to make room".to_owned();
    let top = kubectl_bursar(&client, "top -A").await?;
    Ok(format!("{}\n{top}", table::render(&rows)))
}

/// Creates the pod that finds no GPU with room, and deletes a large pod once the status names the
/// reason.
async fn run_pending_pod(
    environment: &Environment,
    workloads: &Workloads,
    progress: &Progress,
) -> Result<Row, DemoError> {
    let client = environment.cluster.client();
    let workload: &Workload = &workloads.pending;
    let pods = Pods::in_namespace(&client, workload.namespace).await?;
    pods.create(&workload.pod(&environment.probe_image)).await?;
    progress.report(format_args!(
        "{}/{} asks for {} GiB: no GPU has as much free. It waits; its status tells why after 25 s",
        workload.namespace, workload.name, workload.gib
    ));
    let waits = pods
        .wait_until(&workload.name, "to tell why it waits", TIMEOUT, |state| {
            state.is_waiting_with_reason()
        })
        .await?;
    let place = if waits.scheduled {
        "on its node"
    } else {
        "for a node"
    };
    progress.report(format_args!("it waits {place}: {}", waits.waiting_reason));
    let line = format!("explain pod {} -n {}", workload.name, workload.namespace);
    println!("\n{}", kubectl_bursar(&client, &line).await?);

    let leaving = &workloads.initial[workloads.deleted];
    let theirs = Pods::in_namespace(&client, leaving.namespace).await?;
    let start = Instant::now();
    theirs.delete(&leaving.name).await?;
    progress.report(format_args!(
        "{}/{} is deleted to make room",
        leaving.namespace, leaving.name
    ));
    pods.wait_until_running(&workload.name, TIMEOUT).await?;
    let took = start.elapsed().as_secs_f64();
    let output = pods
        .wait_for_log_line(&workload.name, TIMEOUT, ProbeOutput::parse)
        .await?;
    progress.report(format_args!(
        "{}/{} runs, {took:.1} s later",
        workload.namespace, workload.name
    ));
    let mut row = Row::new(workload, &pods.node(&workload.name).await?, &output);
    row.note = format!(
        "{}; ran {took:.1} s after {} was deleted",
        waits.innermost_reason(),
        leaving.name
    );
    Ok(row)
}

async fn apply_budget(
    environment: &Environment,
    namespace: &str,
    gib: u32,
) -> Result<(), DemoError> {
    let budget = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
        "metadata": {"name": "default"},
        "spec": {"deviceMemory": {"guaranteed": format!("{gib}Gi")}},
    });
    let api: Api<GpuMemoryBudget> = Api::namespaced(environment.cluster.client(), namespace);
    let applied = api
        .patch(
            "default",
            &PatchParams::apply("bursar-demo").force(),
            &Patch::Apply(&budget),
        )
        .await;
    let refused = |source| DemoError::Budget {
        namespace: namespace.to_owned(),
        source: Box::new(source),
    };
    applied.map(drop).map_err(refused)
}
