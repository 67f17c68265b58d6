//! Connects the kubelet to one plugin, with the names of `plugin/v1beta1/client.go`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_kubelet::api::deviceplugin::device_plugin_client::DevicePluginClient;
use bursar_kubelet::api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse, Empty,
    PreStartContainerRequest,
};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::{Call, Shared};

/// `KubeletPreStartContainerRPCTimeoutInSecs`: PreStartContainer's time limit.
const PRE_START_LIMIT: Duration = Duration::from_secs(30);

/// A connection. Cutting it ends its stream and fails the open calls.
#[derive(Debug)]
pub struct Client {
    api: DevicePluginClient<Channel>,
    pub cut: CancellationToken,
}

impl Client {
    /// `connectClient`: connects, reads the options, and follows the device list in the background.
    pub async fn connect(
        shared: &Arc<Shared>,
        resource: &str,
        socket: &Path,
    ) -> Result<(), String> {
        let client = Arc::new(Self {
            api: DevicePluginClient::new(dial(socket).await?),
            cut: CancellationToken::new(),
        });
        shared
            .manager()
            .register_client(resource, Arc::clone(&client));
        if let Err(error) = client.greet(shared, resource).await {
            shared.manager().deregister_client(resource);
            return Err(error);
        }
        let (shared, resource) = (Arc::clone(shared), resource.to_owned());
        tokio::spawn(async move {
            client.follow(&shared, &resource).await;
            shared.manager().stream_ended(&resource);
            if shared.dir.exists() {
                shared.write_checkpoint();
            }
        });
        Ok(())
    }

    async fn greet(self: &Arc<Self>, shared: &Shared, resource: &str) -> Result<(), String> {
        shared.note(Call::GetDevicePluginOptions(resource.to_owned()));
        let options = match take(&mut shared.faults.lock().unwrap().options) {
            true => Err(Status::unknown("GetDevicePluginOptions failed")),
            false => Ok(self.api.clone()),
        };
        let options = match options {
            Ok(mut api) => api.get_device_plugin_options(Empty {}).await,
            Err(status) => Err(status),
        };
        let options = options.map_err(|e| format!("failed to get device plugin options: {e}"))?;
        shared
            .manager()
            .connected(resource, Arc::clone(self), options.into_inner());
        Ok(())
    }

    /// Receives device lists until the stream ends for any reason.
    async fn follow(&self, shared: &Shared, resource: &str) {
        shared.note(Call::ListAndWatch(resource.to_owned()));
        let Ok(stream) = self.api.clone().list_and_watch(Empty {}).await else {
            return;
        };
        if take(&mut shared.faults.lock().unwrap().streams) {
            return;
        }
        let mut stream = stream.into_inner();
        loop {
            let list = tokio::select! {
                list = stream.message() => list,
                () = self.cut.cancelled() => return,
            };
            let Ok(Some(list)) = list else { return };
            shared.manager().update(resource, list);
            shared.write_checkpoint();
        }
    }

    /// Calls Allocate, which has no time limit.
    pub async fn allocate(&self, ids: Vec<String>) -> Result<ContainerAllocateResponse, String> {
        let container_requests = vec![ContainerAllocateRequest { devices_ids: ids }];
        let mut api = self.api.clone();
        let answer = self
            .unless_cut(api.allocate(AllocateRequest { container_requests }))
            .await?;
        let first = answer.into_inner().container_responses.into_iter().next();
        first.ok_or_else(|| "no containers return in allocation response".to_owned())
    }

    /// Calls PreStartContainer with [`PRE_START_LIMIT`], which gRPC sends to the plugin too.
    pub async fn pre_start(&self, ids: Vec<String>) -> Result<(), String> {
        let mut request = tonic::Request::new(PreStartContainerRequest { devices_ids: ids });
        request.set_timeout(PRE_START_LIMIT);
        let (mut api, start) = (self.api.clone(), Instant::now());
        let answer = self.unless_cut(api.pre_start_container(request)).await;
        answer
            .map(drop)
            .map_err(|error| match start.elapsed() < PRE_START_LIMIT {
                true => error,
                false => "rpc error: code = DeadlineExceeded".to_owned(),
            })
    }

    async fn unless_cut<T>(
        &self,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, String> {
        tokio::select! {
            answer = call => answer.map_err(|status| {
                format!("rpc error: code = {:?} desc = {}", status.code(), status.message())
            }),
            () = self.cut.cancelled() => {
                Err("rpc error: code = Canceled desc = grpc: the client connection is closing".to_owned())
            }
        }
    }
}

async fn dial(socket: &Path) -> Result<Channel, String> {
    let path = PathBuf::from(socket);
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let path = path.clone();
        async move {
            let stream = tokio::net::UnixStream::connect(path).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    let dialled = Endpoint::from_static("http://localhost")
        .connect_timeout(Duration::from_secs(10))
        .connect_with_connector(connector)
        .await;
    dialled.map_err(|error| format!("failed to dial device plugin: {error}"))
}

/// Takes one of the `left` failures. True where there was one.
fn take(left: &mut u32) -> bool {
    let any = *left > 0;
    *left = left.saturating_sub(1);
    any
}
