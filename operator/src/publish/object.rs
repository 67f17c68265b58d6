//! The API call that writes a status: a server-side apply with the field manager `bursar-operator`.

use std::time::Duration;

use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus, OPERATOR_MANAGER};
use kube::api::{Api, Patch, PatchParams};
use kube::core::Resource as _;
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tokio::time::timeout;

use crate::world::Key;

/// How long one write may take. Less than the time that a pod gets to stop.
const WRITE_TIME: Duration = Duration::from_secs(5);

/// A write that failed. All are worth another try later.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The API server does not let the operator do it.
    #[error(
        "may not write the status of GpuMemoryBudget {namespace}/{name}: give the operator's service \
         account the chart's ClusterRole (patch on gpumemorybudgets/status)"
    )]
    Forbidden {
        /// The budget's namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// What the API server said.
        source: Box<kube::Error>,
    },
    /// Anything else that the API server or the way to it says.
    #[error("cannot write the status of GpuMemoryBudget {namespace}/{name}")]
    Write {
        /// The budget's namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Why.
        source: Box<kube::Error>,
    },
    /// No answer in time.
    #[error("no answer within {} s to the status of GpuMemoryBudget {namespace}/{name}", WRITE_TIME.as_secs())]
    TimedOut {
        /// The budget's namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
}

/// Writes `wanted`; `None` where the budget is gone.
pub(super) async fn write(
    client: &Client,
    key: &Key,
    budget: &GpuMemoryBudget,
    wanted: &GpuMemoryBudgetStatus,
) -> Result<Option<GpuMemoryBudgetStatus>, PublishError> {
    let Key { namespace, name } = key.clone();
    let api = Api::<GpuMemoryBudget>::namespaced(client.clone(), &namespace);
    let body = json!({
        "apiVersion": GpuMemoryBudget::api_version(&()),
        "kind": GpuMemoryBudget::kind(&()),
        // The UID: a budget that was made anew under the same name is another one.
        "metadata": { "name": name, "uid": budget.uid() },
        "status": wanted,
    });
    let (params, patch) = (
        PatchParams::apply(OPERATOR_MANAGER).force(),
        Patch::Apply(body),
    );
    let answer = timeout(WRITE_TIME, api.patch_status(&name, &params, &patch)).await;
    match answer {
        Ok(Ok(written)) => Ok(Some(written.status.unwrap_or_default())),
        Ok(Err(kube::Error::Api(said))) if said.code == 404 => Ok(None),
        Ok(Err(source)) => {
            let forbidden =
                matches!(&source, kube::Error::Api(said) if matches!(said.code, 401 | 403));
            let source = Box::new(source);
            Err(if forbidden {
                PublishError::Forbidden {
                    namespace,
                    name,
                    source,
                }
            } else {
                PublishError::Write {
                    namespace,
                    name,
                    source,
                }
            })
        }
        Err(_) => Err(PublishError::TimedOut { namespace, name }),
    }
}
