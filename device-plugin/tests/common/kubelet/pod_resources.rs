//! Serves the kubelet's PodResources API, with the names of `apis/podresources/server_v1.go`.

use std::path::Path;
use std::sync::Arc;

use bursar_kubelet::api::podresources as api;
use bursar_kubelet::api::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::manager::Manager;
use super::{Kind, Pod, Shared};

pub fn serve(
    socket: &Path,
    shared: Arc<Shared>,
    stop: CancellationToken,
) -> tokio::task::JoinHandle<()> {
    let _left_by_the_one_before = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket).unwrap();
    tokio::spawn(async move {
        let served = tonic::transport::Server::builder()
            .add_service(PodResourcesListerServer::new(Lister(shared)))
            .serve_with_incoming_shutdown(
                UnixListenerStream::new(listener),
                stop.cancelled_owned(),
            );
        served.await.unwrap();
    })
}

struct Lister(Arc<Shared>);

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<api::ListPodResourcesRequest>,
    ) -> Result<Response<api::ListPodResourcesResponse>, Status> {
        let mut manager = self.0.manager();
        // This read changes the state as the real one does: inactive pods are dropped here.
        manager.forget_inactive();
        let pod_resources = manager.active().map(|pod| listed(&manager, pod)).collect();
        Ok(Response::new(api::ListPodResourcesResponse {
            pod_resources,
        }))
    }

    async fn get(
        &self,
        request: Request<api::GetPodResourcesRequest>,
    ) -> Result<Response<api::GetPodResourcesResponse>, Status> {
        if !self.0.faults.lock().unwrap().serves_get {
            return Err(Status::unknown("PodResources API Get method disabled"));
        }
        let api::GetPodResourcesRequest {
            pod_name,
            pod_namespace,
        } = request.into_inner();
        let manager = self.0.manager();
        let pod = manager
            .active()
            .find(|p| p.name == pod_name && p.namespace == pod_namespace);
        let pod = pod.ok_or_else(|| Status::unknown(format!("pod {pod_name} not found")))?;
        let pod_resources = Some(listed(&manager, pod));
        Ok(Response::new(api::GetPodResourcesResponse {
            pod_resources,
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<api::AllocatableResourcesRequest>,
    ) -> Result<Response<api::AllocatableResourcesResponse>, Status> {
        let others = self.0.faults.lock().unwrap().other_plugins.clone();
        // The real kubelet lists each device by itself.
        let devices = others.into_iter().flat_map(|(resource, number)| {
            (0..number).map(move |device| api::ContainerDevices {
                resource_name: resource.clone(),
                device_ids: vec![format!("device-{device}")],
            })
        });
        Ok(Response::new(api::AllocatableResourcesResponse {
            devices: devices.collect(),
        }))
    }
}

/// A pod's containers, without the plain init containers; one entry per device.
fn listed(manager: &Manager, pod: &Pod) -> api::PodResources {
    let containers = pod
        .containers
        .iter()
        .filter(|container| container.kind != Kind::Init);
    let containers = containers.map(|container| {
        let devices = container.limits.iter().flat_map(|(resource, _)| {
            let ids = manager.assigned(&pod.uid, &container.name, resource);
            ids.into_iter().map(|id| api::ContainerDevices {
                resource_name: resource.clone(),
                device_ids: vec![id],
            })
        });
        api::ContainerResources {
            name: container.name.clone(),
            devices: devices.collect(),
        }
    });
    api::PodResources {
        name: pod.name.clone(),
        namespace: pod.namespace.clone(),
        containers: containers.collect(),
    }
}
