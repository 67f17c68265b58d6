//! Reads from the API server, past the watches.

use std::sync::Arc;

use bursar_crds::Quantum;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};

use super::error::{ApiError, with_timeout};
use crate::cluster::facts::pod::PodFacts;
use crate::cluster::slim_pod::SlimPod;

/// How many pods one page of a list holds.
const PAGE_SIZE: u32 = 500;
/// Ended pods may be many and request nothing.
const NOT_TERMINATED: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// Lists the pods of `namespace` that request GPU memory, by name.
///
/// # Errors
/// An error says nothing about the pods.
pub async fn list_requesting_pods(
    client: &Client,
    namespace: &str,
    quantum: Quantum,
) -> Result<Vec<(String, Arc<PodFacts>)>, ApiError> {
    let pods = Api::<SlimPod>::namespaced(client.clone(), namespace);
    let object = format!("the pods of namespace {namespace}");
    let mut page = ListParams::default()
        .fields(NOT_TERMINATED)
        .limit(PAGE_SIZE);
    let mut requests = Vec::new();
    loop {
        let list = with_timeout("read", object.clone(), pods.list(&page)).await?;
        let pods = list.items.iter();
        requests.extend(
            pods.filter_map(|pod| Some((pod.name_any(), Arc::new(PodFacts::of(pod, quantum)?)))),
        );
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(requests),
        }
    }
}
