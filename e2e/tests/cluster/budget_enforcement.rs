//! Checks enforced budgets: pods beyond them are refused, idle memory is lent and reclaimed, and
//! pods beyond a quota are evicted.

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::time::{Duration, Instant};

use bursar_crds::conditions::budget::ENFORCED;
use bursar_crds::resources::BORROWED_PRIORITY_CLASS;
use bursar_crds::{GpuMemoryBudget, GpuNode};
use bursar_e2e::chart;
use bursar_e2e::pods::{PodError, Pods};
use bursar_e2e::wait::{self, Poll};
use futures::FutureExt as _;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ResourceQuota, ServiceAccount};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::operator;
use crate::placement::holder;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, trial};

const PAUSE: Duration = Duration::from_millis(200);
/// The namespaces of [`cleared`].
pub(crate) const TEAMS: [&str; 2] = ["team-a", "team-b"];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("operator/cluster/refused", async |context| {
            cleared(context, pod_beyond_the_budget_is_refused).await
        }),
        trial("operator/cluster/reclaim", async |context| {
            cleared(context, lent_memory_is_reclaimed_by_its_owner).await
        }),
        trial("operator/cluster/accounts", service_accounts_are_limited),
    ]
}

/// Runs a trial in the teams' namespaces, and deletes its objects however the trial ends.
pub(crate) async fn cleared(
    context: &mut TrialContext,
    act: impl AsyncFnOnce(&mut TrialContext) -> Result<(), Failed>,
) -> Result<(), Failed> {
    // The objects are deleted also after a failed assertion.
    let outcome = AssertUnwindSafe(act(context)).catch_unwind().await;
    let client = context.environment.cluster.client();
    let scaled = operator::scale(&client, 1).await;
    for team in TEAMS {
        Api::<GpuMemoryBudget>::namespaced(client.clone(), team)
            .delete_collection(&DeleteParams::default(), &ListParams::default())
            .await?;
        Pods::in_namespace(&client, team)
            .await?
            .delete_all()
            .await?;
        let quotas: Api<ResourceQuota> = Api::namespaced(client.clone(), team);
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let released = async || {
            let left = quotas.list(&ListParams::default()).await;
            let left = left.map_or(usize::MAX, |list| list.items.len());
            let label = namespaces.get(team).await.is_ok_and(|namespace| {
                let labels = namespace.metadata.labels.unwrap_or_default();
                labels.contains_key("bursar.dev/budget")
            });
            match (left, label) {
                (0, false) => Poll::Ready(()),
                state => Poll::Pending(format!("{state:?} quotas and label are left")),
            }
        };
        let what = format!("{team} to be rid of its budget");
        wait::poll_until(&what, START_TIMEOUT, PAUSE, released).await?;
    }
    outcome.unwrap_or_else(|panic| resume_unwind(panic))?;
    scaled
}

/// Creates a team's budget, and waits until an operator that is killed meanwhile has enforced it.
pub(crate) async fn create_team(client: &Client, team: &str, spec: Value) -> Result<Pods, Failed> {
    let pods = Pods::in_namespace(client, team).await?;
    let api: Api<GpuMemoryBudget> = Api::namespaced(client.clone(), team);
    let budget = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
        "metadata": { "name": "default" }, "spec": spec,
    });
    api.create(&PostParams::default(), &serde_json::from_value(budget)?)
        .await?;
    operator::kill(client).await?;
    wait_for_condition(client, team, ENFORCED, "True", START_TIMEOUT).await?;
    Ok(pods)
}

async fn wait_for_condition(
    client: &Client,
    team: &str,
    type_: &str,
    status: &str,
    bound: Duration,
) -> Result<(), Failed> {
    let api: Api<GpuMemoryBudget> = Api::namespaced(client.clone(), team);
    let poll = async || match api.get("default").await {
        Ok(budget) => {
            let conditions = budget.status.map(|status| status.conditions);
            let conditions = conditions.unwrap_or_default();
            match conditions.iter().find(|condition| condition.type_ == type_) {
                Some(condition) if condition.status == status => Poll::Ready(()),
                other => Poll::Pending(format!("{other:?}")),
            }
        }
        Err(error) => Poll::Pending(error.to_string()),
    };
    let what = format!("the budget of {team} to be {type_} {status}");
    Ok(wait::poll_until(&what, bound, PAUSE, poll).await?)
}

/// Returns the message of the API server's refusal.
pub(crate) fn refusal<T>(result: Result<T, PodError>) -> Result<String, Failed> {
    match result {
        Ok(_) => Err("it was let in".into()),
        Err(PodError::ApiServer { source, .. }) => match *source {
            kube::Error::Api(status) => Ok(status.message),
            other => Err(other.into()),
        },
        Err(other) => Err(other.into()),
    }
}

async fn pod_beyond_the_budget_is_refused(context: &mut TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let spec = json!({ "deviceMemory": { "guaranteed": "8Gi" }, "perContainer": { "max": "6Gi" } });
    let pods = create_team(&client, TEAMS[0], spec).await?;
    pods.create(&holder(context, "fits", 5)).await?;
    pods.wait_until_running("fits", START_TIMEOUT).await?;
    let refused = [
        (
            "beyond",
            holder(context, "beyond", 4),
            "exceeded quota: gpu-memory-budget-",
        ),
        (
            "large",
            holder(context, "large", 7),
            "GpuMemoryBudget default of namespace team-a allows 6",
        ),
        (
            "seeing",
            holder(context, "seeing", 1).with_env("NVIDIA_VISIBLE_DEVICES", "all"),
            "NVIDIA_VISIBLE_DEVICES",
        ),
        (
            "covering",
            holder(context, "covering", 1).with_empty_dir("/opt/bursar/lib"),
            "/opt/bursar/lib",
        ),
    ];
    for (name, plan, words) in refused {
        let message = refusal(pods.create(&plan).await)?;
        context.progress.report(format_args!("{name}: {message}"));
        assert!(message.contains(words), "{message}");
    }
    pods.create(&holder(context, "rest", 3)).await?;
    pods.wait_until_running("rest", START_TIMEOUT).await?;
    Ok(())
}

/// Each team is guaranteed half of the GPUs. One team borrows the other's half while that is idle,
/// and yields the half as soon as the other needs it, without an operator.
async fn lent_memory_is_reclaimed_by_its_owner(context: &mut TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let sizes = context.environment.gpu_sizes_in_quanta().await?;
    let (all, half) = (sizes.iter().sum::<u32>(), sizes[0] / 2);
    let count = sizes.iter().map(|size| size / half).sum::<u32>();
    let guaranteed = half * (count / 2);
    let spec = json!({
        "deviceMemory": { "guaranteed": format!("{guaranteed}Gi"), "limit": format!("{all}Gi") },
        "overflow": "Borrow",
    });
    let borrower = create_team(&client, TEAMS[0], spec.clone()).await?;
    let owner = create_team(&client, TEAMS[1], spec).await?;
    let names: Vec<String> = (0..count).map(|index| format!("a-{index}")).collect();
    for name in &names {
        borrower.create(&holder(context, name, half)).await?;
        borrower.wait_until_running(name, START_TIMEOUT).await?;
    }
    let mut borrowed = Vec::new();
    for name in &names {
        let pod = borrower.get(name).await?;
        let class = pod.spec.and_then(|spec| spec.priority_class_name);
        if class.as_deref() == Some(BORROWED_PRIORITY_CLASS) {
            borrowed.push(name.clone());
        }
    }
    assert_eq!(
        borrowed,
        names[names.len() / 2..],
        "who no longer fits the guarantee borrows"
    );

    operator::scale(&client, 0).await?;
    for index in 0..count / 2 {
        let name = format!("b-{index}");
        let asked = Instant::now();
        owner.create(&holder(context, &name, half)).await?;
        owner.wait_until_running(&name, START_TIMEOUT).await?;
        context.progress.report(format_args!(
            "without an operator, {name} took {half} GiB back in {:.1?}",
            asked.elapsed()
        ));
    }
    // The agent releases the memory of an ended pod a moment before the API server deletes the pod.
    let left = borrower.list().await?.into_iter();
    let left: Vec<_> = left
        .map(|pod| pod.metadata)
        .filter(|pod| pod.deletion_timestamp.is_none())
        .filter_map(|pod| pod.name)
        .collect();
    assert_eq!(left, names[..names.len() / 2], "the guarantee stays");
    operator::scale(&client, 1).await?;
    for team in TEAMS {
        wait_for_condition(&client, team, "Ready", "True", START_TIMEOUT).await?;
    }
    Ok(())
}

/// The agent's token writes its own node's GpuNode and no other; the operator's changes its labels
/// only.
async fn service_accounts_are_limited(context: &mut TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let pods: Api<Pod> = Api::namespaced(client.clone(), chart::NAMESPACE);
    let agents = ListParams::default().labels("app.kubernetes.io/component=agent");
    let agent = pods.list(&agents).await?.items.into_iter().next();
    let agent = agent.ok_or("there is no agent")?;
    let node = agent.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let node = node.ok_or("the agent has no node")?;

    let apply = |name: &str| {
        Patch::Apply(json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuNode", "metadata": { "name": name }, "spec": {},
        }))
    };
    let dry = PatchParams {
        dry_run: true,
        ..PatchParams::apply("trial")
    };
    let bound = as_account(context, "agent", Some(&agent)).await?;
    let message = refused(Api::<Pod>::all(bound.clone()).list(&agents).await)?;
    assert!(
        message.contains("cannot list resource \"pods\""),
        "{message}"
    );
    let gpu_nodes: Api<GpuNode> = Api::all(client.clone());
    let nodes: Api<GpuNode> = Api::all(bound);
    let (post, none) = (
        PostParams::default(),
        json!({ "metadata": { "name": "another" }, "spec": {} }),
    );
    let mut others = Vec::new();
    // A GpuNode that does not exist, and an existing one.
    others.push(nodes.patch("another", &dry, &apply("another")).await);
    gpu_nodes
        .create(&post, &serde_json::from_value(none)?)
        .await?;
    others.push(nodes.patch("another", &dry, &apply("another")).await);
    others.push(nodes.patch_status("another", &dry, &apply("another")).await);
    gpu_nodes
        .delete("another", &DeleteParams::default())
        .await?;
    for other in others {
        let message = refused(other)?;
        let own_node_only = format!("its token is of node {node}");
        assert!(message.contains(&own_node_only), "{message}");
    }
    nodes.patch(&node, &dry, &apply(&node)).await?;
    nodes.patch_status(&node, &dry, &apply(&node)).await?;

    let unbound: Api<GpuNode> = Api::all(as_account(context, "agent", None).await?);
    let message = refused(unbound.patch(&node, &dry, &apply(&node)).await)?;
    assert!(message.contains("its token is of no node"), "{message}");

    let operator = as_account(context, "operator", None).await?;
    let namespaces: Api<Namespace> = Api::all(operator.clone());
    let nodes: Api<Node> = Api::all(operator);
    let metadata = |patch: Value| Patch::Merge(json!({ "metadata": patch }));
    let dry = PatchParams {
        dry_run: true,
        ..PatchParams::default()
    };
    let own = metadata(json!({ "labels": { "bursar.dev/budget": "enforced" } }));
    namespaces.patch("default", &dry, &own).await?;
    let steers = metadata(json!({ "labels": { "bursar.dev/largest-free-gib": "1" } }));
    nodes.patch(&node, &dry, &steers).await?;
    let mut others = Vec::new();
    for foreign in [
        json!({ "labels": { "pod-security.kubernetes.io/enforce": "privileged" } }),
        json!({ "annotations": { "a": "b" } }),
    ] {
        let foreign = metadata(foreign);
        others.push(nodes.patch(&node, &dry, &foreign).await.map(drop));
        others.push(namespaces.patch("default", &dry, &foreign).await.map(drop));
    }
    let off = metadata(json!({ "labels": { "kubernetes.io/hostname": null } }));
    others.push(nodes.patch(&node, &dry, &off).await.map(drop));
    let taint = json!({ "key": "bursar.dev/a", "effect": "NoExecute" });
    for spec in [
        json!({ "taints": [taint] }),
        json!({ "unschedulable": true }),
    ] {
        let patch = Patch::Merge(json!({ "spec": spec }));
        others.push(nodes.patch(&node, &dry, &patch).await.map(drop));
    }
    for other in others {
        let message = refused(other)?;
        assert!(
            message.contains("labels that begin with bursar.dev/"),
            "{message}"
        );
    }
    let admin: Api<Namespace> = Api::all(client);
    let message = refused(admin.patch_metadata("default", &dry, &own).await)?;
    assert!(message.contains("set by Bursar's operator"), "{message}");
    Ok(())
}

pub(crate) fn refused<T>(result: Result<T, kube::Error>) -> Result<String, Failed> {
    match result {
        Err(kube::Error::Api(status)) => Ok(status.message.clone()),
        Err(other) => Err(other.into()),
        Ok(_) => Err("it was let do it".into()),
    }
}

/// Returns a client with a token of one of Bursar's accounts, bound to `pod`.
pub(crate) async fn as_account(
    context: &TrialContext,
    part: &str,
    pod: Option<&Pod>,
) -> Result<Client, Failed> {
    let client = context.environment.cluster.client();
    let accounts: Api<ServiceAccount> = Api::namespaced(client, chart::NAMESPACE);
    let request = TokenRequest {
        spec: TokenRequestSpec {
            bound_object_ref: pod.map(|pod| BoundObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: pod.metadata.name.clone(),
                uid: pod.metadata.uid.clone(),
            }),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let name = format!("{}-{part}", chart::RELEASE);
    let token = accounts
        .create_token_request(&name, &PostParams::default(), &request)
        .await?
        .status
        .ok_or("no token")?
        .token;
    let admin = Kubeconfig::read_from(context.environment.cluster.kubeconfig())?;
    let mut config = Config::from_custom_kubeconfig(admin, &KubeConfigOptions::default()).await?;
    config.auth_info = serde_json::from_value(json!({ "token": token }))?;
    Ok(Client::try_from(config)?)
}
