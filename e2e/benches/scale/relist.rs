//! Measures how late events are that arrive while all pods are listed beside an open watch, against
//! a bare watcher of the same events.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bursar_watch::{History, Pauses, watch};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Config, ResourceExt as _};
use serde_json::json;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::time::{sleep, timeout};

use crate::fleet::Fleet;

/// The events during a list that the measurement needs.
const EVENTS: usize = 20;
/// Longer than the watch waits for its next list in any case.
const PAST_THE_NEXT_LIST: Duration = Duration::from_secs(100_000);
/// The timeout of each wait.
const TIMEOUT: Duration = Duration::from_secs(400);
/// The annotation of an event: its number.
const MARK: &str = "bursar.dev/event";

/// The times of a list beside a watch, and of the events meanwhile.
#[derive(Debug)]
pub(crate) struct Relist {
    /// How long the list took.
    pub(crate) took: Duration,
    /// How much later than the bare watcher the watch delivered each event.
    pub(crate) lateness: Vec<Duration>,
}

/// A step of a watcher, for the measurement.
enum Seen {
    Began,
    Event(usize, Instant),
    Ended,
}

/// Changes pods while the watch of the operator lists all pods again.
pub(crate) async fn measure(fleet: &Fleet, kubeconfig: PathBuf) -> anyhow::Result<Relist> {
    let (bare, mut bare_seen) = mpsc::unbounded_channel();
    let watcher = tokio::spawn(watch_bare(client(kubeconfig.clone()).await?, bare));
    let (ours, mut seen) = mpsc::unbounded_channel();
    // The clock of this thread's runtime moves alone.
    let runtime = tokio::runtime::Builder::new_current_thread();
    let follower = thread::spawn(move || follow(runtime, kubeconfig, &ours));
    let first = wait_for(&mut seen, |seen| matches!(seen, Seen::Began)).await?;
    let first = wait_for(&mut seen, |seen| matches!(seen, Seen::Ended)).await? - first;
    let began = wait_for(&mut seen, |seen| matches!(seen, Seen::Began)).await?;

    let (mut applied, mut sent, mut ended) = (BTreeMap::new(), 0, None);
    while ended.is_none() || applied.len() < sent {
        if ended.is_none() {
            fleet.annotate_pod(sent, MARK).await?;
            sent += 1;
        }
        let pause = sleep(first / u32::try_from(4 * EVENTS)?);
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => break,
                now = seen.recv() => match now.context("the watch ended")? {
                    Seen::Event(number, at) => drop(applied.entry(number).or_insert(at)),
                    Seen::Ended => ended = Some(Instant::now()),
                    Seen::Began => anyhow::bail!("the watch listed anew"),
                },
            }
        }
        anyhow::ensure!(
            began.elapsed() < TIMEOUT,
            "{} of {sent} events",
            applied.len()
        );
    }
    let took = ended.context("the list ended")? - began;
    anyhow::ensure!(sent >= EVENTS, "the list ended after {sent} events");
    let mut lateness = Vec::new();
    while lateness.len() < sent {
        let next = timeout(TIMEOUT, bare_seen.recv()).await?;
        if let Seen::Event(number, at) = next.context("the bare watcher ended")? {
            lateness.push(applied[&number].saturating_duration_since(at));
        }
    }
    watcher.abort();
    drop(seen);
    // The thread ends with the first event that nobody receives.
    fleet.annotate_pod(sent, MARK).await?;
    follower
        .join()
        .map_err(|_| anyhow::anyhow!("the watch panicked"))??;
    Ok(Relist { took, lateness })
}

/// Waits for what `is_it` names, and returns when it came.
async fn wait_for(
    seen: &mut mpsc::UnboundedReceiver<Seen>,
    is_it: impl Fn(&Seen) -> bool,
) -> anyhow::Result<Instant> {
    loop {
        let now = timeout(TIMEOUT, seen.recv()).await?;
        if is_it(&now.context("the watch ended")?) {
            return Ok(Instant::now());
        }
    }
}

async fn client(kubeconfig: PathBuf) -> anyhow::Result<Client> {
    let file = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

/// Follows all pods by the operator's watch. After the first list it lets the time of the next one
/// come, which is a day away.
fn follow(
    mut runtime: tokio::runtime::Builder,
    kubeconfig: PathBuf,
    seen: &UnboundedSender<Seen>,
) -> anyhow::Result<()> {
    runtime.enable_all().build()?.block_on(async {
        let pods: Api<Pod> = Api::all(client(kubeconfig).await?);
        let pauses = Pauses::new(Duration::from_millis(100), Duration::from_secs(1));
        let events = watch(pods, watcher::Config::default(), pauses, History::default());
        let mut events = std::pin::pin!(events);
        let mut lists = 0;
        while let Some(event) = events.next().await {
            let now = match event {
                Ok(Event::Init) => Seen::Began,
                Ok(Event::InitDone) => Seen::Ended,
                Ok(Event::Apply(pod) | Event::InitApply(pod)) => match number(&pod) {
                    Some(number) => Seen::Event(number, Instant::now()),
                    None => continue,
                },
                // The old connection ends when the clock moves.
                Ok(_) | Err(_) => continue,
            };
            let is_first_list = matches!(now, Seen::Ended) && lists == 0;
            if seen.send(now).is_err() {
                break;
            }
            if is_first_list {
                lists += 1;
                tokio::time::pause();
                tokio::time::advance(PAST_THE_NEXT_LIST).await;
                tokio::time::resume();
            }
        }
        Ok(())
    })
}

async fn watch_bare(client: Client, seen: UnboundedSender<Seen>) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::all(client);
    let newest = pods.list_metadata(&ListParams::default().limit(1)).await?;
    let mut from = newest.metadata.resource_version.unwrap_or_default();
    loop {
        let params = WatchParams::default().timeout(290);
        let mut events = std::pin::pin!(pods.watch(&params, &from).await?);
        while let Some(event) = events.next().await {
            let (WatchEvent::Added(pod) | WatchEvent::Modified(pod)) = event? else {
                continue;
            };
            if let Some(number) = number(&pod) {
                seen.send(Seen::Event(number, Instant::now()))?;
            }
            from = pod.resource_version().unwrap_or_default();
        }
    }
}

/// The number of the event that changed this pod last.
fn number(pod: &Pod) -> Option<usize> {
    pod.annotations().get(MARK)?.parse().ok()
}

impl Fleet {
    /// Changes a pod of its own for each number.
    async fn annotate_pod(&self, number: usize, annotation: &str) -> anyhow::Result<()> {
        let pods = self.agents.iter().flat_map(|agent| &agent.pods);
        let pod = pods.cycle().nth(number * 7).context("a pod")?;
        let patch = json!({ "metadata": { "annotations": { annotation: number.to_string() } } });
        self.objects.merge_patch(&pod.path(), &patch).await?;
        Ok(())
    }
}
