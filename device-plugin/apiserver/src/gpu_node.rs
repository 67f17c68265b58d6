//! Creates this node's `GpuNode` and writes its status.
//!
//! The agent creates the missing object with its Node as the owner, so that the garbage collector
//! deletes it with the Node. This agent writes the status, by server-side apply. While the agent is
//! away, the operator writes the condition `Ready`. The agent reads the object as untyped JSON,
//! because it may be of another version.

use std::collections::BTreeSet;
use std::future::Future;

use bursar_crds::{AGENT_MANAGER, GpuNode, GpuNodeStatus};
use bursar_ledger::units::GpuUuid;
use bursar_watch::History;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject, Resource as _};
use kube::{Client, ResourceExt as _};
use serde::Deserialize as _;
use serde_json::json;
use tracing::debug;

/// A failed request. Each may be tried again later.
#[derive(Debug, thiserror::Error)]
pub enum GpuNodeError {
    /// Reading this node's `GpuNode` failed.
    #[error("failed to read GpuNode {node}")]
    Read {
        /// The node's name.
        node: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// Reading the owning Node failed.
    #[error("failed to read Node {node}")]
    ReadNode {
        /// The node's name.
        node: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// Creating the object failed.
    #[error("failed to create GpuNode {node}")]
    Create {
        /// The node's name.
        node: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// Writing the owner reference failed.
    #[error("failed to write the owner of GpuNode {node}")]
    WriteOwner {
        /// The node's name.
        node: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// Writing the status failed.
    #[error("failed to write the status of GpuNode {node}")]
    WriteStatus {
        /// The node's name.
        node: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// The object was deleted before the write.
    #[error("failed to write the status of GpuNode {node}: the object was deleted")]
    NotFound {
        /// The node's name.
        node: String,
    },
    /// The API server did not answer in time. The request may have taken effect.
    #[error("the API server did not answer within {} s", .within.as_secs())]
    Timeout {
        /// The timeout.
        within: std::time::Duration,
    },
}

/// The object as of the last response or watch event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedObject {
    /// `metadata.resourceVersion`.
    pub resource_version: String,
    /// `metadata.generation`.
    pub generation: Option<i64>,
    /// The status in the API server; empty if another version wrote a status that this agent cannot
    /// read.
    pub status: GpuNodeStatus,
}

impl ObservedObject {
    /// Reads `object`.
    pub(crate) fn from_object(object: &DynamicObject) -> Self {
        let status = object.data.get("status").filter(|status| !status.is_null());
        let status =
            status.map_or_else(|| Ok(GpuNodeStatus::default()), GpuNodeStatus::deserialize);
        Self {
            resource_version: object.resource_version().unwrap_or_default(),
            generation: object.metadata.generation,
            status: status
                .inspect_err(|error| debug!(%error, "failed to read the status of GpuNode: another version wrote it"))
                .unwrap_or_default(),
        }
    }
}

/// The access to this node's `GpuNode`. Tests replace the API server.
pub trait GpuNodeApi: Send + Sync {
    /// Reads the object; creates it with the drain of these GPUs if it is missing.
    fn ensure(
        &self,
        drain: &BTreeSet<GpuUuid>,
    ) -> impl Future<Output = Result<ObservedObject, GpuNodeError>> + Send;

    /// Writes the status of the object that was last observed as `before`.
    fn write_status(
        &self,
        before: &ObservedObject,
        status: &GpuNodeStatus,
    ) -> impl Future<Output = Result<ObservedObject, GpuNodeError>> + Send;
}

/// The `GpuNode`s as untyped objects.
pub fn gpu_nodes(client: Client) -> Api<DynamicObject> {
    Api::all_with(client, &ApiResource::erase::<GpuNode>(&()))
}

/// This node's `GpuNode` in the API server.
#[derive(Clone)]
pub struct GpuNodeClient {
    nodes: Api<Node>,
    objects: Api<DynamicObject>,
    node: String,
    history: History,
}

impl GpuNodeClient {
    /// The `GpuNode` of the node named `node`. `history` belongs to the watch of that object.
    pub fn new(client: Client, node: impl Into<String>, history: History) -> Self {
        Self {
            nodes: Api::all(client.clone()),
            objects: gpu_nodes(client),
            node: node.into(),
            history,
        }
    }

    async fn owner(&self) -> Result<OwnerReference, GpuNodeError> {
        let found = self.nodes.get_metadata(&self.node).await;
        let node = found.map_err(|source| GpuNodeError::ReadNode {
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

    /// Creates the object. A plain create fails if another writer has created the object meanwhile.
    async fn create(
        &self,
        owner: OwnerReference,
        drain: &BTreeSet<GpuUuid>,
    ) -> Result<ObservedObject, GpuNodeError> {
        let mut object = DynamicObject::new(&self.node, &ApiResource::erase::<GpuNode>(&()));
        object.metadata.owner_references = Some(vec![owner]);
        let drain: Vec<_> = drain.iter().map(GpuUuid::as_str).collect();
        object.data = json!({ "spec": { "drain": drain } });
        let params = PostParams {
            field_manager: Some(AGENT_MANAGER.to_owned()),
            ..PostParams::default()
        };
        let created = self
            .history
            .write(None, self.objects.create(&params, &object));
        let created = created.await.map_err(|source| GpuNodeError::Create {
            node: self.node.clone(),
            source: Box::new(source),
        });
        created.map(|object| ObservedObject::from_object(&object))
    }

    /// Makes the current Node the owner: a Node that registers again has a new UID.
    async fn write_owner(
        &self,
        object: &DynamicObject,
        owner: OwnerReference,
    ) -> Result<ObservedObject, GpuNodeError> {
        let mut owners = object.owner_references().to_vec();
        owners.retain(|other| other.kind != owner.kind);
        owners.push(owner);
        let before = object.resource_version();
        let patch = json!({ "metadata": { "resourceVersion": before, "ownerReferences": owners } });
        let params = PatchParams {
            field_manager: Some(AGENT_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let patch = Patch::Merge(patch);
        let owned = self.objects.patch(&self.node, &params, &patch);
        let owned = self.history.write(before.as_deref(), owned).await;
        let owned = owned.map_err(|source| GpuNodeError::WriteOwner {
            node: self.node.clone(),
            source: Box::new(source),
        });
        owned.map(|object| ObservedObject::from_object(&object))
    }
}

impl GpuNodeApi for GpuNodeClient {
    async fn ensure(&self, drain: &BTreeSet<GpuUuid>) -> Result<ObservedObject, GpuNodeError> {
        let found = self.objects.get_opt(&self.node).await;
        let found = found.map_err(|source| GpuNodeError::Read {
            node: self.node.clone(),
            source: Box::new(source),
        })?;
        let owner = self.owner().await?;
        match found {
            None => self.create(owner, drain).await,
            Some(object) if object.owner_references().contains(&owner) => {
                Ok(ObservedObject::from_object(&object))
            }
            Some(object) => self.write_owner(&object, owner).await,
        }
    }

    async fn write_status(
        &self,
        before: &ObservedObject,
        status: &GpuNodeStatus,
    ) -> Result<ObservedObject, GpuNodeError> {
        let body = json!({
            "apiVersion": GpuNode::api_version(&()),
            "kind": GpuNode::kind(&()),
            "metadata": { "name": self.node },
            "status": status,
        });
        let (params, body) = (
            PatchParams::apply(AGENT_MANAGER).force(),
            Patch::Apply(body),
        );
        let written = self.objects.patch_status(&self.node, &params, &body);
        let written = self
            .history
            .write(Some(&before.resource_version), written)
            .await;
        let written = written.map_err(|source| match source {
            kube::Error::Api(answer) if answer.code == 404 => GpuNodeError::NotFound {
                node: self.node.clone(),
            },
            source => GpuNodeError::WriteStatus {
                node: self.node.clone(),
                source: Box::new(source),
            },
        });
        written.map(|object| ObservedObject::from_object(&object))
    }
}
