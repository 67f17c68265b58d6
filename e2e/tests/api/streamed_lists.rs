//! Follows objects by the operator's watch on the real API server, which streams their list.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bursar_watch::{History, Pauses, watch};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::client::Body;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client, ResourceExt as _};
use libtest_mimic::Failed;
use serde_json::json;
use tokio::time::timeout;
use tower::service_fn;

use crate::isolated_scope::IsolatedScope;
use crate::server::{Server, acquire_permit};
use crate::test_case::PROMISED_TIME;

/// More objects than a page of a list has.
const OBJECTS: usize = 510;
/// The pause after a failure.
const PAUSE: Duration = Duration::from_secs(1);

pub(crate) async fn streamed_lists(server: &Server) -> Result<String, Failed> {
    let _permit = acquire_permit().await;
    let at = IsolatedScope::set_up(server, "streamed").await?;
    let path = format!("/api/v1/namespaces/{}/configmaps", at.name);
    let create = async |number: usize| {
        let object = json!({ "metadata": { "name": format!("streamed-{number}") } });
        at.create(&path, object).await
    };
    for number in 0..OBJECTS {
        create(number).await?;
    }
    let queries = Arc::new(Mutex::new(Vec::new()));
    let (sent, direct) = (queries.clone(), server.control_plane.client());
    let service = service_fn(move |request: http::Request<Body>| {
        let query = request.uri().query().unwrap_or_default().to_owned();
        sent.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(query);
        let direct = direct.clone();
        async move { direct.send(request).await }
    });
    let api = Api::<ConfigMap>::namespaced(Client::new(service, "default"), &at.name);
    let pauses = Pauses::new(PAUSE, PAUSE);
    let mut events = pin!(watch(api, Config::default(), pauses, History::default()));
    let (mut listed, mut is_complete) = (0, false);
    let follow = async {
        while let Some(event) = events.next().await {
            match event.map_err(|error| error.to_string())? {
                Event::Init => listed = 0,
                Event::InitApply(object) => {
                    listed += usize::from(object.name_any().starts_with("streamed-"));
                }
                Event::InitDone => {
                    is_complete = true;
                    create(OBJECTS).await?;
                }
                Event::Apply(object) if object.name_any() == format!("streamed-{OBJECTS}") => {
                    return Ok(());
                }
                Event::Apply(_) | Event::Delete(_) => {}
            }
        }
        Err(Failed::from("the watch ended"))
    };
    timeout(4 * PROMISED_TIME, follow).await??;
    let queries = queries.lock().unwrap_or_else(PoisonError::into_inner);
    let is_stream = |query: &String| query.contains("sendInitialEvents=true");
    let lists = |query: &&String| !query.contains("watch=true");
    if !is_complete || listed != OBJECTS {
        return Err(format!("{listed} of {OBJECTS} objects listed").into());
    }
    if !queries.first().is_some_and(is_stream) || queries.iter().any(|query| lists(&query)) {
        return Err(format!("the list was not streamed: {queries:?}").into());
    }
    Ok(format!("{listed} objects in one stream, and none in pages"))
}
