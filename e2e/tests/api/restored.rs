//! etcd that is put back to a copy of it: resource versions go back, and no watch tells what is lost.

use bursar_sim_api::Telling;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::api::{Api, PostParams};
use libtest_mimic::Failed;
use serde_json::json;

use crate::case::{Case, Outcome, Plan};
use crate::place::Place;
use crate::server::Server;
use crate::tours::in_force;

/// So many objects are made after the copy, so that versions go back by more than what happens during the restore.
const LOST: usize = 200;

/// On a control plane of its own: what other cases had made would be lost.
pub(crate) async fn restored(shared: &Server) -> Result<String, Failed> {
    let server = Server::of_its_own("restored", shared.progress.clone()).await?;
    let outcome = Box::pin(through(&server)).await;
    server.plane.stop().await;
    outcome?.lasted()
}

async fn through(server: &Server) -> Result<Outcome, Failed> {
    let name = "restored";
    let mut case = Case::start(server, name, Plan::told(name, Telling::Plain)).await?;
    let made = async |at: &Place| at.declare("16Gi", "24Gi").await;
    let is_made = async |at: &Place| in_force(at, "16", "24").await;
    case.through("a budget is made", made, is_made).await?;
    server.plane.back_up_etcd().await?;
    let raised = async |at: &Place| {
        at.amend(json!({ "deviceMemory": { "guaranteed": "22Gi", "limit": "30Gi" } }))
            .await
    };
    let is_raised = async |at: &Place| in_force(at, "22", "30").await;
    case.through("it is raised", raised, is_raised).await?;
    let configs = Api::<ConfigMap>::namespaced(server.plane.client(), name);
    for number in 0..LOST {
        let config = json!({ "metadata": { "name": format!("lost-{number}") } });
        let config = serde_json::from_value(config)?;
        configs.create(&PostParams::default(), &config).await?;
    }
    let before = version(server).await?;
    server.plane.restore_etcd().await?;
    let after = version(server).await?;
    if after >= before {
        return Err(format!("version {after} after {before}: nothing was restored").into());
    }
    // Higher than in the copy, and other than what is lost.
    let amended = async |at: &Place| {
        at.amend(json!({ "deviceMemory": { "guaranteed": "20Gi" } }))
            .await
    };
    let is_amended = async |at: &Place| in_force(at, "20", "24").await;
    case.through("it is amended after a restore", amended, is_amended)
        .await?;
    case.end(is_amended).await
}

/// The newest version that the API server knows of.
async fn version(server: &Server) -> Result<u64, Failed> {
    let namespaces = Api::<Namespace>::all(server.plane.client());
    let list = namespaces.list(&Default::default()).await?;
    let version = list.metadata.resource_version.unwrap_or_default();
    Ok(version.parse()?)
}
