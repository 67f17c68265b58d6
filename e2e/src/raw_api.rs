//! Reads and writes objects of the API server by path, as JSON.

use http::{Method, Request};
use kube::Client;
use serde_json::Value;

/// A client for raw JSON. Cheap to clone.
#[derive(Clone)]
pub struct RawApi(Client);

impl RawApi {
    /// Sends requests with the rights of `client`.
    pub fn new(client: Client) -> Self {
        Self(client)
    }

    /// Returns the object or list at `path`, or null if the server has none.
    ///
    /// # Errors
    /// The error of the API server or the connection, except 404.
    pub async fn get(&self, path: &str) -> kube::Result<Value> {
        match self.request(Method::GET, path, &Value::Null).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(Value::Null),
            other => other,
        }
    }

    /// Creates an object below `path`.
    ///
    /// # Errors
    /// The error of the API server or the connection.
    pub async fn create(&self, path: &str, object: &Value) -> kube::Result<Value> {
        self.request(Method::POST, path, object).await
    }

    /// Changes the object at `path` by a merge patch.
    ///
    /// # Errors
    /// The error of the API server or the connection.
    pub async fn merge_patch(&self, path: &str, patch: &Value) -> kube::Result<Value> {
        self.request(Method::PATCH, path, patch).await
    }

    /// Deletes the object at `path`, if it exists.
    ///
    /// # Errors
    /// The error of the API server or the connection, except 404.
    pub async fn delete(&self, path: &str) -> kube::Result<()> {
        match self.request(Method::DELETE, path, &Value::Null).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            other => other.map(drop),
        }
    }

    async fn request(&self, method: Method, path: &str, body: &Value) -> kube::Result<Value> {
        let kind = if method == Method::PATCH {
            "application/merge-patch+json"
        } else {
            "application/json"
        };
        let body = if body.is_null() {
            Vec::new()
        } else {
            body.to_string().into_bytes()
        };
        let request = Request::builder().method(method).uri(path);
        let request = request.header("content-type", kind).body(body);
        self.0
            .request(request.map_err(kube::Error::HttpError)?)
            .await
    }
}
