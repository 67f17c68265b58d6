//! Executes the console blocks of the README and the quick start on the cluster, in order, and
//! compares their output with the pages.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use bursar_e2e::console::{self, Step};
use bursar_e2e::wait::{self, Poll};
use bursar_e2e::{chart, paths};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams};
use libtest_mimic::{Failed, Trial};
use tokio::process::Command;

use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};

/// The pages, in the order in which a newcomer reads them.
const PAGES: &[&str] = &["README.md", "docs/use/guides/quickstart.md"];
/// The node of the pages' output.
const NODE_OF_PAGES: &str = "node-1";
/// A command is repeated for this long until its output is the page's.
const TIMEOUT: Duration = Duration::from_secs(180);
const PAUSE: Duration = Duration::from_millis(300);

/// The beginnings of commands that the trial does not execute, each with the reason.
const NOT_EXECUTED: &[(&str, &str)] = &[
    ("cargo demo", "it starts a cluster of its own"),
    ("cargo verify", "it runs this trial"),
    (
        "REGISTRY=",
        "each command has a shell of its own, with the demo's values",
    ),
    ("cargo e2e release", "install/cluster/release makes one"),
    ("kubectl delete namespace team-a", "the demo makes these"),
    (
        "kubectl create namespace bursar-system",
        "the cluster has Bursar, and install/cluster/release installs it",
    ),
    (
        "helm install bursar",
        "the cluster has Bursar, and install/cluster/release installs it",
    ),
];

/// The beginnings of commands that a reader may repeat: those that read or apply.
const REPEATED: &[&str] = &[
    "kubectl get",
    "kubectl logs",
    "kubectl bursar",
    "kubectl apply",
    "sed ",
];

pub(crate) fn trials() -> Vec<Trial> {
    vec![node_trial("surface/cluster/console", pages_are_true)]
}

async fn pages_are_true(context: &mut TrialContext) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    for name in ["charts", "docs"] {
        symlink(paths::repository().join(name), folder.path().join(name))?;
    }
    // Until a GPU's scrub check the agent does not know the size of a context there, which the
    // pages' amounts contain.
    let checked = "kubectl wait gpunodes --all --for=condition=MemoryScrubbed --timeout=1s";
    let poll = async || match shell(context, folder.path(), checked).await {
        Ok((true, _)) => Poll::Ready(()),
        Ok((false, output)) => Poll::Pending(output),
        Err(failed) => Poll::Failed(failed.message().unwrap_or_default().to_owned()),
    };
    wait::poll_until("the scrub checks", START_TIMEOUT, PAUSE, poll).await?;
    let before = objects(context, folder.path()).await?;
    let outcome = execute_pages(context, folder.path()).await;
    let removed = remove_new_objects(context, folder.path(), &before).await;
    outcome.and(removed)
}

async fn execute_pages(context: &TrialContext, folder: &Path) -> Result<(), Failed> {
    let (mut executed, mut compared) = (0, 0);
    let mut not_executed = BTreeSet::new();
    for name in PAGES {
        let page = fs::read_to_string(paths::repository().join(name))?;
        for step in console::steps(&page)? {
            let mut known = NOT_EXECUTED.iter();
            if let Some((start, _)) = known.find(|(start, _)| step.command.starts_with(start)) {
                not_executed.insert(*start);
                continue;
            }
            let failed = |failed: Failed| {
                let why = failed.message().unwrap_or_default();
                Failed::from(format!("{name}:{}: {why}", step.line))
            };
            execute(context, folder, &step).await.map_err(failed)?;
            executed += 1;
            compared += usize::from(!step.shown.is_empty());
        }
    }
    for (start, reason) in NOT_EXECUTED {
        assert!(
            not_executed.contains(start),
            "no page has `{start}` ({reason}); take it off the list"
        );
    }
    context.progress.report(format_args!(
        "{executed} commands of {}, {compared} with their output",
        PAGES.join(" and ")
    ));
    Ok(())
}

/// Executes a command of a page. One that may be repeated is, until its output is the page's.
async fn execute(context: &TrialContext, folder: &Path, step: &Step) -> Result<(), Failed> {
    let attempt = async || {
        let (succeeded, output) = shell(context, folder, &step.command).await?;
        // Output that the page shows may be that of a command with another exit code, such as
        // `explain` of a pod that waits.
        let as_shown = step.shows(&output) && (succeeded || !step.shown.is_empty());
        Ok::<_, Failed>((as_shown, format!("$ {}\n{output}", step.command)))
    };
    if !REPEATED.iter().any(|start| step.command.starts_with(start)) {
        return match attempt().await? {
            (true, _) => Ok(()),
            (false, output) => Err(output.into()),
        };
    }
    let poll = async || match attempt().await {
        Ok((true, _)) => Poll::Ready(()),
        Ok((false, output)) => Poll::Pending(output),
        Err(failed) => Poll::Failed(failed.message().unwrap_or_default().to_owned()),
    };
    Ok(wait::poll_until("the output of the page", TIMEOUT, PAUSE, poll).await?)
}

/// Executes a command as a reader's shell would. Returns whether it succeeded, and its output with
/// the name of the pages' node.
async fn shell(
    context: &TrialContext,
    folder: &Path,
    command: &str,
) -> Result<(bool, String), Failed> {
    let programs = crate::harness();
    let programs = programs.parent().ok_or("the harness has no folder")?;
    let toolbox = context.toolbox().path();
    let path = std::iter::once(programs.to_path_buf()).chain(std::env::split_paths(&toolbox));
    let output = Command::new("sh")
        .args(["-c", &format!("exec 2>&1\n{command}")])
        .current_dir(folder)
        .env("PATH", std::env::join_paths(path)?)
        .env("KUBECONFIG", context.environment.cluster.kubeconfig())
        .env("REGISTRY", "localhost/bursar")
        .env("VERSION", env!("CARGO_PKG_VERSION"))
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(TIMEOUT, output).await??;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    let nodes: Api<Node> = Api::all(context.environment.cluster.client());
    for node in nodes.list(&ListParams::default()).await? {
        text = text.replace(&node.name_any(), NODE_OF_PAGES);
    }
    Ok((output.status.success(), text))
}

/// Returns the objects that a page may create, and the labels of Bursar's namespace.
async fn objects(context: &TrialContext, folder: &Path) -> Result<BTreeSet<String>, Failed> {
    let mut found = BTreeSet::new();
    let labels = format!(
        "get namespace {} --output jsonpath={{.metadata.labels}}",
        chart::NAMESPACE
    );
    for arguments in [
        "get namespaces --output name",
        "get pods --namespace default --output name",
        "get gpumemorybudgets,resourcequotas --all-namespaces --no-headers --output custom-columns=:.kind,:.metadata.namespace,:.metadata.name",
        &labels,
    ] {
        let (succeeded, output) = shell(context, folder, &format!("kubectl {arguments}")).await?;
        assert!(succeeded, "kubectl {arguments}: {output}");
        found.extend(output.lines().map(str::to_owned));
    }
    Ok(found)
}

/// Removes what a page has left, after a failure for one, and waits until the cluster is as before.
async fn remove_new_objects(
    context: &TrialContext,
    folder: &Path,
    before: &BTreeSet<String>,
) -> Result<(), Failed> {
    let label = "pod-security.kubernetes.io/enforce-";
    shell(
        context,
        folder,
        &format!("kubectl label namespace {} {label}", chart::NAMESPACE),
    )
    .await?;
    for object in objects(context, folder).await?.difference(before) {
        if object.starts_with("namespace/") || object.starts_with("pod/") {
            shell(
                context,
                folder,
                &format!("kubectl delete {object} --wait=false"),
            )
            .await?;
        }
    }
    let poll = async || match objects(context, folder).await {
        Ok(now) if now == *before => Poll::Ready(()),
        Ok(now) => Poll::Pending(format!("{:#?}", now.symmetric_difference(before))),
        Err(failed) => Poll::Failed(failed.message().unwrap_or_default().to_owned()),
    };
    Ok(wait::poll_until("the cluster as before", START_TIMEOUT, PAUSE, poll).await?)
}
