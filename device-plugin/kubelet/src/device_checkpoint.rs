//! Reads the device ids of containers from the kubelet's device checkpoint.
//!
//! Only `kubelet_internal_checkpoint` in the plugin directory maps device ids to a pod's UID. The
//! file also has the agent's Allocate response, and by that the allocation id. The kubelet replaces
//! the file (temporary file, rename) before the admission with the allocation ends.
//!
//! The format is `pkg/kubelet/cm/devicemanager/checkpoint` (Kubernetes 1.20 and later). The agent
//! does not verify the checksum, which hashes Go's rendering of Go types. The rename excludes torn
//! files, and the agent skips and counts damaged entries.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use bursar_ledger::units::{AllocationId, DeviceIdSet, PodUid, Resource};
use k8s_openapi::ByteString;
use prost::Message as _;
use serde::Deserialize;

use super::api::deviceplugin::ContainerAllocateResponse;
use super::plugin::allocation_id_of;

/// The file's name in the kubelet's plugin directory.
pub const FILE_NAME: &str = "kubelet_internal_checkpoint";
/// The most bytes to read: 4,096 device ids in 4,096 containers take about 1.5 MB. Plugins of other
/// vendors share the file.
pub const MAX_BYTES: u64 = 16 << 20;

/// The reason why the kubelet's checkpoint is unusable.
#[derive(Debug, thiserror::Error)]
pub enum DeviceCheckpointError {
    /// The file is missing: the node is new, or its directory was wiped.
    #[error("failed to read {path}: the file does not exist")]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The file is unreadable.
    #[error("failed to read {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        #[source]
        source: io::Error,
    },
    /// The file is larger than [`MAX_BYTES`].
    #[error("failed to read the kubelet's device checkpoint: it is larger than {MAX_BYTES} bytes")]
    TooLarge,
    /// The file does not have the JSON format of kubelets.
    #[error("failed to decode the kubelet's device checkpoint: {0}")]
    Malformed(#[source] serde_json::Error),
}

/// One container's device ids of one of the agent's resources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointEntry {
    /// The pod's UID.
    pub pod: PodUid,
    /// The container's name; init containers are listed too.
    pub container: String,
    /// The resource.
    pub resource: Resource,
    /// The device ids.
    pub device_ids: DeviceIdSet,
    /// The allocation in the agent's response.
    pub allocation: AllocationId,
}

/// The kubelet's entries for the agent's resources.
///
/// The kubelet keeps entries of ended pods until its next allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceCheckpoint {
    /// The entries in the file's order.
    pub entries: Vec<CheckpointEntry>,
    /// The number of damaged entries, and of those that another program answered.
    pub skipped: usize,
}

impl DeviceCheckpoint {
    /// Reads the checkpoint in the kubelet's plugin directory; `names` has the registered names.
    ///
    /// # Errors
    /// [`DeviceCheckpointError`].
    pub fn read(dir: &Path, names: &[(Resource, String)]) -> Result<Self, DeviceCheckpointError> {
        let path = dir.join(FILE_NAME);
        let json = read_bounded(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => DeviceCheckpointError::Missing { path },
            _ => DeviceCheckpointError::Unreadable { path, source },
        })?;
        Self::parse(&json, names)
    }

    /// Parses the content of the file.
    ///
    /// # Errors
    /// [`DeviceCheckpointError::TooLarge`] or [`DeviceCheckpointError::Malformed`].
    pub fn parse(json: &[u8], names: &[(Resource, String)]) -> Result<Self, DeviceCheckpointError> {
        if json.len() as u64 > MAX_BYTES {
            return Err(DeviceCheckpointError::TooLarge);
        }
        let file: File = serde_json::from_slice(json).map_err(DeviceCheckpointError::Malformed)?;
        let mut checkpoint = Self::default();
        for entry in file.data.pod_device_entries.unwrap_or_default() {
            let named = names
                .iter()
                .find(|(_, name)| entry["ResourceName"] == name.as_str());
            let Some(&(resource, _)) = named else {
                continue;
            };
            match parse_entry(resource, entry) {
                Some(entry) => checkpoint.entries.push(entry),
                None => checkpoint.skipped += 1,
            }
        }
        Ok(checkpoint)
    }

    /// The hundredths of a GPU that all containers of a pod have together. Containers that follow
    /// each other have the same device ids.
    pub fn weight_of(entries: &[CheckpointEntry], pod: &PodUid) -> u16 {
        let of_pod =
            |entry: &&CheckpointEntry| entry.resource == Resource::Compute && entry.pod == *pod;
        let device_ids = entries.iter().filter(of_pod);
        let device_ids = device_ids.flat_map(|entry| entry.device_ids.indexes());
        // Below MAX_DEVICE_IDS.
        device_ids.collect::<BTreeSet<u16>>().len() as u16
    }

    /// The entries with exactly these device ids.
    ///
    /// There are several where containers of a pod share ids in turn, and while the entry of an
    /// ended pod remains.
    pub fn entries_with<'a>(
        &'a self,
        resource: Resource,
        device_ids: &'a DeviceIdSet,
    ) -> impl Iterator<Item = &'a CheckpointEntry> {
        self.entries
            .iter()
            .filter(move |entry| entry.resource == resource && entry.device_ids == *device_ids)
    }
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut json = Vec::new();
    std::fs::File::open(path)?
        .take(MAX_BYTES + 1)
        .read_to_end(&mut json)?;
    Ok(json)
}

#[derive(Deserialize)]
struct File {
    #[serde(rename = "Data")]
    data: Data,
}

#[derive(Deserialize)]
struct Data {
    /// Null before the first allocation. Each entry is parsed separately: a damaged or foreign one
    /// must not hide the others.
    #[serde(rename = "PodDeviceEntries")]
    pod_device_entries: Option<Vec<serde_json::Value>>,
}

#[derive(Deserialize)]
struct JsonEntry {
    #[serde(rename = "PodUID")]
    pod: PodUid,
    #[serde(rename = "ContainerName")]
    container: String,
    /// The ids by NUMA node; the agent's are all under -1, "none".
    #[serde(rename = "DeviceIDs")]
    device_ids: BTreeMap<String, Vec<String>>,
    /// A marshalled ContainerAllocateResponse.
    #[serde(rename = "AllocResp")]
    response: ByteString,
}

fn parse_entry(resource: Resource, entry: serde_json::Value) -> Option<CheckpointEntry> {
    let JsonEntry {
        pod,
        container,
        device_ids,
        response: answer,
    } = serde_json::from_value(entry).ok()?;
    let answer = ContainerAllocateResponse::decode(answer.0.as_slice()).ok()?;
    Some(CheckpointEntry {
        pod,
        container,
        resource,
        device_ids: DeviceIdSet::from_ids(resource, device_ids.values().flatten()).ok()?,
        allocation: allocation_id_of(resource, &answer)?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::plugin::container_response;
    use super::*;

    const NAME: &str = "bursar.dev/gpu-memory-gib";

    fn names() -> Vec<(Resource, String)> {
        vec![
            (Resource::DeviceMemory, NAME.to_owned()),
            (
                Resource::ManagedMemory,
                "bursar.dev/managed-memory-gib".to_owned(),
            ),
            (Resource::Compute, "bursar.dev/gpu-compute".to_owned()),
        ]
    }

    fn parse(json: &str) -> Result<DeviceCheckpoint, DeviceCheckpointError> {
        DeviceCheckpoint::parse(json.as_bytes(), &names())
    }

    /// An entry as kubelet 1.36.3 writes it.
    fn entry(pod: &str, container: &str, ids: &[&str], allocation: u64) -> String {
        let answer =
            container_response(Resource::DeviceMemory, AllocationId::from_bits(allocation));
        let answer = serde_json::to_string(&ByteString(answer.encode_to_vec())).unwrap();
        let ids = serde_json::to_string(ids).unwrap();
        format!(
            r#"{{"PodUID":"{pod}","ContainerName":"{container}","ResourceName":"{NAME}","DeviceIDs":{{"-1":{ids}}},"AllocResp":{answer}}}"#
        )
    }

    fn file(entries: &[String]) -> String {
        let entries = entries.join(",");
        format!(
            r#"{{"Data":{{"PodDeviceEntries":[{entries}],"RegisteredDevices":{{"{NAME}":["m-0000"]}}}},"Checksum":3141592653}}"#
        )
    }

    fn device_ids(indexes: &[u16]) -> DeviceIdSet {
        DeviceIdSet::from_indexes(indexes.iter().copied()).unwrap()
    }

    #[test]
    fn entry_names_pod_container_device_ids_and_allocation() {
        let checkpoint = parse(&file(&[entry("uid-1", "main", &["m-0002", "m-0001"], 7)])).unwrap();
        let entry = CheckpointEntry {
            pod: "uid-1".parse().unwrap(),
            container: "main".to_owned(),
            resource: Resource::DeviceMemory,
            device_ids: device_ids(&[1, 2]),
            allocation: AllocationId::from_bits(7),
        };
        assert_eq!(
            checkpoint,
            DeviceCheckpoint {
                entries: vec![entry],
                skipped: 0
            }
        );
    }

    #[test]
    fn checkpoint_of_a_fresh_kubelet_has_no_entry() {
        let never = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;
        assert_eq!(parse(never).unwrap(), DeviceCheckpoint::default());
    }

    #[test]
    fn entries_of_other_vendors_are_ignored() {
        let foreign = r#"{"PodUID":"x","ContainerName":"y","ResourceName":"nvidia.com/gpu","DeviceIDs":null,"AllocResp":"%"}"#;
        let checkpoint = parse(&file(&[foreign.to_owned()])).unwrap();
        assert_eq!(checkpoint, DeviceCheckpoint::default());
    }

    #[test]
    fn damaged_entry_is_counted_and_hides_no_other() {
        let good = entry("uid-1", "main", &["m-0001"], 7);
        let damaged = [
            good.replace("uid-1", "../etc"),
            good.replace("m-0001", "GPU-1"),
            good.replace(r#"["m-0001"]"#, "[]"),
            good.replace(r#"["m-0001"]"#, "3"),
            good.replace("AllocResp\":\"", "AllocResp\":\"%"),
            good.replace("AllocResp\":\"", "AllocResp\":\"AAAA"),
            good.replace("AllocResp", "Other"),
        ];
        for damaged in damaged {
            assert_ne!(damaged, good);
            let checkpoint = parse(&file(&[damaged.clone(), good.clone()])).unwrap();
            assert_eq!(
                (checkpoint.entries.len(), checkpoint.skipped),
                (1, 1),
                "{damaged}"
            );
        }
    }

    #[test]
    fn truncated_file_is_malformed() {
        let whole = file(&[entry("uid-1", "main", &["m-0001"], 7)]);
        for end in 0..whole.len() {
            let error = parse(&whole[..end]).unwrap_err();
            assert!(
                matches!(error, DeviceCheckpointError::Malformed(_)),
                "{end}"
            );
        }
        let text = parse("{").unwrap_err().to_string();
        assert!(text.contains("EOF"), "{text}");
    }

    #[test]
    fn huge_file_is_refused_unread() {
        let dir = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(dir.path().join(FILE_NAME)).unwrap();
        file.set_len(1 << 40).unwrap();
        let error = DeviceCheckpoint::read(dir.path(), &names()).unwrap_err();
        assert!(matches!(error, DeviceCheckpointError::TooLarge));
    }

    #[test]
    fn missing_file_differs_from_an_unreadable_one() {
        let dir = tempfile::tempdir().unwrap();
        let error = || DeviceCheckpoint::read(dir.path(), &names()).unwrap_err();
        assert!(matches!(error(), DeviceCheckpointError::Missing { .. }));
        std::fs::create_dir(dir.path().join(FILE_NAME)).unwrap();
        assert!(matches!(error(), DeviceCheckpointError::Unreadable { .. }));
        let text = error().to_string();
        assert!(text.contains("directory"), "{text}");
    }

    #[test]
    fn containers_that_share_device_ids_are_all_returned() {
        let file = file(&[
            entry("uid-1", "init", &["m-0001", "m-0002"], 7),
            entry("uid-1", "main", &["m-0002", "m-0001"], 8),
            entry("uid-2", "main", &["m-0001"], 9),
        ]);
        let checkpoint = parse(&file).unwrap();
        let both = device_ids(&[1, 2]);
        let names: Vec<_> = checkpoint
            .entries_with(Resource::DeviceMemory, &both)
            .map(|entry| entry.container.as_str())
            .collect();
        assert_eq!(names, ["init", "main"]);
    }
}
