//! Holds the calls between agent, relay and kubelet against those of released versions.

use std::fmt::Debug;

use bursar_ledger::units::{AllocationId, DeviceIdSet, Resource};
use bursar_protocol::testing::assert_frames;
use prost::Message;
use tonic::metadata::MetadataMap;

use crate::api::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ListAndWatchResponse, PreStartContainerRequest,
    RegisterRequest, VERSION,
};
use crate::devices::{DeviceHealth, Devices};
use crate::plugin::{ALLOCATION_ID_METADATA, parse_allocation_ids};

fn bytes_of<M: Message + Default + Debug + PartialEq>(message: &M) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    assert_eq!(M::decode(bytes.as_slice()).as_ref(), Ok(message));
    bytes
}

#[test]
fn notes_and_calls_of_the_relay_have_their_golden_bytes() {
    let resource = Resource::DeviceMemory;
    let device_ids: DeviceIdSet = "0-1,7".parse().unwrap();
    let devices_ids = || device_ids.ids(resource).map(|id| id.to_string()).collect();
    let health = [DeviceHealth::Healthy, DeviceHealth::Unhealthy];
    let devices = Devices::new(resource, health.to_vec()).unwrap();
    let list: ListAndWatchResponse = devices.to_message();
    assert_eq!(Devices::from_message(resource, &list), Some(devices));
    let id = AllocationId::from_bits(7);
    let mut metadata = MetadataMap::new();
    metadata.insert(ALLOCATION_ID_METADATA, id.to_string().parse().unwrap());
    assert_eq!(parse_allocation_ids(&metadata).unwrap(), [id]);
    let today = [
        (
            "Register",
            bytes_of(&RegisterRequest {
                version: VERSION.to_owned(),
                endpoint: "bursar-gpu-memory.sock".to_owned(),
                resource_name: "bursar.dev/gpu-memory-gib".to_owned(),
                options: None,
            }),
        ),
        ("Devices", bytes_of(&list)),
        (
            "Allocate",
            bytes_of(&AllocateRequest {
                container_requests: vec![ContainerAllocateRequest {
                    devices_ids: devices_ids(),
                }],
            }),
        ),
        (
            "AllocationId",
            format!("{ALLOCATION_ID_METADATA}: {id}").into_bytes(),
        ),
        (
            "PreStartContainer",
            bytes_of(&PreStartContainerRequest {
                devices_ids: devices_ids(),
            }),
        ),
    ];
    assert_frames(
        "relay",
        &today.map(|(name, bytes)| (name.to_owned(), bytes)),
    );
}
