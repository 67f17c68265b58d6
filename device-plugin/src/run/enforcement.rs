//! Starts the tasks that hold tenants to their quotas, and the service for retained memory.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use bursar_compute::task::{self as compute, ComputeInputs, ComputeStatus};
use bursar_crds::gpu_node::Fault;
use bursar_enforcement::audit::{AuditInputs, AuditStatus, Auditor};
use bursar_enforcement::drain::{self, DrainInputs};
use bursar_enforcement::driver_limits::{self, Limits};
use bursar_enforcement::faults::{self, FaultInputs};
use bursar_gpu::drain::DrainState;
use bursar_gpu_node::quota_overrides::{self, AppliedSpec};
use bursar_host::checkpoint::Checkpoint;
use bursar_kubelet::lifecycle::Registration;
use bursar_ledger::units::{Bytes, GpuUuid};
use bursar_retained::fdstore_client;
use bursar_retained::lease_ids::LeaseIds;
use bursar_retained::service::LeaseService;
use bursar_retained::status::RetainedStatus;
use bursar_retained::tokens::key;
use bursar_retained::tokens::seal::NodeKey;
use bursar_sessions::lease_handle::{LeaseHandle, LiveLeases};
use bursar_sessions::{CgroupResolver, RecoveryPolicy, Sessions};
use bursar_supervision::provisioners::{Program, Provisioners};
use bursar_supervision::scrub_check::ScrubCache;
use bursar_supervision::supervision::Supervisor;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Agent, AgentError, Gpus, NodeState, Supervised, Tenants};

impl Agent {
    /// Starts the service for retained memory. Where the feature is off, the service refuses every
    /// request.
    pub(super) fn start_lease_service(&mut self, gpus: &Gpus) -> Result<Tenants, AgentError> {
        let paths = &self.config.paths;
        let resolver = Arc::new(CgroupResolver::new(paths.proc.clone()));
        let (leases, commands) = LeaseHandle::channel();
        let (live_sender, live_leases) = watch::channel(LiveLeases::new());
        let folder = paths.run_dir.join("retained");
        let program = self.program();
        let provisioners = Arc::new(Provisioners::new(program.clone()));
        let sampler = Arc::new(gpus.nvml.clone());
        let sessions = Sessions::new(paths.run_dir.clone(), sampler, resolver.clone())
            .with_leases(leases.clone(), live_leases)
            .with_default_policy(RecoveryPolicy::with_action(
                self.config.context_policy.default,
            ))
            // Sizes measured by earlier versions of the agent came from tenants: they lie in the
            // state directory.
            .with_context_sizes(paths.run_dir.join("contexts.json"));
        let sessions = Arc::new(sessions);
        let (status, retained) = watch::channel(RetainedStatus::default());
        let config = &self.config.retained_memory;
        let fdstore = config.enabled.then(|| config.fdstore_socket.clone());
        let secret = key::load_or_create(&paths.run_dir.join(key::FILE_NAME));
        let service = LeaseService {
            commands,
            store_events: fdstore
                .map(fdstore_client::start)
                .transpose()
                .map_err(AgentError::Thread)?,
            per_gpu: config.per_gpu,
            sessions: sessions.clone(),
            membership: resolver,
            provisioners,
            program,
            scrub_cache: ScrubCache::load(Checkpoint::new(folder.join("scrubbed.json"))),
            lease_ids: LeaseIds::new(SystemTime::now()),
            key: NodeKey::new(self.node.clone(), secret)?,
            live_leases: live_sender,
            drain: gpus.drain.clone(),
            released_gpus: watch::Sender::default(),
            scrubbed: watch::Sender::default(),
            status,
        };
        let tenants = Tenants {
            sessions,
            leases,
            retained,
            scrubbed: service.scrubbed.subscribe(),
            released_gpus: service.released_gpus.subscribe(),
            supervised: self.config.retained_memory.enabled.then(|| Supervised {
                provisioners: service.provisioners.clone(),
                fitness: watch::Sender::default(),
            }),
            live_leases: service.live_leases.subscribe(),
            token_key: service.key.public(),
        };
        self.spawn("retained memory", service.run(self.stop.clone()));
        Ok(tenants)
    }

    /// Starts the supervision of the GPUs' allocator runtimes, unless retained memory is off. It
    /// begins once the kubelet has had the node's offer.
    pub(super) fn start_supervision(
        &mut self,
        gpus: &Gpus,
        tenants: &Tenants,
        registration: &watch::Receiver<Registration>,
    ) {
        let Some(Supervised {
            provisioners,
            fitness,
        }) = &tenants.supervised
        else {
            return;
        };
        let supervisor = Supervisor {
            provisioners: provisioners.clone(),
            inventory: gpus.inventory.clone(),
            drain: gpus.drain.clone(),
            live_leases: tenants.live_leases.clone(),
            fitness: fitness.clone(),
        };
        let mut registration = registration.clone();
        let offered = async move {
            let registered = registration.wait_for(Registration::is_registered);
            let is_offered = registered.await.is_ok();
            // The lifecycle ends only with the agent.
            if !is_offered {
                std::future::pending().await
            }
        };
        let task = supervisor.run(offered, std::time::Instant::now, self.stop.clone());
        self.spawn("runtime supervision", task);
    }

    /// How the provisioner is started.
    fn program(&self) -> Program {
        Program {
            path: self.provisioner(),
            driver: self.config.driver.clone(),
            libraries: self.config.paths.run_dir.join("retained/lib"),
            has_helpers: false,
        }
    }

    /// Starts the task that holds the weights of compute time, where the node offers it.
    pub(super) fn start_compute(
        &mut self,
        gpus: &Gpus,
        tenants: &Tenants,
        node: &NodeState,
    ) -> watch::Receiver<ComputeStatus> {
        let (sender, status) = watch::channel(ComputeStatus::new());
        let Some(round) = self.config.resources.compute_round else {
            return status;
        };
        let inputs = ComputeInputs {
            round,
            config: self.config.clone(),
            nvml: gpus.nvml.clone(),
            sessions: tenants.sessions.clone(),
            snapshots: node.snapshots.clone(),
            program: Program {
                libraries: self.config.paths.run_dir.join("compute/lib"),
                has_helpers: true,
                ..self.program()
            },
            events: self.events.clone(),
        };
        let task = compute::run(inputs, sender, self.stop.clone());
        self.spawn("compute time", task);
        status
    }

    /// The configured provisioner, or else the one beside the agent's program.
    pub(super) fn provisioner(&self) -> PathBuf {
        let beside_agent = || {
            let own = std::env::current_exe().unwrap_or_default();
            own.with_file_name("bursar-provisioner")
        };
        self.config
            .retained_memory
            .provisioner
            .clone()
            .unwrap_or_else(beside_agent)
    }

    /// Starts the task that drains GPUs; it keeps the state in `drain`.
    pub(super) fn start_drain(
        &mut self,
        drain: watch::Sender<DrainState>,
        gpus: &Gpus,
        tenants: &Tenants,
    ) {
        let inputs = DrainInputs {
            proc: self.config.paths.proc.clone(),
            sessions: tenants.sessions.clone(),
            orders: self.spec.clone(),
            inventory: gpus.inventory.clone(),
            released_by_leases: tenants.released_gpus.clone(),
        };
        self.spawn("drain", drain::run(inputs, drain, self.stop.clone()));
    }

    pub(super) fn start_driver_limits(
        &mut self,
        gpus: &Gpus,
        tenants: &Tenants,
        node: &NodeState,
    ) -> watch::Receiver<Limits> {
        let (limits, set) = watch::channel(Limits::new());
        let task = driver_limits::run(
            gpus.nvml.clone(),
            tenants.sessions.clone(),
            node.snapshots.clone(),
            limits,
            self.config.audit.clone(),
            self.stop.clone(),
        );
        self.spawn("driver limits", task);
        set
    }

    pub(super) fn start_audit(
        &mut self,
        gpus: &Gpus,
        tenants: &Tenants,
        node: &NodeState,
        limits: &watch::Receiver<Limits>,
        withheld: watch::Sender<BTreeMap<GpuUuid, Bytes>>,
    ) -> Result<watch::Receiver<AuditStatus>, AgentError> {
        let inputs = AuditInputs {
            config: self.config.clone(),
            nvml: gpus.nvml.clone(),
            sessions: tenants.sessions.clone(),
            snapshots: node.snapshots.clone(),
            limits: limits.clone(),
            spec: self.spec.clone(),
            withhold: withheld,
            events: self.events.clone(),
            metrics: self.metrics.audit.clone(),
        };
        let (auditor, audited) = Auditor::new(inputs).map_err(AgentError::Thread)?;
        self.spawn("audit", auditor.run(self.stop.clone()));
        Ok(audited)
    }

    pub(super) fn start_faults(
        &mut self,
        gpus: &Gpus,
        tenants: &Tenants,
        node: &NodeState,
        disconnected_since: watch::Receiver<Option<Instant>>,
    ) -> watch::Receiver<Vec<Fault>> {
        let inputs = FaultInputs {
            paths: self.config.paths.clone(),
            sessions: tenants.sessions.clone(),
            snapshots: node.snapshots.clone(),
            orders: self.spec.clone(),
            policies: self.policies.subscribe(),
            xids: gpus.xids.clone(),
            disconnected_since,
            events: self.events.clone(),
            default_action: self.config.context_policy.default,
            metrics: self.metrics.audit.clone(),
        };
        let (sender, open) = watch::channel(Vec::new());
        self.spawn("faults", faults::run(inputs, sender, self.stop.clone()));
        open
    }

    pub(super) fn start_quota_overrides(
        &mut self,
        tenants: &Tenants,
        node: &NodeState,
    ) -> watch::Receiver<AppliedSpec> {
        let (sender, applied) = watch::channel(AppliedSpec::default());
        let task = quota_overrides::run(
            tenants.sessions.clone(),
            node.snapshots.clone(),
            self.spec.clone(),
            sender,
            self.stop.clone(),
        );
        self.spawn("quota overrides", task);
        applied
    }
}
