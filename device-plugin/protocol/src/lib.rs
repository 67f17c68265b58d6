//! Defines the protocol between the shim, runtime clients and the agent.
//!
//! Two channels, one rule. The [`messages`] are rare and small, and travel over the allocation's
//! Unix socket. The [`credit_page`] holds the credit that a process may spend without a message.
//! The agent alone keeps the ledger. Whatever a process writes to either channel, it can only spend
//! what the agent has granted to it in its own records.
//!
//! * [`units`] counts memory in units of 4 KiB
//! * [`credit`] computes with one credit word, without memory or atomics
//! * `atomic_credit` changes a word that both sides share; tests run every interleaving
//! * [`credit_page`] maps the shared page of such words; the only module here with `unsafe`
//! * [`messages`] encodes and parses messages (between root's own processes as JSON);
//!   [`messages::retained`] those about retained memory, [`messages::token`] those about memory
//!   tokens, whose layout is in [`messages::signed_token`]
//! * [`connect`] connects to the agent from inside a container
//! * [`checksum`] verifies retained memory
//! * [`fence`] encodes why a process image is fenced
//! * [`gpu_uuid`] parses the driver's UUID of a GPU
//! * [`fd_passing`] sends a file descriptor with a message
//! * [`error_class`] classifies driver errors
//! * [`fdstore`] defines the messages between the agent and the fd store of retained memory
//! * [`provisioner`] defines the messages between the agent and the process that creates a GPU's
//!   retained memory

mod atomic_credit;
pub mod checksum;
pub mod connect;
pub mod credit;
pub mod credit_page;
pub mod error_class;
pub mod fd_passing;
pub mod fdstore;
pub mod fence;
#[cfg(test)]
mod golden;
pub mod gpu_uuid;
pub mod messages;
pub mod provisioner;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod units;

/// The version of the protocol that this build speaks. The agent answers a hello with the lower of
/// both versions, so that an upgraded agent serves the shims of running containers.
///
/// * 1: credit, reports
/// * 2: the welcome has a generation; a process reports sticky errors
/// * 3: the agent answers a report with the time until it kills the process
pub const VERSION: u16 = 3;

/// The first version whose agent accepts reports of sticky errors.
pub const POISON_SINCE: u16 = 2;

/// The first version whose shim reads [`messages::Recovery::End`].
pub const END_SINCE: u16 = 3;

/// The folder of the agent's socket in a container.
pub const CONTAINER_RUN_DIR: &str = "/run/bursar";

/// The name of the agent's socket inside its folder.
pub const SOCKET_NAME: &str = "agent.sock";
