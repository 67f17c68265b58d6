//! Kills, stops and starts the operator's pods.

use std::time::Duration;

use bursar_e2e::chart;
use bursar_e2e::wait::{self, Poll};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use libtest_mimic::Failed;
use serde_json::json;

use crate::shared_cluster::START_TIMEOUT;

const PAUSE: Duration = Duration::from_millis(200);

/// Kills the operator without a grace period. Its Deployment creates another one.
///
/// # Errors
/// When there is no operator, or the API server refuses.
pub(crate) async fn kill(client: &Client) -> Result<(), Failed> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), chart::NAMESPACE);
    let operators = ListParams::default().labels("app.kubernetes.io/component=operator");
    let at_once = DeleteParams::default().grace_period(0);
    // After an earlier kill the next operator may not exist yet.
    let poll = async || match pods.delete_collection(&at_once, &operators).await {
        Ok(gone)
            if gone
                .as_ref()
                .left()
                .is_some_and(|list| list.items.is_empty()) =>
        {
            Poll::Pending("there is none".to_owned())
        }
        Ok(_) => Poll::Ready(()),
        Err(error) => Poll::Failed(error.to_string()),
    };
    Ok(wait::poll_until("an operator to kill", START_TIMEOUT, PAUSE, poll).await?)
}

/// Sets the number of operators, and waits until they are ready.
///
/// # Errors
/// When they do not become ready in time.
pub(crate) async fn scale(client: &Client, replicas: u32) -> Result<(), Failed> {
    let api: Api<Deployment> = Api::namespaced(client.clone(), chart::NAMESPACE);
    let name = format!("{}-operator", chart::RELEASE);
    let patch = json!({ "spec": { "replicas": replicas } });
    api.patch(&name, &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    let poll = async || match api.get(&name).await {
        Ok(deployment) => {
            let status = deployment.status.unwrap_or_default();
            let (ready, all) = (
                status.ready_replicas.unwrap_or(0),
                status.replicas.unwrap_or(0),
            );
            let wanted = i32::try_from(replicas).unwrap_or(0);
            if (ready, all) == (wanted, wanted) {
                Poll::Ready(())
            } else {
                Poll::Pending(format!("{ready} of {all} are ready"))
            }
        }
        Err(error) => Poll::Pending(error.to_string()),
    };
    let what = format!("{replicas} operators to be ready");
    Ok(wait::poll_until(&what, START_TIMEOUT, PAUSE, poll).await?)
}
