//! Reads from the API server with a timeout, past the watches.

use std::time::Duration;

use bursar_crds::Quantum;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use tokio::time::timeout;

use crate::cluster::pod_request::{PodRequest, SlimPod};

/// How long one read may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A failed read. It says nothing about the object.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The API server answered with an error, or could not be reached.
    #[error("failed to read {what}")]
    Request {
        /// The object.
        what: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// The API server did not answer in time.
    #[error("failed to read {what}: no answer within {} s", TIMEOUT.as_secs())]
    TimedOut {
        /// The object.
        what: String,
    },
}

/// Awaits a read of `what`.
///
/// # Errors When the API server answers with an error, or not in time.
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

/// How many pods one page of a list holds.
const PAGE_SIZE: u32 = 500;
/// Ended pods may be many and request nothing.
const NOT_TERMINATED: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// Lists the pods of `namespace` that request GPU memory, by name.
///
/// # Errors An error says nothing about the pods.
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
