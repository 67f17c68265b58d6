//! Defines the requests and responses about retained memory.
//!
//! Each request is a connection of its own on the allocation's socket: one request, one response.
//!
//! ```text
//! client                                      agent
//!   Open {version, image, account,        ->        (bytes 0: only an existing lease)
//!         name, key, bytes}
//!                                         <-  Ready {lease, generation, bytes, checksum} + fd
//!                                             or Write {lease, generation, bytes, token,
//!                                             expires} + fd
//!                                             or Refused {why}
//!   Commit {version, lease, token,        ->        (everything is written and mapped read-only)
//!           checksum}
//!                                         <-  Committed, or Refused {why}
//!   Discard {version, lease}              ->        (the memory is wrong or no longer needed)
//!                                         <-  Discarded, or Refused {why}
//! ```
//!
//! `cuMemImportFromShareableHandle` imports the descriptor; every open descriptor keeps the memory
//! (fact F4). An invalid request is answered with `Rejected`, as every other message is.

mod encoding;

use super::{Account, DecodeError, MAX_NAME};

pub(super) use encoding::{decode_request, decode_response, encode_request, encode_response};

/// The name of a lease in a namespace: 1 to [`MAX_NAME`] printable ASCII characters. The agent
/// stores names as JSON, where a control character would take six bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseName(String);

impl LeaseName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for LeaseName {
    type Error = DecodeError;

    /// # Errors
    /// [`DecodeError`] for an empty name, or one longer than [`MAX_NAME`] bytes.
    fn try_from(name: String) -> Result<LeaseName, DecodeError> {
        match name.len() {
            0 => Err(DecodeError::BadValue("lease name")),
            length if length > MAX_NAME => Err(DecodeError::TooLong("lease name")),
            _ if !name.bytes().all(|byte| (b' '..=b'~').contains(&byte)) => {
                Err(DecodeError::BadValue("lease name (printable ASCII)"))
            }
            _ => Ok(LeaseName(name)),
        }
    }
}

/// Identifies a lease's content: a digest of all that decides it (model, revision, quantisation,
/// rank, versions).
pub type Key = [u8; 32];

/// A request about retained memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RetainedRequest {
    /// Opens the namespace's lease of this name and key, and creates a missing one.
    Open {
        /// The highest version that the process speaks.
        version: u16,
        /// The id of the process image. The agent discards the lease that an earlier image of the
        /// process has not committed.
        image: u64,
        /// The GPU.
        account: Account,
        /// The lease's name in the namespace.
        name: LeaseName,
        /// The digest of its content.
        key: Key,
        /// The size of a new lease; zero creates none.
        bytes: u64,
    },
    /// States that the content is written and will not change.
    Commit {
        /// The highest version that the process speaks.
        version: u16,
        /// The lease.
        lease: u64,
        /// The right to commit the lease.
        token: u64,
        /// The checksum of all bytes.
        checksum: u64,
    },
    /// Gives the lease up. The next open creates a new one of a higher generation.
    Discard {
        /// The highest version that the process speaks.
        version: u16,
        /// The lease.
        lease: u64,
    },
}

impl RetainedRequest {
    /// Returns the highest version that the client speaks.
    pub fn version(&self) -> u16 {
        match self {
            RetainedRequest::Open { version, .. }
            | RetainedRequest::Commit { version, .. }
            | RetainedRequest::Discard { version, .. } => *version,
        }
    }

    /// Returns the GPU that the request names.
    pub fn account(&self) -> Option<&Account> {
        match self {
            RetainedRequest::Open { account, .. } => Some(account),
            RetainedRequest::Commit { .. } | RetainedRequest::Discard { .. } => None,
        }
    }
}

/// A response about retained memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetainedResponse {
    /// The lease holds what was committed. Its descriptor comes with it.
    Ready {
        /// The lease's number, never reused on this node.
        lease: u64,
        /// The lease's generation.
        generation: u64,
        /// The size in bytes.
        bytes: u64,
        /// The checksum of the commit.
        checksum: u64,
    },
    /// The lease is new, zeroed, and this process's to write. Its descriptor comes with it.
    Write {
        /// The lease's number, never reused on this node.
        lease: u64,
        /// The lease's generation.
        generation: u64,
        /// The size in bytes: the requested one, rounded up to the driver's granularity.
        bytes: u64,
        /// The right to commit the lease.
        token: u64,
        /// For how many milliseconds from now that right lasts.
        expires_ms: u64,
    },
    /// The lease is committed.
    Committed,
    /// The lease is given up.
    Discarded,
    /// The request was refused.
    Refused(RetainedRefusal),
}

/// Why a request about retained memory is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RetainedRefusal {
    /// There is no such lease, and the request creates none.
    #[error("there is no such lease; create it first")]
    Missing,
    /// The container's quota has less left; a smaller lease would fit.
    #[error("the quota has {free} bytes left; ask for less, or raise the limit of the container")]
    Quota {
        /// The remaining bytes.
        free: u64,
    },
    /// The node lends less of the GPU; a smaller lease would fit.
    #[error(
        "the node lends {free} bytes more of this GPU as retained memory; ask for less, discard leases, or raise retainedMemory.perGpu in the chart"
    )]
    GpuLimit {
        /// The remaining bytes.
        free: u64,
    },
    /// Another process writes the lease: try again.
    #[error("another process is writing the lease; try again once it has committed or ended")]
    Writing,
    /// This node has not proven that the driver clears memory between tenants, so it has no
    /// retained memory.
    #[error(
        "the driver was not seen to clear freed memory on this node; the condition MemoryScrubbed of its GpuNode has the reason"
    )]
    NotScrubbed,
    /// The token does not give the right, or no longer; or the process image is poisoned.
    #[error("this process may no longer use the lease; open it again")]
    Fenced,
    /// The fd store or the provisioner is down: try again later.
    #[error(
        "retained memory is not available now; try again, or see the condition RetainedMemory of the GpuNode"
    )]
    Unavailable,
    /// The container or its namespace may own no more leases, or no more pods may open this one.
    #[error(
        "the container or its namespace owns too many leases, or too many pods have this one open; discard leases that no program needs"
    )]
    TooMany,
    /// Retained memory is disabled on this node.
    #[error(
        "retained memory is switched off on this node; set retainedMemory.enabled in the chart"
    )]
    Off,
    /// The driver failed.
    #[error("the driver answered {code}")]
    Driver {
        /// The `CUresult`.
        code: i32,
    },
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in super::super) fn questions(
        account: impl Strategy<Value = Account>,
    ) -> impl Strategy<Value = RetainedRequest> {
        let name = "[ -~]{1,96}".prop_map(|name| LeaseName::try_from(name).unwrap());
        let open = (
            any::<u16>(),
            any::<u64>(),
            account,
            name,
            any::<Key>(),
            any::<u64>(),
        );
        prop_oneof![
            open.prop_map(
                |(version, image, account, name, key, bytes)| RetainedRequest::Open {
                    version,
                    image,
                    account,
                    name,
                    key,
                    bytes
                }
            ),
            any::<(u16, u64, u64, u64)>().prop_map(|(version, lease, token, checksum)| {
                RetainedRequest::Commit {
                    version,
                    lease,
                    token,
                    checksum,
                }
            }),
            any::<(u16, u64)>()
                .prop_map(|(version, lease)| RetainedRequest::Discard { version, lease }),
        ]
    }

    pub(in super::super) fn answers() -> impl Strategy<Value = RetainedResponse> {
        let refusal = prop_oneof![
            Just(RetainedRefusal::Missing),
            any::<u64>().prop_map(|free| RetainedRefusal::Quota { free }),
            any::<u64>().prop_map(|free| RetainedRefusal::GpuLimit { free }),
            Just(RetainedRefusal::Writing),
            Just(RetainedRefusal::NotScrubbed),
            Just(RetainedRefusal::Fenced),
            Just(RetainedRefusal::Unavailable),
            Just(RetainedRefusal::TooMany),
            Just(RetainedRefusal::Off),
            any::<i32>().prop_map(|code| RetainedRefusal::Driver { code }),
        ];
        prop_oneof![
            any::<(u64, u64, u64, u64)>().prop_map(|(lease, generation, bytes, checksum)| {
                RetainedResponse::Ready {
                    lease,
                    generation,
                    bytes,
                    checksum,
                }
            }),
            any::<(u64, u64, u64, u64, u64)>().prop_map(
                |(lease, generation, bytes, token, expires_ms)| RetainedResponse::Write {
                    lease,
                    generation,
                    bytes,
                    token,
                    expires_ms,
                }
            ),
            Just(RetainedResponse::Committed),
            Just(RetainedResponse::Discarded),
            refusal.prop_map(RetainedResponse::Refused),
        ]
    }

    #[test]
    fn lease_name_is_printable_and_bounded() {
        let name = |name: String| LeaseName::try_from(name).map(|name| name.as_str().len());
        assert_eq!(
            name(String::new()),
            Err(DecodeError::BadValue("lease name"))
        );
        assert_eq!(name(" ~".repeat(MAX_NAME / 2)), Ok(MAX_NAME));
        for other in ["\n", "weights\0", "\u{7f}", "ä"] {
            let refused = name(other.to_owned());
            assert!(
                matches!(refused, Err(DecodeError::BadValue(_))),
                "{other:?}"
            );
        }
        assert_eq!(
            name("a".repeat(MAX_NAME + 1)),
            Err(DecodeError::TooLong("lease name"))
        );
    }
}
