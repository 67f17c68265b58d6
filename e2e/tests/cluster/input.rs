//! Checks that an agent with an invalid configuration exits, and names the field in its log.

use std::collections::BTreeMap;

use bursar_e2e::chart;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{Api, ListParams, PostParams};
use kube::{Client, ResourceExt};
use libtest_mimic::{Failed, Trial};
use serde_json::json;

use crate::shared_cluster::{NAMESPACE, START_TIMEOUT, TrialContext, trial};

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("main/cluster/bad-input", bad_configurations)]
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
            "unknown-field",
            "[resources]\nquanta = \"1Gi\"\n",
            "unknown field `quanta`",
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
                "volumeMounts": [{"name": "config", "mountPath": "/etc/bursar", "readOnly": true}],
            }],
        },
    }))?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let created = pods.create(&PostParams::default(), &pod).await?;
    assert_eq!(created.name_any(), name);
    Ok(())
}
