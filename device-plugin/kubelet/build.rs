//! Generates the kubelet's gRPC services from `proto/`, without `protoc`.
//!
//! Both sides are built: the agent serves DevicePlugin and calls Registration and PodResources, and
//! the fake kubelet of the tests does the reverse.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let files = [
        "proto/deviceplugin-v1beta1.proto",
        "proto/podresources-v1.proto",
    ];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        .build_client(true)
        .build_server(true)
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors)?;
    Ok(())
}
