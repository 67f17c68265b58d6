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

pub mod retained;
pub mod token;

use retained::{RetainedRequest, RetainedResponse};
use token::{TokenRequest, TokenResponse};

use crate::credit_page::MAX_SLOTS;
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
pub struct HeldCredit {
    /// Which memory.
    pub account: Account,
    /// What an earlier agent had granted.
    pub granted: Units,
    /// What the process uses.
    pub used: Units,
}

/// What one process uses of an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// The process as who asked sees it, in its own pid namespace.
    pub pid: u32,
    /// How much it uses, in bytes.
    pub bytes: u64,
}

/// What a process says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The first message of a session.
    Hello {
        /// The highest version that the process speaks.
        version: u16,
        /// Drawn once per process image: tells a reconnect from an exec of the same pid.
        image: u64,
        /// Nothing at first; what it holds when it comes back to a restarted agent.
        holdings: Vec<HeldCredit>,
    },
    /// Asks for this much more credit.
    Credit {
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
    Retained(RetainedRequest),
    /// Asks about a token of memory: first and only message of a connection that is no session.
    Token(TokenRequest),
    /// A fault has poisoned the process's context. Since version 2.
    Poisoned {
        /// The account of the GPU that was current.
        account: u8,
        /// The driver's error, one that [`crate::sticky`] calls poison or that was answered again.
        code: i32,
        /// Whether the process could execute itself again in its place.
        can_reexec: bool,
    },
}

/// What the agent says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Response {
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
        processes: Vec<ProcessUsage>,
    },
    /// What a context takes of this GPU, as far as it was measured by now.
    ContextSize {
        /// The account that was named.
        account: u8,
        /// The size.
        units: Units,
    },
    /// Answers a question about kept memory.
    Retained(RetainedResponse),
    /// Answers a question about a token of memory.
    Token(TokenResponse),
    /// The image that asked is poisoned: it is granted nothing any more. Since version 2.
    Fenced {
        /// The account asked for.
        account: u8,
    },
    /// Answers a report of poison.
    Recovery(Recovery),
    /// The agent will not talk to this peer.
    Rejected {
        /// Why.
        reason: RejectReason,
    },
}

/// What a poisoned process is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Execute its program again, in its own place.
    Reexec,
    /// Hand the error to the program. The agent may kill the container.
    Continue,
}

/// Why the agent hangs up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReason {
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
pub enum DecodeError {
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
    fn parse(payload: &[u8]) -> Result<Self, DecodeError>;

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
pub fn payload_length(header: [u8; HEADER]) -> Result<usize, DecodeError> {
    match usize::from(u16::from_le_bytes(header)) {
        0 => Err(DecodeError::Short),
        length if length > MAX_PAYLOAD => Err(DecodeError::TooLong("frame")),
        length => Ok(length),
    }
}

impl Message for Request {
    fn payload(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Request::Hello {
                version,
                image,
                holdings,
            } => {
                out.push(1);
                out.extend_from_slice(&version.to_le_bytes());
                out.extend_from_slice(&image.to_le_bytes());
                encode_list(
                    &mut out,
                    holdings,
                    |out,
                     HeldCredit {
                         account,
                         granted,
                         used,
                     }| {
                        encode_account(out, account);
                        encode_units(out, *granted);
                        encode_units(out, *used);
                    },
                );
            }
            Request::Credit { account, units } => {
                out.extend_from_slice(&[2, *account]);
                encode_units(&mut out, *units);
            }
            Request::Denied {
                account,
                bytes,
                function,
            } => {
                out.extend_from_slice(&[4, *account]);
                out.extend_from_slice(&bytes.to_le_bytes());
                encode_name(&mut out, function);
            }
            Request::Refresh => out.push(5),
            Request::Query { version, account } => {
                out.push(7);
                out.extend_from_slice(&version.to_le_bytes());
                encode_account(&mut out, account);
            }
            Request::ContextMade { account } => out.extend_from_slice(&[6, *account]),
            Request::Retained(question) => {
                out.push(16);
                retained::encode_request(&mut out, question);
            }
            Request::Token(question) => {
                out.push(17);
                token::encode_request(&mut out, question);
            }
            Request::Poisoned {
                account,
                code,
                can_reexec: able,
            } => {
                out.extend_from_slice(&[8, *account]);
                out.extend_from_slice(&code.to_le_bytes());
                out.push(u8::from(*able));
            }
        }
        out
    }

    fn parse(payload: &[u8]) -> Result<Request, DecodeError> {
        let mut decoder = Decoder(payload);
        let message = match decoder.u8()? {
            1 => Request::Hello {
                version: decoder.u16()?,
                image: decoder.u64()?,
                holdings: decoder.list(|decoder| {
                    Ok(HeldCredit {
                        account: decoder.account()?,
                        granted: decoder.units()?,
                        used: decoder.units()?,
                    })
                })?,
            },
            2 => Request::Credit {
                account: decoder.account_index()?,
                units: decoder.units()?,
            },
            4 => Request::Denied {
                account: decoder.account_index()?,
                bytes: decoder.u64()?,
                function: decoder.name()?,
            },
            5 => Request::Refresh,
            7 => Request::Query {
                version: decoder.u16()?,
                account: decoder.account()?,
            },
            6 => Request::ContextMade {
                account: decoder.account_index()?,
            },
            16 => Request::Retained(retained::decode_request(&mut decoder)?),
            17 => Request::Token(token::decode_request(&mut decoder)?),
            8 => Request::Poisoned {
                account: decoder.account_index()?,
                code: decoder.i32()?,
                can_reexec: match decoder.u8()? {
                    0 => false,
                    1 => true,
                    _ => return Err(DecodeError::BadValue("can_reexec")),
                },
            },
            other => return Err(DecodeError::UnknownMessage(other)),
        };
        decoder.finish(message)
    }
}

impl Message for Response {
    fn payload(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Response::Welcome {
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
                encode_list(&mut out, quotas, |out, Quota { account, bytes }| {
                    encode_account(out, account);
                    out.extend_from_slice(&bytes.to_le_bytes());
                });
            }
            Response::Granted { account, units } => {
                out.extend_from_slice(&[2, *account]);
                encode_units(&mut out, *units);
            }
            Response::Refused { account, free } => {
                out.extend_from_slice(&[3, *account]);
                encode_units(&mut out, *free);
            }
            Response::Refreshed => out.push(4),
            Response::Usage {
                quota,
                used,
                processes,
            } => {
                let processes = &processes[..processes.len().min(MAX_LISTED)];
                out.push(7);
                out.extend_from_slice(&quota.to_le_bytes());
                out.extend_from_slice(&used.to_le_bytes());
                out.extend_from_slice(&(processes.len() as u16).to_le_bytes());
                for ProcessUsage { pid, bytes } in processes {
                    out.extend_from_slice(&pid.to_le_bytes());
                    out.extend_from_slice(&bytes.to_le_bytes());
                }
            }
            Response::Rejected { reason } => {
                let reason = match reason {
                    RejectReason::Version => 1,
                    RejectReason::Identity => 2,
                    RejectReason::Busy => 3,
                    RejectReason::Account => 4,
                };
                out.extend_from_slice(&[5, reason]);
            }
            Response::ContextSize { account, units } => {
                out.extend_from_slice(&[6, *account]);
                encode_units(&mut out, *units);
            }
            Response::Retained(answer) => {
                out.push(16);
                retained::encode_response(&mut out, answer);
            }
            Response::Token(answer) => {
                out.push(17);
                token::encode_response(&mut out, answer);
            }
            Response::Fenced { account } => out.extend_from_slice(&[9, *account]),
            Response::Recovery(verdict) => {
                let verdict = match verdict {
                    Recovery::Reexec => 1,
                    Recovery::Continue => 2,
                };
                out.extend_from_slice(&[10, verdict]);
            }
        }
        out
    }

    fn parse(payload: &[u8]) -> Result<Response, DecodeError> {
        let mut decoder = Decoder(payload);
        let message = match decoder.u8()? {
            number @ (1 | 8) => Response::Welcome {
                version: decoder.u16()?,
                generation: match number {
                    1 => None,
                    _ => Some(decoder.u64()?),
                },
                quotas: decoder.list(|decoder| {
                    Ok(Quota {
                        account: decoder.account()?,
                        bytes: decoder.u64()?,
                    })
                })?,
            },
            2 => Response::Granted {
                account: decoder.account_index()?,
                units: decoder.units()?,
            },
            3 => Response::Refused {
                account: decoder.account_index()?,
                free: decoder.units()?,
            },
            4 => Response::Refreshed,
            7 => Response::Usage {
                quota: decoder.u64()?,
                used: decoder.u64()?,
                processes: decoder.processes()?,
            },
            5 => Response::Rejected {
                reason: match decoder.u8()? {
                    1 => RejectReason::Version,
                    2 => RejectReason::Identity,
                    3 => RejectReason::Busy,
                    4 => RejectReason::Account,
                    _ => return Err(DecodeError::BadValue("reason")),
                },
            },
            6 => Response::ContextSize {
                account: decoder.account_index()?,
                units: decoder.units()?,
            },
            16 => Response::Retained(retained::decode_response(&mut decoder)?),
            17 => Response::Token(token::decode_response(&mut decoder)?),
            9 => Response::Fenced {
                account: decoder.account_index()?,
            },
            10 => Response::Recovery(match decoder.u8()? {
                1 => Recovery::Reexec,
                2 => Recovery::Continue,
                _ => return Err(DecodeError::BadValue("verdict")),
            }),
            other => return Err(DecodeError::UnknownMessage(other)),
        };
        decoder.finish(message)
    }
}

fn encode_units(out: &mut Vec<u8>, units: Units) {
    out.extend_from_slice(&units.min(Units::MAX).0.to_le_bytes());
}

pub(crate) fn encode_name(out: &mut Vec<u8>, name: &str) {
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    out.push(end as u8);
    out.extend_from_slice(&name.as_bytes()[..end]);
}

fn encode_account(out: &mut Vec<u8>, account: &Account) {
    match account {
        Account::Device(uuid) => {
            out.push(0);
            encode_name(out, uuid);
        }
        Account::Managed => out.push(1),
    }
}

fn encode_list<T>(out: &mut Vec<u8>, items: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
    let items = &items[..items.len().min(MAX_SLOTS)];
    out.push(items.len() as u8);
    items.iter().for_each(|item| put(out, item));
}

/// What is left of a payload.
pub(crate) struct Decoder<'a>(pub(crate) &'a [u8]);

impl<'a> Decoder<'a> {
    pub(crate) fn take(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(DecodeError::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(DecodeError::Short)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, DecodeError> {
        self.array().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn i32(&mut self) -> Result<i32, DecodeError> {
        self.array().map(i32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_le_bytes)
    }

    fn units(&mut self) -> Result<Units, DecodeError> {
        let units = Units(self.u32()?);
        if units <= Units::MAX {
            Ok(units)
        } else {
            Err(DecodeError::BadValue("units"))
        }
    }

    fn account_index(&mut self) -> Result<u8, DecodeError> {
        let index = self.u8()?;
        if usize::from(index) < MAX_SLOTS {
            Ok(index)
        } else {
            Err(DecodeError::BadValue("account"))
        }
    }

    pub(crate) fn name(&mut self) -> Result<String, DecodeError> {
        let length = usize::from(self.u8()?);
        if length > MAX_NAME {
            return Err(DecodeError::TooLong("name"));
        }
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes)
            .map(str::to_owned)
            .map_err(|_| DecodeError::BadValue("name"))
    }

    fn account(&mut self) -> Result<Account, DecodeError> {
        match self.u8()? {
            0 => self.name().map(Account::Device),
            1 => Ok(Account::Managed),
            _ => Err(DecodeError::BadValue("account kind")),
        }
    }

    fn list<T>(
        &mut self,
        item: impl Fn(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let length = usize::from(self.u8()?);
        if length > MAX_SLOTS {
            return Err(DecodeError::TooLong("list"));
        }
        (0..length).map(|_| item(self)).collect()
    }

    fn processes(&mut self) -> Result<Vec<ProcessUsage>, DecodeError> {
        let length = usize::from(self.u16()?);
        if length > MAX_LISTED {
            return Err(DecodeError::TooLong("list of processes"));
        }
        let process = |_| {
            Ok(ProcessUsage {
                pid: self.u32()?,
                bytes: self.u64()?,
            })
        };
        (0..length).map(process).collect()
    }

    pub(crate) fn finish<T>(self, message: T) -> Result<T, DecodeError> {
        match self.0.len() {
            0 => Ok(message),
            left => Err(DecodeError::Trailing(left)),
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

    fn request() -> impl Strategy<Value = Request> {
        let slot = 0..MAX_SLOTS as u8;
        let holding =
            (account(), units(), units()).prop_map(|(account, granted, used)| HeldCredit {
                account,
                granted,
                used,
            });
        prop_oneof![
            (any::<u16>(), any::<u64>(), vec(holding, 0..=MAX_SLOTS)).prop_map(
                |(version, image, holdings)| Request::Hello {
                    version,
                    image,
                    holdings
                }
            ),
            (slot.clone(), units()).prop_map(|(account, units)| Request::Credit { account, units }),
            slot.clone()
                .prop_map(|account| Request::ContextMade { account }),
            (slot.clone(), any::<i32>(), any::<bool>()).prop_map(|(account, code, can_reexec)| {
                Request::Poisoned {
                    account,
                    code,
                    can_reexec,
                }
            }),
            (slot, any::<u64>(), "[a-zA-Z0-9_]{0,96}").prop_map(|(account, bytes, function)| {
                Request::Denied {
                    account,
                    bytes,
                    function,
                }
            }),
            Just(Request::Refresh),
            (any::<u16>(), account())
                .prop_map(|(version, account)| Request::Query { version, account }),
            retained::tests::questions(account()).prop_map(Request::Retained),
            token::tests::questions(account()).prop_map(Request::Token),
        ]
    }

    fn response() -> impl Strategy<Value = Response> {
        let slot = 0..MAX_SLOTS as u8;
        let quota = (account(), any::<u64>()).prop_map(|(account, bytes)| Quota { account, bytes });
        let process =
            (any::<u32>(), any::<u64>()).prop_map(|(pid, bytes)| ProcessUsage { pid, bytes });
        let reason = prop_oneof![
            Just(RejectReason::Version),
            Just(RejectReason::Identity),
            Just(RejectReason::Busy),
            Just(RejectReason::Account)
        ];
        prop_oneof![
            (
                any::<u16>(),
                any::<Option<u64>>(),
                vec(quota, 0..=MAX_SLOTS)
            )
                .prop_map(|(version, generation, quotas)| Response::Welcome {
                    version,
                    generation,
                    quotas
                }),
            slot.clone()
                .prop_map(|account| Response::Fenced { account }),
            prop_oneof![Just(Recovery::Reexec), Just(Recovery::Continue)]
                .prop_map(Response::Recovery),
            (slot.clone(), units())
                .prop_map(|(account, units)| Response::Granted { account, units }),
            (slot.clone(), units())
                .prop_map(|(account, units)| Response::ContextSize { account, units }),
            (slot, units()).prop_map(|(account, free)| Response::Refused { account, free }),
            Just(Response::Refreshed),
            (any::<u64>(), any::<u64>(), vec(process, 0..=MAX_LISTED)).prop_map(
                |(quota, used, processes)| Response::Usage {
                    quota,
                    used,
                    processes
                }
            ),
            reason.prop_map(|reason| Response::Rejected { reason }),
            retained::tests::answers().prop_map(Response::Retained),
            token::tests::answers().prop_map(Response::Token),
        ]
    }

    proptest! {
        #[test]
        fn messages_round_trip(message in request(), answer in response()) {
            prop_assert_eq!(Request::parse(&message.payload()), Ok(message));
            prop_assert_eq!(Response::parse(&answer.payload()), Ok(answer));
        }

        #[test]
        fn every_message_fits_in_a_frame(message in request(), answer in response()) {
            for frame in [message.frame(), answer.frame()] {
                prop_assert_eq!(payload_length([frame[0], frame[1]]), Ok(frame.len() - HEADER));
            }
        }

        #[test]
        fn garbage_is_rejected_or_encodes_to_itself(bytes in vec(any::<u8>(), 0..512)) {
            if let Ok(message) = Request::parse(&bytes) {
                prop_assert_eq!(message.payload(), bytes.clone());
            }
            if let Ok(message) = Response::parse(&bytes) {
                prop_assert_eq!(message.payload(), bytes);
            }
        }

        #[test]
        fn parse_never_panics_when_a_message_is_mutated(
            message in request(), at: prop::sample::Index, byte: u8, cut: prop::sample::Index,
        ) {
            let mut bytes = message.payload();
            let place = at.index(bytes.len());
            bytes[place] = byte;
            let _ = Request::parse(&bytes);
            let short = &message.payload()[..cut.index(bytes.len())];
            prop_assert!(Request::parse(short).is_err(), "{:?} parsed though it was cut", short);
            let mut long = message.payload();
            long.push(byte);
            prop_assert_eq!(Request::parse(&long), Err(DecodeError::Trailing(1)));
        }
    }

    #[test]
    fn welcome_without_a_generation_is_version_1() {
        let quotas = vec![Quota {
            account: Account::Managed,
            bytes: 5,
        }];
        let welcome = Response::Welcome {
            version: 1,
            generation: None,
            quotas,
        };
        assert_eq!(welcome.payload(), [1, 1, 0, 1, 1, 5, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn frame_beyond_the_bound_is_refused_by_its_header() {
        assert_eq!(payload_length([0, 0]), Err(DecodeError::Short));
        assert_eq!(
            payload_length([0xff, 0xff]),
            Err(DecodeError::TooLong("frame"))
        );
    }

    #[test]
    fn long_name_is_cut_at_a_char_boundary() {
        let function = "ä".repeat(MAX_NAME);
        let sent = Request::Denied {
            account: 0,
            bytes: 1,
            function,
        };
        let Request::Denied { function, .. } = Request::parse(&sent.payload()).unwrap() else {
            panic!()
        };
        assert_eq!(function, "ä".repeat(MAX_NAME / 2));
    }
}
