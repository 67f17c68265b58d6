//! Defines the messages between a process and the agent: their encoding and a total parser.
//!
//! A frame is a little-endian `u16` length and that many bytes, the first of which names the
//! message. Every length is bounded before anything is copied, and an account is a small index.
//! Bytes that are left over after a message are an error. The agent disconnects a peer that sends
//! anything else.
//!
//! ```text
//! shim                                    agent
//!   Hello {version, image, holdings}  ->
//!                                     <-  Welcome {version, generation, accounts} + credit page
//!                                         (SCM_RIGHTS) or Rejected {reason}
//!   Credit {account, units}           ->
//!                                     <-  Granted {account, units} | Refused {account, free}
//!                                         | Fenced {account}
//!   Refresh                           ->          (writes the page's `others`)
//!                                     <-  Refreshed
//!   Denied {account, bytes, function} ->          (no answer)
//!   ContextMade {account}             ->          (the agent asks the driver)
//!                                     <-  ContextSize {account, units}
//!   Poisoned {account, code, can_reexec} ->                      (since version 2)
//!                                     <-  Recovery {re-exec | continue | end {seconds}}
//!
//!   Query {version, account}          ->          (a connection of its own)
//!                                     <-  Usage {quota, used, processes} or Rejected {reason}
//!   Retained (request)                ->          (a connection of its own: see [`retained`])
//!                                     <-  Retained (response) or Rejected {reason}
//!   Token (request)                   ->          (a connection of its own: see [`token`])
//!                                     <-  Token (response) or Rejected {reason}
//! ```
#![forbid(unsafe_code)]

pub mod retained;
pub mod signed_token;
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

/// The most processes in one usage response: more than a container can have sessions.
pub const MAX_LISTED: usize = 512;

/// The kind of memory that an account counts.
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
    /// The account.
    pub account: Account,
    /// The quota, in bytes.
    pub bytes: u64,
}

/// The credit that a process holds of an account, sent when it connects to a restarted agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldCredit {
    /// The account.
    pub account: Account,
    /// The credit that an earlier agent granted.
    pub granted: Units,
    /// The amount that the process uses.
    pub used: Units,
}

/// The usage of an account by one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// The process in the pid namespace of the process that asked.
    pub pid: u32,
    /// The usage, in bytes.
    pub bytes: u64,
}

/// A message of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The first message of a session.
    Hello {
        /// The highest version that the process speaks.
        version: u16,
        /// A random number of the process image, which tells a reconnect from an exec of the same
        /// pid.
        image: u64,
        /// Empty at first; the held credit on a reconnect to a restarted agent.
        holdings: Vec<HeldCredit>,
    },
    /// Requests more credit.
    Credit {
        /// The account's index in the welcome.
        account: u8,
        /// The missing amount.
        units: Units,
    },
    /// Reports that an allocation was denied.
    Denied {
        /// The account's index in the welcome.
        account: u8,
        /// The bytes that the program requested.
        bytes: u64,
        /// The driver's function, for example `cuMemAlloc_v2`.
        function: String,
    },
    /// Asks the agent to write what the container's other processes use into the page.
    Refresh,
    /// Asks for the container's usage of an account: the first and only message of a connection
    /// without a session. The NVML shim reports the response.
    Query {
        /// The highest version that the process speaks.
        version: u16,
        /// The account.
        account: Account,
    },
    /// Reports a new context, charged the size in the page.
    ContextMade {
        /// The account's index in the welcome.
        account: u8,
    },
    /// A request about retained memory: the first and only message of a connection without a
    /// session.
    Retained(RetainedRequest),
    /// A request about a memory token: the first and only message of a connection without a
    /// session.
    Token(TokenRequest),
    /// Reports that a fault has poisoned the process's contexts. Since version 2.
    Poisoned {
        /// The account of the GPU that was current.
        account: u8,
        /// The driver's error: one that [`crate::error_class`] calls poison, or one that was
        /// returned again.
        code: i32,
        /// Whether the shim could execute the process again.
        can_reexec: bool,
    },
}

/// A message of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Response {
    /// Answers a hello; the credit page comes with it.
    Welcome {
        /// The version that both sides speak.
        version: u16,
        /// The process generation: the number of this process image in its container. None before
        /// version 2.
        generation: Option<u64>,
        /// The container's accounts, in the order of the page's slots.
        quotas: Vec<Quota>,
    },
    /// The page's word holds this much more credit.
    Granted {
        /// The requested account.
        account: u8,
        /// At least the requested amount.
        units: Units,
    },
    /// The quota does not allow it.
    Refused {
        /// The requested account.
        account: u8,
        /// The amount that the quota would allow.
        free: Units,
    },
    /// The page has the usage of the other processes.
    Refreshed,
    /// Answers a query.
    Usage {
        /// The container's quota, in bytes.
        quota: u64,
        /// The container's usage, in bytes: its processes, and unreclaimed memory of exited ones.
        used: u64,
        /// The processes with usage in the asking process's pid namespace; at most [`MAX_LISTED`].
        processes: Vec<ProcessUsage>,
    },
    /// The size of a context of this GPU, if measured by now.
    ContextSize {
        /// The reported account.
        account: u8,
        /// The size.
        units: Units,
    },
    /// Answers a request about retained memory.
    Retained(RetainedResponse),
    /// Answers a request about a memory token.
    Token(TokenResponse),
    /// The process image is fenced and is granted nothing more. Since version 2.
    Fenced {
        /// The requested account.
        account: u8,
    },
    /// Answers a report of a sticky error.
    Recovery(Recovery),
    /// The agent rejects this peer and closes the connection.
    Rejected {
        /// The reason.
        reason: RejectReason,
    },
}

/// The action that the agent asks of a poisoned process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Execute its program again in the same process.
    Reexec,
    /// Return the error to the program. The agent may kill the container.
    Continue,
    /// Return the error to the program, which the agent kills after this time. Since version 3.
    End {
        /// The time in seconds.
        seconds: u16,
    },
}

/// Why the agent closes a connection.
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

/// A message's payload, without the frame's header.
pub trait Message: Sized {
    /// Encodes the payload. Cuts names beyond [`MAX_NAME`], and lists beyond [`MAX_SLOTS`] and
    /// [`MAX_LISTED`], so that encoding cannot fail.
    fn payload(&self) -> Vec<u8>;

    /// Parses a payload.
    ///
    /// # Errors
    /// [`DecodeError`] for anything that [`Message::payload`] does not write.
    fn parse(payload: &[u8]) -> Result<Self, DecodeError>;

    /// Returns the whole frame.
    fn frame(&self) -> Vec<u8> {
        let payload = self.payload();
        debug_assert!(payload.len() <= MAX_PAYLOAD);
        let mut frame = Vec::with_capacity(HEADER + payload.len());
        frame.extend_from_slice(&(payload.len() as u16).to_le_bytes());
        frame.extend_from_slice(&payload);
        frame
    }
}

/// Returns the payload length that a frame's header announces.
///
/// # Errors
/// [`DecodeError`] for an empty frame or one beyond [`MAX_PAYLOAD`].
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
                // A peer of version 1 knows this number only.
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
                out.push(10);
                match verdict {
                    Recovery::Reexec => out.push(1),
                    Recovery::Continue => out.push(2),
                    Recovery::End { seconds } => {
                        out.push(3);
                        out.extend_from_slice(&seconds.to_le_bytes());
                    }
                }
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
                3 => Recovery::End {
                    seconds: decoder.u16()?,
                },
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

/// Reads fields from the rest of a payload.
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
            prop_oneof![
                Just(Recovery::Reexec),
                Just(Recovery::Continue),
                any::<u16>().prop_map(|seconds| Recovery::End { seconds }),
            ]
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
