//! Serves the DevicePlugin API for one resource with lists of a test's choice.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bursar_kubelet::api::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use bursar_kubelet::api::deviceplugin::registration_client::RegistrationClient;
use bursar_kubelet::api::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions,
    Empty, KUBELET_SOCKET, ListAndWatchResponse, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse,
    RegisterRequest, VERSION,
};
use libtest_mimic::Failed;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

/// A plugin that is registered once with the kubelet. Dropping it ends its server.
pub(super) struct FakePlugin {
    service: Service,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

#[derive(Clone)]
struct Service {
    /// The list for the kubelet; none ends the streams.
    list: Arc<watch::Sender<Option<Vec<Device>>>>,
    /// How often the kubelet has opened a stream.
    opened: Arc<AtomicUsize>,
}

impl FakePlugin {
    /// Serves on a new socket in the kubelet's plugin folder, and registers. The socket's name has
    /// to be unique.
    pub(super) async fn register(
        folder: &Path,
        socket: &str,
        resource: &str,
        list: Vec<Device>,
    ) -> Result<Self, Failed> {
        let service = Service {
            list: Arc::new(watch::Sender::new(Some(list))),
            opened: Arc::default(),
        };
        let listener = UnixListener::bind(folder.join(socket))?;
        let plugin = DevicePluginServer::new(service.clone());
        let server = Server::builder().add_service(plugin);
        let server = tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        let kubelet = format!("unix://{}", folder.join(KUBELET_SOCKET).display());
        let channel = Endpoint::try_from(kubelet)?.connect().await?;
        let request = RegisterRequest {
            version: VERSION.to_owned(),
            endpoint: socket.to_owned(),
            resource_name: resource.to_owned(),
            options: None,
        };
        RegistrationClient::new(channel).register(request).await?;
        Ok(Self { service, server })
    }

    /// Sends a list to the kubelet.
    pub(super) fn send(&self, list: Vec<Device>) {
        self.service.list.send_replace(Some(list));
    }

    /// Ends the kubelet's stream.
    pub(super) fn end_stream(&self) {
        self.service.list.send_replace(None);
    }

    /// Waits until no stream is open.
    pub(super) async fn closed(&self) {
        self.service.list.closed().await;
    }

    /// Returns how often the kubelet has opened a stream.
    pub(super) fn opened(&self) -> usize {
        self.service.opened.load(Ordering::SeqCst)
    }
}

impl Drop for FakePlugin {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    async fn list_and_watch(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        self.opened.fetch_add(1, Ordering::SeqCst);
        let lists = WatchStream::new(self.list.subscribe());
        let lists = lists.map_while(|list| Some(Ok(ListAndWatchResponse { devices: list? })));
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("the options do not offer it"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests.len();
        Ok(Response::new(AllocateResponse {
            container_responses: vec![ContainerAllocateResponse::default(); containers],
        }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
