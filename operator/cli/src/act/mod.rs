//! Changes objects: drains, undrains, resizes, and tells pods about an uninstall.
//!
//! Each change of an object is a patch with the version of the object that it was made from, so
//! that a change by another client is not undone.

pub mod drain;
pub mod notify;
pub mod resize;

use kube::Client;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::Request;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The field manager of the changes.
const MANAGER: &str = "kubectl-bursar";

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

/// Sends a merge patch and returns the changed object.
///
/// # Errors
/// When the API server refuses, or the object has changed meanwhile.
pub async fn patch<T: Clone + std::fmt::Debug + DeserializeOwned>(
    client: &Client,
    path: &str,
    name: &str,
    patch: &Value,
) -> Result<T, kube::Error> {
    let params = PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let request = Request::new(path).patch(name, &params, &Patch::Merge(patch));
    client
        .request(request.map_err(kube::Error::BuildRequest)?)
        .await
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
