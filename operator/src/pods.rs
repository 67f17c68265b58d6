//! What the pods of a namespace ask for, asked of the API server itself.

use bursar_crds::Quantum;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};

use crate::ask::{AskError, ask};
use crate::demand::{AskingPod, Demand};

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
