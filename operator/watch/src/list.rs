//! Lists the objects of one kind.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::runtime::watcher::{Config, Error, Result};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tracing::debug;

/// The lifetime of a streamed list in seconds. The API server counts the whole response, so the
/// 45 s of a watch would cut off a large list. client-go takes 300 to 600 s.
const STREAM_SECONDS: u32 = 300;

/// The annotation of the bookmark that follows the last object.
const END: &str = "k8s.io/initial-events-end";

/// An item of a list.
pub(crate) enum Listed<K> {
    Object(K),
    /// An object that was deleted while the list ran.
    Deleted(K),
    /// The end, with the revision of the list.
    End(String),
}

/// A list that runs. An error ends it.
pub(crate) type Listing<K> = BoxStream<'static, Result<Listed<K>>>;

/// The lists of a kind that were streamed.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// Whether the API server streams no lists.
    refused: AtomicBool,
    /// Whether the last stream failed. The next list is read in pages then, which need not come
    /// within one response.
    failed: AtomicBool,
}

/// Lists the objects that `config` selects. An API server that streams lists (KEP-3157) sends them
/// one by one from its cache; another one sends pages.
pub(crate) fn list<K>(api: Api<K>, config: Config, streams: Arc<Streams>) -> Listing<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let lister = Lister {
        api,
        config,
        streams,
        source: Source::Unopened,
    };
    let items = stream::try_unfold(lister, |mut lister| async move {
        let item = lister.next().await?;
        Ok(Some((item, lister)))
    });
    items.boxed()
}

/// The selection of a list.
pub(crate) fn selected(config: &Config) -> ListParams {
    ListParams {
        label_selector: config.label_selector.clone(),
        field_selector: config.field_selector.clone(),
        ..ListParams::default()
    }
}

/// The selection of a watch.
pub(crate) fn watched(config: &Config) -> WatchParams {
    WatchParams {
        label_selector: config.label_selector.clone(),
        field_selector: config.field_selector.clone(),
        timeout: config.timeout,
        bookmarks: config.bookmarks,
        send_initial_events: false,
    }
}

struct Lister<K> {
    api: Api<K>,
    config: Config,
    streams: Arc<Streams>,
    source: Source<K>,
}

enum Source<K> {
    Unopened,
    Events(BoxStream<'static, kube::Result<WatchEvent<K>>>),
    Pages(VecDeque<K>, Page),
}

enum Page {
    First,
    Next(String),
    /// The last page, with the revision of the list.
    Last(String),
}

impl<K> Lister<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    async fn next(&mut self) -> Result<Listed<K>> {
        loop {
            match &mut self.source {
                Source::Unopened => self.source = self.open().await?,
                Source::Events(events) => match streamed(events.next().await) {
                    Ok(Some(item)) => return Ok(item),
                    Ok(None) => {}
                    Err(error) => {
                        self.streams.failed.store(true, Ordering::Relaxed);
                        return Err(error);
                    }
                },
                Source::Pages(objects, page) => {
                    if let Some(object) = objects.pop_front() {
                        return Ok(Listed::Object(object));
                    }
                    let token = match page {
                        Page::First => None,
                        Page::Next(token) => Some(std::mem::take(token)),
                        Page::Last(revision) => return Ok(Listed::End(std::mem::take(revision))),
                    };
                    self.source = self.page(token).await?;
                }
            }
        }
    }

    async fn open(&mut self) -> Result<Source<K>> {
        let failed = self.streams.failed.swap(false, Ordering::Relaxed);
        if !failed && !self.streams.refused.load(Ordering::Relaxed) {
            let params = WatchParams {
                bookmarks: true,
                send_initial_events: true,
                timeout: Some(STREAM_SECONDS),
                ..watched(&self.config)
            };
            // Without a revision the list is at least as new as this request.
            match self.api.watch(&params, "").await {
                Ok(events) => return Ok(Source::Events(events.boxed())),
                Err(kube::Error::Api(status)) if matches!(status.code, 400 | 422) => {
                    debug!(%status.message, "the API server streams no lists");
                    self.streams.refused.store(true, Ordering::Relaxed);
                }
                Err(error) => return Err(Error::InitialListFailed(error)),
            }
        }
        Ok(Source::Pages(VecDeque::new(), Page::First))
    }

    async fn page(&mut self, continue_token: Option<String>) -> Result<Source<K>> {
        let params = ListParams {
            limit: self.config.page_size,
            continue_token,
            ..selected(&self.config)
        };
        let list = self.api.list(&params).await;
        let list = list.map_err(Error::InitialListFailed)?;
        let non_empty = |text: Option<String>| text.filter(|text| !text.is_empty());
        let page = match (
            non_empty(list.metadata.continue_),
            non_empty(list.metadata.resource_version),
        ) {
            (Some(token), _) => Page::Next(token),
            (None, Some(revision)) => Page::Last(revision),
            (None, None) => return Err(Error::NoResourceVersion),
        };
        Ok(Source::Pages(list.items.into(), page))
    }
}

/// The item of a streamed list in an event.
fn streamed<K>(event: Option<kube::Result<WatchEvent<K>>>) -> Result<Option<Listed<K>>> {
    match event {
        Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object))) => {
            Ok(Some(Listed::Object(object)))
        }
        Some(Ok(WatchEvent::Deleted(object))) => Ok(Some(Listed::Deleted(object))),
        Some(Ok(WatchEvent::Bookmark(bookmark))) => {
            let end = bookmark.metadata.annotations.get(END);
            let is_end = end.is_some_and(|end| end == "true");
            Ok(is_end.then_some(Listed::End(bookmark.metadata.resource_version)))
        }
        Some(Ok(WatchEvent::Error(status))) => Err(Error::WatchError(status.boxed())),
        Some(Err(error)) => Err(Error::InitialListFailed(error)),
        None => {
            let ended = io::Error::from(io::ErrorKind::UnexpectedEof);
            Err(Error::InitialListFailed(kube::Error::ReadEvents(ended)))
        }
    }
}
