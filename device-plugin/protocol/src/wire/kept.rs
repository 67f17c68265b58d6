//! What a process and the agent say to each other about kept memory.
//!
//! Each question is a connection of its own on the allocation's socket: one message, one answer. Where a lease is made, its
//! descriptor comes before the answer: it can be mapped while the node still makes sure that it will be kept.
//!
//! ```text
//! client                                      agent
//!   Open {version, image, account,        ->        (bytes 0: only if it is there)
//!         name, key, bytes}
//!                                         <-  Ready {lease, generation, bytes, checksum} + the lease's fd
//!                                             or Made {bytes} + its fd (since version 3), and then
//!                                             Write {lease, generation, bytes, token, expires}, with its fd if it was not Made
//!                                             or Refused {why}
//!   Commit {version, lease, token,        ->        (everything is written, nobody maps it to write)
//!           checksum}
//!                                         <-  Committed, or Refused {why}
//!   Discard {version, lease}              ->        (its memory is wrong, or nobody wants it any more)
//!                                         <-  Discarded, or Refused {why}
//! ```
//!
//! The descriptor is the lease's memory as `cuMemImportFromShareableHandle` takes it; whoever holds it keeps the
//! memory (design F4). What cannot be asked at all is answered with `Goodbye`, as every other message is.

use super::{Account, Fields, MAX_NAME, WireError, put_account, put_name};

/// What a namespace calls a lease: 1 to [`MAX_NAME`] printable characters of ASCII. JSON writes a control character as
/// six: the agent keeps names so, beside each lease.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseName(String);

impl LeaseName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for LeaseName {
    type Error = WireError;

    /// # Errors
    /// [`WireError`] where it is empty or longer than [`MAX_NAME`] bytes.
    fn try_from(name: String) -> Result<LeaseName, WireError> {
        match name.len() {
            0 => Err(WireError::BadValue("lease name")),
            length if length > MAX_NAME => Err(WireError::TooLong("lease name")),
            _ if !name.bytes().all(|byte| (b' '..=b'~').contains(&byte)) => {
                Err(WireError::BadValue("lease name (printable ASCII)"))
            }
            _ => Ok(LeaseName(name)),
        }
    }
}

/// What a lease's content is of: a digest of all that decides it (model, revision, quantisation, rank, versions).
pub type Key = [u8; 32];

/// What a process asks about kept memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeptQuestion {
    /// Opens the namespace's lease of this name and key; creates it where it is not there.
    Open {
        /// The highest version that the process speaks.
        version: u16,
        /// Names the process image, by the same number for all of it: what an image before an exec was writing is
        /// discarded.
        image: u64,
        /// The GPU.
        account: Account,
        /// The lease's name in the namespace.
        name: LeaseName,
        /// What its content is of.
        key: Key,
        /// How large to create it; zero creates nothing.
        bytes: u64,
    },
    /// The content is written and will not change.
    Commit {
        /// The highest version that the process speaks.
        version: u16,
        /// The lease.
        lease: u64,
        /// The right to commit it.
        token: u64,
        /// Of all of its bytes.
        checksum: u64,
    },
    /// Gives the lease up. The next open creates one anew, of a higher generation.
    Discard {
        /// The highest version that the process speaks.
        version: u16,
        /// The lease.
        lease: u64,
    },
}

impl KeptQuestion {
    /// The highest version that who asks speaks.
    pub fn version(&self) -> u16 {
        match self {
            KeptQuestion::Open { version, .. }
            | KeptQuestion::Commit { version, .. }
            | KeptQuestion::Discard { version, .. } => *version,
        }
    }

    /// The GPU that it asks for by name.
    pub fn account(&self) -> Option<&Account> {
        match self {
            KeptQuestion::Open { account, .. } => Some(account),
            KeptQuestion::Commit { .. } | KeptQuestion::Discard { .. } => None,
        }
    }
}

/// What the agent answers about kept memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptAnswer {
    /// The lease holds what was committed. Its descriptor comes with it.
    Ready {
        /// Names the lease; never another one on this node.
        lease: u64,
        /// Its generation, L.
        generation: u64,
        /// How large it is.
        bytes: u64,
        /// What it was committed with.
        checksum: u64,
    },
    /// The lease's memory, whose descriptor comes with it: to be mapped, and used only once the answer has come too.
    Made {
        /// How large it is.
        bytes: u64,
    },
    /// The lease is new, zeroed, and this process's to write. Its descriptor came with [`Made`](Self::Made), or comes
    /// with this.
    Write {
        /// Names the lease; never another one on this node.
        lease: u64,
        /// Its generation, L.
        generation: u64,
        /// How large it is: what was asked for, rounded up to the driver's granularity.
        bytes: u64,
        /// The right to commit it.
        token: u64,
        /// For how many milliseconds from now that right lasts.
        expires_ms: u64,
    },
    /// The lease is committed.
    Committed,
    /// The lease is given up.
    Discarded,
    /// Not now, or not at all.
    Refused(KeptRefusal),
}

/// Why something about kept memory is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeptRefusal {
    /// There is no such lease, and none was to be created.
    #[error("there is no such lease")]
    Missing,
    /// The container's quota has not so much left; less asked for would fit.
    #[error("the quota has {free} bytes left for it")]
    Quota {
        /// What is left.
        free: u64,
    },
    /// Another process writes it: ask again.
    #[error("another process writes it")]
    Writing,
    /// This node did not prove that the driver clears memory between tenants: there is no kept memory on it.
    #[error("the driver was not seen to clear freed memory on this node")]
    NotScrubbed,
    /// The token is not, or no longer, the right to do so; or the process image is poisoned.
    #[error("the right to do so has ended")]
    Fenced,
    /// The part of the node that would do it is away: ask again later.
    #[error("kept memory is not available now")]
    Unavailable,
    /// The container or its namespace may own no more leases, or no more pods may have this one open.
    #[error(
        "its container or namespace may own no more leases, or no more pods may have this one open"
    )]
    TooMany,
    /// Kept memory is switched off on this node.
    #[error("this node keeps no memory: it is switched off")]
    Off,
    /// The driver failed.
    #[error("the driver answered {code}")]
    Driver {
        /// The `CUresult`.
        code: i32,
    },
}

pub(super) fn put_question(out: &mut Vec<u8>, question: &KeptQuestion) {
    match question {
        KeptQuestion::Open {
            version,
            image,
            account,
            name,
            key,
            bytes,
        } => {
            out.push(1);
            out.extend_from_slice(&version.to_le_bytes());
            out.extend_from_slice(&image.to_le_bytes());
            put_account(out, account);
            put_name(out, name.as_str());
            out.extend_from_slice(key);
            out.extend_from_slice(&bytes.to_le_bytes());
        }
        KeptQuestion::Commit {
            version,
            lease,
            token,
            checksum,
        } => {
            out.push(2);
            out.extend_from_slice(&version.to_le_bytes());
            put_numbers(out, &[*lease, *token, *checksum]);
        }
        KeptQuestion::Discard { version, lease } => {
            out.push(3);
            out.extend_from_slice(&version.to_le_bytes());
            put_numbers(out, &[*lease]);
        }
    }
}

pub(super) fn question(fields: &mut Fields<'_>) -> Result<KeptQuestion, WireError> {
    Ok(match fields.u8()? {
        1 => KeptQuestion::Open {
            version: fields.u16()?,
            image: fields.u64()?,
            account: fields.account()?,
            name: LeaseName::try_from(fields.name()?)?,
            key: fields.array()?,
            bytes: fields.u64()?,
        },
        2 => KeptQuestion::Commit {
            version: fields.u16()?,
            lease: fields.u64()?,
            token: fields.u64()?,
            checksum: fields.u64()?,
        },
        3 => KeptQuestion::Discard {
            version: fields.u16()?,
            lease: fields.u64()?,
        },
        _ => return Err(WireError::BadValue("question about kept memory")),
    })
}

pub(super) fn put_answer(out: &mut Vec<u8>, answer: &KeptAnswer) {
    match *answer {
        KeptAnswer::Ready {
            lease,
            generation,
            bytes,
            checksum,
        } => {
            out.push(1);
            put_numbers(out, &[lease, generation, bytes, checksum]);
        }
        KeptAnswer::Write {
            lease,
            generation,
            bytes,
            token,
            expires_ms,
        } => {
            out.push(2);
            put_numbers(out, &[lease, generation, bytes, token, expires_ms]);
        }
        KeptAnswer::Committed => out.push(3),
        KeptAnswer::Discarded => out.push(4),
        KeptAnswer::Refused(why) => {
            out.push(5);
            put_refusal(out, why);
        }
        KeptAnswer::Made { bytes } => {
            out.push(6);
            put_numbers(out, &[bytes]);
        }
    }
}

pub(super) fn answer(fields: &mut Fields<'_>) -> Result<KeptAnswer, WireError> {
    Ok(match fields.u8()? {
        1 => KeptAnswer::Ready {
            lease: fields.u64()?,
            generation: fields.u64()?,
            bytes: fields.u64()?,
            checksum: fields.u64()?,
        },
        2 => KeptAnswer::Write {
            lease: fields.u64()?,
            generation: fields.u64()?,
            bytes: fields.u64()?,
            token: fields.u64()?,
            expires_ms: fields.u64()?,
        },
        3 => KeptAnswer::Committed,
        4 => KeptAnswer::Discarded,
        5 => KeptAnswer::Refused(refusal(fields)?),
        6 => KeptAnswer::Made {
            bytes: fields.u64()?,
        },
        _ => return Err(WireError::BadValue("answer about kept memory")),
    })
}

fn put_refusal(out: &mut Vec<u8>, why: KeptRefusal) {
    match why {
        KeptRefusal::Missing => out.push(1),
        KeptRefusal::Quota { free } => {
            out.push(2);
            put_numbers(out, &[free]);
        }
        KeptRefusal::Writing => out.push(3),
        KeptRefusal::NotScrubbed => out.push(4),
        KeptRefusal::Fenced => out.push(5),
        KeptRefusal::Unavailable => out.push(6),
        KeptRefusal::TooMany => out.push(7),
        KeptRefusal::Off => out.push(9),
        KeptRefusal::Driver { code } => {
            out.push(8);
            out.extend_from_slice(&code.to_le_bytes());
        }
    }
}

fn refusal(fields: &mut Fields<'_>) -> Result<KeptRefusal, WireError> {
    Ok(match fields.u8()? {
        1 => KeptRefusal::Missing,
        2 => KeptRefusal::Quota {
            free: fields.u64()?,
        },
        3 => KeptRefusal::Writing,
        4 => KeptRefusal::NotScrubbed,
        5 => KeptRefusal::Fenced,
        6 => KeptRefusal::Unavailable,
        7 => KeptRefusal::TooMany,
        8 => KeptRefusal::Driver {
            code: i32::from_le_bytes(fields.array()?),
        },
        9 => KeptRefusal::Off,
        _ => return Err(WireError::BadValue("refusal")),
    })
}

fn put_numbers(out: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in super::super) fn questions(
        account: impl Strategy<Value = Account>,
    ) -> impl Strategy<Value = KeptQuestion> {
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
                |(version, image, account, name, key, bytes)| KeptQuestion::Open {
                    version,
                    image,
                    account,
                    name,
                    key,
                    bytes
                }
            ),
            any::<(u16, u64, u64, u64)>().prop_map(|(version, lease, token, checksum)| {
                KeptQuestion::Commit {
                    version,
                    lease,
                    token,
                    checksum,
                }
            }),
            any::<(u16, u64)>()
                .prop_map(|(version, lease)| KeptQuestion::Discard { version, lease }),
        ]
    }

    pub(in super::super) fn answers() -> impl Strategy<Value = KeptAnswer> {
        let refusal = prop_oneof![
            Just(KeptRefusal::Missing),
            any::<u64>().prop_map(|free| KeptRefusal::Quota { free }),
            Just(KeptRefusal::Writing),
            Just(KeptRefusal::NotScrubbed),
            Just(KeptRefusal::Fenced),
            Just(KeptRefusal::Unavailable),
            Just(KeptRefusal::TooMany),
            Just(KeptRefusal::Off),
            any::<i32>().prop_map(|code| KeptRefusal::Driver { code }),
        ];
        prop_oneof![
            any::<(u64, u64, u64, u64)>().prop_map(|(lease, generation, bytes, checksum)| {
                KeptAnswer::Ready {
                    lease,
                    generation,
                    bytes,
                    checksum,
                }
            }),
            any::<(u64, u64, u64, u64, u64)>().prop_map(
                |(lease, generation, bytes, token, expires_ms)| KeptAnswer::Write {
                    lease,
                    generation,
                    bytes,
                    token,
                    expires_ms,
                }
            ),
            Just(KeptAnswer::Committed),
            Just(KeptAnswer::Discarded),
            any::<u64>().prop_map(|bytes| KeptAnswer::Made { bytes }),
            refusal.prop_map(KeptAnswer::Refused),
        ]
    }

    #[test]
    fn lease_name_is_printable_and_bounded() {
        let name = |name: String| LeaseName::try_from(name).map(|name| name.as_str().len());
        assert_eq!(name(String::new()), Err(WireError::BadValue("lease name")));
        assert_eq!(name(" ~".repeat(MAX_NAME / 2)), Ok(MAX_NAME));
        for other in ["\n", "weights\0", "\u{7f}", "ä"] {
            let refused = name(other.to_owned());
            assert!(matches!(refused, Err(WireError::BadValue(_))), "{other:?}");
        }
        assert_eq!(
            name("a".repeat(MAX_NAME + 1)),
            Err(WireError::TooLong("lease name"))
        );
    }
}
