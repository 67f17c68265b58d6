//! Defines the messages between the agent and the fd store, which only holds the descriptors of
//! retained memory.
//!
//! Frames are those of the [`messages`](crate::messages). Descriptors travel with them
//! ([`fd_passing`](crate::fd_passing)). The fd store knows leases by number. A lease's blob
//! describes it, and only the agent reads the blob.
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
//! ```
#![forbid(unsafe_code)]

use crate::messages::{DecodeError, Decoder, MAX_PAYLOAD, Message};

/// The version of this protocol. The fd store outlives agents, so numbers and meanings of messages
/// never change.
pub const VERSION: u16 = 1;

/// The folder of the fd store's socket on the host, which only root may enter.
pub const RUN_DIR: &str = "/run/bursar/fdstore";

/// The name of the fd store's socket inside its folder.
pub const SOCKET_NAME: &str = "fdstore.sock";

/// The lease of the export keep-alive: a small piece of exported memory without an owner. While one
/// exported descriptor is open on a system, each further export and close is thirty times as fast.
pub const KEEP_ALIVE: u64 = 0;

/// The longest blob, in bytes.
pub const MAX_BLOB: usize = 4096;

/// The most leases of an fd store. Its limits of open files and of memory may allow fewer.
pub const MAX_LEASES: usize = 65_536;

/// The agent's record of a lease, stored with its descriptor: at most [`MAX_BLOB`] bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blob(Vec<u8>);

impl Blob {
    /// Wraps these bytes.
    ///
    /// # Errors
    /// [`DecodeError::TooLong`] beyond [`MAX_BLOB`].
    pub fn new(bytes: Vec<u8>) -> Result<Blob, DecodeError> {
        if bytes.len() > MAX_BLOB {
            return Err(DecodeError::TooLong("blob"));
        }
        Ok(Blob(bytes))
    }

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A lease in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLease {
    /// The lease's number.
    pub lease: u64,
    /// The agent's record of the lease.
    pub blob: Blob,
}

/// A request of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// A response of the fd store.
#[derive(Clone, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
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
    #[error("the fd store speaks no version that old")]
    Version,
    /// A request on a connection that sent no hello.
    #[error("the fd store was not greeted first")]
    NoHello,
}

impl Message for FdStoreRequest {
    fn payload(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            FdStoreRequest::Hello { version } => {
                out.push(1);
                out.extend_from_slice(&version.to_le_bytes());
            }
            FdStoreRequest::Put { lease, blob } => put_entry(numbered(&mut out, 2), *lease, blob),
            FdStoreRequest::Update { lease, blob } => {
                put_entry(numbered(&mut out, 3), *lease, blob)
            }
            FdStoreRequest::Get { lease } => put_number(numbered(&mut out, 4), *lease),
            FdStoreRequest::Drop { lease } => put_number(numbered(&mut out, 5), *lease),
            FdStoreRequest::List { from } => put_number(numbered(&mut out, 6), *from),
        }
        out
    }

    fn parse(payload: &[u8]) -> Result<FdStoreRequest, DecodeError> {
        let mut decoder = Decoder(payload);
        let message = match decoder.u8()? {
            1 => FdStoreRequest::Hello {
                version: decoder.u16()?,
            },
            2 => FdStoreRequest::Put {
                lease: decoder.u64()?,
                blob: blob(&mut decoder)?,
            },
            3 => FdStoreRequest::Update {
                lease: decoder.u64()?,
                blob: blob(&mut decoder)?,
            },
            4 => FdStoreRequest::Get {
                lease: decoder.u64()?,
            },
            5 => FdStoreRequest::Drop {
                lease: decoder.u64()?,
            },
            6 => FdStoreRequest::List {
                from: decoder.u64()?,
            },
            other => return Err(DecodeError::UnknownMessage(other)),
        };
        decoder.finish(message)
    }
}

impl Message for FdStoreResponse {
    fn payload(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            FdStoreResponse::Ready {
                version,
                leases,
                room,
            } => {
                out.push(1);
                out.extend_from_slice(&version.to_le_bytes());
                out.extend_from_slice(&leases.to_le_bytes());
                out.extend_from_slice(&room.to_le_bytes());
            }
            FdStoreResponse::Stored => out.push(2),
            FdStoreResponse::Lease(StoredLease { lease, blob }) => {
                put_entry(numbered(&mut out, 3), *lease, blob);
            }
            FdStoreResponse::Dropped => out.push(4),
            FdStoreResponse::Listed { leases } => {
                out.push(5);
                for StoredLease { lease, blob } in leases {
                    put_entry(&mut out, *lease, blob);
                }
            }
            FdStoreResponse::Refused(refusal) => {
                let refusal = match refusal {
                    Refusal::Missing => 1,
                    Refusal::Exists => 2,
                    Refusal::Full => 3,
                    Refusal::NoDescriptor => 4,
                    Refusal::Version => 5,
                    Refusal::NoHello => 6,
                };
                out.extend_from_slice(&[6, refusal]);
            }
        }
        out
    }

    fn parse(payload: &[u8]) -> Result<FdStoreResponse, DecodeError> {
        let mut decoder = Decoder(payload);
        let message = match decoder.u8()? {
            1 => FdStoreResponse::Ready {
                version: decoder.u16()?,
                leases: decoder.u32()?,
                room: decoder.u32()?,
            },
            2 => FdStoreResponse::Stored,
            3 => FdStoreResponse::Lease(entry(&mut decoder)?),
            4 => FdStoreResponse::Dropped,
            5 => {
                let mut leases = Vec::new();
                while !decoder.0.is_empty() {
                    leases.push(entry(&mut decoder)?);
                }
                FdStoreResponse::Listed { leases }
            }
            6 => FdStoreResponse::Refused(match decoder.u8()? {
                1 => Refusal::Missing,
                2 => Refusal::Exists,
                3 => Refusal::Full,
                4 => Refusal::NoDescriptor,
                5 => Refusal::Version,
                6 => Refusal::NoHello,
                _ => return Err(DecodeError::BadValue("refusal")),
            }),
            other => return Err(DecodeError::UnknownMessage(other)),
        };
        decoder.finish(message)
    }
}

/// Returns the first of these leases, as many as fit into one [`FdStoreResponse::Listed`].
pub fn fit_in_frame(leases: impl IntoIterator<Item = StoredLease>) -> Vec<StoredLease> {
    let mut room = MAX_PAYLOAD - 1;
    let fits = |StoredLease { lease: _, blob }: &StoredLease| {
        let takes = size_of::<u64>() + size_of::<u16>() + blob.0.len();
        let fits = takes <= room;
        room = room.saturating_sub(takes);
        fits
    };
    leases.into_iter().take_while(fits).collect()
}

fn numbered(out: &mut Vec<u8>, message: u8) -> &mut Vec<u8> {
    out.push(message);
    out
}

fn put_number(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_le_bytes());
}

fn put_entry(out: &mut Vec<u8>, lease: u64, blob: &Blob) {
    put_number(out, lease);
    out.extend_from_slice(&(blob.0.len() as u16).to_le_bytes());
    out.extend_from_slice(&blob.0);
}

fn entry(decoder: &mut Decoder<'_>) -> Result<StoredLease, DecodeError> {
    Ok(StoredLease {
        lease: decoder.u64()?,
        blob: blob(decoder)?,
    })
}

fn blob(decoder: &mut Decoder<'_>) -> Result<Blob, DecodeError> {
    let length = usize::from(decoder.u16()?);
    if length > MAX_BLOB {
        return Err(DecodeError::TooLong("blob"));
    }
    decoder.take(length).map(|bytes| Blob(bytes.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn some_blob() -> impl Strategy<Value = Blob> {
        vec(any::<u8>(), 0..=MAX_BLOB).prop_map(Blob)
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
        let refusal =
            prop::sample::select(vec![Missing, Exists, Full, NoDescriptor, Version, NoHello]);
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
        fn garbage_is_rejected_or_encodes_to_itself(
            message in request(), answer in response(), at: prop::sample::Index, byte: u8, cut: prop::sample::Index,
        ) {
            for mut bytes in [message.payload(), answer.payload()] {
                let place = at.index(bytes.len());
                bytes[place] = byte;
                bytes.truncate(cut.index(bytes.len()) + 1);
                if let Ok(message) = FdStoreRequest::parse(&bytes) {
                    prop_assert_eq!(message.payload(), bytes.clone());
                }
                if let Ok(answer) = FdStoreResponse::parse(&bytes) {
                    prop_assert_eq!(answer.payload(), bytes);
                }
            }
        }
    }

    #[test]
    fn list_is_cut_at_the_end_of_a_frame() {
        let big = |lease| StoredLease {
            lease,
            blob: Blob(vec![7; MAX_BLOB]),
        };
        assert_eq!(fit_in_frame([big(1), big(2)]), [big(1)]);
        assert!(Blob::new(vec![0; MAX_BLOB + 1]).is_err());
    }
}
