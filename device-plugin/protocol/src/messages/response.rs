//! Encodes the messages of the agent.

use super::codec::{Decoder, encode_account, encode_list, encode_units};
use super::retained::{self, RetainedResponse};
use super::token::{self, TokenResponse};
use super::{DecodeError, MAX_LISTED, Message, ProcessUsage, Quota};
use crate::units::Units;

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
