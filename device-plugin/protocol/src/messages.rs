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

mod codec;
pub(crate) mod json;
mod request;
mod response;
pub mod retained;
pub mod signed_token;
pub mod token;

use crate::units::Units;

pub use json::JsonMessage;
pub use request::{REFUSED_BY_DRIVER, Request};
pub use response::{Recovery, RejectReason, Response};

/// The longest payload of a frame. A welcome with [`MAX_SLOTS`](crate::credit_page::MAX_SLOTS)
/// accounts fits.
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

impl Account {
    /// Returns the UUID of an account of device memory: any text, if a tenant process sent it.
    pub fn device_uuid(&self) -> Option<&str> {
        match self {
            Self::Device(uuid) => Some(uuid),
            Self::Managed => None,
        }
    }
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
    /// Encodes the payload. Cuts names beyond [`MAX_NAME`], and lists beyond
    /// [`MAX_SLOTS`](crate::credit_page::MAX_SLOTS) and [`MAX_LISTED`], so that encoding cannot
    /// fail.
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

#[cfg(test)]
mod tests;
