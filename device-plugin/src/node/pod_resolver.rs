//! Finds out for whom the kubelet starts a container: PreStartContainer names tokens only.
//!
//! The kubelet's device checkpoint ties tokens to a pod's UID and a container; PodResources adds the
//! pod's name, and the API server that one pod's priority and shape. Only the pod's UID is needed; the rest is for order
//! and messages, so it is bounded in time and may be missing.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tracing::debug;

use super::allocator::Identity;
use super::checkpoint_state::PodName;
use crate::kubelet::device_checkpoint::{DeviceCheckpoint, DeviceCheckpointError, Held};
use crate::kubelet::plugin::NotBound;
use crate::kubelet::pod_resources::{ContainerName, Holder, PodResourcesClient, holder_of};
use crate::ledger::{Priority, Shape};
use crate::units::{PodUid, Resource, TokenSet};

/// How many GPUs a pod wants its memory spread over. It grants nothing.
pub const GPUS_ANNOTATION: &str = "bursar.dev/gpus";

/// A static pod's UID at the kubelet, on its mirror at the API server.
const STATIC_POD_ANNOTATION: &str = "kubernetes.io/config.hash";

/// The most that the API server may take: what it tells is not worth a longer wait.
const API_LIMIT: Duration = Duration::from_secs(1);

/// Why nobody can be named.
#[derive(Debug, thiserror::Error)]
pub enum NoIdentity {
    /// The kubelet's checkpoint does not have these tokens.
    #[error("the kubelet's device checkpoint has no container with tokens {0}")]
    NotHeld(TokenSet),
    /// It has them for two pods, which kubelets do not do.
    #[error("the kubelet's device checkpoint has tokens {0} for more than one pod")]
    Ambiguous(TokenSet),
    /// It cannot be read, and the API server did not help out.
    #[error("cannot tell which pod holds tokens {tokens}: {source}")]
    Unreadable {
        /// The tokens.
        tokens: TokenSet,
        /// Why not.
        source: DeviceCheckpointError,
    },
}

impl From<NoIdentity> for NotBound {
    fn from(error: NoIdentity) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Asks the kubelet and the API server.
#[derive(Clone)]
pub struct Identities {
    /// The kubelet's plugin directory, with its checkpoint.
    pub device_plugin_dir: PathBuf,
    /// Our resources as they are registered.
    pub names: Vec<(Resource, String)>,
    /// The kubelet's PodResources.
    pub pod_resources: PodResourcesClient,
    /// The API server, where there is one.
    pub client: Option<Client>,
}

/// What the API server told of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Told {
    uid: PodUid,
    priority: Priority,
    shape: Shape,
}

impl Identities {
    /// What the kubelet's checkpoint says now.
    pub async fn kubelet(&self) -> Result<DeviceCheckpoint, DeviceCheckpointError> {
        let (dir, names) = (self.device_plugin_dir.clone(), self.names.clone());
        let read = move || DeviceCheckpoint::read(&dir, &names);
        match tokio::task::spawn_blocking(read).await {
            Ok(read) => read,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// Who holds `tokens`.
    pub async fn find(
        &self,
        resource: Resource,
        tokens: &TokenSet,
    ) -> Result<Identity, NoIdentity> {
        let (checkpoint, container) = tokio::join!(self.kubelet(), self.name(resource, tokens));
        let told = match &container {
            Some(container) => self.ask(container).await,
            None => None,
        };
        let (held, all) = match checkpoint {
            Ok(checkpoint) => {
                let held = checkpoint.holders(resource, tokens).cloned().collect();
                (held, checkpoint.held)
            }
            Err(source) if told.is_none() => {
                return Err(NoIdentity::Unreadable {
                    tokens: tokens.clone(),
                    source,
                });
            }
            Err(_) => (Vec::new(), Vec::new()),
        };
        let mut identity = identity(held, container, told, tokens)?;
        identity.containers = containers_of(&identity.pod, resource, all);
        Ok(identity)
    }

    /// The container that PodResources lists with some of the tokens. Plain init containers are
    /// not listed, but later containers of their pod have the same tokens.
    async fn name(&self, resource: Resource, tokens: &TokenSet) -> Option<ContainerName> {
        holder_of(&self.list(resource).await, tokens).cloned()
    }

    /// Whom PodResources lists with tokens of a resource; nobody where it does not tell.
    pub async fn list(&self, resource: Resource) -> Vec<Holder> {
        let mut names = self.names.iter();
        let Some((_, name)) = names.find(|(named, _)| *named == resource) else {
            return Vec::new();
        };
        let listed = self.pod_resources.list(resource, name).await;
        listed.unwrap_or_else(|error| {
            debug!(%error, "no pod names");
            Vec::new()
        })
    }

    /// Reads the pod as the answer to a dry run that changes nothing: unlike a `get`, an admission policy can keep that to
    /// pods of this node.
    async fn ask(&self, container: &ContainerName) -> Option<Told> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone()?, &container.namespace);
        let dry = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let nothing = Patch::Merge(json!({}));
        let read = pods.patch_status(&container.pod, &dry, &nothing);
        match tokio::time::timeout(API_LIMIT, read).await {
            Ok(Ok(pod)) => told(&pod),
            Ok(Err(error)) => {
                debug!(%error, pod = container.pod, "no priority");
                None
            }
            Err(_) => None,
        }
    }
}

/// The tokens of all containers of a pod, also of those that start later: the kubelet allocates for all of them first.
fn containers_of(pod: &PodUid, resource: Resource, all: Vec<Held>) -> Vec<TokenSet> {
    let of_pod = |held: &Held| held.pod == *pod && held.resource == resource;
    all.into_iter()
        .filter(of_pod)
        .map(|held| held.tokens)
        .collect()
}

/// Puts the answers together.
fn identity(
    held: Vec<Held>,
    container: Option<ContainerName>,
    told: Option<Told>,
    tokens: &TokenSet,
) -> Result<Identity, NoIdentity> {
    let pod = match (held.first(), &told) {
        (Some(first), _) if held.iter().any(|other| other.pod != first.pod) => {
            return Err(NoIdentity::Ambiguous(tokens.clone()));
        }
        (Some(first), _) => first.pod.clone(),
        (None, Some(told)) => told.uid.clone(),
        (None, None) => return Err(NoIdentity::NotHeld(tokens.clone())),
    };
    // A pod of the same name that came after ours has another UID: then neither what is told nor
    // the name is our pod's.
    let is_another = told.as_ref().is_some_and(|told| told.uid != pod);
    let (told, container) = match is_another {
        true => (None, None),
        false => (told, container),
    };
    let ContainerName {
        namespace,
        pod: name,
        container,
    } = container.unwrap_or_else(|| ContainerName {
        namespace: String::new(),
        pod: String::new(),
        container: String::new(),
    });
    Ok(Identity {
        pod,
        name: (!name.is_empty()).then_some(PodName { namespace, name }),
        container,
        held,
        containers: Vec::new(),
        shape: told.as_ref().map(|told| told.shape).unwrap_or_default(),
        priority: told.as_ref().map(|told| told.priority).unwrap_or_default(),
    })
}

fn told(pod: &Pod) -> Option<Told> {
    let annotation = |key: &str| pod.metadata.annotations.as_ref()?.get(key);
    let uid = annotation(STATIC_POD_ANNOTATION).or(pod.metadata.uid.as_ref())?;
    let gpus = annotation(GPUS_ANNOTATION).and_then(|gpus| gpus.parse::<NonZeroU16>().ok());
    Some(Told {
        uid: uid.parse().ok()?,
        priority: Priority(
            pod.spec
                .as_ref()
                .and_then(|spec| spec.priority)
                .unwrap_or_default(),
        ),
        shape: gpus.map(|gpus| Shape { gpus }).unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PodSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;
    use crate::units::AllocationId;

    fn tokens() -> TokenSet {
        TokenSet::from_indexes([1, 2]).unwrap()
    }

    fn held(pod: &str, container: &str) -> Held {
        Held {
            pod: pod.parse().unwrap(),
            container: container.into(),
            resource: Resource::DeviceMemory,
            tokens: tokens(),
            allocation: AllocationId::from_bits(7),
        }
    }

    fn name() -> ContainerName {
        ContainerName {
            namespace: "team".into(),
            pod: "train-0".into(),
            container: "main".into(),
        }
    }

    fn pod(uid: &str, annotations: &[(&str, &str)]) -> Pod {
        let annotations = annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Pod {
            metadata: ObjectMeta {
                uid: Some(uid.into()),
                annotations: Some(annotations.collect()),
                ..ObjectMeta::default()
            },
            spec: Some(PodSpec {
                priority: Some(100),
                ..PodSpec::default()
            }),
            status: None,
        }
    }

    #[test]
    fn the_kubelets_checkpoint_names_the_pod_and_the_api_server_its_priority_and_shape() {
        let told = told(&pod("uid-1", &[(GPUS_ANNOTATION, "2")]));
        let found = identity(vec![held("uid-1", "main")], Some(name()), told, &tokens()).unwrap();
        assert_eq!(
            (found.pod.as_str(), found.priority),
            ("uid-1", Priority(100))
        );
        assert_eq!(found.shape.gpus.get(), 2);
        assert_eq!(found.name.unwrap().to_string(), "team/train-0");
    }

    #[tokio::test]
    async fn pod_is_read_by_a_dry_run_that_changes_nothing() {
        use axum::body::{Body, to_bytes};
        use axum::http::{Request, Response};

        let server = tower::service_fn(|request: Request<kube::client::Body>| async move {
            let asked = format!("{} {}", request.method(), request.uri());
            let body = to_bytes(Body::new(request.into_body()), 64).await?;
            assert_eq!(
                (asked.as_str(), &body[..]),
                (
                    "PATCH /api/v1/namespaces/team/pods/train-0/status?&dryRun=All",
                    b"{}".as_slice()
                )
            );
            let pod = serde_json::to_vec(&pod("uid-1", &[])).unwrap();
            Ok::<_, axum::Error>(Response::new(Body::from(pod)))
        });
        let identities = Identities {
            device_plugin_dir: PathBuf::new(),
            names: Vec::new(),
            pod_resources: PodResourcesClient::new(std::path::Path::new("/nobody/listens/here")),
            client: Some(Client::new(server, "default")),
        };
        let told = identities.ask(&name()).await.unwrap();
        assert_eq!((told.uid.as_str(), told.priority), ("uid-1", Priority(100)));
    }

    #[test]
    fn all_containers_of_the_pod_are_told_and_no_others() {
        let of = |pod: &str, tokens: [u16; 2]| Held {
            tokens: TokenSet::from_indexes(tokens).unwrap(),
            ..held(pod, "main")
        };
        let managed = Held {
            resource: Resource::ManagedMemory,
            ..of("uid-1", [7, 8])
        };
        let all = vec![
            of("uid-1", [1, 2]),
            of("uid-2", [3, 4]),
            of("uid-1", [5, 6]),
            managed,
        ];
        let pod = "uid-1".parse().unwrap();
        let containers = containers_of(&pod, Resource::DeviceMemory, all);
        let indexes: Vec<Vec<u16>> = containers
            .iter()
            .map(|set| set.indexes().collect())
            .collect();
        assert_eq!(indexes, [[1, 2], [5, 6]]);
    }

    #[test]
    fn a_pod_of_the_same_name_with_another_uid_gives_nothing() {
        let told = told(&pod("uid-2", &[]));
        let found = identity(vec![held("uid-1", "main")], Some(name()), told, &tokens()).unwrap();
        assert_eq!((found.pod.as_str(), found.priority), ("uid-1", Priority(0)));
        assert_eq!(found.name, None, "what is kept hangs on its namespace");
    }

    #[test]
    fn a_static_pod_has_the_uid_that_its_mirror_notes() {
        let told = told(&pod("mirror", &[(STATIC_POD_ANNOTATION, "0123abcd")])).unwrap();
        assert_eq!(told.uid.as_str(), "0123abcd");
    }

    #[test]
    fn a_shape_that_is_no_number_is_one_gpu() {
        for bad in ["0", "-1", "two", ""] {
            assert_eq!(
                told(&pod("uid-1", &[(GPUS_ANNOTATION, bad)]))
                    .unwrap()
                    .shape,
                Shape::default()
            );
        }
    }

    #[test]
    fn without_the_kubelets_checkpoint_the_api_server_names_the_pod() {
        let told = told(&pod("uid-1", &[]));
        let found = identity(Vec::new(), Some(name()), told, &tokens()).unwrap();
        assert_eq!(
            (found.pod.as_str(), found.container.as_str()),
            ("uid-1", "main")
        );
    }

    #[test]
    fn two_pods_with_the_same_tokens_are_not_told_apart_by_chance() {
        let found = identity(
            vec![held("uid-1", "a"), held("uid-2", "a")],
            None,
            None,
            &tokens(),
        );
        assert!(matches!(found, Err(NoIdentity::Ambiguous(_))));
        assert!(matches!(
            identity(Vec::new(), None, None, &tokens()),
            Err(NoIdentity::NotHeld(_))
        ));
    }
}
