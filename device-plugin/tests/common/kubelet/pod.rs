//! Defines pods, as far as a device manager needs them.

/// A pod. The containers are in order of admission: init containers first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub containers: Vec<Container>,
    pub phase: Phase,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    Active,
    Succeeded,
    /// The pod failed, with this message.
    Failed(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    pub name: String,
    pub kind: Kind,
    /// Device plugin resources with their counts.
    pub limits: Vec<(String, usize)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A plain init container, which ends before the next container starts.
    Init,
    /// A restartable init container, which runs as long as the pod.
    Sidecar,
    App,
}

impl Pod {
    /// A pod without containers. Its UID is derived from its name.
    pub fn new(name: &str) -> Self {
        Self {
            uid: format!("{name}-uid"),
            namespace: "default".to_owned(),
            name: name.to_owned(),
            containers: Vec::new(),
            phase: Phase::Active,
        }
    }

    /// A pod with one container, `main`.
    pub fn with(name: &str, resource: &str, count: usize) -> Self {
        Self::new(name).container(Kind::App, "main", resource, count)
    }

    /// Adds a container.
    pub fn container(mut self, kind: Kind, name: &str, resource: &str, count: usize) -> Self {
        let limits = vec![(resource.to_owned(), count)];
        self.containers.push(Container {
            name: name.to_owned(),
            kind,
            limits,
        });
        self.containers
            .sort_by_key(|container| container.kind == Kind::App);
        self
    }

    /// Adds a limit to the container that was added last.
    pub fn and(mut self, resource: &str, count: usize) -> Self {
        let last = self.containers.last_mut().expect("a container");
        last.limits.push((resource.to_owned(), count));
        self
    }

    pub fn container_named(&self, name: &str) -> &Container {
        self.containers
            .iter()
            .find(|c| c.name == name)
            .expect("a container of the pod")
    }

    pub fn is_terminal(&self) -> bool {
        self.phase != Phase::Active
    }
}
