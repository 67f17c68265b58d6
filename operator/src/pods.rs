//! What the pods of a namespace ask for, asked of the API server itself.

use std::time::Duration;

use bursar_crds::Quantum;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use tokio::time::timeout;

use crate::demand::{AskingPod, Demand};

/// How long the API server may take to answer with a page.
const TIME: Duration = Duration::from_secs(5);
/// So many pods at a time.
const PAGE: u32 = 500;
/// Those that have ended may be many, and ask for nothing any more.
const ALIVE: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// Nobody knows which pods there are.
#[derive(Debug, thiserror::Error)]
pub enum PodsError {
    /// The API server or the way to it.
    #[error("cannot list the pods of namespace {namespace}")]
    Request {
        /// The namespace.
        namespace: String,
        /// What was said.
        source: Box<kube::Error>,
    },
    /// No answer in time.
    #[error("no answer within {} s about the pods of namespace {namespace}", TIME.as_secs())]
    TimedOut {
        /// The namespace.
        namespace: String,
    },
}

/// The pods of `namespace` that ask for something, by name, as they are now.
///
/// # Errors
/// None of them says anything of the pods.
pub async fn asking(
    client: &Client,
    namespace: &str,
    quantum: Quantum,
) -> Result<Vec<(String, Demand)>, PodsError> {
    let pods = Api::<AskingPod>::namespaced(client.clone(), namespace);
    let namespace = || namespace.to_owned();
    let mut page = ListParams::default().fields(ALIVE).limit(PAGE);
    let mut demands = Vec::new();
    loop {
        let list = match timeout(TIME, pods.list(&page)).await {
            Ok(list) => list.map_err(|source| PodsError::Request {
                namespace: namespace(),
                source: Box::new(source),
            })?,
            Err(_) => {
                return Err(PodsError::TimedOut {
                    namespace: namespace(),
                });
            }
        };
        let asking = list.items.iter();
        demands.extend(asking.filter_map(|pod| Some((pod.name_any(), Demand::of(pod, quantum)?))));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(demands),
        }
    }
}
