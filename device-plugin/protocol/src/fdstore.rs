//! Defines the messages between the agent and the fd store, which only holds the descriptors of
//! retained memory.
//!
//! Frames are those of the [`messages`](crate::messages), and a payload is JSON, because both sides
//! are root's. Descriptors travel with them ([`fd_passing`](crate::fd_passing)). The fd store knows
//! leases by number. A lease's blob describes it, and only the agent reads the blob.
//!
//! ```text
//! agent                                   fd store
//!   Hello {version}                   ->          (a message of an earlier agent is read first;
//!                                                  that agent is disconnected)
//!                                     <-  Ready {version, leases, room}
//!   Put {lease, blob} + fd            ->
//!                                     <-  Stored | Refused {Exists | Full | NoDescriptor}
//!   Update {lease, blob}              ->
//!                                     <-  Stored | Refused {Missing}
//!   Get {lease}                       ->
//!                                     <-  Lease {lease, blob} + fd | Refused {Missing}
//!   Drop {lease}                      ->
//!                                     <-  Dropped, also for a missing lease
//!   List {from}                       ->
//!                                     <-  Listed {leases}: from that number on, as many as fit
//!   any other payload                 ->
//!                                     <-  Refused {Unknown}
//! ```
//!
//! An administrator replaces the fd store by hand, so it is mostly older than the agent. The agent
//! sends no message to an fd store whose version does not have it ([`FdStoreRequest::since`]).
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use crate::messages::json::encode;
use crate::messages::{DecodeError, JsonMessage, MAX_PAYLOAD, Message};

/// The version of this protocol. The fd store outlives agents, so names and meanings of messages
/// never change. The messages of version 1 were no JSON.
pub const VERSION: u16 = 2;

/// The oldest version that the fd store speaks.
pub const OLDEST_VERSION: u16 = 2;

/// The folder of the fd store's socket on the host, which only root may enter.
pub const RUN_DIR: &str = "/run/bursar/fdstore";

/// The name of the fd store's socket inside its folder.
pub const SOCKET_NAME: &str = "fdstore.sock";

/// The lease of the export keep-alive: a small piece of exported memory without an owner. While one
/// exported descriptor is open on a system, each further export and close is thirty times as fast.
pub const KEEP_ALIVE: u64 = 0;

/// The longest blob, in bytes of its JSON.
pub const MAX_BLOB: usize = 4096;

/// The most leases of an fd store. Its limits of open files and of memory may allow fewer.
pub const MAX_LEASES: usize = 65_536;

/// The agent's record of a lease, stored with its descriptor: text whose JSON has at most
/// [`MAX_BLOB`] bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Blob(String);

impl TryFrom<String> for Blob {
    type Error = DecodeError;

    fn try_from(text: String) -> Result<Blob, DecodeError> {
        match encode(&text).len() {
            ..=MAX_BLOB => Ok(Blob(text)),
            _ => Err(DecodeError::TooLong("blob")),
        }
    }
}

impl Blob {
    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A lease in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredLease {
    /// The lease's number.
    pub lease: u64,
    /// The agent's record of the lease.
    pub blob: Blob,
}

/// A request of the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum FdStoreRequest {
    /// The first message of a connection. Only the agent that sent the latest one is served.
    Hello {
        /// The highest version that the agent speaks.
        version: u16,
    },
    /// Stores a descriptor, which comes with this message.
    Put {
        /// A number without a lease.
        lease: u64,
        /// The record to store with the descriptor.
        blob: Blob,
    },
    /// Replaces a lease's blob.
    Update {
        /// The lease.
        lease: u64,
        /// Its new blob.
        blob: Blob,
    },
    /// Asks for a duplicate of a lease's descriptor.
    Get {
        /// The lease.
        lease: u64,
    },
    /// Closes a lease's descriptor and forgets the lease.
    Drop {
        /// The lease.
        lease: u64,
    },
    /// Asks for the stored leases.
    List {
        /// The smallest number to list.
        from: u64,
    },
}

impl FdStoreRequest {
    /// Returns the first version of the protocol that has this message with all of its fields.
    pub fn since(&self) -> u16 {
        match self {
            FdStoreRequest::Hello { version: _ } => 1,
            FdStoreRequest::Put { lease: _, blob: _ }
            | FdStoreRequest::Update { lease: _, blob: _ }
            | FdStoreRequest::Get { lease: _ }
            | FdStoreRequest::Drop { lease: _ }
            | FdStoreRequest::List { from: _ } => 2,
        }
    }

    /// Checks that an fd store of `version` has this message.
    ///
    /// # Errors
    /// [`Refusal::Unknown`], as the fd store itself would answer.
    pub fn ensure_known_by(&self, version: u16) -> Result<(), Refusal> {
        match self.since() <= version {
            true => Ok(()),
            false => Err(Refusal::Unknown),
        }
    }
}

/// A response of the fd store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum FdStoreResponse {
    /// Answers a hello.
    Ready {
        /// The version that both sides speak.
        version: u16,
        /// The number of stored leases.
        leases: u32,
        /// How many more leases fit.
        room: u32,
    },
    /// The fd store has the descriptor and the blob.
    Stored,
    /// A lease; a duplicate of its descriptor comes with it.
    Lease(StoredLease),
    /// The fd store does not have the lease, any more or at all.
    Dropped,
    /// Leases in the order of their numbers, as many as fit into a frame.
    Listed {
        /// Made by [`fit_in_frame`]. Empty when no lease has the requested number or a higher one.
        leases: Vec<StoredLease>,
    },
    /// The request was refused.
    Refused(Refusal),
}

/// Why the fd store refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Refusal {
    /// There is no lease of that number.
    #[error("the fd store has no such lease")]
    Missing,
    /// There is one of that number already.
    #[error("the fd store has a lease of that number")]
    Exists,
    /// The fd store holds as many as it may.
    #[error("the fd store is full")]
    Full,
    /// No descriptor came with the message.
    #[error("no descriptor came with the lease")]
    NoDescriptor,
    /// The agent's version is older than the oldest that the fd store speaks.
    #[error(
        "the fd store does not speak this agent's version; delete its pod, which ends all retained memory"
    )]
    Version,
    /// A request on a connection that sent no hello.
    #[error("the fd store was not greeted first")]
    NoHello,
    /// The payload is no message of the fd store's version.
    #[error(
        "the fd store does not know this message, because its version is older than the agent's; delete its pod, which ends all retained memory"
    )]
    Unknown,
}

impl JsonMessage for FdStoreRequest {}

impl JsonMessage for FdStoreResponse {}

/// Returns the first of these leases, as many as fit into one [`FdStoreResponse::Listed`].
pub fn fit_in_frame(leases: impl IntoIterator<Item = StoredLease>) -> Vec<StoredLease> {
    let mut room = MAX_PAYLOAD - FdStoreResponse::Listed { leases: vec![] }.payload().len();
    let fits = |lease: &StoredLease| {
        let left = room.checked_sub(encode(lease).len() + ",".len());
        room = left.unwrap_or(0);
        left.is_some()
    };
    leases.into_iter().take_while(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn some_blob() -> impl Strategy<Value = Blob> {
        ".{0,300}".prop_map(|text| Blob::try_from(text).unwrap())
    }

    fn some_entry() -> impl Strategy<Value = StoredLease> {
        (any::<u64>(), some_blob()).prop_map(|(lease, blob)| StoredLease { lease, blob })
    }

    fn request() -> impl Strategy<Value = FdStoreRequest> {
        prop_oneof![
            any::<u16>().prop_map(|version| FdStoreRequest::Hello { version }),
            some_entry()
                .prop_map(|StoredLease { lease, blob }| FdStoreRequest::Put { lease, blob }),
            some_entry()
                .prop_map(|StoredLease { lease, blob }| FdStoreRequest::Update { lease, blob }),
            any::<u64>().prop_map(|lease| FdStoreRequest::Get { lease }),
            any::<u64>().prop_map(|lease| FdStoreRequest::Drop { lease }),
            any::<u64>().prop_map(|from| FdStoreRequest::List { from }),
        ]
    }

    fn response() -> impl Strategy<Value = FdStoreResponse> {
        use Refusal::*;
        let refusal = prop::sample::select(vec![
            Missing,
            Exists,
            Full,
            NoDescriptor,
            Version,
            NoHello,
            Unknown,
        ]);
        prop_oneof![
            any::<(u16, u32, u32)>().prop_map(|(version, leases, room)| FdStoreResponse::Ready {
                version,
                leases,
                room
            }),
            Just(FdStoreResponse::Stored),
            some_entry().prop_map(FdStoreResponse::Lease),
            Just(FdStoreResponse::Dropped),
            vec(some_entry(), 0..8).prop_map(|leases| FdStoreResponse::Listed {
                leases: fit_in_frame(leases)
            }),
            refusal.prop_map(FdStoreResponse::Refused),
        ]
    }

    proptest! {
        #[test]
        fn messages_round_trip_and_fit_in_a_frame(message in request(), answer in response()) {
            prop_assert!(message.payload().len() <= MAX_PAYLOAD && answer.payload().len() <= MAX_PAYLOAD);
            prop_assert_eq!(FdStoreRequest::parse(&message.payload()), Ok(message));
            prop_assert_eq!(FdStoreResponse::parse(&answer.payload()), Ok(answer));
        }

        #[test]
        fn garbage_is_rejected_or_a_message(
            message in request(), answer in response(), at: prop::sample::Index, byte: u8,
        ) {
            for mut bytes in [message.payload(), answer.payload()] {
                let place = at.index(bytes.len());
                bytes[place] = byte;
                if let Ok(other) = FdStoreRequest::parse(&bytes) {
                    prop_assert_eq!(FdStoreRequest::parse(&other.payload()), Ok(other));
                }
                if let Ok(other) = FdStoreResponse::parse(&bytes) {
                    prop_assert_eq!(FdStoreResponse::parse(&other.payload()), Ok(other));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn message_is_known_since_a_version_that_the_agent_speaks(message in request()) {
            let since = message.since();
            prop_assert!((1..=VERSION).contains(&since));
            prop_assert_eq!(message.ensure_known_by(since), Ok(()));
            prop_assert_eq!(message.ensure_known_by(since - 1), Err(Refusal::Unknown));
        }
    }

    #[test]
    fn longest_blob_fits_in_a_frame_and_a_longer_one_is_rejected() {
        for character in ["x", "\"", "\u{1}", "ä"] {
            let length = (MAX_BLOB - 2) / (encode(&character).len() - 2);
            let blob = Blob::try_from(character.repeat(length)).unwrap();
            let list = fit_in_frame(vec![
                StoredLease {
                    lease: u64::MAX,
                    blob: blob.clone()
                };
                2
            ]);
            assert_eq!(list.len(), 1);
            let put = FdStoreRequest::Put {
                lease: u64::MAX,
                blob,
            };
            let listed = FdStoreResponse::Listed { leases: list };
            assert!(put.payload().len().max(listed.payload().len()) <= MAX_PAYLOAD);
            assert!(Blob::try_from(character.repeat(length + 1)).is_err());
        }
        let frame = format!(
            r#"{{"Update":{{"lease":1,"blob":"{}"}}}}"#,
            "x".repeat(MAX_BLOB - 1)
        );
        assert!(FdStoreRequest::parse(frame.as_bytes()).is_err());
    }
}
