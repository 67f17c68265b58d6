//! Describes a lease as the fd store keeps it, in a blob beside the descriptor.

use std::collections::BTreeSet;

use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, PodUid};
use bursar_protocol::messages::retained::Key;
use bursar_sessions::Process;
use serde::{Deserialize, Serialize};

/// The key of a lease.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LeaseKey {
    /// The namespace whose pods share the lease.
    pub namespace: String,
    /// The lease's name in its namespace.
    pub name: String,
    /// A digest that identifies the content.
    #[serde(with = "hex")]
    pub key: Key,
    /// The GPU that has the memory.
    pub gpu: GpuUuid,
}

/// The description of a lease: the blob beside its descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LeaseRecord {
    /// The lease's key.
    pub title: LeaseKey,
    /// The size.
    pub bytes: Bytes,
    /// The GPU's generation when the memory was created; in any other generation the memory is
    /// lost. The count starts again when its file is lost.
    pub gpu_generation: u64,
    /// The container that is charged: the creator, and after it another container of its pod with
    /// the same GPU.
    pub owner: AllocationId,
    /// The owner's pod.
    pub pod: PodUid,
    /// The pods that opened the lease and did not discard it. The lease lives as long as one of
    /// them.
    pub(crate) openers: BTreeSet<PodUid>,
    /// The content of the memory.
    pub content: Content,
}

impl LeaseRecord {
    /// Whether a pod other than the owner's has the lease open.
    pub(super) fn is_shared(&self) -> bool {
        self.openers.iter().any(|opener| *opener != self.pod)
    }
}

/// The content of a lease's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// A process is writing it.
    Writing(Writer),
    /// A writer has committed it.
    Committed {
        /// The write token of the commit; a repeated commit with this token succeeds.
        token: u64,
        /// The checksum of all bytes.
        checksum: u64,
    },
    /// A pod discarded the lease while other pods may have it mapped.
    Discarded,
}

/// The writer of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Writer {
    /// The process.
    pub process: Process,
    /// The process image.
    pub image: u64,
    /// The write token.
    pub token: u64,
    /// When the token expires.
    pub until: BootTime,
}

/// The blob of a lease, as this agent reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoredRecord {
    /// The lease's description.
    Read(LeaseRecord),
    /// Another version of the agent wrote a blob that this agent cannot read.
    Unreadable {
        /// The lease's GPU and size, where those can be read.
        extent: Option<(GpuUuid, Bytes)>,
        /// The parser's error.
        why: String,
    },
}

/// Serializes a key as 64 hex digits, because blobs occupy the fd store's memory.
mod hex {
    use bursar_protocol::messages::retained::Key;
    use data_encoding::HEXLOWER;
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(key: &Key, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&HEXLOWER.encode(key))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Key, D::Error> {
        let text = String::deserialize(from)?;
        let key = HEXLOWER.decode(text.as_bytes()).map_err(D::Error::custom)?;
        key.try_into()
            .map_err(|_| D::Error::custom("a key has 64 hex digits"))
    }
}
