//! Lists and watches the objects of one kind, with retries.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::time::Duration;

use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt as _};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::runtime::watcher::{Config, Error, Event, Result};
use kube::{Api, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use crate::history::{History, is_below};
use crate::pauses::Pauses;

/// The watch lists again after so many seconds in any case.
const RELIST: std::ops::Range<u64> = 600..1800;

/// The lifetime of one watch in seconds, unless the caller sets it: the default of kube's
/// `watcher`.
const LIFETIME: u32 = 290;

/// How long a watch may be silent beyond its lifetime before its connection counts as dead.
const MARGIN: Duration = Duration::from_secs(5);

/// A shorter watch without an event counts as a failure. client-go has the same bound.
const SHORT: Duration = Duration::from_secs(1);

/// Watches the objects of `api` that `config` selects, with the events of kube's `watcher`. After a
/// failure the watch pauses as `pauses` say.
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
        paused: None,
        relist: Instant::now(),
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
    /// The end of the pause before the next attempt.
    paused: Option<Instant>,
    /// When the next list is due.
    relist: Instant,
    state: State<K>,
}

enum State<K> {
    Unlisted,
    Listing(VecDeque<K>, Page),
    /// A list or a watch ended at this revision.
    Listed {
        revision: String,
        /// Whether the API server has just returned the revision as the newest.
        is_newest: bool,
    },
    Watching(Watching<K>),
}

enum Page {
    First,
    Next(String),
    /// The last page, with the revision of the list.
    Last(String),
}

struct Watching<K> {
    revision: String,
    began: Instant,
    has_delivered: bool,
    events: BoxStream<'static, kube::Result<WatchEvent<K>>>,
}

/// The next state, and an event for the caller.
type Step<K> = (State<K>, Option<Result<Event<K>>>);

impl<K> Follower<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    async fn next(&mut self) -> Result<Event<K>> {
        loop {
            if let Some(until) = self.paused.take() {
                sleep_until(until).await;
            }
            let (state, item) = match std::mem::replace(&mut self.state, State::Unlisted) {
                State::Unlisted => {
                    let listing = State::Listing(VecDeque::new(), Page::First);
                    (listing, Some(Ok(Event::Init)))
                }
                State::Listing(objects, page) => self.list(objects, page).await,
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

    fn pause(&mut self) {
        self.paused = Some(Instant::now() + self.pauses.next());
    }

    async fn list(&mut self, mut objects: VecDeque<K>, page: Page) -> Step<K> {
        if let Some(object) = objects.pop_front() {
            let item = Event::InitApply(object);
            return (State::Listing(objects, page), Some(Ok(item)));
        }
        let continue_token = match page {
            Page::First => None,
            Page::Next(token) => Some(token),
            Page::Last(revision) => {
                let pause = Duration::from_secs(rand::random_range(RELIST));
                self.relist = Instant::now() + pause;
                let is_newest = true;
                let listed = State::Listed {
                    revision,
                    is_newest,
                };
                return (listed, Some(Ok(Event::InitDone)));
            }
        };
        let params = ListParams {
            limit: self.config.page_size,
            continue_token,
            ..self.selected()
        };
        let list = match self.api.list(&params).await {
            Ok(list) => list,
            Err(error) => return (State::Unlisted, Some(Err(Error::InitialListFailed(error)))),
        };
        let non_empty = |text: Option<String>| text.filter(|text| !text.is_empty());
        let page = match (
            non_empty(list.metadata.continue_),
            non_empty(list.metadata.resource_version),
        ) {
            (Some(token), _) => Page::Next(token),
            (None, Some(revision)) => {
                self.history.listed(&revision);
                Page::Last(revision)
            }
            (None, None) => return (State::Unlisted, Some(Err(Error::NoResourceVersion))),
        };
        (State::Listing(list.items.into(), page), None)
    }

    async fn resume(&mut self, revision: String, is_newest: bool) -> Step<K> {
        if !is_newest {
            // The smallest possible list.
            let params = ListParams {
                limit: Some(1),
                ..self.selected()
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
        let params = WatchParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            timeout: self.config.timeout,
            bookmarks: self.config.bookmarks,
            send_initial_events: false,
        };
        match self.api.watch(&params, &revision).await {
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

    fn selected(&self) -> ListParams {
        ListParams {
            label_selector: self.config.label_selector.clone(),
            field_selector: self.config.field_selector.clone(),
            ..ListParams::default()
        }
    }

    async fn follow(&mut self, mut watching: Watching<K>) -> Step<K> {
        let time = Duration::from_secs(self.config.timeout.unwrap_or(LIFETIME).into()) + MARGIN;
        let delivered = tokio::select! {
            delivered = timeout(time, watching.events.next()) => delivered.unwrap_or_default(),
            () = sleep_until(self.relist) => return (State::Unlisted, None),
            () = self.history.list_requested() => return (State::Unlisted, None),
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
                    _ => resumed(watching.revision),
                };
                return (state, Some(Err(Error::WatchError(status.boxed()))));
            }
            // An unreadable event is skipped. A broken connection ends the stream.
            Some(Err(error)) => {
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
        resumed(watching.revision)
    }
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
