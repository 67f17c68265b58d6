//! Runs the demo: pods of two teams on the GPUs of a cluster.
//!
//! ```text
//! budgets -> large pods, one a GPU -> small pods (one fills its quota) -> a pod that no GPU fits
//!         -> why that pod waits -> a large pod is deleted -> the pending pod runs
//!         -> these pods by `kubectl bursar top`; they are deleted
//!         -> a team borrows every GPU -> the other team's pod gets its guarantee back
//!         -> a program faults, and is restarted in place -> the table of all pods
//! ```

mod lending;
mod probe_output;
mod recovery;
mod table;
mod workloads;

use std::fmt::Display;
use std::time::{Duration, Instant};

use bursar_cli::args::Cli;
use bursar_cli::run::Session;
use bursar_cli::table::Terminal;
use bursar_crds::GpuMemoryBudget;
use clap::Parser as _;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};

use self::probe_output::ProbeOutput;
use self::table::Row;
use self::workloads::{Workload, Workloads};
use crate::environment::{Environment, EnvironmentError};
use crate::pods::{PodError, Pods};
use crate::progress::Progress;
use crate::wait::{self, Poll, WaitError};

/// The timeout of one pod's start, for images on the node or pulled once.
const TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

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
    /// A pod's explanation, or a budget, did not reach its expected state.
    #[error(transparent)]
    Wait(#[from] WaitError),
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

/// Runs the demo, and returns the table of its pods.
///
/// # Errors
/// When a pod does not reach its expected state in time.
pub async fn run(environment: &Environment, progress: &Progress) -> Result<String, DemoError> {
    let workloads = Workloads::for_environment(environment).await?;
    let client = environment.cluster.client();
    for (namespace, gib) in workloads.budgets() {
        Pods::in_namespace(&client, namespace).await?;
        apply_budget(environment, namespace, gib, workloads.total).await?;
        progress.report(format_args!(
            "{namespace:<14}  budget: {gib} GiB guaranteed, up to {} GiB while others leave them idle",
            workloads.total
        ));
    }
    let mut rows = Vec::new();
    for workload in &workloads.initial {
        rows.push(run_pod(environment, workload, progress).await?);
    }
    rows.push(run_pending_pod(environment, &workloads, progress).await?);
    rows[workloads.deleted].note = "was deleted to make room".to_owned();
    println!("\n{}", kubectl_bursar(&client, "top -A").await?);
    for namespace in NAMESPACES {
        let pods = Pods::in_namespace(&client, namespace).await?;
        pods.delete_all().await?;
    }
    rows.extend(lending::run(environment, &workloads, progress).await?);
    recovery::run(environment, &workloads, progress).await?;
    Ok(table::render(&rows))
}

/// Reports one line about a pod, aligned with the lines about other pods.
fn report(progress: &Progress, workload: &Workload, what: impl Display) {
    let pod = format!("{}/{}", workload.namespace, workload.name);
    progress.report(format_args!("{pod:<14}  {:>3} GiB  {what}", workload.gib));
}

/// Creates a pod that finds room, and waits for the probe's line.
async fn run_pod(
    environment: &Environment,
    workload: &Workload,
    progress: &Progress,
) -> Result<Row, DemoError> {
    let pods = Pods::in_namespace(&environment.cluster.client(), workload.namespace).await?;
    pods.create(&workload.pod(&environment.probe_image)).await?;
    pods.wait_until_running(&workload.name, TIMEOUT).await?;
    let output = pods
        .wait_for_log_line(&workload.name, TIMEOUT, ProbeOutput::parse)
        .await?;
    report(progress, workload, output.summary());
    Ok(Row::new(
        workload,
        &pods.node(&workload.name).await?,
        &output,
    ))
}

/// Waits until agent or scheduler has published why the pod waits, and returns that reason.
async fn wait_for_reason(client: &Client, explain: &str) -> Result<String, DemoError> {
    let line = format!("{explain} -o json");
    let poll = async || match kubectl_bursar(client, &line).await {
        Ok(output) => match reason(&output) {
            Some(reason) => Poll::Ready(reason),
            None => Poll::Pending(output),
        },
        Err(error) => Poll::Failed(error.to_string()),
    };
    Ok(wait::poll_until("the reason of the wait", TIMEOUT, POLL_INTERVAL, poll).await?)
}

/// Returns the reason in the output of `explain -o json`: the agent's, or the scheduler's where no
/// node has room.
fn reason(output: &str) -> Option<String> {
    let (_, explanation) = output.split_once('\n')?;
    let explanation: Value = serde_json::from_str(explanation).ok()?;
    let lines = explanation["lines"].as_array()?;
    let text = |label: &str| {
        let line = lines.iter().find(|line| line["label"] == label)?;
        line["text"].as_str().map(str::to_owned)
    };
    let unscheduled = text("scheduler").filter(|text| text.contains("nodes are available"));
    text("agent").or(unscheduled)
}

/// Creates the pod that finds no GPU with room, and deletes a large pod once the reason is known.
async fn run_pending_pod(
    environment: &Environment,
    workloads: &Workloads,
    progress: &Progress,
) -> Result<Row, DemoError> {
    let client = environment.cluster.client();
    let workload: &Workload = &workloads.pending;
    let pods = Pods::in_namespace(&client, workload.namespace).await?;
    pods.create(&workload.pod(&environment.probe_image)).await?;
    let explain = format!("explain pod {} -n {}", workload.name, workload.namespace);
    let reason = wait_for_reason(&client, &explain).await?;
    report(progress, workload, format_args!("waits: {reason}"));
    println!("\n{}", kubectl_bursar(&client, &explain).await?);

    let leaving = &workloads.initial[workloads.deleted];
    let theirs = Pods::in_namespace(&client, leaving.namespace).await?;
    let start = Instant::now();
    theirs.delete(&leaving.name).await?;
    report(progress, leaving, "is deleted to make room");
    pods.wait_until_running(&workload.name, TIMEOUT).await?;
    let took = start.elapsed().as_secs_f64();
    let output = pods
        .wait_for_log_line(&workload.name, TIMEOUT, ProbeOutput::parse)
        .await?;
    report(progress, workload, format_args!("runs {took:.1} s later"));
    let mut row = Row::new(workload, &pods.node(&workload.name).await?, &output);
    row.note = format!("waited; ran {took:.1} s after {} was deleted", leaving.name);
    Ok(row)
}

async fn apply_budget(
    environment: &Environment,
    namespace: &str,
    gib: u32,
    limit: u32,
) -> Result<(), DemoError> {
    let budget = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
        "metadata": {"name": "default"},
        "spec": {
            "deviceMemory": {"guaranteed": format!("{gib}Gi"), "limit": format!("{limit}Gi")},
            "contextPolicy": {"action": "InPlace"},
        },
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_the_agents_or_that_of_an_unscheduled_pod() {
        let output = |lines: Value| format!("$ line\n{}", json!({ "lines": lines }));
        let agent = json!({ "label": "agent", "text": "waiting for 8 GiB" });
        let idle = json!({ "label": "scheduler", "text": "has not looked at the pod yet" });
        let full = json!({ "label": "scheduler", "text": "0/1 nodes are available: none" });
        assert_eq!(
            reason(&output(json!([agent, idle]))).as_deref(),
            Some("waiting for 8 GiB")
        );
        assert_eq!(reason(&output(json!([idle]))), None);
        assert_eq!(
            reason(&output(json!([full]))).as_deref(),
            Some("0/1 nodes are available: none")
        );
    }
}
