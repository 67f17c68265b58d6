//! Encodes the messages of a process.

use super::codec::{Decoder, encode_account, encode_list, encode_name, encode_units};
use super::retained::{self, RetainedRequest};
use super::token::{self, TokenRequest};
use super::{Account, DecodeError, HeldCredit, Message};
use crate::units::Units;

/// Begins the function of a [`Request::Denied`] that the quota allowed and the driver refused. An
/// agent that does not know it counts the function among the others.
pub const REFUSED_BY_DRIVER: &str = "driver:";

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
        /// The driver's function, for example `cuMemAlloc_v2`, perhaps after [`REFUSED_BY_DRIVER`].
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
