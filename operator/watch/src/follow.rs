//! Lists and watches the objects of one kind, with retries.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt as _};
use kube::api::{ListParams, WatchEvent};
use kube::runtime::watcher::{Config, Error, Event, Result};
use kube::{Api, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use crate::history::{History, is_below};
use crate::list::{Listed, Listing, Streams, list, selected, watched};
use crate::pauses::Pauses;

/// After so many seconds the watch lists again in any case.
const RELIST: std::ops::Range<u64> = 72_000..100_000;

/// After so many seconds the watch lists again when a watch broke off, as at a restore of etcd.
const RELIST_AFTER_BREAK: std::ops::Range<u64> = 600..1800;

/// The lifetime of one watch in seconds, unless the caller sets it: the default of kube's
/// `watcher`.
const LIFETIME: u32 = 290;

/// How long a watch may be silent beyond its lifetime before its connection counts as dead.
const MARGIN: Duration = Duration::from_secs(5);

/// A shorter watch without an event counts as a failure. client-go has the same bound.
const SHORT: Duration = Duration::from_secs(1);

/// Watches the objects of `api` that `config` selects, with the events of kube's `watcher`. After a
/// failure the watch pauses as `pauses` say. A later list runs beside the watch, so `Apply` and
/// `Delete` may come between `Init` and `InitDone`.
pub fn watch<K>(
    api: Api<K>,
    config: Config,
    pauses: Pauses,
    history: History,
) -> impl Stream<Item = Result<Event<K>>> + Send + use<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let follower = Follower {
        api,
        config,
        pauses,
        history,
        streams: Arc::default(),
        paused: None,
        relist: Instant::now(),
        ready: VecDeque::new(),
        beside: None,
        broke_beside: false,
        covered: None,
        state: State::Unlisted,
    };
    stream::unfold(follower, |mut follower| async move {
        let item = follower.next().await;
        Some((item, follower))
    })
}

struct Follower<K> {
    api: Api<K>,
    config: Config,
    pauses: Pauses,
    history: History,
    streams: Arc<Streams>,
    /// The end of the pause before the next attempt.
    paused: Option<Instant>,
    /// When the next list is due.
    relist: Instant,
    /// Events that the caller gets next.
    ready: VecDeque<Event<K>>,
    /// The list that runs beside the watch.
    beside: Option<List<K>>,
    /// Whether a watch broke off while that list ran.
    broke_beside: bool,
    /// The revision of the last such list, which has the effect of each event up to it.
    covered: Option<String>,
    state: State<K>,
}

enum State<K> {
    Unlisted,
    Listing(List<K>),
    /// A list or a watch ended at this revision.
    Listed {
        revision: String,
        /// Whether the API server has just returned the revision as the newest.
        is_newest: bool,
    },
    Watching(Watching<K>),
}

struct Watching<K> {
    revision: String,
    began: Instant,
    has_delivered: bool,
    events: BoxStream<'static, kube::Result<WatchEvent<K>>>,
}

/// The namespace and the name of an object.
type Key = (Option<String>, String);

/// A list, and what happened to its objects meanwhile.
struct List<K> {
    items: Listing<K>,
    /// The revision of the watch beside it when the list began.
    since: String,
    /// The objects that the list reported as deleted.
    deleted: BTreeMap<Key, K>,
    /// The last event of each object from the watch.
    changes: BTreeMap<Key, Event<K>>,
}

/// The next state, and an event for the caller.
type Step<K> = (State<K>, Option<Result<Event<K>>>);

impl<K> Follower<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    async fn next(&mut self) -> Result<Event<K>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            if let Some(until) = self.paused.take() {
                sleep_until(until).await;
            }
            let (state, item) = match std::mem::replace(&mut self.state, State::Unlisted) {
                State::Unlisted => {
                    (self.beside, self.covered) = (None, None);
                    let list = self.list(String::new());
                    (State::Listing(list), Some(Ok(Event::Init)))
                }
                State::Listing(list) => self.read_list(list).await,
                State::Listed {
                    revision,
                    is_newest,
                } => self.resume(revision, is_newest).await,
                State::Watching(watching) => self.follow(watching).await,
            };
            self.state = state;
            if let Some(item) = item {
                if item.is_err() {
                    self.pause();
                }
                return item;
            }
        }
    }

    /// The time after which the API server ends a watch.
    fn lifetime(&self) -> Duration {
        Duration::from_secs(self.config.timeout.unwrap_or(LIFETIME).into())
    }

    fn pause(&mut self) {
        self.paused = Some(Instant::now() + self.pauses.next());
    }

    fn relist_within(&mut self, seconds: std::ops::Range<u64>) {
        self.relist = Instant::now() + Duration::from_secs(rand::random_range(seconds));
    }

    /// Begins a list beside a watch at the revision `since`.
    fn list(&self, since: String) -> List<K> {
        let (api, config) = (self.api.clone(), self.config.clone());
        List {
            items: list(api, config, self.streams.clone()),
            since,
            deleted: BTreeMap::new(),
            changes: BTreeMap::new(),
        }
    }

    async fn read_list(&mut self, mut list: List<K>) -> Step<K> {
        match list.items.next().await {
            Some(Ok(Listed::End(revision))) => {
                self.history.listed(&revision);
                self.finish(list);
                let is_newest = true;
                let listed = State::Listed {
                    revision,
                    is_newest,
                };
                (listed, None)
            }
            Some(Ok(item)) => {
                let event = list.event(item);
                (State::Listing(list), event.map(Ok))
            }
            Some(Err(error)) => (State::Unlisted, Some(Err(error))),
            None => (State::Unlisted, None),
        }
    }

    /// Takes an item of the list beside a watch.
    fn read_beside(&mut self, watching: Watching<K>, item: Result<Listed<K>>) -> Step<K> {
        let Some(mut list) = self.beside.take() else {
            return (State::Watching(watching), None);
        };
        let revision = match item {
            Ok(Listed::End(revision)) => revision,
            Ok(item) => {
                let event = list.event(item);
                self.beside = Some(list);
                return (State::Watching(watching), event.map(Ok));
            }
            // A list that replaces the watch follows, and is tried again until it has its end: the
            // caller has seen the beginning of one.
            Err(error) => return (State::Unlisted, Some(Err(error))),
        };
        if is_below(&revision, &list.since) {
            self.history.began_anew(&list.since, &revision);
            return (State::Unlisted, None);
        }
        list.changes.retain(|_, event| match event {
            Event::Apply(object) | Event::Delete(object) => {
                !is_covered(&object.resource_version().unwrap_or_default(), &revision)
            }
            _ => false,
        });
        self.finish(list);
        self.covered = Some(revision);
        (State::Watching(watching), None)
    }

    /// Readies the end of a list for the caller.
    fn finish(&mut self, mut list: List<K>) {
        let broke = std::mem::take(&mut self.broke_beside);
        self.relist_within(if broke { RELIST_AFTER_BREAK } else { RELIST });
        for (key, event) in list.changes {
            let deleted = list.deleted.remove(&key);
            match event {
                Event::Apply(object) => self.ready.push_back(Event::InitApply(object)),
                Event::Delete(object) => drop(list.deleted.insert(key, object)),
                _ => drop(deleted),
            }
        }
        self.ready.push_back(Event::InitDone);
        let deleted = list.deleted.into_values();
        self.ready.extend(deleted.map(Event::Delete));
    }

    async fn resume(&mut self, revision: String, is_newest: bool) -> Step<K> {
        if !is_newest {
            // The smallest possible list.
            let params = ListParams {
                limit: Some(1),
                ..selected(&self.config)
            };
            let list = self.api.list_metadata(&params).await;
            match list.map(|list| list.metadata.resource_version.unwrap_or_default()) {
                Ok(newest) if is_below(&newest, &revision) => {
                    self.history.began_anew(&revision, &newest);
                    return (State::Unlisted, None);
                }
                Ok(_) => {}
                Err(error) => return failed_to_start(revision, error),
            }
        }
        match self.api.watch(&watched(&self.config), &revision).await {
            Ok(events) => {
                let watching = Watching {
                    revision,
                    began: Instant::now(),
                    has_delivered: false,
                    events: events.boxed(),
                };
                (State::Watching(watching), None)
            }
            Err(error) => failed_to_start(revision, error),
        }
    }

    async fn follow(&mut self, mut watching: Watching<K>) -> Step<K> {
        let time = self.lifetime() + MARGIN;
        let is_beside = self.beside.is_some();
        let delivered = tokio::select! {
            // No event waits for a list.
            biased;
            delivered = timeout(time, watching.events.next()) => delivered.unwrap_or_default(),
            () = self.history.list_requested() => return (State::Unlisted, None),
            Some(item) = next_item(&mut self.beside) => return self.read_beside(watching, item),
            () = sleep_until(self.relist), if !is_beside => {
                self.beside = Some(self.list(watching.revision.clone()));
                return (State::Watching(watching), Some(Ok(Event::Init)));
            }
        };
        let (object, event) = match delivered {
            None => return (self.ended(watching), None),
            Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object))) => {
                (object.resource_version(), Some(Event::Apply(object)))
            }
            Some(Ok(WatchEvent::Deleted(object))) => {
                (object.resource_version(), Some(Event::Delete(object)))
            }
            Some(Ok(WatchEvent::Bookmark(bookmark))) => {
                (Some(bookmark.metadata.resource_version), None)
            }
            Some(Ok(WatchEvent::Error(status))) => {
                let state = match status.code {
                    410 => State::Unlisted,
                    _ => self.broken(watching),
                };
                return (state, Some(Err(Error::WatchError(status.boxed()))));
            }
            // An unreadable event is skipped. A broken connection ends the stream.
            Some(Err(error)) => {
                self.relist_after_break();
                let error = Error::WatchFailed(error);
                return (State::Watching(watching), Some(Err(error)));
            }
        };
        let Some(revision) = object.filter(|revision| !revision.is_empty()) else {
            return (State::Unlisted, Some(Err(Error::NoResourceVersion)));
        };
        if is_below(&revision, &watching.revision) {
            self.history.began_anew(&watching.revision, &revision);
            // Without a pause an API server that repeats itself would cause list after list.
            self.pause();
            return (State::Unlisted, None);
        }
        self.history.saw(&revision);
        self.pauses.reset();
        let list = self.covered.as_ref();
        let is_news = list.is_none_or(|list| !is_covered(&revision, list));
        let event = event.filter(|_| is_news);
        if let (Some(list), Some(event)) = (&mut self.beside, &event) {
            list.note(event.clone());
        }
        watching.revision = revision;
        watching.has_delivered = true;
        (State::Watching(watching), event.map(Ok))
    }

    /// Handles the end of a watch or of its connection.
    fn ended(&mut self, watching: Watching<K>) -> State<K> {
        let lasted = watching.began.elapsed();
        debug!(?lasted, url = self.api.resource_url(), "watch ended");
        if !watching.has_delivered && lasted < SHORT {
            self.pause();
        } else {
            self.pauses.reset();
        }
        let lifetime = self.lifetime();
        // A connection that died in silence ends later than the API server would end the watch.
        match (lifetime.saturating_sub(MARGIN)..lifetime + MARGIN / 2).contains(&lasted) {
            true => resumed(watching.revision),
            false => self.broken(watching),
        }
    }

    /// Handles a watch that did not end by itself. A list soon is what finds a restored etcd whose
    /// revisions have passed the last one.
    fn broken(&mut self, watching: Watching<K>) -> State<K> {
        self.relist_after_break();
        resumed(watching.revision)
    }

    fn relist_after_break(&mut self) {
        self.broke_beside = self.beside.is_some();
        let before = self.relist;
        self.relist_within(RELIST_AFTER_BREAK);
        self.relist = self.relist.min(before);
    }
}

/// The next item of a list. Waits for ever without one.
async fn next_item<K>(beside: &mut Option<List<K>>) -> Option<Result<Listed<K>>> {
    match beside {
        Some(list) => list.items.next().await,
        None => std::future::pending().await,
    }
}

impl<K: Resource> List<K> {
    /// The event for an item of the list.
    fn event(&mut self, item: Listed<K>) -> Option<Event<K>> {
        match item {
            Listed::Object(object) => {
                self.deleted.remove(&key(&object));
                Some(Event::InitApply(object))
            }
            Listed::Deleted(object) => {
                self.deleted.insert(key(&object), object);
                None
            }
            Listed::End(_) => None,
        }
    }

    /// Notes an event of the watch.
    fn note(&mut self, event: Event<K>) {
        if let Event::Apply(object) | Event::Delete(object) = &event {
            self.changes.insert(key(object), event);
        }
    }
}

fn key<K: Resource>(object: &K) -> Key {
    (object.namespace(), object.name_any())
}

/// Whether a list of revision `list` has the effect of an event of revision `event`.
fn is_covered(event: &str, list: &str) -> bool {
    event == list || is_below(event, list)
}

fn resumed<K>(revision: String) -> State<K> {
    let is_newest = false;
    State::Listed {
        revision,
        is_newest,
    }
}

fn failed_to_start<K>(revision: String, error: kube::Error) -> Step<K> {
    let state = match &error {
        kube::Error::Api(status) if status.code == 410 => State::Unlisted,
        _ => resumed(revision),
    };
    (state, Some(Err(Error::WatchStartFailed(error))))
}
