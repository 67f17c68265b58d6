//! Keeps the device manager's state, with the names of `manager.go` and `pod_devices.go`. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use bursar_kubelet::api::deviceplugin::{
    ContainerAllocateResponse, DevicePluginOptions, HEALTHY, ListAndWatchResponse,
};
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use super::checkpoint::{Content, Entry};
use super::client::Client;
use super::{Container, Kind, Pod, Shared};

/// A resource in the node's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    pub capacity: usize,
    pub allocatable: usize,
}

/// The options that the kubelet passes to the runtime for a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    pub cdi_devices: Vec<String>,
    pub annotations: BTreeMap<String, String>,
}

/// The result of `devicesToAllocate`.
#[derive(Debug)]
pub enum Wanted {
    /// No call is needed: the container has its devices, or runs.
    Nothing,
    /// The devices to allocate, in this order.
    Ids(Vec<String>),
}

#[derive(Debug)]
struct Endpoint {
    /// None after a restart, until the plugin registers.
    client: Option<Arc<Client>>,
    options: Option<DevicePluginOptions>,
    stopped: Option<Instant>,
}

type Ids = BTreeSet<String>;

#[derive(Debug)]
pub struct Manager {
    endpoints: BTreeMap<String, Endpoint>,
    /// `server.clients`: the connected plugins.
    clients: BTreeMap<String, Arc<Client>>,
    healthy: BTreeMap<String, Ids>,
    unhealthy: BTreeMap<String, Ids>,
    allocated: BTreeMap<String, Ids>,
    held: BTreeMap<(String, String, String), (Vec<String>, ContainerAllocateResponse)>,
    /// `devicesToReuse` of the pod that is being admitted.
    reuse: Option<(String, BTreeMap<String, Ids>)>,
    active: BTreeMap<String, Pod>,
    /// The containers with a process. The runtime knows them, so they outlive the kubelet.
    running: BTreeSet<(String, String)>,
    pub sources_ready: bool,
    random: StdRng,
}

impl Manager {
    pub fn new(seed: u64) -> Self {
        Self {
            endpoints: BTreeMap::new(),
            clients: BTreeMap::new(),
            healthy: BTreeMap::new(),
            unhealthy: BTreeMap::new(),
            allocated: BTreeMap::new(),
            held: BTreeMap::new(),
            reuse: None,
            active: BTreeMap::new(),
            running: BTreeSet::new(),
            sources_ready: true,
            random: StdRng::seed_from_u64(seed),
        }
    }

    /// `readCheckpoint`, in a new process.
    pub fn restore(&mut self, content: Content) {
        let running = std::mem::take(&mut self.running);
        let seed = self.random.random();
        *self = Self {
            running,
            sources_ready: false,
            ..Self::new(seed)
        };
        for Entry {
            uid,
            container,
            resource,
            ids,
            answer,
        } in content.entries
        {
            self.held.insert((uid, container, resource), (ids, answer));
        }
        for resource in content.registered.into_keys() {
            self.healthy.insert(resource.clone(), Ids::new());
            self.unhealthy.insert(resource.clone(), Ids::new());
            let stopped = Some(Instant::now());
            self.endpoints.insert(
                resource,
                Endpoint {
                    client: None,
                    options: None,
                    stopped,
                },
            );
        }
        self.recount();
    }

    /// `toCheckpointData` and the registered devices.
    pub fn to_checkpoint(&self) -> Content {
        let entry =
            |((uid, container, resource), (ids, answer)): (&(String, String, String), &_)| {
                let (ids, answer): (&Vec<String>, &ContainerAllocateResponse) = (ids, answer);
                Entry {
                    uid: uid.clone(),
                    container: container.clone(),
                    resource: resource.clone(),
                    ids: ids.clone(),
                    answer: answer.clone(),
                }
            };
        Content {
            entries: self
                .held
                .iter()
                .map(|(key, (ids, answer))| entry((key, &(ids.clone(), answer.clone()))))
                .collect(),
            registered: self.healthy.clone(),
        }
    }

    pub fn client(&self, resource: &str) -> Option<Arc<Client>> {
        self.clients.get(resource).cloned()
    }

    /// `registerClient`: replaces the former client without closing it.
    pub fn register_client(&mut self, resource: &str, client: Arc<Client>) {
        self.clients.insert(resource.to_owned(), client);
    }

    pub fn deregister_client(&mut self, resource: &str) {
        self.clients.remove(resource);
    }

    /// `PluginConnected`.
    pub fn connected(&mut self, resource: &str, client: Arc<Client>, options: DevicePluginOptions) {
        let endpoint = Endpoint {
            client: Some(client),
            options: Some(options),
            stopped: None,
        };
        self.endpoints.insert(resource.to_owned(), endpoint);
    }

    /// `runClient` after its stream ended: disconnects the client that is registered now, whichever
    /// it is.
    pub fn stream_ended(&mut self, resource: &str) {
        let Some(client) = self.clients.remove(resource) else {
            return;
        };
        client.cut.cancel();
        if let Some(endpoint) = self.endpoints.get_mut(resource) {
            endpoint.stopped = Some(Instant::now());
            let healthy = self
                .healthy
                .insert(resource.to_owned(), Ids::new())
                .unwrap_or_default();
            self.unhealthy
                .entry(resource.to_owned())
                .or_default()
                .extend(healthy);
        }
    }

    /// Disconnects all clients, because the kubelet's process ends.
    pub fn disconnect_all(&mut self) {
        for client in std::mem::take(&mut self.clients).into_values() {
            client.cut.cancel();
        }
    }

    /// `genericDeviceUpdateCallback`.
    pub fn update(&mut self, resource: &str, list: ListAndWatchResponse) {
        let (healthy, unhealthy): (Vec<_>, Vec<_>) = list
            .devices
            .into_iter()
            .partition(|device| device.health == HEALTHY);
        let ids = |devices: Vec<_>| {
            let id = |device: bursar_kubelet::api::deviceplugin::Device| device.id;
            devices.into_iter().map(id).collect::<Ids>()
        };
        self.healthy.insert(resource.to_owned(), ids(healthy));
        self.unhealthy.insert(resource.to_owned(), ids(unhealthy));
    }

    /// `GetCapacity`.
    pub fn capacity(&self, resource: &str) -> Option<Capacity> {
        let endpoint = self.endpoints.get(resource)?;
        if Shared::expired(endpoint.stopped) {
            return None;
        }
        let allocatable = self.healthy.get(resource).map_or(0, Ids::len);
        let unhealthy = self.unhealthy.get(resource).map_or(0, Ids::len);
        Some(Capacity {
            capacity: allocatable + unhealthy,
            allocatable,
        })
    }

    pub fn resource_health(&self, uid: &str, container: &str) -> Vec<(String, bool)> {
        let held = self
            .held
            .iter()
            .filter(|((u, c, _), _)| u == uid && c == container);
        held.flat_map(|((_, _, resource), (ids, _))| {
            let unhealthy = self.unhealthy.get(resource);
            ids.iter()
                .map(move |id| (id.clone(), !unhealthy.is_some_and(|u| u.contains(id))))
        })
        .collect()
    }

    pub fn is_plugin_resource(&self, resource: &str) -> bool {
        self.healthy.contains_key(resource) || self.allocated.contains_key(resource)
    }

    /// The client of the resource's plugin.
    pub fn endpoint(&self, resource: &str) -> Result<Arc<Client>, String> {
        let endpoint = self.endpoints.get(resource);
        let endpoint = endpoint.ok_or_else(|| format!("unknown Device Plugin {resource}"))?;
        match (&endpoint.client, endpoint.stopped) {
            (Some(client), None) => Ok(Arc::clone(client)),
            _ => Err(format!("endpoint {resource} has been stopped")),
        }
    }

    /// Whether the kubelet calls PreStartContainer. It does not until the plugin has registered
    /// again.
    pub fn needs_pre_start(&self, resource: &str) -> Result<bool, String> {
        let endpoint = self.endpoints.get(resource);
        let endpoint = endpoint.ok_or_else(|| format!("endpoint not found for {resource}"))?;
        Ok(endpoint
            .options
            .is_some_and(|options| options.pre_start_required))
    }

    /// `devicesToAllocate`.
    pub fn choose(
        &mut self,
        uid: &str,
        container: &str,
        resource: &str,
        count: usize,
    ) -> Result<Wanted, String> {
        let assigned = self.assigned(uid, container, resource);
        if !assigned.is_empty() && assigned.len() != count {
            return Err(format!("pod {uid} changed request for resource {resource}"));
        }
        let is_running = self
            .running
            .contains(&(uid.to_owned(), container.to_owned()));
        if !self.sources_ready && is_running {
            return Ok(Wanted::Nothing);
        }
        let reusable = self.reusable(uid, resource);
        let Some(healthy) = self.healthy.get(resource) else {
            return Err(format!("cannot allocate unregistered device {resource}"));
        };
        if healthy.is_empty() {
            return Err(format!(
                "no healthy devices present; cannot allocate unhealthy devices {resource}"
            ));
        }
        if !assigned.iter().all(|id| healthy.contains(id)) {
            return Err(format!(
                "previously allocated devices of {resource} are no longer healthy"
            ));
        }
        if !assigned.is_empty() || count == 0 {
            return Ok(Wanted::Nothing);
        }
        let in_use = self.allocated.entry(resource.to_owned()).or_default();
        let mut chosen: Vec<String> = reusable.into_iter().collect();
        chosen.shuffle(&mut self.random);
        chosen.truncate(count);
        let mut free: Vec<String> = healthy.difference(in_use).cloned().collect();
        let needed = count - chosen.len();
        if free.len() < needed {
            return Err(format!(
                "requested number of devices unavailable for {resource}. Requested: {needed}, Available: {}",
                free.len()
            ));
        }
        free.shuffle(&mut self.random);
        chosen.extend(free.into_iter().take(needed));
        in_use.extend(chosen.iter().cloned());
        chosen.shuffle(&mut self.random);
        Ok(Wanted::Ids(chosen))
    }

    /// The devices that init containers of the pod under admission leave to its later containers.
    fn reusable(&mut self, uid: &str, resource: &str) -> Ids {
        if self.reuse.as_ref().is_none_or(|(pod, _)| pod != uid) {
            self.reuse = Some((uid.to_owned(), BTreeMap::new()));
        }
        let reuse = self
            .reuse
            .as_ref()
            .and_then(|(_, reuse)| reuse.get(resource));
        reuse.cloned().unwrap_or_default()
    }

    /// Updates the reusable devices after a container's allocation. Those of a plain init container
    /// become reusable, those of any other do not.
    pub fn update_reusable(&mut self, uid: &str, container: &Container) {
        for (resource, _) in &container.limits {
            let ids = self.assigned(uid, &container.name, resource);
            let mut reusable = self.reusable(uid, resource);
            match container.kind {
                Kind::Init => reusable.extend(ids),
                Kind::Sidecar | Kind::App => reusable.retain(|id| !ids.contains(id)),
            }
            if let Some((_, reuse)) = &mut self.reuse {
                reuse.insert(resource.clone(), reusable);
            }
        }
    }

    pub fn insert(
        &mut self,
        uid: &str,
        container: &str,
        resource: &str,
        ids: Vec<String>,
        answer: ContainerAllocateResponse,
    ) {
        let key = (uid.to_owned(), container.to_owned(), resource.to_owned());
        self.held.insert(key, (ids, answer));
    }

    /// `m.allocatedDevices = m.podDevices.devices()`.
    pub fn recount(&mut self) {
        self.allocated.clear();
        for ((_, _, resource), (ids, _)) in &self.held {
            self.allocated
                .entry(resource.clone())
                .or_default()
                .extend(ids.iter().cloned());
        }
    }

    /// `UpdateAllocatedDevices`.
    pub fn forget_inactive(&mut self) {
        if !self.sources_ready {
            return;
        }
        let before = self.held.len();
        let active = &self.active;
        self.held.retain(|(uid, _, _), _| active.contains_key(uid));
        if self.held.len() != before {
            self.recount();
        }
    }

    pub fn assigned(&self, uid: &str, container: &str, resource: &str) -> Vec<String> {
        let key = (uid.to_owned(), container.to_owned(), resource.to_owned());
        let mut ids = self
            .held
            .get(&key)
            .map(|(ids, _)| ids.clone())
            .unwrap_or_default();
        ids.sort_unstable();
        ids
    }

    pub fn run_options(&self, uid: &str, container: &str) -> Options {
        let mut options = Options::default();
        for ((u, c, _), (_, answer)) in &self.held {
            if u == uid && c == container {
                let devices = answer.cdi_devices.iter().map(|device| device.name.clone());
                options.cdi_devices.extend(devices);
                options.annotations.extend(answer.annotations.clone());
            }
        }
        options
    }

    pub fn shuffle(&mut self, ids: &mut [String]) {
        ids.shuffle(&mut self.random);
    }

    pub fn active(&self) -> impl Iterator<Item = &Pod> {
        self.active.values()
    }

    pub fn set_active(&mut self, pod: &Pod) {
        self.active.insert(pod.uid.clone(), pod.clone());
    }

    pub fn set_inactive(&mut self, uid: &str) {
        self.active.remove(uid);
        self.running.retain(|(pod, _)| pod != uid);
    }

    pub fn set_running(&mut self, uid: &str, container: &str, running: bool) {
        let key = (uid.to_owned(), container.to_owned());
        if running {
            self.running.insert(key);
        } else {
            self.running.remove(&key);
        }
    }

    pub fn clear_running(&mut self) {
        self.running.clear();
    }
}
