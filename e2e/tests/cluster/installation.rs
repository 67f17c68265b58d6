//! Checks the way of an installation. It leads from a registry to a held pod, through a change of
//! the quantum, to a cluster without a trace of it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use bursar_crds::{GpuMemoryBudget, GpuNode};
use bursar_e2e::artifacts::Artifacts;
use bursar_e2e::chart::{NAMESPACE, RELEASE};
use bursar_e2e::cli_archive;
use bursar_e2e::cluster::{ClusterOptions, ClusterScope, LocalCluster};
use bursar_e2e::console;
use bursar_e2e::environment::Environment;
use bursar_e2e::images;
use bursar_e2e::kube::{self as parts, Toolbox};
use bursar_e2e::paths;
use bursar_e2e::pods::{PodBuilder, Pods};
use bursar_e2e::progress::Progress;
use bursar_e2e::wait::{self, Poll};
use bursar_e2e::workspace::{self, Profile};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams, PostParams};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::cluster_state::{ClusterState, call};
use crate::quota::event_line;
use crate::registry::Registry;
use crate::shared_cluster;
use crate::signatures;
use crate::upgrade;
use crate::versions;

const GIB: u64 = 1 << 30;
/// The promised time from `helm install` to a pod that is held to its quota.
const INSTALL_PROMISE: Duration = Duration::from_secs(60);
/// The timeout of each step, on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(240);
const PAUSE: Duration = Duration::from_millis(200);
/// The pre-release of this workspace's version that the trial makes.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "-trial.1");

pub(crate) fn trials() -> Vec<Trial> {
    let trials = vec![
        Trial::test("install/cluster/release", || run(install_from_registry)),
        Trial::test("install/cluster/uninstall", || run(uninstall)),
        Trial::test("install/cluster/upgrade", || run(upgrade::keeps_pods)),
        Trial::test("fleet/cluster/versions-long", || {
            run(versions::run_beside_today)
        }),
        Trial::test("install/cluster/signatures-long", || {
            run(signatures::verify)
        }),
    ];
    let yours = shared_cluster::kubeconfig().is_some();
    let ignored = |trial: Trial| trial.with_ignored_flag(yours);
    trials.into_iter().map(ignored).collect()
}

fn run(act: impl AsyncFnOnce(&Progress) -> Result<(), Failed>) -> Result<(), Failed> {
    // Both clusters at once would take the memory and the time of the shared one's trials.
    shared_cluster::take_down();
    tokio::runtime::Runtime::new()?.block_on(act(&Progress::start()))
}

async fn install_from_registry(progress: &Progress) -> Result<(), Failed> {
    let toolbox = parts::build(progress)?;
    let programs = workspace::build(Profile::Dev, false)?;
    let registry = Registry::start().await?;
    let folder = tempfile::tempdir()?;
    let address = registry.address();
    let begin = Instant::now();
    let release = folder.path().join("release");
    let released = registry.release(&programs, VERSION, release, None, progress)?;
    progress.report(format_args!(
        "{:.1?} for the release to {address}",
        begin.elapsed()
    ));
    check_files(&released.folder)?;

    let options = ClusterOptions {
        name: "release".to_owned(),
        harness: crate::harness(),
        toolbox: toolbox.clone(),
        scope: ClusterScope::WithNode,
    };
    let local = LocalCluster::up(options, progress).await?;
    let pause = images::write_pause(folder.path())?;
    local.import_image(&pause.path).await?;
    let known = local.images().await?;
    assert!(
        !known.iter().any(|image| image.contains("/bursar/")),
        "{known:?}"
    );
    let _registry_on_node = local.expose_host_port(registry.port)?;

    let begin = Instant::now();
    for command in commands_of_quick_start()? {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &command])
            .env("KUBECONFIG", local.kubeconfig())
            .env("PATH", toolbox.path())
            .env("REGISTRY", &address)
            .env("VERSION", VERSION)
            .current_dir(paths::repository())
            .kill_on_drop(true);
        let output = tokio::time::timeout(TIMEOUT, shell.output()).await??;
        assert!(output.status.success(), "{command}: {output:?}");
    }
    progress.report(format_args!("{:.1?} for the quick start", begin.elapsed()));
    let pods = Pods::in_namespace(&local.client(), "trials").await?;
    let image = format!("{address}/probe:{VERSION}");
    let greedy = PodBuilder::new("greedy", image)
        .arguments(&["greedy"])
        .gib(4);
    pods.create(&greedy).await?;
    let refused = pods
        .wait_for_log_line("greedy", TIMEOUT, event_line("refused"))
        .await?;
    let took = begin.elapsed();
    progress.report(format_args!(
        "{took:.1?} from helm install to a pod that is held to its quota"
    ));
    assert_eq!(refused["refused"]["name"], "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(refused["device"]["total"], 4 * GIB, "{refused}");
    assert!(refused["got"].as_u64() <= Some(4 * GIB), "{refused}");
    assert!(took < INSTALL_PROMISE, "{took:?} since helm install");
    // The node has pulled what the chart names by digest.
    let known = local.images().await?;
    for name in ["agent", "operator", "simulated-driver"] {
        let digest = released.images[name].rsplit('@').next().unwrap_or_default();
        let pulled = known
            .iter()
            .any(|image| image.contains(name) && image.ends_with(digest));
        assert!(pulled, "{name}@{digest} in {known:?}");
    }
    let test = ["test", RELEASE, "--namespace", NAMESPACE, "--logs"];
    let tested = call(&toolbox.program("helm"), &test, &local.kubeconfig()).await?;
    assert!(tested.contains("Succeeded"), "{tested}");
    Ok(local.down()?)
}

/// Returns the quick start's commands that install on a cluster with a registry: with simulated
/// GPUs, and from a registry without TLS.
fn commands_of_quick_start() -> Result<Vec<String>, Failed> {
    let page = paths::repository().join("docs/use/guides/quickstart.md");
    let page = fs::read_to_string(page)?;
    let (_, section) = page
        .split_once("### On a cluster with")
        .ok_or("no section")?;
    let (section, _) = section.split_once("## 2").ok_or("no end of the section")?;
    let options = " --values charts/bursar/values-simulated.yaml --plain-http";
    let steps = console::steps(section)?.into_iter();
    let commands = steps.map(|step| step.command).filter_map(|command| {
        match command.split(' ').take(2).collect::<Vec<_>>()[..] {
            ["helm", "install"] => Some(command + options),
            ["kubectl", "create" | "label"] => Some(command),
            _ => None,
        }
    });
    let commands: Vec<_> = commands.collect();
    assert_eq!(commands.len(), 3, "{commands:?}");
    Ok(commands)
}

/// Checks the checksums and the bills of materials of a release.
fn check_files(folder: &Path) -> Result<(), Failed> {
    let checked = std::process::Command::new("sha256sum")
        .args(["--check", "--strict", "--quiet", "SHA256SUMS"])
        .current_dir(folder)
        .status()?;
    assert!(checked.success(), "the checksums differ");
    let sums = fs::read_to_string(folder.join("SHA256SUMS"))?;
    let archive = format!(
        "kubectl-bursar_{VERSION}_linux_{}.tar.gz",
        images::architecture()
    );
    for name in [archive.as_str(), cli_archive::MANIFEST] {
        assert!(sums.contains(&format!("  {name}\n")), "{name} in {sums}");
    }
    let manifest = fs::read_to_string(folder.join(cli_archive::MANIFEST))?;
    assert!(manifest.contains(&archive), "{manifest}");
    let bill = |image: &str| -> Result<Value, Failed> {
        let name = format!("{image}-{VERSION}-{}.cdx.json", images::architecture());
        Ok(serde_json::from_slice(&fs::read(folder.join(name))?)?)
    };
    for (image, expected) in [
        (
            "agent",
            vec!["bursar-shim", "bursar-fdstore", "tokio", "libc.so.6"],
        ),
        ("operator", vec!["bursar-operator", "kube-client"]),
        ("simulated-driver", vec!["bursar-sim-cuda"]),
    ] {
        let bill = bill(image)?;
        let components = bill["components"].as_array().ok_or("no components")?;
        let names: BTreeSet<&str> = components
            .iter()
            .filter_map(|component| component["name"].as_str())
            .collect();
        for name in expected {
            assert!(names.contains(name), "{image} lacks {name}: {names:?}");
        }
        // A bill of another image's packages would name the API client for all of them.
        assert_eq!(names.contains("kube-client"), image != "simulated-driver");
        let text = bill.to_string();
        assert!(
            !text.contains("/tmp/"),
            "{image} names a folder of the build"
        );
        let known: BTreeSet<_> = components
            .iter()
            .chain([&bill["metadata"]["component"]])
            .map(|component| &component["bom-ref"])
            .map(Value::to_string)
            .collect();
        for edge in bill["dependencies"].as_array().into_iter().flatten() {
            assert!(known.contains(&edge["ref"].to_string()), "{edge}");
        }
    }
    Ok(())
}

/// The guide whose commands the trial runs.
const GUIDE: &str = "docs/use/guides/upgrade-rollback-uninstall.md";

/// Returns the commands of the guide's section about leaving nothing.
fn documented_commands() -> Result<Vec<String>, Failed> {
    let guide = fs::read_to_string(paths::repository().join(GUIDE))?;
    let section = guide.split("To leave nothing").nth(1);
    let section = section.ok_or("the guide has no such section")?;
    let blocks = section.split("```console").skip(1);
    let blocks = blocks.filter_map(|block| block.split("```").next());
    let mut commands: Vec<String> = Vec::new();
    for line in blocks.flat_map(str::lines) {
        match (line.trim().strip_prefix("$ "), commands.last_mut()) {
            (Some(command), _) => commands.push(command.to_owned()),
            (None, Some(last)) if last.ends_with('\\') => {
                last.pop();
                last.push_str(line.trim());
            }
            _ => {}
        }
    }
    Ok(commands)
}

/// Runs the guide's command in a shell. The last commands are for each node.
async fn run_documented(
    command: &str,
    local: &LocalCluster,
    toolbox: &Toolbox,
) -> Result<(), Failed> {
    let on_node = command.starts_with("rm ");
    let mut shell = if on_node {
        let mounts = local.host_path("/");
        let process = mounts.to_string_lossy().into_owned();
        let process = process.split('/').nth(2).unwrap_or_default().to_owned();
        let mut enter = Command::new("nsenter");
        enter.args(["--target", &process, "--mount", "sh", "-c"]);
        enter
    } else {
        let mut shell = Command::new("sh");
        shell.arg("-c");
        shell
    };
    shell
        .arg(command)
        .env("KUBECONFIG", local.kubeconfig())
        .env("PATH", toolbox.path())
        .current_dir(paths::repository())
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let until_none = command.ends_with("# none");
    let begin = Instant::now();
    loop {
        let output = tokio::time::timeout(TIMEOUT, shell.output()).await??;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        // The node's folders are mount points here, which `rm` empties and cannot remove.
        let done = output.status.success() || (on_node && stderr.contains("busy"));
        assert!(done, "{command}: {stderr}");
        if !until_none || output.stdout.is_empty() {
            return Ok(());
        }
        assert!(begin.elapsed() < TIMEOUT, "{command}: still {output:?}");
        tokio::time::sleep(PAUSE).await;
    }
}

async fn uninstall(progress: &Progress) -> Result<(), Failed> {
    let artifacts = Artifacts::from_workspace(Profile::Dev, crate::harness(), progress)?;
    let environment = Environment::without_bursar(&artifacts, "uninstall", progress).await?;
    let kubectl = artifacts.toolbox.program("kubectl");
    let kubeconfig = environment.cluster.kubeconfig();
    let client = environment.cluster.client();
    let pods = Pods::in_namespace(&client, "trials").await?;
    let none = "this needs a cluster of our own";
    let local = environment.cluster.local().ok_or(none)?;
    let before = ClusterState::read(local, &kubectl).await?;

    environment.install_bursar(&artifacts, progress).await?;
    let budgets: Api<GpuMemoryBudget> = Api::namespaced(client.clone(), "trials");
    let budget = serde_json::from_value(json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
        "metadata": {"name": "default"}, "spec": {"deviceMemory": {"guaranteed": "8Gi"}},
    }))?;
    budgets.create(&PostParams::default(), &budget).await?;
    let holder = PodBuilder::new("holder", &environment.probe_image)
        .arguments(&["hold", "--bytes=1Gi"])
        .gib(4);
    pods.create(&holder).await?;
    pods.wait_until_running("holder", TIMEOUT).await?;
    let helm = artifacts.toolbox.program("helm");
    check_quantum(&environment, &helm, &pods, progress).await?;
    pods.create(&holder).await?;
    pods.wait_until_running("holder", TIMEOUT).await?;

    let installed = ClusterState::read(local, &kubectl).await?;
    let changes = installed.differences_since(&before);
    assert!(
        changes.len() > 40,
        "an installation changes more: {changes:#?}"
    );
    let delete = ["delete", "pods", "--all", "--namespace=trials"];
    call(&kubectl, &delete, &kubeconfig).await?;
    let commands = documented_commands()?;
    assert!(
        commands.len() > 8,
        "the guide has few commands: {commands:?}"
    );
    for command in &commands {
        run_documented(command, local, &artifacts.toolbox).await?;
    }
    let gone = async || match ClusterState::read(local, &kubectl).await {
        Ok(after) => match unexplained(&after.differences_since(&before)) {
            left if left.is_empty() => Poll::Ready(()),
            left => Poll::Pending(format!("{left:#?}")),
        },
        Err(error) => Poll::Pending(format!("{error:?}")),
    };
    wait::poll_until("a cluster as before", TIMEOUT, PAUSE, gone).await?;
    progress.report(format_args!(
        "{} commands of the guide removed {} traces",
        commands.len(),
        changes.len()
    ));
    drop(environment);
    Ok(())
}

/// Removes the differences that the guide explains, and what Kubernetes' own programs write some
/// time after their start. The kubelet keeps the number of a resource that no plugin offers, and a
/// file of device allocations.
fn unexplained(differences: &[String]) -> Vec<&String> {
    let explained = |line: &&String| {
        line.contains("/status/capacity bursar.dev/")
            || line.contains("/status/allocatable bursar.dev/") && line.ends_with("=0")
            || line.ends_with("device-plugins/kubelet_internal_checkpoint")
            || line.starts_with("+ Lease kube-node-lease ")
            || line.starts_with("+ ServiceAccount kube-system ")
            || line.ends_with(" kube-root-ca.crt")
    };
    differences.iter().filter(|line| !explained(line)).collect()
}

/// Checks that another quantum is refused while a pod has memory, and is taken over afterwards.
async fn check_quantum(
    environment: &Environment,
    helm: &Path,
    pods: &Pods,
    progress: &Progress,
) -> Result<(), Failed> {
    let kubeconfig = environment.cluster.kubeconfig();
    let chart = paths::repository().join("charts/bursar");
    let chart = chart.display().to_string();
    let upgrade = async |quantum: &str| {
        let quantum = format!("--set=gpuMemory.quantum={quantum}");
        let upgrade = ["upgrade", RELEASE, &chart, "--namespace", NAMESPACE];
        let values = ["--reuse-values", quantum.as_str()];
        call(helm, &[&upgrade[..], &values].concat(), &kubeconfig).await
    };
    let nodes: Api<GpuNode> = Api::all(environment.cluster.client());
    let published = async || match nodes.list(&ListParams::default()).await {
        Ok(list) if list.items.iter().any(has_pods) => Poll::Ready(()),
        Ok(_) => Poll::Pending("no GpuNode names a pod".to_owned()),
        Err(error) => Poll::Pending(error.to_string()),
    };
    wait::poll_until("the pod in a GpuNode", TIMEOUT, PAUSE, published).await?;
    let begin = Instant::now();
    let message = match upgrade("512Mi").await {
        Err(failed) => failed.message().unwrap_or_default().to_owned(),
        Ok(_) => return Err("the quantum changed under a running pod".into()),
    };
    assert!(
        message.contains("failed to change the quantum"),
        "{message}"
    );
    assert!(message.contains("delete them first"), "{message}");
    progress.report(format_args!("{:.1?} to the refusal", begin.elapsed()));
    // Nothing has changed: the policies admit pods with the resource of the old quantum. A pod that
    // the trial really creates could be in the GpuNode after its deletion, and refuse the change.
    let probe = PodBuilder::new("later", &environment.probe_image).gib(1);
    let dry = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    pods.api().create(&dry, &probe.build()).await?;
    // The operator keeps the quantum too, and the release can be upgraded as before.
    let operators: Api<Deployment> = Api::namespaced(environment.cluster.client(), NAMESPACE);
    let operator = serde_json::to_string(&operators.get("bursar-operator").await?)?;
    assert!(operator.contains("--quantum=1Gi"), "{operator}");
    upgrade("1Gi").await?;
    assert_eq!(pods.state("holder").await?.phase, "Running");

    pods.delete("holder").await?;
    let cluster_nodes: Api<Node> = Api::all(environment.cluster.client());
    let settled = async |quantum: &str, suffix: &str| -> Result<(), Failed> {
        upgrade(quantum).await?;
        let labelled = async || match cluster_nodes.list(&ListParams::default()).await {
            Ok(list) => labels_of_one_quantum(&list.items, suffix),
            Err(error) => Poll::Pending(error.to_string()),
        };
        Ok(wait::poll_until("labels of the quantum", TIMEOUT, PAUSE, labelled).await?)
    };
    // The agent takes the pod out of its GpuNode first.
    let freed = async || match nodes.list(&ListParams::default()).await {
        Ok(list) if !list.items.iter().any(has_pods) => Poll::Ready(()),
        Ok(_) => Poll::Pending("a GpuNode names a pod".to_owned()),
        Err(error) => Poll::Pending(error.to_string()),
    };
    wait::poll_until("no pod in a GpuNode", TIMEOUT, PAUSE, freed).await?;
    let begin = Instant::now();
    settled("512Mi", "512mib").await?;
    progress.report(format_args!("{:.1?} to another quantum", begin.elapsed()));
    settled("1Gi", "gib").await
}

/// Returns whether the nodes have labels of memory with this suffix, and no other ones.
fn labels_of_one_quantum(nodes: &[Node], suffix: &str) -> Poll<()> {
    let labels = nodes.iter().flat_map(|node| &node.metadata.labels);
    let keys = labels.flatten().map(|(key, _)| key);
    let ours: Vec<&String> = keys
        .filter(|key| key.starts_with("bursar.dev/largest-"))
        .collect();
    let suffix = format!("-{suffix}");
    if !ours.is_empty() && ours.iter().all(|key| key.ends_with(&suffix)) {
        Poll::Ready(())
    } else {
        Poll::Pending(format!("{ours:?}"))
    }
}

fn has_pods(node: &GpuNode) -> bool {
    let gpus = node.status.iter().flat_map(|status| &status.gpus);
    gpus.into_iter().any(|gpu| !gpu.pods.is_empty())
}
