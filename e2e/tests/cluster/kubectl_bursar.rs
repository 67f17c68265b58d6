//! Runs `kubectl bursar` against the cluster, with the rights of an admin and of a tenant: each
//! command, and `explain` for planted causes.

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use bursar_cli::explain::Cause;
use bursar_crds::gpu_node::GpuStatus;
use bursar_e2e::pods::{PodBuilder, Pods};
use bursar_e2e::wait::{self, Poll};
use bursar_e2e::{chart, images, sim};
use futures::FutureExt as _;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::RoleBinding;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::discovery::ApiResource;
use kube::{Client, ResourceExt as _};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::budget_enforcement::{TEAMS, cleared, create_team};
use crate::placement::holder;
use crate::quota::event_line;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};
use crate::status;

const PAUSE: Duration = Duration::from_millis(300);
/// A command ends within this time on a loaded machine. `drain` waits for the agent.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(180);
/// A restored or undrained GPU serves pods again within this time.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(180);
/// A container without a session is suspicious only after 60 s.
const SETTLED: Duration = Duration::from_secs(180);
/// The service account with the tenant's role.
const TENANT: &str = "tenant";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        node_trial("cli/cluster/commands", async |context| {
            as_teams(context, every_command_works).await
        }),
        node_trial("cli/cluster/explain", async |context| {
            as_teams(context, planted_causes_are_explained).await
        }),
    ]
}

/// Runs a trial in the namespaces of both teams, and removes its objects however the trial ends.
async fn as_teams(
    context: &mut TrialContext,
    act: impl AsyncFnOnce(&mut TrialContext) -> Result<(), Failed>,
) -> Result<(), Failed> {
    cleared(context, async |context| {
        let client = context.environment.cluster.client();
        create_tenant(&client).await?;
        let outcome = AssertUnwindSafe(act(context)).catch_unwind().await;
        remove_workloads(&client).await?;
        outcome.unwrap_or_else(|panic| resume_unwind(panic))
    })
    .await
}

/// Creates a service account with Kubernetes' role `edit` in the first team's namespace. The chart
/// aggregates the view of budgets to that role.
async fn create_tenant(client: &Client) -> Result<(), Failed> {
    let team = TEAMS[0];
    for team in TEAMS {
        Pods::in_namespace(client, team).await?;
    }
    let apply = PatchParams::apply("trial");
    let account =
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": TENANT } });
    Api::<ServiceAccount>::namespaced(client.clone(), team)
        .patch(TENANT, &apply, &Patch::Apply(account))
        .await?;
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": { "name": TENANT },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit" },
        "subjects": [{ "kind": "ServiceAccount", "name": TENANT, "namespace": team }],
    });
    Api::<RoleBinding>::namespaced(client.clone(), team)
        .patch(TENANT, &apply, &Patch::Apply(binding))
        .await?;
    Ok(())
}

/// Deletes the objects that create pods.
async fn remove_workloads(client: &Client) -> Result<(), Failed> {
    let (delete, all) = (DeleteParams::background(), ListParams::default());
    for team in TEAMS {
        let client = || client.clone();
        Api::<Deployment>::namespaced(client(), team)
            .delete_collection(&delete, &all)
            .await?;
        Api::<StatefulSet>::namespaced(client(), team)
            .delete_collection(&delete, &all)
            .await?;
        Api::<ReplicaSet>::namespaced(client(), team)
            .delete_collection(&delete, &all)
            .await?;
        Api::<Job>::namespaced(client(), team)
            .delete_collection(&delete, &all)
            .await?;
        Api::<PodDisruptionBudget>::namespaced(client(), team)
            .delete_collection(&delete, &all)
            .await?;
    }
    Ok(())
}

/// One run of the program.
#[derive(Debug)]
struct Run {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Run {
    /// Checks the exit code and words of the output.
    fn has(&self, code: i32, words: &[&str]) -> Result<&Self, Failed> {
        let is_missing = |word: &&&str| !self.out.contains(**word) && !self.err.contains(**word);
        match words.iter().find(is_missing) {
            None if self.code == Some(code) => Ok(self),
            missing => Err(format!("not {code} with {missing:?}: {self:#?}").into()),
        }
    }

    fn json(&self) -> Result<Value, Failed> {
        serde_json::from_str(&self.out).map_err(|error| format!("{error}: {self:#?}").into())
    }
}

/// The built program, which stands beside the harness.
fn program() -> PathBuf {
    crate::harness().with_file_name("kubectl-bursar")
}

/// Runs a command line of `kubectl bursar` with the rights of an admin.
async fn run(context: &TrialContext, line: &str) -> Result<Run, Failed> {
    run_with_input(context, line, "").await
}

/// Runs a command line of `kubectl bursar` with the rights of the tenant.
async fn run_as_tenant(context: &TrialContext, line: &str) -> Result<Run, Failed> {
    let user = format!("system:serviceaccount:{}:{TENANT}", TEAMS[0]);
    run(context, &format!("{line} --as={user}")).await
}

async fn run_with_input(context: &TrialContext, line: &str, input: &str) -> Result<Run, Failed> {
    let mut command = Command::new(program());
    command.args(line.split_whitespace());
    output_of(command, context, input).await
}

async fn output_of(
    mut command: Command,
    context: &TrialContext,
    input: &str,
) -> Result<Run, Failed> {
    command
        .env("KUBECONFIG", context.environment.cluster.kubeconfig())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).await?;
    }
    let output = tokio::time::timeout(COMMAND_TIMEOUT, child.wait_with_output()).await??;
    Ok(Run {
        code: output.status.code(),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Runs a command line until its output satisfies `wanted`.
async fn run_until(
    context: &TrialContext,
    line: &str,
    bound: Duration,
    wanted: impl Fn(&Run) -> bool,
) -> Result<Run, Failed> {
    let poll = async || match run(context, line).await {
        Ok(run) if wanted(&run) => Poll::Ready(run),
        Ok(run) => Poll::Pending(format!("{run:#?}")),
        Err(failed) => Poll::Failed(failed.message().unwrap_or_default().to_owned()),
    };
    Ok(wait::poll_until(line, bound, PAUSE, poll).await?)
}

/// Waits until `doctor` finds this.
async fn doctor_finds(context: &TrialContext, finding: &str) -> Result<(), Failed> {
    let found = |run: &Run| run.code == Some(1) && run.out.contains(finding);
    run_until(context, "doctor", START_TIMEOUT, found)
        .await
        .map(drop)
}

async fn every_command_works(context: &mut TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let [team, _] = TEAMS;
    let spec = json!({ "deviceMemory": { "guaranteed": "16Gi", "limit": "24Gi" } });
    let pods = create_team(&client, team, spec).await?;
    pods.create(&holder(context, "holder", 8)).await?;
    pods.wait_for_log_line("holder", START_TIMEOUT, event_line("holding"))
        .await?;
    let node = pods.node("holder").await?;
    tables_show_the_pod(context, &node).await?;
    installation_is_examined(context).await?;
    tenant_sees_its_own(context, &node).await?;
    quota_is_lowered_and_lifted(context).await?;
    gpu_is_drained_and_undrained(context, &node).await?;
    commands_without_a_cluster_work(context).await?;
    let state = pods.state("holder").await?;
    assert!(state.running && state.restarts == 0, "{state:?}");
    Ok(())
}

async fn tables_show_the_pod(context: &TrialContext, node: &str) -> Result<(), Failed> {
    let team = TEAMS[0];
    // The agent reports a binding a moment later.
    let sum = "2 GPUs on 1 node: 8 of 32 GiB bound, largest free 16 GiB, 0 waiting, 0 faults";
    let gpus = run_until(context, "gpus", START_TIMEOUT, |run| run.out.contains(sum)).await?;
    gpus.has(0, &[node, sum])?;
    let gpus = run(context, &format!("gpus {node} -o json"))
        .await?
        .json()?;
    let all = gpus["items"][0]["status"]["gpus"].as_array().map(Vec::len);
    assert_eq!(all, Some(2), "{gpus}");
    let missing = run(context, "gpus nowhere").await?;
    missing.has(2, &["failed to find GpuNode nowhere"])?;
    // The use comes from the agent through the API server's pod proxy.
    let line = format!("top -n {team} -o json");
    let used = |run: &Run| {
        let bytes = run.json().map(|top| top["items"][0]["usedBytes"].as_u64());
        bytes.is_ok_and(|bytes| bytes >= Some(1 << 30))
    };
    let top = run_until(context, &line, START_TIMEOUT, used)
        .await?
        .json()?;
    assert_eq!(top["items"][0]["quotaBytes"], 8_u64 << 30, "{top}");
    assert_eq!(top["items"][0]["state"]["name"], "enforced", "{top}");
    let top = run(context, "top -A -o wide").await?;
    top.has(0, &["NAMESPACE", "holder", "8 GiB", "yes"])?;
    let top = run(context, &format!("top -n {team} -l app=none")).await?;
    top.has(0, &["No pod has GPU memory."])?;
    let top = run(context, "top namespaces").await?;
    top.has(0, &[team, "16 GiB", "24 GiB"])?;
    let names = run(context, &format!("top -n {team} -o name --no-headers")).await?;
    assert_eq!(names.out, "pod/holder\n");
    let budgets = run(context, "budgets").await?;
    budgets.has(
        0,
        &[
            "8 of 16 GiB",
            "8 of 24 GiB",
            "cohort default: 16 of 32 GiB guaranteed",
        ],
    )?;
    let budgets = run(context, &format!("budgets -n {team} -o yaml")).await?;
    budgets.has(0, &["kind: GpuMemoryBudget"])?;
    let retained = run(context, "retained").await?;
    retained.has(0, &["LEASES", node])?;
    let events = run(context, &format!("events -n {team} --since 10m")).await?;
    events.has(0, &["pod/holder", "GpuMemoryBound"])?;
    let explained = run(context, &format!("explain pod holder -n {team}")).await?;
    explained.has(0, &["holder runs on", "8 GiB (container main)"])?;
    let wrong = run(context, &format!("explain pod none -n {team}")).await?;
    wrong.has(2, &["failed to read pod"])?;
    Ok(())
}

async fn installation_is_examined(context: &TrialContext) -> Result<(), Failed> {
    let version = env!("CARGO_PKG_VERSION");
    let agents = format!("agents           1 at {version}");
    let versions = run(context, "version").await?;
    versions.has(
        0,
        &["Kubernetes       v1.", &agents, "operators        1 at"],
    )?;
    // The plugin by kubectl's own mechanism.
    let mut kubectl = Command::new(context.toolbox().program("kubectl"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = program().parent().map(PathBuf::from).into_iter();
    let path = std::env::join_paths(folders.chain(std::env::split_paths(&path)))?;
    kubectl
        .args(["bursar", "version", "--client"])
        .env("PATH", path);
    output_of(kubectl, context, "")
        .await?
        .has(0, &[&format!("kubectl bursar   {version}")])?;
    let preflight = run(context, "doctor --preflight").await?;
    preflight.has(
        0,
        &[
            "OK    Kubernetes v1.",
            "containerd://2.",
            "0 failures, 0 warnings",
        ],
    )?;
    // The operator was started again a moment ago.
    let ready = |run: &Run| run.out.contains("the operator is ready");
    let doctor = run_until(context, "doctor -o json", START_TIMEOUT, ready).await?;
    let findings = doctor.json()?;
    let findings = findings["items"].as_array().map_or(&[][..], Vec::as_slice);
    let of = |check: &str| findings.iter().find(|finding| finding["check"] == check);
    let steering = match context.has_mutating_policies().await? {
        true => "OK",
        false => "WARN",
    };
    for (check, expected) in [
        ("Kubernetes", "OK"),
        ("Steering", steering),
        ("PodSecurity", "OK"),
        ("Operator", "OK"),
        ("StaleAgent", "OK"),
        ("VersionSkew", "OK"),
    ] {
        let level = of(check).map(|finding| &finding["level"]);
        assert_eq!(level, Some(&json!(expected)), "{check}: {findings:#?}");
    }
    // No Prometheus runs in this cluster.
    let scraped = of("NotScraped").map(|finding| &finding["level"]);
    assert_eq!(
        (scraped, doctor.code),
        (Some(&json!("WARN")), Some(1)),
        "{findings:#?}"
    );
    assert!(
        findings.iter().all(|finding| finding["level"] != "FAIL"),
        "{findings:#?}"
    );
    let remains = run(context, "uninstall --check").await?;
    remains.has(
        1,
        &[
            "1 pod with GPU memory",
            "1 budget",
            "1 GpuNode",
            "helm uninstall bursar",
        ],
    )?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("support.tar.gz");
    let support = run(context, &format!("support --file {}", file.display())).await?;
    support.has(0, &["bursar-support/doctor.json", "wrote"])?;
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(std::fs::File::open(&file)?));
    let mut names = Vec::new();
    for entry in archive.entries()? {
        names.push(entry?.path()?.display().to_string());
    }
    let has = |part: &str| names.iter().any(|name| name.contains(part));
    assert!(
        has("gpunodes.json") && has("logs/bursar-agent-") && has("logs/bursar-operator-"),
        "{names:?}"
    );
    Ok(())
}

async fn tenant_sees_its_own(context: &TrialContext, node: &str) -> Result<(), Failed> {
    let team = TEAMS[0];
    let forbidden = "could not read gpunodes: forbidden";
    let top = run_as_tenant(context, &format!("top -n {team}")).await?;
    top.has(
        0,
        &[
            "holder",
            forbidden,
            "metrics of the agents (pods/proxy): forbidden",
        ],
    )?;
    let budgets = run_as_tenant(context, &format!("budgets -n {team}")).await?;
    budgets.has(0, &["8 of 16 GiB"])?;
    let events = run_as_tenant(context, &format!("events -n {team}")).await?;
    events.has(0, &["GpuMemoryBound"])?;
    let explained = run_as_tenant(context, &format!("explain pod holder -n {team}")).await?;
    explained.has(0, &["holder runs on", forbidden])?;
    for (line, words) in [
        ("gpus", "failed to read gpunodes: forbidden"),
        ("retained", "failed to read gpunodes: forbidden"),
        ("top -A", "could not read pods: forbidden"),
        ("events -A", "failed to read events: forbidden"),
    ] {
        run_as_tenant(context, line).await?.has(2, &[words])?;
    }
    let drain = run_as_tenant(context, &format!("drain {node} --yes")).await?;
    drain.has(2, &["failed to read GpuNode", "forbidden"])?;
    let resize = run_as_tenant(context, &format!("resize holder 4Gi -n {team}")).await?;
    resize.has(2, &["failed to change GpuMemoryBudget", "forbidden"])?;
    let doctor = run_as_tenant(context, "doctor").await?;
    // A release without steering is a finding.
    let code = i32::from(!context.has_mutating_policies().await?);
    doctor.has(code, &[forbidden])?;
    Ok(())
}

async fn quota_is_lowered_and_lifted(context: &TrialContext) -> Result<(), Failed> {
    let team = TEAMS[0];
    let quota = async || {
        let top = run(context, &format!("top -n {team} -o json"))
            .await?
            .json()?;
        Ok::<_, Failed>(top["items"][0]["quotaBytes"].as_u64())
    };
    let dry = run(context, &format!("resize holder 4Gi -n {team} --dry-run")).await?;
    dry.has(0, &["kubectl patch gpumemorybudget"])?;
    assert_eq!(quota().await?, Some(8 << 30));
    let lowered = run(context, &format!("resize holder 4Gi -n {team}")).await?;
    lowered.has(0, &["has a quota of 4 GiB."])?;
    assert_eq!(quota().await?, Some(4 << 30));
    let above = run(context, &format!("resize holder 9Gi -n {team}")).await?;
    above.has(2, &["requests 8 GiB, and a quota cannot be more"])?;
    let lifted = run(context, &format!("resize holder --reset -n {team}")).await?;
    lifted.has(0, &["has its request as its quota again."])?;
    assert_eq!(quota().await?, Some(8 << 30));
    Ok(())
}

async fn gpu_is_drained_and_undrained(context: &TrialContext, node: &str) -> Result<(), Failed> {
    let gpus = run(context, &format!("gpus {node} -o json"))
        .await?
        .json()?;
    let gpus = gpus["items"][0]["status"]["gpus"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let idle = gpus
        .iter()
        .find(|gpu| gpu["pods"].as_array().is_none_or(Vec::is_empty));
    let idle = idle
        .and_then(|gpu| gpu["index"].as_i64())
        .ok_or("no GPU is idle")?;
    let dry = run(context, &format!("drain {node} {idle} --dry-run")).await?;
    dry.has(0, &["kubectl patch gpunode"])?;
    let refused = run_with_input(context, &format!("drain {node} {idle}"), "n\n").await?;
    refused.has(1, &["No pod has memory there.", "Nothing was changed."])?;
    let drained = run(context, &format!("drain {node} {idle} --yes --timeout 90s")).await?;
    drained.has(
        0,
        &[
            "drained after",
            &format!("Undo: kubectl bursar undrain {node} GPU-"),
        ],
    )?;
    let gpus = run(context, "gpus").await?;
    gpus.has(0, &["Drained"])?;
    let doctor = run(context, "doctor").await?;
    doctor.has(
        1,
        &[
            &format!("{node}: GPU {idle} is drained"),
            "kubectl bursar undrain",
        ],
    )?;
    let undrained = run(context, &format!("undrain {node}")).await?;
    undrained.has(0, &["offers them to pods again"])?;
    let all = |run: &Run| run.out.contains("8 of 32 GiB bound");
    run_until(context, "gpus", RESTORE_TIMEOUT, all).await?;
    context
        .environment
        .wait_for_allocatable(|quanta| quanta == 32, RESTORE_TIMEOUT)
        .await?;
    Ok(())
}

async fn commands_without_a_cluster_work(context: &TrialContext) -> Result<(), Failed> {
    for shell in ["bash", "zsh", "fish"] {
        run(context, &format!("completion {shell}"))
            .await?
            .has(0, &["undrain"])?;
    }
    let script = run(context, "completion kubectl").await?;
    script.has(0, &["kubectl-bursar __complete"])?;
    run(context, "nonsense")
        .await?
        .has(2, &["Usage: kubectl bursar"])?;
    Ok(())
}

/// The user who asks for an explanation.
#[derive(Clone, Copy, Debug)]
enum User {
    Admin,
    Tenant,
}
const BOTH: &[User] = &[User::Admin, User::Tenant];
const ADMIN: &[User] = &[User::Admin];

/// Waits until the explanation of an object has a cause for each user, with its remedy and the exit
/// code. Returns the last explanation as JSON.
async fn explained(
    context: &TrialContext,
    (kind, name, team): (&str, &str, &str),
    users: &[User],
    cause: Cause,
    bound: Duration,
) -> Result<Value, Failed> {
    let line = format!("explain {kind} {name} -n {team}");
    let mut explanation = Value::Null;
    for user in users {
        let ask = async |line: &str| match user {
            User::Admin => run(context, line).await,
            User::Tenant => run_as_tenant(context, line).await,
        };
        // The pod may change between two looks, so that both have to find the cause.
        let look = async || {
            let answer = ask(&format!("{line} -o json")).await?;
            let causes = answer.json()?;
            let all = causes["causes"].as_array();
            if answer.code != Some(1) || all.is_none_or(|all| !all.contains(&json!(cause.as_str())))
            {
                return Err(Failed::from(format!("{answer:#?}")));
            }
            let text = ask(&line).await?;
            text.has(1, cause.remedy().as_slice())?;
            if matches!(user, User::Tenant) {
                text.has(1, &["could not read gpunodes: forbidden"])?;
            }
            Ok(causes)
        };
        let poll = async || match look().await {
            Ok(causes) => Poll::Ready(causes),
            Err(failed) => Poll::Pending(failed.message().unwrap_or_default().to_owned()),
        };
        let what = format!("{cause:?} in {line} by {user:?}");
        explanation = wait::poll_until(&what, bound, PAUSE, poll).await?;
    }
    let headline = explanation["headline"].as_str().unwrap_or_default();
    context
        .progress
        .report(format_args!("{cause:?}: {headline}"));
    Ok(explanation)
}

/// The texts of an explanation's lines with this label.
fn lines(explanation: &Value, label: &str) -> String {
    let lines = explanation["lines"].as_array().into_iter().flatten();
    let of_label = lines.filter(|line| line["label"] == label);
    of_label
        .filter_map(|line| line["text"].as_str())
        .collect::<Vec<_>>()
        .join("\n")
}

async fn planted_causes_are_explained(context: &mut TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let memory = json!({ "guaranteed": "44Gi", "limit": "46Gi" });
    let spec = json!({ "deviceMemory": memory, "perContainer": { "max": "33Gi" } });
    let pods = create_team(&client, TEAMS[0], spec).await?;
    refusals_are_explained(context).await?;
    // The agent reports this pod after a minute, in which the other causes are explained.
    let begin = Instant::now();
    pods.create(&without_driver(context)).await?;
    pods.wait_until_running(IDLE, START_TIMEOUT).await?;
    let (node, ten) = waits_are_explained(context, &pods).await?;
    unusable_gpus_are_explained(context, &pods, &node, ten).await?;
    run_time_causes_are_explained(context, &pods).await?;
    preemption_is_explained(context, &pods).await?;
    lack_of_an_agent_is_explained(context, &pods, &node).await?;
    let idle = ("pod", IDLE, TEAMS[0]);
    let left = SETTLED.saturating_sub(begin.elapsed()).max(START_TIMEOUT);
    explained(context, idle, ADMIN, Cause::NoDriverInImage, left).await?;
    Ok(())
}

/// The pod of [`without_driver`].
const IDLE: &str = "idle";

/// A pod with GPU memory whose program is static and loads no driver.
fn without_driver(context: &TrialContext) -> PodBuilder {
    let _ = context;
    PodBuilder::new(IDLE, images::PAUSE).gib(1)
}

/// A pod template of containers with these limits.
fn template(context: &TrialContext, app: &str, limits: &[&str], class: Option<&str>) -> Value {
    let containers: Vec<Value> = limits
        .iter()
        .enumerate()
        .map(|(number, limit)| {
            json!({ "name": format!("c{number}"), "image": context.environment.probe_image,
                "args": ["hold", "--bytes=1Gi"], "resources": { "limits": { "bursar.dev/gpu-memory-gib": limit } } })
        })
        .collect();
    json!({ "metadata": { "labels": { "app": app } }, "spec": { "priorityClassName": class, "containers": containers,
        "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": false } })
}

/// Creates a Deployment, StatefulSet, ReplicaSet or Job of one pod.
async fn create_workload(
    context: &TrialContext,
    team: &str,
    kind: &str,
    name: &str,
    mut template: Value,
) -> Result<(), Failed> {
    let selector = json!({ "matchLabels": template["metadata"]["labels"] });
    let (version, spec) = match kind {
        "Job" => {
            template["spec"]["restartPolicy"] = json!("Never");
            ("batch/v1", json!({ "template": template }))
        }
        _ => (
            "apps/v1",
            json!({ "replicas": 1, "selector": selector, "template": template, "serviceName": name }),
        ),
    };
    let mut object =
        json!({ "apiVersion": version, "kind": kind, "metadata": { "name": name }, "spec": spec });
    if kind != "StatefulSet"
        && let Some(spec) = object["spec"].as_object_mut()
    {
        spec.remove("serviceName");
    }
    let (group, version) = version.split_once('/').unwrap_or_default();
    let resource = ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: format!("{group}/{version}"),
        kind: kind.to_owned(),
        plural: format!("{}s", kind.to_lowercase()),
    };
    let client = context.environment.cluster.client();
    let api: Api<DynamicObject> = Api::namespaced_with(client, team, &resource);
    api.create(&PostParams::default(), &serde_json::from_value(object)?)
        .await?;
    Ok(())
}

/// Pods that the API server refuses at their creation.
async fn refusals_are_explained(context: &TrialContext) -> Result<(), Failed> {
    let [team, other] = TEAMS;
    let borrowed = Some("bursar-borrowed");
    for (kind, name, limits, class, cause) in [
        (
            "Deployment",
            "guarantee",
            &["25", "20"][..],
            None,
            Cause::OverGuarantee,
        ),
        (
            "StatefulSet",
            "limit",
            &["25", "25"][..],
            borrowed,
            Cause::OverLimit,
        ),
        (
            "Job",
            "maximum",
            &["34"][..],
            None,
            Cause::OverContainerMaximum,
        ),
        (
            "Deployment",
            "form",
            &["8Gi"][..],
            None,
            Cause::WrongAmountForm,
        ),
    ] {
        let template = template(context, name, limits, class);
        create_workload(context, team, kind, name, template).await?;
        let object = (&*kind.to_lowercase(), name, team);
        let explanation = explained(context, object, BOTH, cause, START_TIMEOUT).await?;
        assert_eq!(explanation["verdict"], "Fails", "{explanation}");
    }
    context.set_require_budget(true).await?;
    let outcome = async {
        refused_without_budget(context).await?;
        create_workload(
            context,
            other,
            "Deployment",
            "poor",
            template(context, "poor", &["2"], None),
        )
        .await?;
        explained(
            context,
            ("deploy", "poor", other),
            ADMIN,
            Cause::NoBudget,
            START_TIMEOUT,
        )
        .await
    };
    let outcome = outcome.await;
    context.set_require_budget(false).await?;
    outcome?;
    remove_workloads(&context.environment.cluster.client()).await
}

/// Waits until the changed policy is in force.
async fn refused_without_budget(context: &TrialContext) -> Result<(), Failed> {
    let manifest = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "tried" },
        "spec": template(context, "tried", &["1"], None)["spec"] });
    let poll = async || {
        let mut kubectl = Command::new(context.toolbox().program("kubectl"));
        kubectl.args([
            "create",
            "--dry-run=server",
            "--filename=-",
            "--namespace",
            TEAMS[1],
        ]);
        match output_of(kubectl, context, &manifest.to_string()).await {
            Ok(run) if run.err.contains("has no GpuMemoryBudget in force") => Poll::Ready(()),
            Ok(run) => Poll::Pending(format!("{run:#?}")),
            Err(failed) => Poll::Failed(failed.message().unwrap_or_default().to_owned()),
        }
    };
    Ok(wait::poll_until("the policy to require a budget", START_TIMEOUT, PAUSE, poll).await?)
}

/// Pods for which no node or no GPU has room. Returns the node, on which both GPUs have a pod of 10
/// and a pod waits. Returns also which of the two has a GPU without the idle pod.
async fn waits_are_explained(
    context: &TrialContext,
    pods: &Pods,
) -> Result<(String, &'static str), Failed> {
    let team = TEAMS[0];
    let tens = ["ten-a", "ten-b"];
    for name in tens {
        pods.create(&holder(context, name, 10)).await?;
        pods.wait_until_running(name, START_TIMEOUT).await?;
    }
    let node = pods.node("ten-a").await?;
    let has = |gpu: &GpuStatus, name: &str| gpu.pods.iter().any(|pod| pod.name == name);
    let status = status::wait_for_status(context, &node, "three bound pods", |status| {
        let mut names = tens.iter().chain([&IDLE]);
        names.all(|name| status.gpus.iter().any(|gpu| has(gpu, name)))
    })
    .await?;
    let is_alone = |name: &&str| {
        status
            .gpus
            .iter()
            .any(|gpu| has(gpu, name) && !has(gpu, IDLE))
    };
    let alone = tens
        .into_iter()
        .find(is_alone)
        .ok_or("no pod of 10 has a GPU alone")?;
    pods.create(&holder(context, "thirteen", 13)).await?;
    let thirteen = ("pod", "thirteen", team);
    explained(
        context,
        thirteen,
        BOTH,
        Cause::NoNodeWithRoom,
        START_TIMEOUT,
    )
    .await?;
    another_plugin_is_explained(context, thirteen, &node).await?;
    pods.delete("thirteen").await?;
    pods.wait_until_deleted("thirteen", START_TIMEOUT).await?;
    create_workload(
        context,
        team,
        "StatefulSet",
        "eight",
        template(context, "eight", &["8"], None),
    )
    .await?;
    let eight = ("pod", "eight-0", team);
    let explanation = explained(context, eight, BOTH, Cause::Fragmentation, START_TIMEOUT).await?;
    assert!(
        lines(&explanation, "agent").contains("largest free 6 GiB"),
        "{explanation}"
    );
    let statefulset = ("statefulset", "eight", team);
    let explanation = explained(
        context,
        statefulset,
        ADMIN,
        Cause::Fragmentation,
        START_TIMEOUT,
    )
    .await?;
    // The agent reports a moment later which GPU it holds for the pod.
    let room = lines(&explanation, "node").replace(" (held for this pod)", "");
    let free = status.gpus.iter();
    let free = free.map(|gpu| format!("GPU {} has {} GiB", gpu.index, gpu.free));
    let free = free.collect::<Vec<_>>().join(", ");
    let expected = format!("no GPU has 8 GiB for it: {free}");
    assert_eq!(room, expected, "{explanation}");
    // The agent reports a waiting pod in the GpuNode a moment after the Event.
    let waits = |run: &Run| run.out.contains("waiting ");
    let top = run_until(context, &format!("top -n {team}"), START_TIMEOUT, waits).await?;
    top.has(0, &["eight-0"])?;
    Ok((node, alone))
}

/// Another plugin offers the node's GPUs too, as far as the node's status says.
async fn another_plugin_is_explained(
    context: &TrialContext,
    pod: (&str, &str, &str),
    node: &str,
) -> Result<(), Failed> {
    let nodes: Api<Node> = Api::all(context.environment.cluster.client());
    let offer = async |amount: Value| {
        let amounts = json!({ "nvidia.com/gpu": amount });
        let patch = json!({ "status": { "capacity": amounts, "allocatable": amounts } });
        nodes
            .patch_status(node, &PatchParams::default(), &Patch::Merge(patch))
            .await
    };
    offer(json!("2")).await?;
    let outcome = async {
        explained(context, pod, ADMIN, Cause::OtherPlugin, START_TIMEOUT).await?;
        doctor_finds(context, "nvidia.com/gpu is 2 there too").await
    };
    let outcome = outcome.await;
    offer(Value::Null).await?;
    outcome
}

/// GPUs that are drained or lost: that of the pod `ten`, which has it alone.
async fn unusable_gpus_are_explained(
    context: &TrialContext,
    pods: &Pods,
    node: &str,
    ten: &str,
) -> Result<(), Failed> {
    let team = TEAMS[0];
    let eight = ("pod", "eight-0", team);
    let holding = pods
        .wait_for_log_line(ten, START_TIMEOUT, event_line("holding"))
        .await?;
    let uuid = holding["device"]["uuid"]
        .as_str()
        .ok_or("the GPU has no UUID")?;
    let drained = run(context, &format!("drain {node} {uuid} --yes --timeout 90s")).await?;
    let killed = format!("1 pod has memory there, whose processes will be killed: team-a/{ten}.");
    drained.has(0, &[killed.as_str()])?;
    explained(context, eight, ADMIN, Cause::GpuDrained, START_TIMEOUT).await?;
    run(context, &format!("undrain {node} {uuid}"))
        .await?
        .has(0, &[])?;
    pods.wait_until_running("eight-0", RESTORE_TIMEOUT).await?;
    let runs = |run: &Run| run.code == Some(0);
    run_until(
        context,
        &format!("explain pod eight-0 -n {team}"),
        START_TIMEOUT,
        runs,
    )
    .await?;

    let gpus = context.environment.simulated_gpus.clone();
    let gpus = gpus.ok_or("GPUs that are real are not broken for a test")?;
    let number = (0..2).find(|number| sim::uuid(*number) == uuid);
    let number = number.ok_or_else(|| format!("no GPU is {uuid}"))?;
    gpus.lose(number)?;
    let lost = explained(context, eight, ADMIN, Cause::GpuLost, START_TIMEOUT).await;
    gpus.restore(number)?;
    lost?;
    remove_workloads(&context.environment.cluster.client()).await?;
    let others = pods.list().await?.into_iter().map(|pod| pod.name_any());
    let others: Vec<String> = others.filter(|name| name != IDLE).collect();
    for name in &others {
        pods.delete(name).await?;
    }
    for name in &others {
        pods.wait_until_deleted(name, START_TIMEOUT).await?;
    }
    context
        .environment
        .wait_for_allocatable(|quanta| quanta == 32, RESTORE_TIMEOUT)
        .await?;
    Ok(())
}

/// Pods that run, and are denied memory, fault, or are not held to their quota.
async fn run_time_causes_are_explained(context: &TrialContext, pods: &Pods) -> Result<(), Failed> {
    let team = TEAMS[0];
    let probe = &context.environment.probe_image;
    let greedy = PodBuilder::new("greedy", probe).arguments(&["greedy", "--chunk=256Mi"]);
    let faulty = PodBuilder::new("faulty", probe)
        .arguments(&["fault", "--file=/count/faults", "--times=1"])
        .with_empty_dir("/count")
        .restart_always();
    let privileged = PodBuilder::new("privileged", probe).arguments(&["hold", "--bytes=1Gi"]);
    for plan in [greedy, faulty, privileged.privileged()] {
        pods.create(&plan.gib(4)).await?;
    }
    let denied = ("pod", "greedy", team);
    let explanation = explained(context, denied, BOTH, Cause::Denied, START_TIMEOUT).await?;
    let denial = lines(&explanation, "denied");
    assert!(
        denial.contains("cuMemAlloc") && denial.contains("of the quota of 4 GiB"),
        "{explanation}"
    );
    let poisoned = ("pod", "faulty", team);
    explained(context, poisoned, BOTH, Cause::Poisoned, START_TIMEOUT).await?;
    let gap = ("pod", "privileged", team);
    explained(context, gap, BOTH, Cause::NotEnforced, START_TIMEOUT).await?;
    doctor_finds(
        context,
        "team-a/privileged (container main) is not held to its quota",
    )
    .await?;
    for name in ["greedy", "faulty", "privileged"] {
        pods.delete(name).await?;
        pods.wait_until_deleted(name, START_TIMEOUT).await?;
    }
    Ok(())
}

/// An owner waits for a borrower that a disruption budget protects, and runs without it.
async fn preemption_is_explained(context: &TrialContext, pods: &Pods) -> Result<(), Failed> {
    let [team, other] = TEAMS;
    let client = context.environment.cluster.client();
    let theirs = Pods::in_namespace(&client, other).await?;
    for name in ["lent-a", "lent-b"] {
        let template = template(context, "lent", &["12"], Some("bursar-borrowed"));
        let mut template = template;
        template["metadata"]["labels"]["set"] = json!(name);
        create_workload(context, other, "ReplicaSet", name, template).await?;
    }
    let all_run = async || match theirs.list().await {
        Ok(list)
            if list.len() == 2
                && list
                    .iter()
                    .all(|pod| bursar_e2e::pods::PodState::of(pod).running) =>
        {
            Poll::Ready(())
        }
        Ok(list) => Poll::Pending(format!("{} pods", list.len())),
        Err(error) => Poll::Pending(error.to_string()),
    };
    wait::poll_until("both borrowers to run", START_TIMEOUT, PAUSE, all_run).await?;
    let budget = json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "lent" },
        "spec": { "maxUnavailable": 0, "selector": { "matchLabels": { "app": "lent" } } },
    });
    let budgets = Api::<PodDisruptionBudget>::namespaced(client, other);
    budgets
        .create(&PostParams::default(), &serde_json::from_value(budget)?)
        .await?;
    pods.create(&holder(context, "owner", 7)).await?;
    let owner = ("pod", "owner", team);
    let explanation =
        explained(context, owner, BOTH, Cause::DisruptionBudget, START_TIMEOUT).await?;
    let published = "a PodDisruptionBudget protects team-b/lent-";
    assert!(
        lines(&explanation, "in the way").contains(published),
        "{explanation}"
    );
    let explanation = explained(context, owner, ADMIN, Cause::VictimsLeave, START_TIMEOUT).await?;
    let victim = lines(&explanation, "in the way");
    assert!(
        victim.contains("(12 GiB, priority -10, borrows): a PodDisruptionBudget"),
        "{explanation}"
    );
    assert!(
        lines(&explanation, "next").contains("the operator holds GPU"),
        "{explanation}"
    );
    budgets.delete("lent", &DeleteParams::default()).await?;
    pods.wait_until_running("owner", START_TIMEOUT).await?;
    let runs = |run: &Run| run.code == Some(0);
    run_until(
        context,
        &format!("explain pod owner -n {team}"),
        START_TIMEOUT,
        runs,
    )
    .await?;
    pods.delete("owner").await?;
    remove_workloads(&context.environment.cluster.client()).await?;
    Ok(theirs.delete_all().await?)
}

/// The node's agent is gone while a pod finds no node.
async fn lack_of_an_agent_is_explained(
    context: &TrialContext,
    pods: &Pods,
    node: &str,
) -> Result<(), Failed> {
    pods.create(&holder(context, "late", 33)).await?;
    let sets: Api<DaemonSet> =
        Api::namespaced(context.environment.cluster.client(), chart::NAMESPACE);
    let name = format!("{}-agent", chart::RELEASE);
    let only_on = async |node: Value| {
        let patch =
            json!({ "spec": { "template": { "spec": { "nodeSelector": { "trial": node } } } } });
        let params = PatchParams::default();
        sets.patch(&name, &params, &Patch::Merge(patch)).await
    };
    only_on(json!("nowhere")).await?;
    let outcome = async {
        let late = ("pod", "late", TEAMS[0]);
        explained(context, late, ADMIN, Cause::NodeWithoutAgent, START_TIMEOUT).await?;
        // The agent is first not ready, and later gone.
        doctor_finds(context, &format!("FAIL  {node}: ")).await
    };
    let outcome = outcome.await;
    only_on(Value::Null).await?;
    pods.delete("late").await?;
    context
        .environment
        .wait_for_allocatable(|quanta| quanta == 32, RESTORE_TIMEOUT)
        .await?;
    outcome
}
