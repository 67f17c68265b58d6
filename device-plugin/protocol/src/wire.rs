//! The messages between a process and the agent, their encoding, and a parser that is total.
//!
//! A frame is a little-endian `u16` length and that many bytes, the first of which names the
//! message. Every length is bounded before anything is copied, an account is a small index, and
//! what is left over after a message is an error: a peer that sends anything else is hung up on.
//!
//! ```text
//! shim                                    agent
//!   Hello {version, image, holdings}  ->
//!                                     <-  Welcome {version, generation, accounts} + the credit page
//!                                         (SCM_RIGHTS) or Goodbye {reason}
//!   Request {account, units}          ->
//!                                     <-  Granted {account, units} | Refused {account, free}
//!                                         | Fenced {account}
//!   Refresh                           ->                         (writes the page's `others`)
//!                                     <-  Refreshed
//!   Denied {account, bytes, function} ->                         (no answer)
//!   ContextMade {account}             ->                         (asks the driver)
//!                                     <-  ContextSize {account, units}
//!   Poisoned {account, code, able}    ->                         (since version 2)
//!                                     <-  Verdict {execute again | go on}
//!
//!   Query {version, account}          ->                         (a connection of its own, and all of it)
//!                                     <-  Usage {quota, used, processes} or Goodbye {reason}
//!   Kept (question)                   ->                         (the same: see [`kept`])
//!                                     <-  Kept (answer) or Goodbye {reason}
//!   Token (question)                  ->                         (the same: see [`token`])
//!                                     <-  Token (answer) or Goodbye {reason}
//! ```
#![forbid(unsafe_code)]

pub mod kept;
pub mod token;

use kept::{KeptAnswer, KeptQuestion};
use token::{TokenAnswer, TokenQuestion};

use crate::page::MAX_SLOTS;
use crate::units::Units;

/// The longest payload of a frame. A welcome with [`MAX_SLOTS`] accounts fits.
pub const MAX_PAYLOAD: usize = 8192;

/// Bytes of a frame before its payload.
pub const HEADER: usize = 2;

/// The longest name (a UUID, a function) in a message. `MIG-GPU-<uuid>/<gi>/<ci>` is below 64.
pub const MAX_NAME: usize = 96;

/// The most processes that one usage lists: more than a container can have sessions.
pub const MAX_LISTED: usize = 512;

/// What memory an account counts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Account {
    /// Device memory of the GPU (or MIG instance) with this UUID, as NVML prints it.
    Device(String),
    /// CUDA managed memory.
    Managed,
}

/// An account with the container's quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Which memory.
    pub account: Account,
    /// How much of it, in bytes.
    pub bytes: u64,
}

/// What a process holds of an account when it says hello again, to a restarted agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Which memory.
    pub account: Account,
    /// What an earlier agent had granted.
    pub granted: Units,
    /// What the process uses.
    pub used: Units,
}

/// What one process uses of an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The process as who asked sees it, in its own pid namespace.
    pub pid: u32,
    /// How much it uses, in bytes.
    pub bytes: u64,
}

/// What a process says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToAgent {
    /// The first message of a session.
    Hello {
        /// The highest version that the process speaks.
        version: u16,
        /// Drawn once per process image: tells a reconnect from an exec of the same pid.
        image: u64,
        /// Nothing at first; what it holds when it comes back to a restarted agent.
        holdings: Vec<Holding>,
    },
    /// Asks for this much more credit.
    Request {
        /// The account's index in the welcome.
        account: u8,
        /// How much is missing.
        units: Units,
    },
    /// Reports that an allocation was denied.
    Denied {
        /// The account's index in the welcome.
        account: u8,
        /// What the program asked for.
        bytes: u64,
        /// The driver's function, for example `cuMemAlloc_v2`.
        function: String,
    },
    /// Asks the agent to write what the container's other processes use into the page.
    Refresh,
    /// Asks what the container uses of an account: first and only message of a connection that is no
    /// session. Reports (NVML) are made of its answer.
    Query {
        /// The highest version that the process speaks.
        version: u16,
        /// Which memory.
        account: Account,
    },
    /// A context was made, and charged what the page says that one takes.
    ContextMade {
        /// The account's index in the welcome.
        account: u8,
    },
    /// Asks about kept memory: first and only message of a connection that is no session.
    Kept(KeptQuestion),
    /// Asks about a token of memory: first and only message of a connection that is no session.
    Token(TokenQuestion),
    /// A fault has poisoned the process's context. Since version 2.
    Poisoned {
        /// The account of the GPU that was current.
        account: u8,
        /// The driver's error, one that [`crate::sticky`] calls poison or that was answered again.
        code: i32,
        /// Whether the process could execute itself again in its place.
        able: bool,
    },
}

/// What the agent says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToShim {
    /// Answers a hello; the credit page comes with it.
    Welcome {
        /// The version that both speak.
        version: u16,
        /// P, the number of this process image among its container's; none before version 2.
        generation: Option<u64>,
        /// The container's accounts; the page's slots are in the same order.
        quotas: Vec<Quota>,
    },
    /// The page's word holds this much more.
    Granted {
        /// The account asked for.
        account: u8,
        /// At least what was asked for.
        units: Units,
    },
    /// The quota does not allow it.
    Refused {
        /// The account asked for.
        account: u8,
        /// What the quota would allow.
        free: Units,
    },
    /// The page holds what the others use.
    Refreshed,
    /// Answers a query.
    Usage {
        /// What the container may use, in bytes.
        quota: u64,
        /// What it uses, in bytes: its processes, and what dead ones left that is not free yet.
        used: u64,
        /// The processes that use any of it and that who asked can see; at most [`MAX_LISTED`].
        processes: Vec<Listed>,
    },
    /// What a context takes of this GPU, as far as it was measured by now.
    ContextSize {
        /// The account that was named.
        account: u8,
        /// The size.
        units: Units,
    },
    /// Answers a question about kept memory.
    Kept(KeptAnswer),
    /// Answers a question about a token of memory.
    Token(TokenAnswer),
    /// The image that asked is poisoned: it is granted nothing any more. Since version 2.
    Fenced {
        /// The account asked for.
        account: u8,
    },
    /// Answers a report of poison.
    Verdict(Verdict),
    /// The agent will not talk to this peer.
    Goodbye {
        /// Why.
        reason: Reason,
    },
}

/// What a poisoned process is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Execute its program again, in its own place.
    Execute,
    /// Hand the error to the program. The agent may kill the container.
    GoOn,
}

/// Why the agent hangs up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The peer's version is older than the oldest that the agent speaks.
    Version,
    /// The peer is not a process of this allocation's container.
    Identity,
    /// The container has too many sessions.
    Busy,
    /// The container has no such account.
    Account,
}

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The message ends before its last field.
    #[error("the message ends early")]
    Short,
    /// Bytes are left over after the message.
    #[error("{0} bytes are left over after the message")]
    Trailing(usize),
    /// No message has this number.
    #[error("unknown message {0}")]
    UnknownMessage(u8),
    /// A field holds a value that it cannot have.
    #[error("bad value in field {0}")]
    BadValue(&'static str),
    /// A frame or list is longer than the bounds of this module.
    #[error("{0} is too long")]
    TooLong(&'static str),
}

/// A message that can be sent: its payload, without the frame's header.
pub trait Message: Sized {
    /// Writes the payload. Names beyond [`MAX_NAME`] are cut, lists beyond [`MAX_SLOTS`] and
    /// [`MAX_LISTED`] too: an encoder that cannot fail has no error to lose.
    fn payload(&self) -> Vec<u8>;

    /// Reads a payload.
    ///
    /// # Errors
    /// [`WireError`] for anything that [`Message::payload`] does not write.
    fn parse(payload: &[u8]) -> Result<Self, WireError>;

    /// The whole frame.
    fn frame(&self) -> Vec<u8> {
        let payload = self.payload();
        debug_assert!(payload.len() <= MAX_PAYLOAD);
        let mut frame = Vec::with_capacity(HEADER + payload.len());
        frame.extend_from_slice(&(payload.len() as u16).to_le_bytes());
        frame.extend_from_slice(&payload);
        frame
    }
}

/// The payload's length that a frame's header announces.
///
/// # Errors
/// [`WireError`] for an empty frame or one beyond [`MAX_PAYLOAD`].
pub fn payload_length(header: [u8; HEADER]) -> Result<usize, WireError> {
    match usize::from(u16::from_le_bytes(header)) {
        0 => Err(WireError::Short),
        length if length > MAX_PAYLOAD => Err(WireError::TooLong("frame")),
        length => Ok(length),
    }
}

impl Message for ToAgent {
    fn payload(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            ToAgent::Hello {
                version,
                image,
                holdings,
            } => {
                out.push(1);
                out.extend_from_slice(&version.to_le_bytes());
                out.extend_from_slice(&image.to_le_bytes());
                put_list(
                    &mut out,
                    holdings,
                    |out,
                     Holding {
                         account,
                         granted,
                         used,
                     }| {
                        put_account(out, account);
                        put_units(out, *granted);
                        put_units(out, *used);
                    },
                );
            }
            ToAgent::Request { account, units } => {
                out.extend_from_slice(&[2, *account]);
                put_units(&mut out, *units);
            }
            ToAgent::Denied {
                account,
                bytes,
                function,
            } => {
                out.extend_from_slice(&[4, *account]);
                out.extend_from_slice(&bytes.to_le_bytes());
                put_name(&mut out, function);
            }
            ToAgent::Refresh => out.push(5),
            ToAgent::Query { version, account } => {
                out.push(7);
                out.extend_from_slice(&version.to_le_bytes());
                put_account(&mut out, account);
            }
            ToAgent::ContextMade { account } => out.extend_from_slice(&[6, *account]),
            ToAgent::Kept(question) => {
                out.push(16);
                kept::put_question(&mut out, question);
            }
            ToAgent::Token(question) => {
                out.push(17);
                token::put_question(&mut out, question);
            }
            ToAgent::Poisoned {
                account,
                code,
                able,
            } => {
                out.extend_from_slice(&[8, *account]);
                out.extend_from_slice(&code.to_le_bytes());
                out.push(u8::from(*able));
            }
        }
        out
    }

    fn parse(payload: &[u8]) -> Result<ToAgent, WireError> {
        let mut fields = Fields(payload);
        let message = match fields.u8()? {
            1 => ToAgent::Hello {
                version: fields.u16()?,
                image: fields.u64()?,
                holdings: fields.list(|fields| {
                    Ok(Holding {
                        account: fields.account()?,
                        granted: fields.units()?,
                        used: fields.units()?,
                    })
                })?,
            },
            2 => ToAgent::Request {
                account: fields.slot()?,
                units: fields.units()?,
            },
            4 => ToAgent::Denied {
                account: fields.slot()?,
                bytes: fields.u64()?,
                function: fields.name()?,
            },
            5 => ToAgent::Refresh,
            7 => ToAgent::Query {
                version: fields.u16()?,
                account: fields.account()?,
            },
            6 => ToAgent::ContextMade {
                account: fields.slot()?,
            },
            16 => ToAgent::Kept(kept::question(&mut fields)?),
            17 => ToAgent::Token(token::question(&mut fields)?),
            8 => ToAgent::Poisoned {
                account: fields.slot()?,
                code: fields.i32()?,
                able: match fields.u8()? {
                    0 => false,
                    1 => true,
                    _ => return Err(WireError::BadValue("able")),
                },
            },
            other => return Err(WireError::UnknownMessage(other)),
        };
        fields.end(message)
    }
}

impl Message for ToShim {
    fn payload(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            ToShim::Welcome {
                version,
                generation,
                quotas,
            } => {
                // A peer of version 1 knows the one number only.
                out.push(if generation.is_some() { 8 } else { 1 });
                out.extend_from_slice(&version.to_le_bytes());
                if let Some(generation) = generation {
                    out.extend_from_slice(&generation.to_le_bytes());
                }
                put_list(&mut out, quotas, |out, Quota { account, bytes }| {
                    put_account(out, account);
                    out.extend_from_slice(&bytes.to_le_bytes());
                });
            }
            ToShim::Granted { account, units } => {
                out.extend_from_slice(&[2, *account]);
                put_units(&mut out, *units);
            }
            ToShim::Refused { account, free } => {
                out.extend_from_slice(&[3, *account]);
                put_units(&mut out, *free);
            }
            ToShim::Refreshed => out.push(4),
            ToShim::Usage {
                quota,
                used,
                processes,
            } => {
                let processes = &processes[..processes.len().min(MAX_LISTED)];
                out.push(7);
                out.extend_from_slice(&quota.to_le_bytes());
                out.extend_from_slice(&used.to_le_bytes());
                out.extend_from_slice(&(processes.len() as u16).to_le_bytes());
                for Listed { pid, bytes } in processes {
                    out.extend_from_slice(&pid.to_le_bytes());
                    out.extend_from_slice(&bytes.to_le_bytes());
                }
            }
            ToShim::Goodbye { reason } => {
                let reason = match reason {
                    Reason::Version => 1,
                    Reason::Identity => 2,
                    Reason::Busy => 3,
                    Reason::Account => 4,
                };
                out.extend_from_slice(&[5, reason]);
            }
            ToShim::ContextSize { account, units } => {
                out.extend_from_slice(&[6, *account]);
                put_units(&mut out, *units);
            }
            ToShim::Kept(answer) => {
                out.push(16);
                kept::put_answer(&mut out, answer);
            }
            ToShim::Token(answer) => {
                out.push(17);
                token::put_answer(&mut out, answer);
            }
            ToShim::Fenced { account } => out.extend_from_slice(&[9, *account]),
            ToShim::Verdict(verdict) => {
                let verdict = match verdict {
                    Verdict::Execute => 1,
                    Verdict::GoOn => 2,
                };
                out.extend_from_slice(&[10, verdict]);
            }
        }
        out
    }

    fn parse(payload: &[u8]) -> Result<ToShim, WireError> {
        let mut fields = Fields(payload);
        let message = match fields.u8()? {
            number @ (1 | 8) => ToShim::Welcome {
                version: fields.u16()?,
                generation: match number {
                    1 => None,
                    _ => Some(fields.u64()?),
                },
                quotas: fields.list(|fields| {
                    Ok(Quota {
                        account: fields.account()?,
                        bytes: fields.u64()?,
                    })
                })?,
            },
            2 => ToShim::Granted {
                account: fields.slot()?,
                units: fields.units()?,
            },
            3 => ToShim::Refused {
                account: fields.slot()?,
                free: fields.units()?,
            },
            4 => ToShim::Refreshed,
            7 => ToShim::Usage {
                quota: fields.u64()?,
                used: fields.u64()?,
                processes: fields.processes()?,
            },
            5 => ToShim::Goodbye {
                reason: match fields.u8()? {
                    1 => Reason::Version,
                    2 => Reason::Identity,
                    3 => Reason::Busy,
                    4 => Reason::Account,
                    _ => return Err(WireError::BadValue("reason")),
                },
            },
            6 => ToShim::ContextSize {
                account: fields.slot()?,
                units: fields.units()?,
            },
            16 => ToShim::Kept(kept::answer(&mut fields)?),
            17 => ToShim::Token(token::answer(&mut fields)?),
            9 => ToShim::Fenced {
                account: fields.slot()?,
            },
            10 => ToShim::Verdict(match fields.u8()? {
                1 => Verdict::Execute,
                2 => Verdict::GoOn,
                _ => return Err(WireError::BadValue("verdict")),
            }),
            other => return Err(WireError::UnknownMessage(other)),
        };
        fields.end(message)
    }
}

fn put_units(out: &mut Vec<u8>, units: Units) {
    out.extend_from_slice(&units.min(Units::MAX).0.to_le_bytes());
}

pub(crate) fn put_name(out: &mut Vec<u8>, name: &str) {
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    out.push(end as u8);
    out.extend_from_slice(&name.as_bytes()[..end]);
}

fn put_account(out: &mut Vec<u8>, account: &Account) {
    match account {
        Account::Device(uuid) => {
            out.push(0);
            put_name(out, uuid);
        }
        Account::Managed => out.push(1),
    }
}

fn put_list<T>(out: &mut Vec<u8>, items: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
    let items = &items[..items.len().min(MAX_SLOTS)];
    out.push(items.len() as u8);
    items.iter().for_each(|item| put(out, item));
}

/// What is left of a payload.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn take(&mut self, length: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(WireError::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(WireError::Short)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, WireError> {
        self.array().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn i32(&mut self) -> Result<i32, WireError> {
        self.array().map(i32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_le_bytes)
    }

    fn units(&mut self) -> Result<Units, WireError> {
        let units = Units(self.u32()?);
        if units <= Units::MAX {
            Ok(units)
        } else {
            Err(WireError::BadValue("units"))
        }
    }

    fn slot(&mut self) -> Result<u8, WireError> {
        let index = self.u8()?;
        if usize::from(index) < MAX_SLOTS {
            Ok(index)
        } else {
            Err(WireError::BadValue("account"))
        }
    }

    pub(crate) fn name(&mut self) -> Result<String, WireError> {
        let length = usize::from(self.u8()?);
        if length > MAX_NAME {
            return Err(WireError::TooLong("name"));
        }
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes)
            .map(str::to_owned)
            .map_err(|_| WireError::BadValue("name"))
    }

    fn account(&mut self) -> Result<Account, WireError> {
        match self.u8()? {
            0 => self.name().map(Account::Device),
            1 => Ok(Account::Managed),
            _ => Err(WireError::BadValue("account kind")),
        }
    }

    fn list<T>(
        &mut self,
        item: impl Fn(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let length = usize::from(self.u8()?);
        if length > MAX_SLOTS {
            return Err(WireError::TooLong("list"));
        }
        (0..length).map(|_| item(self)).collect()
    }

    fn processes(&mut self) -> Result<Vec<Listed>, WireError> {
        let length = usize::from(self.u16()?);
        if length > MAX_LISTED {
            return Err(WireError::TooLong("list of processes"));
        }
        let process = |_| {
            Ok(Listed {
                pid: self.u32()?,
                bytes: self.u64()?,
            })
        };
        (0..length).map(process).collect()
    }

    pub(crate) fn end<T>(self, message: T) -> Result<T, WireError> {
        match self.0.len() {
            0 => Ok(message),
            left => Err(WireError::Trailing(left)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn units() -> impl Strategy<Value = Units> {
        (0..=Units::MAX.0).prop_map(Units)
    }

    fn account() -> impl Strategy<Value = Account> {
        prop_oneof![
            "[ -~]{0,96}".prop_map(Account::Device),
            Just(Account::Managed)
        ]
    }

    fn to_agent() -> impl Strategy<Value = ToAgent> {
        let slot = 0..MAX_SLOTS as u8;
        let holding = (account(), units(), units()).prop_map(|(account, granted, used)| Holding {
            account,
            granted,
            used,
        });
        prop_oneof![
            (any::<u16>(), any::<u64>(), vec(holding, 0..=MAX_SLOTS)).prop_map(
                |(version, image, holdings)| ToAgent::Hello {
                    version,
                    image,
                    holdings
                }
            ),
            (slot.clone(), units())
                .prop_map(|(account, units)| ToAgent::Request { account, units }),
            slot.clone()
                .prop_map(|account| ToAgent::ContextMade { account }),
            (slot.clone(), any::<i32>(), any::<bool>()).prop_map(|(account, code, able)| {
                ToAgent::Poisoned {
                    account,
                    code,
                    able,
                }
            }),
            (slot, any::<u64>(), "[a-zA-Z0-9_]{0,96}").prop_map(|(account, bytes, function)| {
                ToAgent::Denied {
                    account,
                    bytes,
                    function,
                }
            }),
            Just(ToAgent::Refresh),
            (any::<u16>(), account())
                .prop_map(|(version, account)| ToAgent::Query { version, account }),
            kept::tests::questions(account()).prop_map(ToAgent::Kept),
            token::tests::questions(account()).prop_map(ToAgent::Token),
        ]
    }

    fn to_shim() -> impl Strategy<Value = ToShim> {
        let slot = 0..MAX_SLOTS as u8;
        let quota = (account(), any::<u64>()).prop_map(|(account, bytes)| Quota { account, bytes });
        let process = (any::<u32>(), any::<u64>()).prop_map(|(pid, bytes)| Listed { pid, bytes });
        let reason = prop_oneof![
            Just(Reason::Version),
            Just(Reason::Identity),
            Just(Reason::Busy),
            Just(Reason::Account)
        ];
        prop_oneof![
            (
                any::<u16>(),
                any::<Option<u64>>(),
                vec(quota, 0..=MAX_SLOTS)
            )
                .prop_map(|(version, generation, quotas)| ToShim::Welcome {
                    version,
                    generation,
                    quotas
                }),
            slot.clone().prop_map(|account| ToShim::Fenced { account }),
            prop_oneof![Just(Verdict::Execute), Just(Verdict::GoOn)].prop_map(ToShim::Verdict),
            (slot.clone(), units()).prop_map(|(account, units)| ToShim::Granted { account, units }),
            (slot.clone(), units())
                .prop_map(|(account, units)| ToShim::ContextSize { account, units }),
            (slot, units()).prop_map(|(account, free)| ToShim::Refused { account, free }),
            Just(ToShim::Refreshed),
            (any::<u64>(), any::<u64>(), vec(process, 0..=MAX_LISTED)).prop_map(
                |(quota, used, processes)| ToShim::Usage {
                    quota,
                    used,
                    processes
                }
            ),
            reason.prop_map(|reason| ToShim::Goodbye { reason }),
            kept::tests::answers().prop_map(ToShim::Kept),
            token::tests::answers().prop_map(ToShim::Token),
        ]
    }

    proptest! {
        #[test]
        fn messages_round_trip(message in to_agent(), answer in to_shim()) {
            prop_assert_eq!(ToAgent::parse(&message.payload()), Ok(message));
            prop_assert_eq!(ToShim::parse(&answer.payload()), Ok(answer));
        }

        #[test]
        fn every_message_fits_in_a_frame(message in to_agent(), answer in to_shim()) {
            for frame in [message.frame(), answer.frame()] {
                prop_assert_eq!(payload_length([frame[0], frame[1]]), Ok(frame.len() - HEADER));
            }
        }

        #[test]
        fn garbage_is_rejected_or_encodes_to_itself(bytes in vec(any::<u8>(), 0..512)) {
            if let Ok(message) = ToAgent::parse(&bytes) {
                prop_assert_eq!(message.payload(), bytes.clone());
            }
            if let Ok(message) = ToShim::parse(&bytes) {
                prop_assert_eq!(message.payload(), bytes);
            }
        }

        #[test]
        fn parse_never_panics_when_a_message_is_mutated(
            message in to_agent(), at: prop::sample::Index, byte: u8, cut: prop::sample::Index,
        ) {
            let mut bytes = message.payload();
            let place = at.index(bytes.len());
            bytes[place] = byte;
            let _ = ToAgent::parse(&bytes);
            let short = &message.payload()[..cut.index(bytes.len())];
            prop_assert!(ToAgent::parse(short).is_err(), "{:?} parsed though it was cut", short);
            let mut long = message.payload();
            long.push(byte);
            prop_assert_eq!(ToAgent::parse(&long), Err(WireError::Trailing(1)));
        }
    }

    #[test]
    fn welcome_without_a_generation_is_version_1() {
        let quotas = vec![Quota {
            account: Account::Managed,
            bytes: 5,
        }];
        let welcome = ToShim::Welcome {
            version: 1,
            generation: None,
            quotas,
        };
        assert_eq!(welcome.payload(), [1, 1, 0, 1, 1, 5, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn frame_beyond_the_bound_is_refused_by_its_header() {
        assert_eq!(payload_length([0, 0]), Err(WireError::Short));
        assert_eq!(
            payload_length([0xff, 0xff]),
            Err(WireError::TooLong("frame"))
        );
    }

    #[test]
    fn long_name_is_cut_at_a_char_boundary() {
        let function = "ä".repeat(MAX_NAME);
        let sent = ToAgent::Denied {
            account: 0,
            bytes: 1,
            function,
        };
        let ToAgent::Denied { function, .. } = ToAgent::parse(&sent.payload()).unwrap() else {
            panic!()
        };
        assert_eq!(function, "ä".repeat(MAX_NAME / 2));
    }
}
