//! Creates, watches and reads pods, each step with a timeout.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerStatus, DownwardAPIVolumeFile, DownwardAPIVolumeSource,
    EmptyDirVolumeSource, EnvVar, HostPathVolumeSource, Namespace, ObjectFieldSelector, Pod,
    PodSpec, ResourceRequirements, SeccompProfile, SecurityContext, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, LogParams, PostParams};

use crate::wait::{self, Poll, WaitError};

/// The resource name of GPU memory with the default quantum.
pub const GPU_MEMORY: &str = "bursar.dev/gpu-memory-gib";

/// The pause between two polls of a pod.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The kind of a container besides the pod's main one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Ends before the next container starts.
    Init,
    /// An init container that runs as long as the pod (`restartPolicy: Always`).
    Sidecar,
    /// Runs beside the main container.
    Beside,
}

/// A container besides the pod's main one.
#[derive(Debug, Clone)]
struct ContainerPlan {
    role: Role,
    name: String,
    gib: Option<u32>,
    arguments: Vec<String>,
}

/// Builds a pod of one container or more.
#[derive(Debug, Clone)]
pub struct PodBuilder {
    name: String,
    image: String,
    arguments: Vec<String>,
    gib: Option<u32>,
    limits: BTreeMap<String, Quantity>,
    init_gib: Option<u32>,
    init_arguments: Vec<String>,
    sidecar_arguments: Option<Vec<String>>,
    beside: Vec<u32>,
    others: Vec<ContainerPlan>,
    annotations: BTreeMap<String, String>,
    node: Option<String>,
    priority_class: Option<String>,
    security_context: Option<SecurityContext>,
    user_namespace: bool,
    environment: Vec<EnvVar>,
    volumes: Vec<(VolumeMount, Volume)>,
    restarts: bool,
}

impl PodBuilder {
    /// Makes a pod called `name` that runs the entry point of `image`.
    pub fn new(name: impl Into<String>, image: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            image: image.into(),
            arguments: Vec::new(),
            gib: None,
            limits: BTreeMap::new(),
            init_gib: None,
            init_arguments: vec!["report".to_owned()],
            sidecar_arguments: None,
            beside: Vec::new(),
            others: Vec::new(),
            annotations: BTreeMap::new(),
            node: None,
            priority_class: None,
            security_context: None,
            user_namespace: false,
            environment: Vec::new(),
            volumes: Vec::new(),
            restarts: false,
        }
    }

    /// Sets the arguments.
    pub fn arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments = arguments
            .iter()
            .map(|argument| (*argument).to_owned())
            .collect();
        self
    }

    /// Requests this much GPU memory, in GiB.
    pub fn gib(mut self, gib: u32) -> Self {
        self.gib = Some(gib);
        self
    }

    /// Sets another limit of the main container.
    pub fn limit(mut self, resource: &str, amount: &str) -> Self {
        self.limits
            .insert(resource.to_owned(), Quantity(amount.to_owned()));
        self
    }

    /// Adds an init container of the same image that requests this much GPU memory, in GiB. By
    /// default the container reports its devices and exits.
    pub fn init_gib(mut self, gib: u32) -> Self {
        self.init_gib = Some(gib);
        self
    }

    /// Sets the arguments of the init container.
    pub fn init_arguments(mut self, arguments: &[&str]) -> Self {
        let arguments = arguments.iter();
        self.init_arguments = arguments.map(|argument| (*argument).to_owned()).collect();
        self
    }

    /// Adds a sidecar of the same image without GPU memory, which starts before the init container.
    pub fn sidecar_arguments(mut self, arguments: &[&str]) -> Self {
        let arguments = arguments.iter();
        let arguments = arguments.map(|argument| (*argument).to_owned()).collect();
        self.sidecar_arguments = Some(arguments);
        self
    }

    /// Adds containers with the same arguments, each with a request for GPU memory in GiB.
    pub fn additional_containers(mut self, gib: &[u32]) -> Self {
        self.beside = gib.to_vec();
        self
    }

    /// Adds a container of the same image, after those of its kind. Without an amount in GiB it
    /// requests no GPU memory.
    pub fn container(
        mut self,
        role: Role,
        name: &str,
        gib: impl Into<Option<u32>>,
        arguments: &[&str],
    ) -> Self {
        let arguments = arguments.iter();
        self.others.push(ContainerPlan {
            role,
            name: name.to_owned(),
            gib: gib.into(),
            arguments: arguments.map(|argument| (*argument).to_owned()).collect(),
        });
        self
    }

    /// Adds an annotation.
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Lets the scheduler choose only the node with this name.
    pub fn on_node(mut self, name: &str) -> Self {
        self.node = Some(name.to_owned());
        self
    }

    /// Sets the PriorityClass.
    pub fn priority_class(mut self, name: &str) -> Self {
        self.priority_class = Some(name.to_owned());
        self
    }

    /// Runs the containers by Kubernetes' restricted profile, with a read-only root file system.
    pub fn restricted(mut self) -> Self {
        self.security_context = Some(restricted());
        self
    }

    /// Runs the containers privileged.
    pub fn privileged(mut self) -> Self {
        self.security_context = Some(privileged());
        self
    }

    /// Runs the pod in a user namespace (`hostUsers: false`).
    pub fn user_namespace(mut self) -> Self {
        self.user_namespace = true;
        self
    }

    /// Adds a variable to the environment.
    pub fn with_env(mut self, name: &str, value: &str) -> Self {
        self.environment.push(EnvVar {
            name: name.to_owned(),
            value: Some(value.to_owned()),
            ..EnvVar::default()
        });
        self
    }

    /// Makes the kubelet restart the containers whenever they exit.
    pub fn restart_always(mut self) -> Self {
        self.restarts = true;
        self
    }

    /// Mounts an empty volume at `path`.
    pub fn with_empty_dir(self, path: &str) -> Self {
        let volume = Volume {
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..Volume::default()
        };
        self.volume(path, volume, None)
    }

    /// Mounts a file of a downward API volume at `path`, which contains the pod's name.
    pub fn with_downward_api_file(self, path: &str) -> Self {
        let file = DownwardAPIVolumeFile {
            path: "name".to_owned(),
            field_ref: Some(ObjectFieldSelector {
                field_path: "metadata.name".to_owned(),
                ..ObjectFieldSelector::default()
            }),
            ..DownwardAPIVolumeFile::default()
        };
        let volume = Volume {
            downward_api: Some(DownwardAPIVolumeSource {
                items: Some(vec![file]),
                ..DownwardAPIVolumeSource::default()
            }),
            ..Volume::default()
        };
        self.volume(path, volume, Some("name"))
    }

    /// Mounts the node's `path` at the same path.
    pub fn with_host_path(self, path: &str) -> Self {
        let volume = Volume {
            host_path: Some(HostPathVolumeSource {
                path: path.to_owned(),
                type_: None,
            }),
            ..Volume::default()
        };
        self.volume(path, volume, None)
    }

    fn volume(mut self, path: &str, mut volume: Volume, file: Option<&str>) -> Self {
        volume.name = format!("volume-{}", self.volumes.len());
        let mount = VolumeMount {
            name: volume.name.clone(),
            mount_path: path.to_owned(),
            sub_path: file.map(str::to_owned),
            ..VolumeMount::default()
        };
        self.volumes.push((mount, volume));
        self
    }

    /// Returns the pod's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn build_container(&self, name: &str, arguments: Vec<String>, gib: Option<u32>) -> Container {
        let limits =
            gib.map(|gib| BTreeMap::from([(GPU_MEMORY.to_owned(), Quantity(gib.to_string()))]));
        Container {
            name: name.to_owned(),
            image: Some(self.image.clone()),
            args: Some(arguments),
            env: Some(self.environment.clone()),
            volume_mounts: Some(
                self.volumes
                    .iter()
                    .map(|(mount, _)| mount.clone())
                    .collect(),
            ),
            resources: Some(ResourceRequirements {
                limits,
                ..ResourceRequirements::default()
            }),
            security_context: self.security_context.clone(),
            // The kubelet copies the last lines of a failed program's log to the pod's status.
            termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
            ..Container::default()
        }
    }

    /// Returns the pod as the API server receives it.
    #[must_use]
    pub fn build(&self) -> Pod {
        let sidecar = self.sidecar_arguments.iter().map(|arguments| Container {
            restart_policy: Some("Always".to_owned()),
            ..self.build_container("sidecar", arguments.clone(), None)
        });
        let init = self.init_gib.iter();
        let init =
            init.map(|gib| self.build_container("init", self.init_arguments.clone(), Some(*gib)));
        let beside = self.beside.iter().enumerate();
        let beside = beside.map(|(number, gib)| {
            self.build_container(
                &format!("beside-{number}"),
                self.arguments.clone(),
                Some(*gib),
            )
        });
        let mut main = self.build_container("main", self.arguments.clone(), self.gib);
        if let Some(resources) = &mut main.resources {
            let limits = resources.limits.get_or_insert_default();
            limits.extend(self.limits.clone());
        }
        let of_role = |is_beside: bool| {
            let plans = self.others.iter();
            let plans = plans.filter(move |plan| (plan.role == Role::Beside) == is_beside);
            plans.map(|plan| Container {
                restart_policy: (plan.role == Role::Sidecar).then(|| "Always".to_owned()),
                ..self.build_container(&plan.name, plan.arguments.clone(), plan.gib)
            })
        };
        let volumes = self.volumes.iter();
        Pod {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                annotations: Some(self.annotations.clone()),
                ..ObjectMeta::default()
            },
            spec: Some(PodSpec {
                containers: [main]
                    .into_iter()
                    .chain(beside)
                    .chain(of_role(true))
                    .collect(),
                init_containers: Some(sidecar.chain(init).chain(of_role(false)).collect()),
                volumes: Some(volumes.map(|(_, volume)| volume.clone()).collect()),
                node_selector: self.node.as_deref().map(hostname),
                priority_class_name: self.priority_class.clone(),
                restart_policy: Some(if self.restarts { "Always" } else { "Never" }.to_owned()),
                automount_service_account_token: Some(false),
                // With 0 the API server would delete the pod before the kubelet has stopped the
                // containers.
                termination_grace_period_seconds: Some(1),
                host_users: self.user_namespace.then_some(false),
                ..PodSpec::default()
            }),
            status: None,
        }
    }
}

/// Returns the node selector that only this node satisfies.
fn hostname(node: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("kubernetes.io/hostname".to_owned(), node.to_owned())])
}

/// Returns Kubernetes' restricted profile with a read-only root file system.
fn restricted() -> SecurityContext {
    SecurityContext {
        run_as_user: Some(1000),
        run_as_group: Some(1000),
        run_as_non_root: Some(true),
        read_only_root_filesystem: Some(true),
        allow_privilege_escalation: Some(false),
        capabilities: Some(Capabilities {
            drop: Some(vec!["ALL".to_owned()]),
            ..Capabilities::default()
        }),
        seccomp_profile: Some(SeccompProfile {
            type_: "RuntimeDefault".to_owned(),
            ..SeccompProfile::default()
        }),
        ..SecurityContext::default()
    }
}

fn privileged() -> SecurityContext {
    SecurityContext {
        privileged: Some(true),
        ..SecurityContext::default()
    }
}

/// The error of an operation on pods.
#[derive(Debug, thiserror::Error)]
pub enum PodError {
    /// The API server refused.
    #[error("{what}: {source}")]
    ApiServer {
        /// The operation.
        what: String,
        /// The API server's error.
        source: Box<kube::Error>,
    },
    /// The wait timed out or cannot succeed.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

fn api_error(what: impl Into<String>) -> impl FnOnce(kube::Error) -> PodError {
    let what = what.into();
    move |source| PodError::ApiServer {
        what,
        source: Box::new(source),
    }
}

/// The parts of a pod's status that tests read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodState {
    /// Its phase.
    pub phase: String,
    /// The reason of its phase, such as that of the kubelet that rejected it.
    pub reason: String,
    /// Whether the pod has a node.
    pub scheduled: bool,
    /// Whether some container runs.
    pub running: bool,
    /// Whether all containers run.
    pub all_running: bool,
    /// The restarts of all containers.
    pub restarts: i32,
    /// The reason for which a container waits: `reason: message`, or the scheduler's message.
    pub waiting_reason: String,
}

impl PodState {
    /// Extracts the state from the pod's status.
    pub fn of(pod: &Pod) -> Self {
        let status = pod.status.clone().unwrap_or_default();
        let containers = status.container_statuses.unwrap_or_default();
        let inits = status.init_container_statuses.unwrap_or_default();
        let states = inits
            .iter()
            .chain(&containers)
            .filter_map(|container| container.state.as_ref());
        let waiting = states
            .filter_map(|state| state.waiting.as_ref())
            .filter(|waiting| waiting.reason.as_deref() != Some("PodInitializing"))
            .map(|waiting| {
                format!(
                    "{}: {}",
                    waiting.reason.clone().unwrap_or_default(),
                    waiting.message.clone().unwrap_or_default()
                )
            })
            .next();
        let unscheduled = status
            .conditions
            .iter()
            .flatten()
            .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")
            .and_then(|condition| condition.message.clone());
        let runs = |container: &ContainerStatus| {
            let state = container.state.as_ref();
            state.is_some_and(|state| state.running.is_some())
        };
        Self {
            phase: status.phase.unwrap_or_default(),
            reason: status.reason.unwrap_or_default(),
            scheduled: pod
                .spec
                .as_ref()
                .is_some_and(|spec| spec.node_name.is_some()),
            running: containers.iter().any(runs),
            all_running: !containers.is_empty() && containers.iter().all(runs),
            restarts: containers
                .iter()
                .map(|container| container.restart_count)
                .sum(),
            waiting_reason: waiting.or(unscheduled).unwrap_or_default(),
        }
    }

    /// Returns whether the pod is pending with a reason: a container that waits for a GPU, or a pod
    /// without a node.
    pub fn is_waiting_with_reason(&self) -> bool {
        self.phase == "Pending"
            && !self.waiting_reason.is_empty()
            && !self.waiting_reason.starts_with("ContainerCreating")
    }

    /// Returns the reason as written by the agent or the scheduler, without the prefixes of gRPC
    /// and the kubelet.
    pub fn innermost_reason(&self) -> &str {
        self.waiting_reason
            .rsplit_once(" desc = ")
            .map_or(self.waiting_reason.as_str(), |(_, reason)| reason)
    }

    /// Formats the state in one line, for errors.
    fn summary(&self) -> String {
        format!("{} {}", self.phase, self.waiting_reason)
    }
}

/// The pods of one namespace.
#[derive(Clone)]
pub struct Pods {
    api: Api<Pod>,
    namespace: String,
    /// The UIDs of the pods that this value and its clones have created.
    created: Arc<Mutex<Vec<String>>>,
}

impl Pods {
    /// Returns the pods of `namespace`, and creates the namespace if it does not exist.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn in_namespace(client: &Client, namespace: &str) -> Result<Self, PodError> {
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let what = format!("namespace {namespace}");
        if namespaces
            .get_opt(namespace)
            .await
            .map_err(api_error(what.as_str()))?
            .is_none()
        {
            let object = Namespace {
                metadata: ObjectMeta {
                    name: Some(namespace.to_owned()),
                    ..ObjectMeta::default()
                },
                ..Namespace::default()
            };
            namespaces
                .create(&PostParams::default(), &object)
                .await
                .map_err(api_error(what))?;
        }
        Ok(Self {
            api: Api::namespaced(client.clone(), namespace),
            namespace: namespace.to_owned(),
            created: Arc::default(),
        })
    }

    /// Returns the API's client of these pods.
    pub fn api(&self) -> Api<Pod> {
        self.api.clone()
    }

    /// Returns the UIDs of the pods that this value and its clones have created, in that order.
    pub fn created(&self) -> Vec<String> {
        let created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
        created.clone()
    }

    /// Deletes the namespace with its objects, and does not wait for the end of the deletion.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn delete_namespace(client: &Client, namespace: &str) -> Result<(), PodError> {
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let deleted = namespaces.delete(namespace, &DeleteParams::default()).await;
        match deleted {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            other => other
                .map(drop)
                .map_err(api_error(format!("delete namespace {namespace}"))),
        }
    }

    /// Creates the pod. The API server refuses pods until the namespace's default service account
    /// exists, so creation is tried again until then.
    ///
    /// # Errors
    /// When the API server refuses the pod.
    pub async fn create(&self, plan: &PodBuilder) -> Result<(), PodError> {
        let pod = plan.build();
        let what = format!("create pod {}/{}", self.namespace, plan.name);
        let created =
            wait::poll_until(
                &what,
                Duration::from_secs(15),
                POLL_INTERVAL,
                async || match self.api.create(&PostParams::default(), &pod).await {
                    Ok(pod) => Poll::Ready(Ok(pod.metadata.uid)),
                    Err(kube::Error::Api(status)) if status.message.contains("serviceaccount") => {
                        Poll::Pending(status.message.clone())
                    }
                    Err(error) => Poll::Ready(Err(error)),
                },
            )
            .await?;
        let uid = created.map_err(api_error(what))?;
        let mut created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
        created.extend(uid);
        Ok(())
    }

    /// Deletes the pod, and does not wait for the end of the deletion.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn delete(&self, name: &str) -> Result<(), PodError> {
        self.delete_with(name, &DeleteParams::default()).await
    }

    /// Deletes the pod with a grace period of 0, so that the API server removes the object before
    /// its containers stop.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn force_delete(&self, name: &str) -> Result<(), PodError> {
        self.delete_with(name, &DeleteParams::default().grace_period(0))
            .await
    }

    async fn delete_with(&self, name: &str, params: &DeleteParams) -> Result<(), PodError> {
        let what = format!("delete pod {}/{name}", self.namespace);
        match self.api.delete(name, params).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            other => other.map(drop).map_err(api_error(what)),
        }
    }

    /// Deletes every pod of the namespace and waits until the API server has none.
    ///
    /// # Errors
    /// When the API server refuses, or a pod remains.
    pub async fn delete_all(&self) -> Result<(), PodError> {
        let all = ListParams::default();
        self.api
            .delete_collection(&DeleteParams::default(), &all)
            .await
            .map_err(api_error("delete pods"))?;
        let what = format!("the end of every pod in {}", self.namespace);
        let poll = async || match self.api.list(&all).await {
            Ok(list) if list.items.is_empty() => Poll::Ready(()),
            Ok(list) => Poll::Pending(format!("{} are left", list.items.len())),
            Err(error) => Poll::Pending(error.to_string()),
        };
        Ok(wait::poll_until(&what, Duration::from_secs(60), POLL_INTERVAL, poll).await?)
    }

    /// Returns every pod of the namespace.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn list(&self) -> Result<Vec<Pod>, PodError> {
        Ok(self
            .api
            .list(&ListParams::default())
            .await
            .map_err(api_error("list pods"))?
            .items)
    }

    /// Returns the state of the pod.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn state(&self, name: &str) -> Result<PodState, PodError> {
        Ok(PodState::of(&self.get(name).await?))
    }

    /// Returns the pod.
    ///
    /// # Errors
    /// When the API server refuses or has no such pod.
    pub async fn get(&self, name: &str) -> Result<Pod, PodError> {
        self.api
            .get(name)
            .await
            .map_err(api_error(format!("pod {}/{name}", self.namespace)))
    }

    /// Returns the name of the pod's node.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn node(&self, name: &str) -> Result<String, PodError> {
        let pod = self.get(name).await?;
        Ok(pod.spec.and_then(|spec| spec.node_name).unwrap_or_default())
    }

    /// Waits until the pod's state is as wanted. A pod that is Failed ends the wait, unless Failed
    /// is wanted.
    ///
    /// # Errors
    /// After `bound`, with the pod's state.
    pub async fn wait_until(
        &self,
        name: &str,
        wanted: &str,
        bound: Duration,
        is_so: impl Fn(&PodState) -> bool,
    ) -> Result<PodState, PodError> {
        let what = format!("pod {}/{name} {wanted}", self.namespace);
        let poll = async || match self.api.get_opt(name).await {
            Ok(Some(pod)) => {
                let state = PodState::of(&pod);
                if is_so(&state) {
                    Poll::Ready(state)
                } else if state.phase == "Failed" {
                    let message = pod
                        .status
                        .and_then(|status| status.message)
                        .unwrap_or_default();
                    Poll::Failed(format!("Failed {message} {}", state.waiting_reason))
                } else {
                    Poll::Pending(state.summary())
                }
            }
            Ok(None) => Poll::Pending("it is not there".to_owned()),
            Err(error) => Poll::Pending(error.to_string()),
        };
        Ok(wait::poll_until(&what, bound, POLL_INTERVAL, poll).await?)
    }

    /// Waits until a container of the pod runs.
    ///
    /// # Errors
    /// As [`Self::wait_until`].
    pub async fn wait_until_running(
        &self,
        name: &str,
        bound: Duration,
    ) -> Result<PodState, PodError> {
        self.wait_until(name, "to run", bound, |state| state.running)
            .await
    }

    /// Waits until the pod is scheduled and a container waits for a reason that contains `reason`.
    ///
    /// # Errors
    /// As [`Self::wait_until`].
    pub async fn wait_until_waiting(
        &self,
        name: &str,
        reason: &str,
        bound: Duration,
    ) -> Result<PodState, PodError> {
        let wanted = format!("to wait with {reason:?} in its status");
        self.wait_until(name, &wanted, bound, |state| {
            state.scheduled && state.waiting_reason.contains(reason)
        })
        .await
    }

    /// Waits until the API server has no such pod.
    ///
    /// # Errors
    /// After `bound`.
    pub async fn wait_until_deleted(&self, name: &str, bound: Duration) -> Result<(), PodError> {
        let what = format!("the end of pod {}/{name}", self.namespace);
        let poll = async || match self.api.get_opt(name).await {
            Ok(None) => Poll::Ready(()),
            Ok(Some(pod)) => Poll::Pending(PodState::of(&pod).summary()),
            Err(error) => Poll::Pending(error.to_string()),
        };
        Ok(wait::poll_until(&what, bound, POLL_INTERVAL, poll).await?)
    }

    /// Returns the log of the pod's container.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn log(&self, name: &str) -> Result<String, PodError> {
        self.read_log(name, LogParams::default()).await
    }

    /// Returns the log of one of the pod's containers.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn container_log(&self, name: &str, container: &str) -> Result<String, PodError> {
        let params = LogParams {
            container: Some(container.to_owned()),
            ..LogParams::default()
        };
        self.read_log(name, params).await
    }

    /// Returns the node's time of the first line in the container's log, if there is one.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn first_log_time(&self, name: &str) -> Result<Option<Timestamp>, PodError> {
        let params = LogParams {
            timestamps: true,
            ..LogParams::default()
        };
        let log = self.read_log(name, params).await?;
        let first = log.split(' ').next();
        Ok(first.and_then(|time| time.parse().ok()))
    }

    async fn read_log(&self, name: &str, params: LogParams) -> Result<String, PodError> {
        let what = format!("log of pod {}/{name}", self.namespace);
        self.api.logs(name, &params).await.map_err(api_error(what))
    }

    /// Waits for a line of the pod's log from which `wanted` returns a value.
    ///
    /// # Errors
    /// After `bound`, with the last line of the log.
    pub async fn wait_for_log_line<T>(
        &self,
        name: &str,
        bound: Duration,
        wanted: impl Fn(&str) -> Option<T>,
    ) -> Result<T, PodError> {
        self.wait_for_line(name, bound, async || self.log(name).await, wanted)
            .await
    }

    /// Waits for a line of a container's log as [`Self::wait_for_log_line`] does.
    ///
    /// # Errors
    /// After `bound`, with the last line of the log.
    pub async fn wait_for_container_log_line<T>(
        &self,
        name: &str,
        container: &str,
        bound: Duration,
        wanted: impl Fn(&str) -> Option<T>,
    ) -> Result<T, PodError> {
        let log = async || self.container_log(name, container).await;
        self.wait_for_line(name, bound, log, wanted).await
    }

    async fn wait_for_line<T>(
        &self,
        name: &str,
        bound: Duration,
        log: impl AsyncFn() -> Result<String, PodError>,
        wanted: impl Fn(&str) -> Option<T>,
    ) -> Result<T, PodError> {
        let what = format!("a line in the log of pod {}/{name}", self.namespace);
        let poll = async || match log().await {
            Ok(log) => match log.lines().find_map(&wanted) {
                Some(found) => Poll::Ready(found),
                None => Poll::Pending(format!(
                    "its log ends with {:?}",
                    log.lines().last().unwrap_or_default()
                )),
            },
            Err(error) => Poll::Pending(error.to_string()),
        };
        Ok(wait::poll_until(&what, bound, POLL_INTERVAL, poll).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(status: serde_json::Value) -> Pod {
        serde_json::from_value(
            json!({"metadata": {}, "spec": {"containers": [], "nodeName": "n"}, "status": status}),
        )
        .unwrap()
    }

    #[test]
    fn waiting_reason_is_that_of_the_container_status() {
        let waiting =
            json!({"reason": "CreateContainerConfigError", "message": "waiting for 8 GiB"});
        let status = json!({"phase": "Pending", "containerStatuses": [
            {"name": "main", "image": "", "imageID": "", "ready": false, "restartCount": 2, "state": {"waiting": waiting}}]});
        let state = PodState::of(&pod(status));
        assert_eq!(
            state.waiting_reason,
            "CreateContainerConfigError: waiting for 8 GiB"
        );
        assert_eq!(state.innermost_reason(), state.waiting_reason);
        assert_eq!(
            (state.running, state.restarts, state.scheduled),
            (false, 2, true)
        );
    }

    #[test]
    fn innermost_reason_drops_the_kubelets_prefix() {
        let message = "device plugin PreStartContainer rpc failed with err: rpc error: code = ResourceExhausted desc = waiting for 8 GiB";
        let waiting = json!({"reason": "CreateContainerConfigError", "message": message});
        let status = json!({"phase": "Pending", "containerStatuses": [
            {"name": "main", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": {"waiting": waiting}}]});
        assert_eq!(
            PodState::of(&pod(status)).innermost_reason(),
            "waiting for 8 GiB"
        );
    }

    #[test]
    fn builder_sets_gpu_memory_as_a_limit_in_gib() {
        let pod = PodBuilder::new("a", "image").gib(10).build();
        let limits = pod.spec.unwrap().containers[0]
            .resources
            .clone()
            .unwrap()
            .limits
            .unwrap();
        assert_eq!(limits[GPU_MEMORY], Quantity("10".to_owned()));
    }
}
