//! Changes objects: drains, undrains, resizes, rolls relays, and tells pods about an uninstall.
//!
//! Each change of an object is a patch with the version of the object that it was made from. So a
//! change by another client is not undone. The agent reports in the status of the same objects, so
//! that a conflict is ordinary: the change is then made from the newer object.

pub mod drain;
pub mod notify;
pub mod resize;
pub mod roll;

use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::Request;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The field manager of the changes.
const MANAGER: &str = "kubectl-bursar";

/// A change is tried so often. An agent writes the status of its GpuNode a few times a second.
const TRIES: usize = 10;

/// Reads one object.
///
/// # Errors
/// When the API server refuses.
pub async fn get<T: Clone + std::fmt::Debug + DeserializeOwned>(
    client: &Client,
    path: &str,
    name: &str,
) -> Result<T, kube::Error> {
    let request = Request::new(path).get(name, &kube::api::GetParams::default());
    client
        .request(request.map_err(kube::Error::BuildRequest)?)
        .await
}

/// Changes one object by the merge patch that `patch_of` makes from it. When another client wrote
/// the object meanwhile, reads it again and makes the patch anew. Returns whether it was changed.
///
/// # Errors
/// When the API server refuses, when `patch_of` fails, or when other clients keep writing the
/// object.
pub async fn change<T: Clone + std::fmt::Debug + DeserializeOwned>(
    client: &Client,
    path: &str,
    name: &str,
    patch_of: impl Fn(&T) -> anyhow::Result<Option<Value>>,
) -> anyhow::Result<bool> {
    for _ in 1..TRIES {
        match change_once(client, path, name, &patch_of).await {
            Err(error) if is_conflict(&error) => {}
            outcome => return outcome,
        }
    }
    change_once(client, path, name, &patch_of).await
}

async fn change_once<T: Clone + std::fmt::Debug + DeserializeOwned>(
    client: &Client,
    path: &str,
    name: &str,
    patch_of: impl Fn(&T) -> anyhow::Result<Option<Value>>,
) -> anyhow::Result<bool> {
    let Some(patch) = patch_of(&get(client, path, name).await?)? else {
        return Ok(false);
    };
    let params = PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let request = Request::new(path).patch(name, &params, &Patch::Merge(patch));
    let request = request.map_err(kube::Error::BuildRequest)?;
    client.request::<Value>(request).await?;
    Ok(true)
}

fn is_conflict(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<kube::Error>();
    matches!(error, Some(kube::Error::Api(status)) if status.code == 409)
}

/// Deletes the object with this UID.
///
/// # Errors
/// When the API server refuses.
pub async fn delete(client: &Client, path: &str, name: &str, uid: &str) -> Result<(), kube::Error> {
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    let request = Request::new(path).delete(name, &params);
    let request = request.map_err(kube::Error::BuildRequest)?;
    client.request::<Value>(request).await.map(drop)
}

/// Creates one object.
///
/// # Errors
/// When the API server refuses, for example because the object exists.
pub async fn create(client: &Client, path: &str, object: &Value) -> Result<(), kube::Error> {
    let params = PostParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PostParams::default()
    };
    let request = Request::new(path).create(&params, object.to_string().into_bytes());
    let request = request.map_err(kube::Error::BuildRequest)?;
    client.request::<Value>(request).await.map(drop)
}
