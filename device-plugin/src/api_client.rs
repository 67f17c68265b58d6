//! Connects to the API server with a deadline for every request.

use std::time::Duration;

use futures::future::BoxFuture;
use kube::Client;
use kube::client::{ClientBuilder, DynBody};
use tokio::time::timeout;
use tower::BoxError;
use tower::util::MapFutureLayer;
use tracing::warn;

/// The time within which the API server has to begin each response.
const API_TIMEOUT: Duration = Duration::from_secs(20);
/// The longest silence within a response. A quiet watch of kube lasts 200 s.
const WATCH_TIMEOUT: Duration = Duration::from_secs(210);

/// Connects to the API server of the agent's cluster, or to the one in `KUBECONFIG`.
///
/// Every request of the client has a deadline.
pub async fn connect_api_server() -> Option<Client> {
    let client = kube::Config::infer()
        .await
        .map_err(kube::Error::InferConfig)
        .and_then(|config| client_with_deadlines(config, API_TIMEOUT));
    client
        .inspect_err(
            |error| warn!(%error, "failed to configure a client of the API server: no status, and every pod has priority 0"),
        )
        .ok()
}

/// A client of `config` with a deadline for each step of a request.
///
/// The body of a response has a longer deadline than its beginning: a watch may be quiet.
fn client_with_deadlines(mut config: kube::Config, silence: Duration) -> kube::Result<Client> {
    config.connect_timeout = Some(silence);
    config.write_timeout = Some(silence);
    config.read_timeout = Some(WATCH_TIMEOUT);
    let head_deadline = MapFutureLayer::new(move |answer: ResponseFuture| async move {
        let answer: Result<_, BoxError> = timeout(silence, answer).await?;
        answer
    });
    Ok(ClientBuilder::try_from(config)?
        .with_layer(&head_deadline)
        .build())
}

/// A response of kube's client that has not arrived yet.
type ResponseFuture = BoxFuture<'static, Result<::http::Response<Box<DynBody>>, BoxError>>;

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    const SILENCE: Duration = Duration::from_millis(50);

    async fn client_of(server: &TcpListener) -> Client {
        let address = server.local_addr().unwrap();
        let config = kube::Config::new(format!("http://{address}").parse().unwrap());
        client_with_deadlines(config, SILENCE).unwrap()
    }

    #[tokio::test]
    async fn request_times_out_when_the_api_server_is_silent() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = client_of(&silent).await;
        let answer = timeout(Duration::from_secs(10), client.apiserver_version()).await;
        assert!(answer.expect("the request has a deadline").is_err());
    }

    #[tokio::test]
    async fn watch_continues_without_events() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = client_of(&silent).await;
        let server = tokio::spawn(async move {
            let (mut stream, _) = silent.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await.unwrap();
            let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
            stream.write_all(head).await.unwrap();
            std::future::pending::<()>().await
        });
        let nodes = bursar_apiserver::gpu_node::gpu_nodes(client);
        let params = kube::api::WatchParams::default();
        let watch = nodes.watch(&params, "1");
        let watch = timeout(Duration::from_secs(10), watch).await.unwrap();
        let mut events = std::pin::pin!(watch.unwrap());
        let next_event = timeout(10 * SILENCE, events.next()).await;
        assert!(next_event.is_err(), "{next_event:?}");
        server.abort();
    }
}
