//! Includes the kubelet's gRPC services, generated from `proto/`.

/// `v1beta1`: Registration, which the kubelet serves, and DevicePlugin, which the agent serves.
#[allow(missing_docs, reason = "generated; the fields are described in proto/")]
pub mod deviceplugin {
    tonic::include_proto!("v1beta1");

    /// The only version that kubelets support.
    pub const VERSION: &str = "v1beta1";
    /// The health of a device that the kubelet may allocate.
    pub const HEALTHY: &str = "Healthy";
    /// The health of a device that the kubelet must not allocate.
    pub const UNHEALTHY: &str = "Unhealthy";
    /// The kubelet's registration socket, in its plugin directory.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
}

/// `v1`: PodResourcesLister, which the kubelet serves.
#[allow(missing_docs, reason = "generated; the fields are described in proto/")]
pub mod podresources {
    tonic::include_proto!("v1");
}
