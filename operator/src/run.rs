//! The operator's tasks and their end.

use bursar_http::Listeners;
use futures::stream::poll_fn;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::runtime::reflector;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::api::write::Writer;
use crate::budget::reconcile::Reconciler;
use crate::cluster::World;
use crate::cluster::own_writes;
use crate::cluster::watch_liveness::Pulse;
use crate::cluster::watches::{GATHER, changes, observe};
use crate::nodes::context_policies;
use crate::nodes::namespace_label;
use crate::placement::{self, Rules};
use crate::serve::metrics::Metrics;
use crate::serve::probes::Sources;

/// Tells the time of day, for records that people read. Decisions count time by the monotonic clock.
pub type Clock = fn() -> Timestamp;

/// Budgets named and not yet taken up; more wait with the watches.
const WORK: usize = 256;

/// Why the operator ended without being told to.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// A task came to its end.
    #[error("{task} ended unasked")]
    Ended {
        /// Which.
        task: &'static str,
    },
    /// A task panicked.
    #[error("a task panicked")]
    Panicked(#[source] tokio::task::JoinError),
}

/// Runs until `shutdown`; then ends when the writes that were begun are done. Ends early with the first
/// task that does.
pub async fn run(
    client: Client,
    listeners: Listeners,
    rules: Rules,
    clock: Clock,
    shutdown: CancellationToken,
) -> Result<(), OperatorError> {
    let quantum = rules.quantum;
    let (budgets, writer) = reflector::store();
    let (world_sender, world) = watch::channel(World::new(quantum));
    let pulse = Pulse::default();
    let metrics = Metrics::new(budgets.clone(), world.clone(), pulse.clone());
    let (work_sender, mut work) = mpsc::channel(WORK);
    let (wrote, written) = own_writes::channel();
    let changes = changes(&client, quantum, writer, &metrics, &pulse, written);
    let sources = Sources {
        metrics: metrics.clone(),
        world: world.clone(),
        pulse,
    };
    let writer = Writer::new(client, metrics.clone(), wrote);
    let placement = placement::controller::run(
        writer.clone(),
        world.clone(),
        rules,
        clock,
        metrics.clone(),
        shutdown.clone(),
    );
    let ordered = context_policies::run(writer.clone(), world.clone(), shutdown.clone());
    let released = namespace_label::run(writer.clone(), world.clone(), shutdown.clone());
    let reconciler = Reconciler::new(writer, world, metrics, clock);

    let mut tasks = JoinSet::new();
    tasks.spawn({
        let shutdown = shutdown.clone();
        async move {
            bursar_http::serve(listeners, sources, shutdown).await;
            "the web server"
        }
    });
    tasks.spawn({
        let shutdown = shutdown.clone();
        async move {
            observe(changes, world_sender, work_sender, GATHER, shutdown).await;
            "the watch"
        }
    });
    tasks.spawn(async move {
        reconciler
            .run(budgets, poll_fn(move |context| work.poll_recv(context)))
            .await;
        "the reconciler"
    });
    tasks.spawn(async move {
        ordered.await;
        "the orders to nodes"
    });
    tasks.spawn(async move {
        released.await;
        "the release of namespaces"
    });
    tasks.spawn(async move {
        placement.await;
        "placement"
    });
    info!(%quantum, version = env!("CARGO_PKG_VERSION"), "started");

    let first = tasks.join_next().await;
    let asked = shutdown.is_cancelled();
    shutdown.cancel();
    let mut result = first.map_or(Ok(()), |ended| outcome(ended, asked));
    while let Some(ended) = tasks.join_next().await {
        result = result.and(outcome(ended, true));
    }
    info!("stopped");
    result
}

/// A task's end: fine where it was asked for.
fn outcome(
    ended: Result<&'static str, tokio::task::JoinError>,
    asked: bool,
) -> Result<(), OperatorError> {
    match ended.map_err(OperatorError::Panicked)? {
        _ if asked => Ok(()),
        task => Err(OperatorError::Ended { task }),
    }
}
