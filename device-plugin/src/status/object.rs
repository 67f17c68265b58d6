//! The API calls on this node's `GpuNode`.
//!
//! Server-side apply with the field manager `bursar-agent`: the object is made when it is missing,
//! owned by its Node, so that it goes when the Node goes. The status has one writer, this agent.

use std::future::Future;

use bursar_crds::{AGENT_MANAGER, GpuNode, GpuNodeStatus};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, Patch, PatchParams};
use kube::core::{PartialObjectMetaExt as _, Resource as _};
use kube::{Client, ResourceExt as _};
use serde_json::json;

/// A call that failed. All are worth another try later.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// Reading this node's `GpuNode`.
    #[error("cannot read GpuNode {node}")]
    Read {
        /// The node's name.
        node: String,
        /// Why.
        source: Box<kube::Error>,
    },
    /// Reading the Node that owns it.
    #[error("cannot read Node {node}")]
    ReadNode {
        /// The node's name.
        node: String,
        /// Why.
        source: Box<kube::Error>,
    },
    /// Making the object.
    #[error("cannot create GpuNode {node}")]
    Create {
        /// The node's name.
        node: String,
        /// Why.
        source: Box<kube::Error>,
    },
    /// Writing its status.
    #[error("cannot write the status of GpuNode {node}")]
    Write {
        /// The node's name.
        node: String,
        /// Why.
        source: Box<kube::Error>,
    },
    /// The object was deleted while it was written.
    #[error("GpuNode {node} is gone")]
    Gone {
        /// The node's name.
        node: String,
    },
}

/// What is known of the object after a call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// `metadata.generation`.
    pub generation: Option<i64>,
    /// The status as the API server has it.
    pub status: GpuNodeStatus,
}

/// This node's `GpuNode`, wherever it is kept.
pub trait Object: Send + Sync {
    /// The object as it is, made where it is missing.
    fn ensure(&self) -> impl Future<Output = Result<Known, ObjectError>> + Send;

    /// Writes the status.
    fn write(
        &self,
        status: &GpuNodeStatus,
    ) -> impl Future<Output = Result<Known, ObjectError>> + Send;
}

/// The object in the API server.
#[derive(Clone)]
pub struct ApiObject {
    nodes: Api<Node>,
    objects: Api<GpuNode>,
    node: String,
}

impl ApiObject {
    /// The `GpuNode` of the node named `node`.
    pub fn new(client: Client, node: impl Into<String>) -> Self {
        Self {
            nodes: Api::all(client.clone()),
            objects: Api::all(client),
            node: node.into(),
        }
    }

    fn params() -> PatchParams {
        PatchParams::apply(AGENT_MANAGER).force()
    }

    async fn owner(&self) -> Result<OwnerReference, ObjectError> {
        let found = self.nodes.get_metadata(&self.node).await;
        let node = found.map_err(|source| ObjectError::ReadNode {
            node: self.node.clone(),
            source: Box::new(source),
        })?;
        Ok(OwnerReference {
            api_version: Node::api_version(&()).into_owned(),
            kind: Node::kind(&()).into_owned(),
            name: self.node.clone(),
            uid: node.uid().unwrap_or_default(),
            ..OwnerReference::default()
        })
    }
}

impl Object for ApiObject {
    async fn ensure(&self) -> Result<Known, ObjectError> {
        let found = self.objects.get_opt(&self.node).await;
        let found = found.map_err(|source| ObjectError::Read {
            node: self.node.clone(),
            source: Box::new(source),
        })?;
        let owner = self.owner().await?;
        if let Some(object) = found
            && object.owner_references().contains(&owner)
        {
            return Ok(known(object));
        }
        let meta = kube::core::ObjectMeta {
            name: Some(self.node.clone()),
            owner_references: Some(vec![owner]),
            ..Default::default()
        };
        let meta = meta.into_request_partial::<GpuNode>();
        let mut body = serde_json::to_value(meta).unwrap_or_default();
        body["spec"] = json!({});
        self.objects
            .patch(&self.node, &Self::params(), &Patch::Apply(body))
            .await
            .map(known)
            .map_err(|source| ObjectError::Create {
                node: self.node.clone(),
                source: Box::new(source),
            })
    }

    async fn write(&self, status: &GpuNodeStatus) -> Result<Known, ObjectError> {
        let body = json!({
            "apiVersion": GpuNode::api_version(&()),
            "kind": GpuNode::kind(&()),
            "metadata": { "name": self.node },
            "status": status,
        });
        let written = self
            .objects
            .patch_status(&self.node, &Self::params(), &Patch::Apply(body))
            .await;
        written.map(known).map_err(|source| match source {
            kube::Error::Api(answer) if answer.code == 404 => ObjectError::Gone {
                node: self.node.clone(),
            },
            source => ObjectError::Write {
                node: self.node.clone(),
                source: Box::new(source),
            },
        })
    }
}

fn known(object: GpuNode) -> Known {
    Known {
        generation: object.metadata.generation,
        status: object.status.unwrap_or_default(),
    }
}
