//! Starts the operator's tasks and joins them.

use std::sync::Arc;

use bursar_crds::context_policy::ContextAction;
use bursar_http::Listeners;
use futures::FutureExt as _;
use futures::future::pending;
use futures::stream::poll_fn;
use kube::Client;
use kube::runtime::reflector;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api::write::ApiWriter;
use crate::budget::fault_evictions;
use crate::budget::reconcile::Reconciler;
use crate::clock::Clock;
use crate::cluster::ClusterIndex;
use crate::cluster::own_writes;
use crate::cluster::watch_liveness::WatchLiveness;
use crate::cluster::watches::{DEBOUNCE, update_index, watch_all};
use crate::leader::{Candidate, Election, GRACE, LAST_CALL};
use crate::nodes::absent_agents;
use crate::nodes::context_policies;
use crate::nodes::maintenance;
use crate::nodes::namespace_label;
use crate::nodes::pod_settings;
use crate::placement::{self, PlacementOptions};
use crate::serve::metrics::Metrics;
use crate::serve::probes::{ReplicaSources, Sources};

/// Budgets queued for the reconciler. When the queue is full, the watches wait.
const QUEUE_LENGTH: usize = 256;

/// Why the operator ended without a request to stop.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// A task returned early.
    #[error("task {task} ended without a request to stop")]
    TaskEnded {
        /// The name of the task.
        task: &'static str,
    },
    /// A task panicked.
    #[error("a task panicked")]
    Panicked(#[source] tokio::task::JoinError),
}

/// The choices of the command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// The placement of pods.
    pub placement: PlacementOptions,
    /// The agents' action for poisoned contexts by default.
    pub default_action: ContextAction,
    /// The namespace of the agents, which are missed there when they are away.
    pub agents: Option<String>,
    /// The election of the replica that works. Without one every replica works.
    pub election: Option<Election>,
}

/// Runs until `shutdown`, and finishes the writes that have begun. Returns early when a task does.
/// With an election, the operator works only while it holds the lease, and then returns an error.
pub async fn run(
    client: Client,
    listeners: Listeners,
    options: Options,
    clock: Clock,
    shutdown: CancellationToken,
) -> Result<(), OperatorError> {
    let sources = ReplicaSources::default();
    let mut tasks = JoinSet::new();
    let server = bursar_http::serve(listeners, sources.clone(), shutdown.clone());
    spawn(&mut tasks, "http-server", server);
    let election = options.election.clone();
    let candidate =
        election.map(|election| Arc::new(Candidate::new(client.clone(), election, clock)));
    let since = match &candidate {
        Some(candidate) => candidate.acquire(&shutdown).await,
        None => Some(Instant::now()),
    };
    if let Some(since) = since {
        spawn_work(&mut tasks, client, options, clock, &sources, &shutdown);
        if let Some(candidate) = candidate.clone() {
            let shutdown = shutdown.clone();
            spawn(&mut tasks, "leader-election", async move {
                // A slow Event must not delay the end after the loss of the Lease.
                let announced = candidate.announce().then(|()| pending());
                tokio::select! {
                    () = candidate.hold(since, &shutdown) => {}
                    () = announced => {}
                }
            });
        }
    }
    let result = join_all(tasks, &shutdown).await;
    if let Some(candidate) = candidate.filter(|_| since.is_some()) {
        let limit = if result.is_ok() { GRACE } else { LAST_CALL };
        if timeout(limit, candidate.release()).await.is_err() {
            warn!("failed to give up the Lease in time");
        }
    }
    info!("stopped");
    result
}

/// Spawns the tasks that watch and write.
fn spawn_work(
    tasks: &mut JoinSet<&'static str>,
    client: Client,
    options: Options,
    clock: Clock,
    sources: &ReplicaSources,
    shutdown: &CancellationToken,
) {
    let placement = options.placement;
    let quantum = placement.quantum;
    let (budgets, writer) = reflector::store();
    let index = ClusterIndex::new(quantum)
        .with_default_action(options.default_action)
        .with_agents_in(options.agents);
    let (index_sender, index) = watch::channel(index);
    let liveness = WatchLiveness::default();
    let metrics = Metrics::new(budgets.clone(), index.clone(), liveness.clone());
    let (work_sender, mut work) = mpsc::channel(QUEUE_LENGTH);
    let (responses, own_writes) = own_writes::channel();
    let changes = watch_all(&client, quantum, writer, &liveness, own_writes);
    sources.start_work(Sources {
        metrics: metrics.clone(),
        index: index.clone(),
        liveness,
    });
    let writer = ApiWriter::new(client, metrics.clone(), responses);
    let updates = update_index(
        changes,
        index_sender,
        work_sender,
        DEBOUNCE,
        shutdown.clone(),
    );
    spawn(tasks, "watches", updates);
    let reconciler = Reconciler::new(writer.clone(), index.clone(), metrics.clone(), clock);
    let queue = poll_fn(move |context| work.poll_recv(context));
    spawn(tasks, "budget-reconciler", reconciler.run(budgets, queue));
    let context_policies = context_policies::run(writer.clone(), index.clone(), shutdown.clone());
    spawn(tasks, "context-policies", context_policies);
    let pod_settings = pod_settings::run(writer.clone(), index.clone(), shutdown.clone());
    spawn(tasks, "pod-settings", pod_settings);
    if placement.drain_for_nvidia {
        let drains = maintenance::run(writer.clone(), index.clone(), shutdown.clone());
        spawn(tasks, "drains for NVIDIA's operators", drains);
    }
    let absences = absent_agents::run(writer.clone(), index.clone(), clock, shutdown.clone());
    spawn(tasks, "absent-agents", absences);
    let namespace_labels = namespace_label::run(writer.clone(), index.clone(), shutdown.clone());
    spawn(tasks, "namespace-labels", namespace_labels);
    let fault_evictions = fault_evictions::run(writer.clone(), index.clone(), shutdown.clone());
    spawn(tasks, "fault-evictions", fault_evictions);
    let placement =
        placement::controller::run(writer, index, placement, clock, metrics, shutdown.clone());
    spawn(tasks, "placement", placement);
    info!(%quantum, version = env!("CARGO_PKG_VERSION"), "started");
}

/// Spawns a task that returns its name.
fn spawn(
    tasks: &mut JoinSet<&'static str>,
    name: &'static str,
    work: impl Future<Output = ()> + Send + 'static,
) {
    tasks.spawn(async move {
        work.await;
        name
    });
}

/// Joins the tasks. The first one that ends stops the others. What they have begun goes on after a
/// request to stop, and for [`GRACE`] otherwise: the replica may have lost the Lease.
async fn join_all(
    mut tasks: JoinSet<&'static str>,
    shutdown: &CancellationToken,
) -> Result<(), OperatorError> {
    let first = tasks.join_next().await;
    let requested = shutdown.is_cancelled();
    shutdown.cancel();
    let mut result = first.map_or(Ok(()), |ended| task_result(ended, requested));
    let deadline = Instant::now() + GRACE;
    loop {
        let next = tasks.join_next();
        let ended = match requested {
            true => next.await,
            false => match timeout_at(deadline, next).await {
                Ok(ended) => ended,
                Err(_) => {
                    warn!("work that had begun is cut off");
                    return result;
                }
            },
        };
        match ended {
            Some(ended) => result = result.and(task_result(ended, true)),
            None => return result,
        }
    }
}

/// The result of a finished task: an error unless the shutdown was requested.
fn task_result(
    ended: Result<&'static str, tokio::task::JoinError>,
    requested: bool,
) -> Result<(), OperatorError> {
    match ended.map_err(OperatorError::Panicked)? {
        _ if requested => Ok(()),
        task => Err(OperatorError::TaskEnded { task }),
    }
}
