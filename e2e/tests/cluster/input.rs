//! Checks that an agent with an invalid configuration exits and names the field, that one goes on
//! beside unknown keys, and that a pod keeps the configuration of its version.

use std::collections::BTreeMap;

use bursar_crds::conditions::gpu_node::{ACCEPTED, NOT_UNDERSTOOD, OK};
use bursar_e2e::chart;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use libtest_mimic::{Failed, Trial};
use serde_json::json;

use crate::agent_away::{delete_agent, wait_for_another_agent};
use crate::placement::run_each;
use crate::relay::wait_for_condition;
use crate::restarts::{agent_pid, kill_agent};
use crate::shared_cluster::{NAMESPACE, START_TIMEOUT, TrialContext, node_trial, trial};

/// The variable of the agent's container with its configuration.
const CONFIG: &str = "BURSAR_CONFIG";
/// The manager of the fields that the trial changes.
const MANAGER: &str = "config-skew";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("main/cluster/bad-input", bad_configurations),
        node_trial("fleet/cluster/config-skew", agent_keeps_its_configuration),
    ]
}

async fn bad_configurations(context: &mut TrialContext) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let image = agents_image(&client).await?;
    let cases = [
        (
            "quantum-0",
            "[resources]\nquantum = \"0\"\n",
            "resources.quantum",
        ),
        (
            "unknown-policy",
            "[audit]\npolicy = \"stop\"\n",
            "audit.policy",
        ),
        ("no-toml", "quantum: 1Gi\n", "agent.toml"),
    ];
    for (name, config, expected) in cases {
        run_agent(&client, name, &image, config).await?;
        let ended = context
            .pods
            .wait_until(name, "to fail", START_TIMEOUT, |state| {
                state.phase == "Failed"
            })
            .await?;
        let log = context.pods.log(name).await?;
        assert!(log.contains(expected), "{name} ({ended:?}) said: {log}");
        context
            .progress
            .report(format_args!("{name}: {}", log.trim().replace('\n', " ")));
    }
    Ok(())
}

/// Returns the image of the agent's DaemonSet.
async fn agents_image(client: &Client) -> Result<String, Failed> {
    let api: Api<DaemonSet> = Api::namespaced(client.clone(), chart::NAMESPACE);
    let agents = ListParams::default().labels("app.kubernetes.io/component=agent");
    let list = api.list(&agents).await?;
    let template = list
        .items
        .into_iter()
        .find_map(|set| set.spec?.template.spec);
    let container = template.and_then(|spec| spec.containers.into_iter().next());
    Ok(container
        .and_then(|container| container.image)
        .ok_or("the agent's DaemonSet has no image")?)
}

/// Runs a pod of the agent's image with this configuration, beside the real agent. The agent reads
/// its configuration first, and so changes nothing on the node.
async fn run_agent(client: &Client, name: &str, image: &str, config: &str) -> Result<(), Failed> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let map = ConfigMap {
        data: Some(BTreeMap::from([(
            "agent.toml".to_owned(),
            config.to_owned(),
        )])),
        ..serde_json::from_value(json!({"metadata": {"name": name}}))?
    };
    maps.create(&PostParams::default(), &map).await?;
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never", "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
            "volumes": [{"name": "config", "configMap": {"name": name}}],
            "containers": [{
                "name": "agent", "image": image, "args": ["--config=/etc/bursar/agent.toml"],
                "env": [{"name": "NODE_NAME", "value": "nowhere"}],
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": [{"name": "config", "mountPath": "/etc/bursar", "readOnly": true}],
            }],
        },
    }))?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let created = pods.create(&PostParams::default(), &pod).await?;
    assert_eq!(created.name_any(), name);
    Ok(())
}

/// Upgrades the DaemonSet alone, as a canary does for days. An agent whose container restarts then
/// has the configuration of its own pod. A new pod has the new one, whose unknown key is told.
async fn agent_keeps_its_configuration(context: &mut TrialContext) -> Result<(), Failed> {
    let sets: Api<DaemonSet> =
        Api::namespaced(context.environment.cluster.client(), chart::NAMESPACE);
    let set = sets.get("bursar-agent").await?;
    let spec = set.spec.and_then(|spec| spec.template.spec);
    let containers = spec.map(|spec| spec.containers).unwrap_or_default();
    let mut env = containers.into_iter().filter_map(|one| one.env).flatten();
    let config = env.find(|variable| variable.name == CONFIG);
    let config = config.and_then(|variable| variable.value);
    let config = config.ok_or("the agent has no configuration")?;
    let tried = canary(context, &sets, &config).await;
    configure(&sets, "RollingUpdate", &config).await?;
    wait_for_condition(context, ACCEPTED, OK).await?;
    tried
}

async fn canary(context: &TrialContext, sets: &Api<DaemonSet>, config: &str) -> Result<(), Failed> {
    let unreadable = format!("{config}\n[later");
    configure(sets, "OnDelete", &unreadable).await?;
    let before = agent_pid(context)?;
    kill_agent(context)?;
    wait_for_another_agent(context, before).await?;
    run_each(context, &[("beside-a-canary", 2)]).await?;
    configure(sets, "OnDelete", &format!("{config}\n[later]\nkey = 1\n")).await?;
    delete_agent(context).await?;
    wait_for_condition(context, ACCEPTED, NOT_UNDERSTOOD).await?;
    context.history.check_none_failed_or_restarted().await
}

/// Changes the strategy and the configuration of the DaemonSet. Leaves neither field to the trial,
/// because Helm would not change it any more.
async fn configure(sets: &Api<DaemonSet>, strategy: &str, config: &str) -> Result<(), Failed> {
    let patch = json!({ "spec": {
        "updateStrategy": { "type": strategy, "rollingUpdate": null },
        "template": { "spec": { "containers": [
            { "name": "agent", "env": [{ "name": CONFIG, "value": config }] },
        ] } },
    } });
    let params = PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let set = sets
        .patch("bursar-agent", &params, &Patch::Strategic(patch))
        .await?;
    let others: Vec<_> = set
        .metadata
        .managed_fields
        .into_iter()
        .flatten()
        .filter(|fields| fields.manager.as_deref() != Some(MANAGER))
        .collect();
    let patch = json!({ "metadata": { "managedFields": others } });
    sets.patch("bursar-agent", &params, &Patch::Merge(patch))
        .await?;
    Ok(())
}
