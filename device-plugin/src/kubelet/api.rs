//! The kubelet's gRPC services, generated from `proto/`.

/// `v1beta1`: Registration (the kubelet serves it) and DevicePlugin (the agent serves it).
#[allow(missing_docs, reason = "generated; the fields are described in proto/")]
pub mod deviceplugin {
    tonic::include_proto!("v1beta1");

    /// The only version that any kubelet speaks.
    pub const VERSION: &str = "v1beta1";
    /// The health of a device that may be given to a container.
    pub const HEALTHY: &str = "Healthy";
    /// The health of a device that may not.
    pub const UNHEALTHY: &str = "Unhealthy";
    /// The kubelet's registration socket, in its plugin directory.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
}

/// `v1`: PodResourcesLister (the kubelet serves it).
#[allow(missing_docs, reason = "generated; the fields are described in proto/")]
pub mod podresources {
    tonic::include_proto!("v1");
}
