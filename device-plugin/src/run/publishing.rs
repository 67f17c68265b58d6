//! Starts the tasks that tell the node's state: status, events, metrics and probes.

use bursar_apiserver::events::EventSender;
use bursar_apiserver::gpu_node::GpuNodeClient;
use bursar_apiserver::spec_watch::{self, Observation, WatchOutput};
use bursar_apiserver::{ParsedSpec, namespaces};
use bursar_gpu_node::NodeReport;
use bursar_gpu_node::publish::Publisher;
use bursar_http::Listeners;
use bursar_watch::History;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tracing::info;

use super::{Agent, AgentError};
use crate::http::{Heartbeat, Sources, Verdict};
use crate::publisher::StatusPublisher;

impl Agent {
    pub(super) fn start_publisher(
        &mut self,
        publisher: StatusPublisher,
    ) -> (watch::Receiver<NodeReport>, watch::Receiver<Verdict>) {
        let (task, reports, readiness) = publisher.start(self.stop.clone());
        self.spawn("status publisher", task);
        (reports, readiness)
    }

    /// Starts the tasks that need the API server, except the writer of the status.
    ///
    /// Returns the API for that writer, and what the watch has observed of the node's `GpuNode`.
    pub(super) fn follow_api_server(
        &mut self,
        client: Client,
        events: EventSender,
        spec: watch::Sender<Option<ParsedSpec>>,
    ) -> (GpuNodeClient, watch::Receiver<Observation>) {
        let (node, metrics) = (self.node.clone(), self.metrics.api.clone());
        self.spawn(
            "events",
            events.run(
                client.clone(),
                node.clone(),
                metrics.clone(),
                self.stop.clone(),
            ),
        );
        self.spawn(
            "namespace watch",
            namespaces::run(
                client.clone(),
                self.policies.clone(),
                metrics.clone(),
                self.stop.clone(),
            ),
        );
        let (observed, observations) = watch::channel(Observation::default());
        let history = History::default();
        let output = WatchOutput {
            spec,
            observed,
            metrics,
        };
        self.spawn(
            "spec watch",
            spec_watch::run(
                client.clone(),
                node.clone(),
                history.clone(),
                output,
                self.stop.clone(),
            ),
        );
        (GpuNodeClient::new(client, node, history), observations)
    }

    /// Starts the writer of the node's status.
    pub(super) fn start_writer(&mut self, writer: Publisher<GpuNodeClient>) {
        self.spawn("GpuNode writer", writer.run(self.stop.clone()));
    }

    /// Serves metrics and probes.
    pub(super) async fn serve(
        &mut self,
        heartbeat: watch::Receiver<std::time::Instant>,
        readiness: watch::Receiver<Verdict>,
    ) -> Result<(), AgentError> {
        let sources = Sources {
            metrics: self.metrics.clone(),
            health: Heartbeat(heartbeat),
            readiness,
        };
        let listeners = Listeners::bind(self.config.http.listen, self.config.http.probes).await?;
        let address = |listener: &TcpListener| listener.local_addr().ok();
        if let Some((address, probes)) = address(&listeners.metrics).zip(address(&listeners.probes))
        {
            info!(%address, %probes, "serving metrics and probes");
        }
        let served = bursar_http::serve(listeners, sources, self.stop.clone());
        self.spawn("http server", served);
        Ok(())
    }
}
