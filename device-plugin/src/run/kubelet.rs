//! Starts the node task and the registration with the kubelet.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bursar_apiserver::PodSettingsReader;
use bursar_config::{Config, SharingConfig};
use bursar_gpu::cuda_fitness::CudaFitnesses;
use bursar_gpu::generations::GpuGenerations;
use bursar_host::clock;
use bursar_host::pod_cgroups::PodCgroups;
use bursar_kubelet::devices::Devices;
use bursar_kubelet::lifecycle::{Lifecycle, Registration};
use bursar_kubelet::pod_resources::PodResourcesClient;
use bursar_kubelet::server::PluginService;
use bursar_ledger::units::{Bytes, GpuUuid, Resource};
use bursar_node::actor::{DeviceUpdates, Inputs, NodeHandle, Observers, node_task};
use bursar_node::allocator::NodeAllocator;
use bursar_node::host::{HostError, OsHost};
use bursar_node::other_plugins::{self, GpuOwners};
use bursar_node::pod_resolver::PodResolver;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{Agent, Gpus, NodeState, Tenants};
use crate::metrics::Metrics;
use crate::relay::{self, probe};

impl Agent {
    /// Starts to look for other device plugins with the node's GPUs.
    pub(super) fn start_owner_check(&mut self) -> watch::Receiver<GpuOwners> {
        let (sender, owners) = watch::channel(GpuOwners::default());
        let kubelet = PodResourcesClient::new(&self.config.kubelet.pod_resources_socket);
        let task = other_plugins::run(kubelet, sender, self.stop.clone());
        self.spawn("owner check", task);
        owners
    }

    /// A resolver for the extended resources under the names that pods request.
    pub(super) fn pod_resolver(&self) -> PodResolver {
        let Config {
            resources, kubelet, ..
        } = &self.config;
        let named = |resource: Resource| (resource, resource.name(resources.quantum).to_owned());
        PodResolver {
            device_plugin_dir: kubelet.device_plugin_dir.clone(),
            resource_names: {
                use Resource::{Compute, DeviceMemory, ManagedMemory};
                [DeviceMemory, ManagedMemory, Compute].map(named).to_vec()
            },
            pod_resources: PodResourcesClient::new(&kubelet.pod_resources_socket),
            settings: PodSettingsReader::new(self.client.as_ref().map(|_| self.spec.clone())),
            checkpoint_read: Default::default(),
        }
    }

    /// Restores the state of the agent that ran before.
    pub(super) async fn recover_allocator(
        &self,
        tenants: &Tenants,
    ) -> Result<NodeAllocator<OsHost>, HostError> {
        let config = &self.config;
        let host = OsHost::new(config, tenants.sessions.clone(), tenants.leases.clone())?;
        let found = host.survey();
        let kubelet = self
            .pod_resolver()
            .read_device_checkpoint()
            .await
            .unwrap_or_else(|error| {
                warn!(%error, "failed to read the kubelet's device checkpoint at the start");
                Default::default()
            });
        let cgroups = PodCgroups::new(config.paths.cgroup_root.clone());
        let metrics = self.metrics.node.clone();
        let mut allocator =
            NodeAllocator::new(config.resources, clock::boot_id(), host, cgroups, metrics);
        allocator
            .recover(found, &kubelet.entries, clock::now())
            .await;
        if tenants.supervised.is_some() {
            // Nothing is known yet of this driver, whatever the agent before has found.
            allocator
                .set_cuda_fitness(&CudaFitnesses::new(), clock::now())
                .await;
        }
        if !config.sharing.allow_unscrubbed {
            allocator
                .set_scrubbed_gpus(BTreeSet::new(), clock::now())
                .await;
        }
        Ok(allocator)
    }

    /// The inputs of the node task; `withheld` is the memory that the audit excludes from binding.
    pub(super) fn node_inputs(
        &self,
        gpus: &Gpus,
        tenants: &Tenants,
        owners: &watch::Receiver<GpuOwners>,
        withheld: watch::Receiver<BTreeMap<GpuUuid, Bytes>>,
    ) -> Inputs {
        let SharingConfig {
            allow_unscrubbed,
            refuse_beside_other_plugins: refuses,
        } = self.config.sharing;
        Inputs {
            inventory: gpus.inventory.clone(),
            owners: refuses.then(|| owners.clone()),
            cuda_fitness: tenants
                .supervised
                .as_ref()
                .map(|supervised| supervised.fitness.subscribe()),
            drain: gpus.drain.clone(),
            scrubbed: (!allow_unscrubbed).then(|| tenants.scrubbed.clone()),
            spec: self.spec.clone(),
            withheld,
        }
    }

    pub(super) fn start_node(
        &mut self,
        allocator: NodeAllocator<OsHost>,
        inputs: Inputs,
        generations: GpuGenerations,
    ) -> (NodeState, NodeHandle, DeviceUpdates) {
        let observers = Observers {
            events: self.events.clone(),
            metrics: self.metrics.node.clone(),
        };
        let (task, handle, updates, snapshots, heartbeat) = node_task(
            allocator,
            self.pod_resolver(),
            self.config.binding.wait,
            inputs,
            generations,
            observers,
        );
        self.spawn("node", task.run());
        let state = NodeState {
            snapshots,
            heartbeat,
        };
        (state, handle, updates)
    }

    /// Registers the resources, each as soon as the node offers a device of that resource.
    ///
    /// Returns the registration state of device memory.
    pub(super) fn register(
        &mut self,
        node: NodeHandle,
        updates: DeviceUpdates,
    ) -> watch::Receiver<Registration> {
        let DeviceUpdates {
            device,
            managed,
            compute,
        } = updates;
        let silent = watch::Sender::new(false);
        let is_silent = silent.subscribe();
        if let Some(dir) = self.config.kubelet.relay_dir.clone() {
            let metrics = self.metrics.clone();
            let count = move || metrics.count_relay_silence();
            let stop = self.stop.clone();
            self.spawn("relay probe", async move {
                let probe = probe::run(dir, "bursar-relay", probe::PACE, silent, count);
                stop.run_until_cancelled(probe).await;
            });
        }
        let node = Arc::new(node);
        let mut register_resource = |resource: Resource, devices: watch::Receiver<Devices>| {
            let name = resource.name(self.config.resources.quantum).to_owned();
            let service = PluginService {
                resource,
                allocator: node.clone(),
                devices: devices.clone(),
            };
            let kubelet = &self.config.kubelet;
            let relay = kubelet.relay_dir.clone();
            let dir = relay.as_ref().unwrap_or(&kubelet.device_plugin_dir);
            let (lifecycle, mut registration) = Lifecycle::new(dir, name.clone(), service);
            self.spawn(
                "registration",
                register_when_offered(lifecycle, devices, self.stop.clone()),
            );
            if let Some(dir) = relay {
                let (task, with_kubelet) = relay::follow(
                    dir,
                    name,
                    is_silent.clone(),
                    registration,
                    self.stop.clone(),
                );
                self.spawn("relay watch", task);
                registration = with_kubelet;
            }
            self.spawn(
                "registration counter",
                count_registrations(
                    registration.clone(),
                    resource,
                    self.metrics.clone(),
                    self.stop.clone(),
                ),
            );
            registration
        };
        register_resource(Resource::ManagedMemory, managed);
        register_resource(Resource::Compute, compute);
        register_resource(Resource::DeviceMemory, device)
    }
}

/// Registers a resource once the node offers a device, until `stop`.
async fn register_when_offered(
    lifecycle: Lifecycle<NodeHandle>,
    mut devices: watch::Receiver<Devices>,
    stop: CancellationToken,
) {
    let first = tokio::select! {
        first = devices.wait_for(|devices| !devices.is_empty()) => first.is_ok(),
        () = stop.cancelled() => false,
    };
    if first {
        lifecycle.run(stop).await;
    }
}

/// Counts the registrations that the kubelet accepted.
async fn count_registrations(
    mut registration: watch::Receiver<Registration>,
    resource: Resource,
    metrics: Metrics,
    stop: CancellationToken,
) {
    while let Some(Ok(())) = stop.run_until_cancelled(registration.changed()).await {
        if registration.borrow_and_update().is_registered() {
            metrics.count_registration(resource);
        }
    }
    // The lifecycle may end before the agent stops. Its own task reports that.
    stop.cancelled().await;
}
