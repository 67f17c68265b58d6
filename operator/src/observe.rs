//! Turns watches into changes of the world, and those into budgets to look at.
//!
//! ```text
//!   six watches, own writes --> world.apply --> dirty, gathered for a while --> one look at each budget concerned
//! ```
//!
//! Gathering bounds the writes: however fast pods come and go, a budget is looked at once per period.

use std::future::ready;
use std::time::Duration;

use backon::ExponentialBuilder;
use bursar_crds::resources::{BUDGET_LABEL, QUOTA_LABEL};
use bursar_crds::{GpuMemoryBudget, GpuNode, Quantum};
use futures::stream::{self, BoxStream, Stream, StreamExt, select_all};
use k8s_openapi::api::core::v1::{Namespace, ResourceQuota};
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, Config, ResourceExt as _};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::ahead::{Written, merged};
use crate::budget::Quota;
use crate::demand::{AskingPod, Demand};
use crate::metrics::Metrics;
use crate::placement::Told;
use crate::placement::landscape::lowered;
use crate::placement::load::Load;
use crate::placement::node::{GpuFacts, NodeFacts, SlimNode};
use crate::placement::pod::PodFacts;
use crate::pulse::Pulse;
use crate::world::{Change, Claim, Dirty, Gpus, World, budget_label, cohort_label, kinds, slimmed};

/// How long a watch lasts before the API server ends it and it is taken up again, in seconds. A
/// connection that died in silence is noticed then.
const WATCH_SECONDS: u32 = 200;

/// How long the API server may be silent within an answer: a watch's time, and some. A watch that died in
/// silence is begun anew after it.
pub const SILENCE: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 5);

/// The longest pause before a watch that failed is taken up again; chance adds as much at most. The library's own
/// would leave an operator blind for up to a minute after an API server is back from a longer absence.
const MOST_PAUSE: Duration = Duration::from_secs(5);

/// How many objects of our own kinds a list tells in one answer: they are parsed whole, and most of one is
/// its `managedFields`.
const OURS_AT_ONCE: u32 = 50;

/// How long changes are gathered.
pub const GATHER: Duration = Duration::from_millis(500);

/// A client by the pod's service account or `KUBECONFIG`.
pub async fn client() -> Result<Client, kube::Error> {
    let config = Config::infer().await.map_err(kube::Error::InferConfig)?;
    Client::try_from(patient(config, SILENCE))
}

/// `config` with none of its requests waiting for ever: the API server may be silent for so long within an answer.
pub fn patient(mut config: Config, silence: Duration) -> Config {
    config.read_timeout = Some(silence);
    config.reset_reader_on_write = true;
    // The library would wait the 10 s that an eviction's refusal asks for, and hide that it was refused. Everything
    // here is tried again by who wanted it.
    config.default_retry = false;
    config
}

/// The pauses of a watch that fails again and again.
fn pauses() -> watcher::ExponentialBackoff {
    let pauses = ExponentialBuilder::default().with_jitter();
    let pauses = pauses.with_min_delay(Duration::from_millis(500));
    let pauses = pauses.with_max_delay(MOST_PAUSE).without_max_times();
    pauses.into()
}

/// What the API server tells of budgets, pods, GPU nodes, nodes, quotas and namespaces, for as long as it is listened to. The
/// budgets are kept in `budgets` as well. What was `written` is known before its watch tells. A watch that fails is taken up again, with back-off.
pub fn changes(
    client: &Client,
    quantum: Quantum,
    budgets: Writer<GpuMemoryBudget>,
    metrics: &Metrics,
    pulse: &Pulse,
    written: Written,
) -> BoxStream<'static, Change> {
    let client = &pulse.listening(client.clone());
    let pulse = || pulse.clone();
    let config = || watcher::Config::default().timeout(WATCH_SECONDS);
    let ours = || config().page_size(OURS_AT_ONCE);
    let watches = [
        {
            let watch = watcher(Api::<GpuMemoryBudget>::all(client.clone()), ours());
            let watch = watch
                .backoff(pauses())
                .modify(|budget| budget.managed_fields_mut().clear())
                .reflect(budgets);
            heard(kinds::BUDGETS, metrics, pulse(), watch)
                .flat_map(move |event| {
                    both(
                        Told::Lowered(slimmed(event.clone(), lowered)),
                        Change::Budget(slimmed(event, |budget| Some(Claim::of(budget, quantum)))),
                    )
                })
                .boxed()
        },
        {
            let watch = watcher(Api::<AskingPod>::all(client.clone()), config());
            let watch = heard(kinds::PODS, metrics, pulse(), watch.backoff(pauses()));
            merged(watch, written.pods)
                .flat_map(move |event| {
                    let load = slimmed(event.clone(), |pod| Load::read(pod, quantum));
                    let facts = slimmed(event.clone(), |pod| PodFacts::of(pod, quantum));
                    // Who is bound is on its node before it counts there: it is not to count twice.
                    let facts = stream::iter([Change::Placement(Told::Pod(facts))]);
                    facts.chain(both(
                        Told::Load(load),
                        Change::Pod(slimmed(event, |pod| Demand::of(pod, quantum))),
                    ))
                })
                .boxed()
        },
        {
            let watch = watcher(Api::<GpuNode>::all(client.clone()), ours());
            let watch = heard(kinds::GPU_NODES, metrics, pulse(), watch.backoff(pauses()));
            merged(watch, written.gpu_nodes)
                .flat_map(move |event| {
                    let facts = |node: &GpuNode| Some(GpuFacts::of(node, quantum));
                    both(
                        Told::Gpus(slimmed(event.clone(), facts)),
                        Change::GpuNode(slimmed(event, |node| Some(Gpus::of(node, quantum)))),
                    )
                })
                .boxed()
        },
        {
            let watch = watcher(Api::<SlimNode>::all(client.clone()), config());
            let watch = heard(kinds::NODES, metrics, pulse(), watch.backoff(pauses()));
            merged(watch, written.nodes)
                .flat_map(move |event| {
                    let facts = |node: &SlimNode| Some(NodeFacts::of(node, quantum));
                    both(
                        Told::Node(slimmed(event.clone(), facts)),
                        Change::Node(slimmed(event, cohort_label)),
                    )
                })
                .boxed()
        },
        {
            let quotas = Api::<ResourceQuota>::all(client.clone());
            let watch = watcher(quotas, config().labels(QUOTA_LABEL));
            let watch = heard(kinds::QUOTAS, metrics, pulse(), watch.backoff(pauses()));
            merged(watch, written.quotas)
                .map(|event| Change::Quota(slimmed(event, |quota| Some(Quota::of(quota)))))
                .boxed()
        },
        {
            let namespaces = Api::<PartialObjectMeta<Namespace>>::all(client.clone());
            let watch = watcher(namespaces, config().labels(BUDGET_LABEL));
            let watch = heard(kinds::NAMESPACES, metrics, pulse(), watch.backoff(pauses()));
            merged(watch, written.namespaces)
                .map(|event| Change::Namespace(slimmed(event, budget_label)))
                .boxed()
        },
    ];
    select_all(watches).boxed()
}

/// One event for the two who are told of it. Budgets come last: all is known when they are asked for.
fn both(told: Told, change: Change) -> impl Stream<Item = Change> + Send {
    stream::iter([Change::Placement(told), change])
}

/// The events of one watch. Its errors are counted, and the first of a row is logged.
fn heard<T, S>(
    kind: &'static str,
    metrics: &Metrics,
    pulse: Pulse,
    watch: S,
) -> impl Stream<Item = watcher::Event<T>> + Send + use<T, S>
where
    T: Send,
    S: Stream<Item = watcher::Result<watcher::Event<T>>> + Send,
{
    let metrics = metrics.clone();
    let mut failures = 0_u32;
    watch.filter_map(move |item| {
        pulse.beat(kind);
        let event = match item {
            Ok(event) => {
                if failures > 0 && !matches!(event, watcher::Event::Init) {
                    info!(kind, failures, "watched again");
                    failures = 0;
                }
                Some(event)
            }
            Err(error) => {
                metrics.watch_failed(kind);
                failures = failures.saturating_add(1);
                if failures == 1 {
                    warn!(kind, error = %chain(&error), remedy = remedy(&error), "cannot watch; trying on");
                }
                None
            }
        };
        ready(event)
    })
}

fn remedy(error: &watcher::Error) -> &'static str {
    let code = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => status.code,
        _ => 0,
    };
    match code {
        401 | 403 => "give the operator's service account the chart's ClusterRole",
        404 => "install the chart's CRDs (crds.install)",
        _ => "none if it passes; else see whether the API server answers",
    }
}

/// An error with its sources, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// Keeps `world` at what `changes` tell, and names the budgets to look at in `work`, once all kinds have
/// been listed. Ends with `shutdown`, `changes` or the reader of `work`.
pub async fn observe(
    mut changes: impl Stream<Item = Change> + Unpin,
    world: watch::Sender<World>,
    work: mpsc::Sender<ObjectRef<GpuMemoryBudget>>,
    gather: Duration,
    shutdown: CancellationToken,
) {
    let mut dirty = Dirty::default();
    let mut due = None;
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            change = changes.next() => {
                let Some(change) = change else { return };
                world.send_modify(|world| dirty.add(world.apply(change)));
                if due.is_none() && !dirty.is_empty() && world.borrow().missing().is_empty() {
                    due = Some(Instant::now() + gather);
                }
            }
            () = until(due) => {
                due = None;
                let budgets = world.borrow().budgets(&std::mem::take(&mut dirty));
                for key in budgets {
                    let budget = ObjectRef::new(&key.name).within(&key.namespace);
                    if work.send(budget).await.is_err() {
                        return;
                    }
                }
            }
        }
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_api_server_that_is_back_after_an_hour_is_found_within_ten_seconds() {
        let mut away = Duration::ZERO;
        for pause in pauses().take(2000) {
            assert!(pause <= 2 * MOST_PAUSE, "{pause:?} after {away:?}");
            away += pause;
        }
        assert!(away > Duration::from_secs(3600), "it goes on: {away:?}");
    }
}
