//! Reads and writes the kubelet's checkpoint file in its JSON form.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use bursar_kubelet::api::deviceplugin::ContainerAllocateResponse;
use bursar_kubelet::device_checkpoint::FILE_NAME;
use k8s_openapi::ByteString;
use prost::Message as _;
use serde::{Deserialize, Serialize};

/// One container's devices of one resource.
#[derive(Debug, Clone)]
pub struct Entry {
    pub uid: String,
    pub container: String,
    pub resource: String,
    pub ids: Vec<String>,
    pub answer: ContainerAllocateResponse,
}

/// The content of the file.
#[derive(Debug, Default)]
pub struct Content {
    pub entries: Vec<Entry>,
    pub registered: BTreeMap<String, BTreeSet<String>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: Data,
    /// FNV-1a of the data. The real kubelet hashes Go's text form of Go values, which only Go
    /// produces.
    checksum: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    pod_device_entries: Option<Vec<FileEntry>>,
    registered_devices: BTreeMap<String, BTreeSet<String>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct FileEntry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    device_ids: BTreeMap<i64, Vec<String>>,
    alloc_resp: ByteString,
}

pub fn write(dir: &Path, content: &Content) {
    let entry = |e: &Entry| FileEntry {
        pod_uid: e.uid.clone(),
        container_name: e.container.clone(),
        resource_name: e.resource.clone(),
        device_ids: BTreeMap::from([(-1, e.ids.clone())]),
        alloc_resp: ByteString(e.answer.encode_to_vec()),
    };
    let entries: Vec<_> = content.entries.iter().map(entry).collect();
    let data = Data {
        // Go writes a nil slice as null.
        pod_device_entries: (!entries.is_empty()).then_some(entries),
        registered_devices: content.registered.clone(),
    };
    let checksum = fnv(&serde_json::to_vec(&data).unwrap());
    let file = serde_json::to_vec(&File { data, checksum }).unwrap();
    let temporary = dir.join(".checkpoint-tmp");
    std::fs::write(&temporary, file).unwrap();
    std::fs::rename(temporary, dir.join(FILE_NAME)).unwrap();
}

/// Returns the content of the file. A missing or damaged file counts as empty, as it does for the
/// real kubelet.
pub fn read(dir: &Path) -> Content {
    let Ok(json) = std::fs::read(dir.join(FILE_NAME)) else {
        return Content::default();
    };
    let Ok(file) = serde_json::from_slice::<File>(&json) else {
        return Content::default();
    };
    if file.checksum != fnv(&serde_json::to_vec(&file.data).unwrap()) {
        return Content::default();
    }
    let entry = |e: FileEntry| Entry {
        uid: e.pod_uid,
        container: e.container_name,
        resource: e.resource_name,
        ids: e.device_ids.into_values().flatten().collect(),
        answer: ContainerAllocateResponse::decode(e.alloc_resp.0.as_slice()).unwrap(),
    };
    Content {
        entries: file
            .data
            .pod_device_entries
            .into_iter()
            .flatten()
            .map(entry)
            .collect(),
        registered: file.data.registered_devices,
    }
}

fn fnv(bytes: &[u8]) -> u32 {
    let step = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
    bytes.iter().fold(0x811c_9dc5, step)
}
