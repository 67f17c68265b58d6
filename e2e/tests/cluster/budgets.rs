//! Checks that the API server itself refuses invalid budgets, and names the cause.

use bursar_crds::GpuMemoryBudget;
use kube::api::{Api, DeleteParams, PostParams};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::shared_cluster::{NAMESPACE, TrialContext, trial};

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("main/cluster/budgets", budgets)]
}

fn budget(name: &str, spec: &Value) -> Result<GpuMemoryBudget, Failed> {
    let budget = json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
        "metadata": {"name": name}, "spec": spec,
    });
    Ok(serde_json::from_value(budget)?)
}

async fn budgets(context: &mut TrialContext) -> Result<(), Failed> {
    let api: Api<GpuMemoryBudget> =
        Api::namespaced(context.environment.cluster.client(), NAMESPACE);
    let create = PostParams::default();
    let good = json!({"deviceMemory": {"guaranteed": "16Gi", "limit": "24Gi"}, "perContainer": {"max": "16Gi"}});
    let accepted = api.create(&create, &budget("default", &good)?).await?;
    assert_eq!(accepted.spec.cohort, "default");
    api.delete("default", &DeleteParams::default()).await?;

    let refused = [
        (
            "default",
            json!({"deviceMemory": {"guaranteed": "24Gi", "limit": "16Gi"}}),
            "guaranteed must not be more than limit",
        ),
        (
            "default",
            json!({"deviceMemory": {"guaranteed": "16Gi"}, "perContainer": {"max": "17Gi"}}),
            "perContainer.max must not be more than the namespace may use",
        ),
        (
            "default",
            json!({"deviceMemory": {"guaranteed": "500m"}}),
            "must be a whole number of bytes",
        ),
        (
            "default",
            json!({"deviceMemory": {"guaranteed": "16Gi"}, "overrides": [{"pod": "p", "deviceMemory": "0.5"}]}),
            "must be a whole number of bytes",
        ),
        (
            "default",
            json!({"deviceMemory": {"guaranteed": "16Gi"}, "overrides": [{"pod": "p"}]}),
            "set deviceMemory, managedMemory or both",
        ),
        (
            "mine",
            json!({"deviceMemory": {"guaranteed": "16Gi"}}),
            "its name is `default`",
        ),
    ];
    for (name, spec, reason) in refused {
        match api.create(&create, &budget(name, &spec)?).await {
            Err(kube::Error::Api(status)) if status.message.contains(reason) => {}
            other => return Err(format!("{spec}, and the API server says {other:?}").into()),
        }
    }
    Ok(())
}
