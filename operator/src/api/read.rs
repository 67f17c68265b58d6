//! What is asked of the API server itself, and not of a watch: it has so long to answer, and no longer.

use std::time::Duration;

use bursar_crds::Quantum;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use tokio::time::timeout;

use crate::cluster::pod_request::{PodRequest, SlimPod};

/// How long the API server may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Nobody knows: it says nothing of what was asked about.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The API server or the way to it.
    #[error("cannot look at {what}")]
    Request {
        /// What was asked about.
        what: String,
        /// What was said.
        source: Box<kube::Error>,
    },
    /// No answer in time.
    #[error("no answer within {} s about {what}", TIMEOUT.as_secs())]
    TimedOut {
        /// What was asked about.
        what: String,
    },
}

/// The answer to a question about `what`.
///
/// # Errors
/// When there is none, or none in time.
pub async fn with_timeout<T>(
    what: &str,
    answer: impl Future<Output = kube::Result<T>>,
) -> Result<T, ReadError> {
    let what = || what.to_owned();
    match timeout(TIMEOUT, answer).await {
        Ok(answer) => answer.map_err(|source| ReadError::Request {
            what: what(),
            source: Box::new(source),
        }),
        Err(_) => Err(ReadError::TimedOut { what: what() }),
    }
}

/// So many pods at a time.
const PAGE_SIZE: u32 = 500;
/// Those that have ended may be many, and ask for nothing any more.
const NOT_TERMINATED: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// The pods of `namespace` that ask for something, by name, as they are now.
///
/// # Errors
/// None of them says anything of the pods.
pub async fn list_requesting_pods(
    client: &Client,
    namespace: &str,
    quantum: Quantum,
) -> Result<Vec<(String, PodRequest)>, ReadError> {
    let pods = Api::<SlimPod>::namespaced(client.clone(), namespace);
    let what = format!("the pods of namespace {namespace}");
    let mut page = ListParams::default()
        .fields(NOT_TERMINATED)
        .limit(PAGE_SIZE);
    let mut requests = Vec::new();
    loop {
        let list = with_timeout(&what, pods.list(&page)).await?;
        let asking = list.items.iter();
        requests
            .extend(asking.filter_map(|pod| Some((pod.name_any(), PodRequest::of(pod, quantum)?))));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(requests),
        }
    }
}
