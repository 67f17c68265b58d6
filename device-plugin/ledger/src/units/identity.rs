//! Defines the identities of GPUs, allocations, pods and leases.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{UnitError, serde_as_str};

/// The UUID of a GPU or a MIG instance (`GPU-...`, `MIG-...`). No other name of a GPU survives a
/// reboot and a change of the enumeration order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid(String);

impl GpuUuid {
    /// The UUID as NVML writes it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the UUID is of a MIG instance. A program can open one instance and no other GPU.
    pub fn is_mig(&self) -> bool {
        self.0.starts_with("MIG-")
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for GpuUuid {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        // Drivers before 470 name a MIG instance `MIG-GPU-<uuid>/<gi>/<ci>`.
        let body = text
            .strip_prefix("GPU-")
            .or_else(|| text.strip_prefix("MIG-"));
        match body {
            Some(body)
                if (1..=96).contains(&body.len())
                    && body
                        .bytes()
                        .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'/') =>
            {
                Ok(Self(text.to_owned()))
            }
            _ => Err(UnitError::Gpu(text.to_owned())),
        }
    }
}

serde_as_str!(GpuUuid);

/// The id of one `Allocate` answer, which names the container's CDI device, folder and socket. It
/// is random, so that no id occurs again after a reboot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AllocationId(u64);

impl AllocationId {
    /// The id with these bits, which the caller draws at random.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bits of the id.
    pub const fn bits(self) -> u64 {
        self.0
    }
}

impl fmt::Display for AllocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for AllocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AllocationId({self})")
    }
}

impl FromStr for AllocationId {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let malformed = || UnitError::Allocation(text.to_owned());
        let lower_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if text.len() != 16 || !text.bytes().all(lower_hex) {
            return Err(malformed());
        }
        u64::from_str_radix(text, 16)
            .map(Self)
            .map_err(|_| malformed())
    }
}

serde_as_str!(AllocationId);

/// A pod's UID. It becomes part of cgroup paths, so it contains no character with a meaning there;
/// a static pod's UID is a hash without dashes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(String);

impl PodUid {
    /// The UID as the API server writes it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for PodUid {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let harmless = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if (1..=64).contains(&text.len()) && text.bytes().all(harmless) {
            Ok(Self(text.to_owned()))
        } else {
            Err(UnitError::Pod(text.to_owned()))
        }
    }
}

serde_as_str!(PodUid);

/// The id of a lease of retained memory, which is never used again on this node. It grows, so it
/// serves as the lease's generation too.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_id_is_16_lower_case_hex_digits() {
        let id = AllocationId::from_bits(0xbeef);
        assert_eq!(id.to_string(), "000000000000beef");
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["beef", "000000000000BEEF", "+00000000000beef", ""] {
            assert!(bad.parse::<AllocationId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn pod_uid_with_path_characters_is_rejected() {
        assert!(
            "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11"
                .parse::<PodUid>()
                .is_ok()
        );
        assert!("8b2e3f0a1f5c4c419d530a5f4f7a9d11".parse::<PodUid>().is_ok());
        for bad in ["", "..", "a/b", "a.slice", "a\0"] {
            assert!(bad.parse::<PodUid>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn gpu_uuid_accepts_gpus_and_mig_instances() {
        assert!(
            "GPU-5e0d2ba4-6a6c-4d3d-9d0b-000000000001"
                .parse::<GpuUuid>()
                .is_ok()
        );
        assert!("MIG-GPU-5e0d2ba4/1/0".parse::<GpuUuid>().is_ok());
        for bad in ["", "GPU-", "gpu-1", "GPU-a b"] {
            assert!(bad.parse::<GpuUuid>().is_err(), "{bad:?}");
        }
    }
}
