//! Names the extended resources, labels and the priority class of the API.

use serde::{Deserialize, Serialize};

/// The prefix of every resource, label and annotation of Bursar.
pub const PREFIX: &str = "bursar.dev/";

/// The resource that counts hundredths of a GPU's compute time: a pod's weight under contention.
pub const GPU_COMPUTE: &str = "bursar.dev/gpu-compute";

/// The weights of one GPU together, in hundredths of it.
pub const WHOLE_GPU: u16 = 100;

/// The PriorityClass that makes a pod a borrower. Shipped by the chart.
pub const BORROWED_PRIORITY_CLASS: &str = "bursar-borrowed";

/// Label of the operator's ResourceQuotas, which tells a budget's two quotas apart.
pub const QUOTA_LABEL: &str = "bursar.dev/quota";

/// Label of the guaranteed quota while the budget's `overflow` is `Borrow`, with that value.
pub const OVERFLOW_LABEL: &str = "bursar.dev/overflow";

/// Label of a namespace whose budget is in force, with the value [`ENFORCED`].
pub const BUDGET_LABEL: &str = "bursar.dev/budget";

/// The value of [`BUDGET_LABEL`].
pub const ENFORCED: &str = "enforced";

/// Label of an agent's Events and of the operator's evictions, by which admission policies find
/// them: [`AGENT`] or [`OPERATOR`].
pub const WRITER_LABEL: &str = "bursar.dev/writer";

/// The value of [`WRITER_LABEL`] of what an agent writes.
pub const AGENT: &str = "agent";

/// The value of [`WRITER_LABEL`] of what the operator writes.
pub const OPERATOR: &str = "operator";

/// Node label: the most device memory that one GPU of the node can give a pod now, in quanta.
/// Written by the operator; it ends as the resource's name does.
pub fn largest_free_label(quantum: Quantum) -> String {
    format!("{PREFIX}largest-free-{}", quantum.suffix())
}

/// Node label: the most that one GPU could give a pod once its borrowers were evicted, in quanta.
pub fn largest_reclaimable_label(quantum: Quantum) -> String {
    format!("{PREFIX}largest-reclaimable-{}", quantum.suffix())
}

/// Node label: the most that one GPU could give a pod without any other pod, in quanta.
pub fn largest_gpu_label(quantum: Quantum) -> String {
    format!("{PREFIX}largest-gpu-{}", quantum.suffix())
}

/// The amount of memory that one device id stands for, the same in the whole cluster.
///
/// The resources' names contain the quantum, so that a request means the same on every node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Quantum {
    /// 256 MiB, for cards of 8 GiB and less.
    #[serde(rename = "256Mi")]
    Mib256,
    /// 512 MiB.
    #[serde(rename = "512Mi")]
    Mib512,
    /// 1 GiB, the default.
    #[default]
    #[serde(rename = "1Gi")]
    Gib1,
}

/// The error for a text that names no quantum.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no quantum: write 256Mi, 512Mi or 1Gi")]
pub struct UnknownQuantum(String);

impl Quantum {
    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Mib256 => 256 << 20,
            Self::Mib512 => 512 << 20,
            Self::Gib1 => 1 << 30,
        }
    }

    /// How many whole quanta `bytes` holds.
    pub fn floor(self, bytes: u64) -> i64 {
        // 2^64 bytes are 2^36 of the smallest quanta.
        i64::try_from(bytes / self.bytes()).unwrap_or(i64::MAX)
    }

    /// The resource that counts device memory, such as `bursar.dev/gpu-memory-gib`.
    pub fn device_memory(self) -> &'static str {
        match self {
            Self::Mib256 => "bursar.dev/gpu-memory-256mib",
            Self::Mib512 => "bursar.dev/gpu-memory-512mib",
            Self::Gib1 => "bursar.dev/gpu-memory-gib",
        }
    }

    /// All quanta.
    pub const ALL: [Self; 3] = [Self::Mib256, Self::Mib512, Self::Gib1];

    /// The suffix of resource names that count in this quantum, such as `gib`.
    fn suffix(self) -> &'static str {
        match self {
            Self::Mib256 => "256mib",
            Self::Mib512 => "512mib",
            Self::Gib1 => "gib",
        }
    }

    /// The resource that counts managed (unified) memory, such as `bursar.dev/managed-memory-gib`.
    pub fn managed_memory(self) -> &'static str {
        match self {
            Self::Mib256 => "bursar.dev/managed-memory-256mib",
            Self::Mib512 => "bursar.dev/managed-memory-512mib",
            Self::Gib1 => "bursar.dev/managed-memory-gib",
        }
    }
}

impl std::str::FromStr for Quantum {
    type Err = UnknownQuantum;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "256Mi" => Ok(Self::Mib256),
            "512Mi" => Ok(Self::Mib512),
            "1Gi" | "1024Mi" => Ok(Self::Gib1),
            other => Err(UnknownQuantum(other.to_owned())),
        }
    }
}

impl std::fmt::Display for Quantum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Mib256 => "256Mi",
            Self::Mib512 => "512Mi",
            Self::Gib1 => "1Gi",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::parse_bytes;

    #[test]
    fn a_quantum_is_written_as_the_quantity_that_it_is() {
        for quantum in Quantum::ALL {
            let text = quantum.to_string();
            assert_eq!(parse_bytes(&text), Ok(quantum.bytes()));
            assert_eq!(text.parse(), Ok(quantum));
        }
        for bad in ["0", "2Gi", "1GiB", "", "1gi"] {
            assert_eq!(bad.parse::<Quantum>(), Err(UnknownQuantum(bad.into())));
        }
    }

    #[test]
    fn labels_end_as_the_resource_does() {
        for quantum in Quantum::ALL {
            let name = quantum
                .device_memory()
                .strip_prefix("bursar.dev/gpu-memory-");
            assert_eq!(name, Some(quantum.suffix()));
            assert!(largest_free_label(quantum).ends_with(quantum.suffix()));
        }
        assert_eq!(
            largest_free_label(Quantum::Gib1),
            "bursar.dev/largest-free-gib"
        );
    }

    #[test]
    fn a_part_of_a_quantum_is_not_counted() {
        assert_eq!(Quantum::Gib1.floor((16 << 30) + (1 << 29)), 16);
        assert_eq!(Quantum::Mib512.floor((16 << 30) + (1 << 29)), 33);
    }
}
