//! What is asked of the API server itself, and not of a watch: it has so long to answer, and no longer.

use std::time::Duration;

use bursar_crds::Quantum;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use tokio::time::timeout;

use crate::cluster::pod_request::{AskingPod, Demand};

/// How long the API server may take to answer.
const TIME: Duration = Duration::from_secs(5);

/// Nobody knows: it says nothing of what was asked about.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The API server or the way to it.
    #[error("cannot look at {what}")]
    Request {
        /// What was asked about.
        what: String,
        /// What was said.
        source: Box<kube::Error>,
    },
    /// No answer in time.
    #[error("no answer within {} s about {what}", TIME.as_secs())]
    TimedOut {
        /// What was asked about.
        what: String,
    },
}

/// The answer to a question about `what`.
///
/// # Errors
/// When there is none, or none in time.
pub async fn ask<T>(
    what: &str,
    answer: impl Future<Output = kube::Result<T>>,
) -> Result<T, AskError> {
    let what = || what.to_owned();
    match timeout(TIME, answer).await {
        Ok(answer) => answer.map_err(|source| AskError::Request {
            what: what(),
            source: Box::new(source),
        }),
        Err(_) => Err(AskError::TimedOut { what: what() }),
    }
}

/// So many pods at a time.
const PAGE: u32 = 500;
/// Those that have ended may be many, and ask for nothing any more.
const ALIVE: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// The pods of `namespace` that ask for something, by name, as they are now.
///
/// # Errors
/// None of them says anything of the pods.
pub async fn asking(
    client: &Client,
    namespace: &str,
    quantum: Quantum,
) -> Result<Vec<(String, Demand)>, AskError> {
    let pods = Api::<AskingPod>::namespaced(client.clone(), namespace);
    let what = format!("the pods of namespace {namespace}");
    let mut page = ListParams::default().fields(ALIVE).limit(PAGE);
    let mut demands = Vec::new();
    loop {
        let list = ask(&what, pods.list(&page)).await?;
        let asking = list.items.iter();
        demands.extend(asking.filter_map(|pod| Some((pod.name_any(), Demand::of(pod, quantum)?))));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(demands),
        }
    }
}
