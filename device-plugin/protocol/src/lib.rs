//! What the shim, runtime clients and the agent say to each other.
//!
//! Two channels, one rule. The [`wire`] carries rare, small messages over the allocation's Unix
//! socket; the [`page`] carries the credit that a process may spend without asking. The agent is
//! the only ledger: whatever a process writes to either, it can only ever spend what the agent
//! has granted to it in its own books.
//!
//! * [`units`] counts memory in 4 KiB units
//! * [`word`] is the arithmetic of one credit word, without memory or atomics
//! * `cell` is one word in memory that both sides change, checked with every interleaving
//! * [`page`] is the shared page of such words; the only module here with `unsafe`
//! * [`wire`] is the messages, their encoding and a total parser; [`wire::kept`] those about kept memory,
//!   [`wire::token`] those about tokens of memory
//! * [`dial`] reaches the agent from inside a container
//! * [`checksum`] is what kept memory is verified by
//! * [`fence`] is what the page says of an image that gets nothing more
//! * [`socket`] passes a page's file descriptor beside a message
//! * [`sticky`] says which errors of the driver poison a context
//! * [`vault`] is what the agent says to the keeper of kept memory's descriptors
//! * [`worker`] is what the agent says to the process that makes kept memory of one GPU

mod atomic_credit;
pub mod checksum;
pub mod connect;
pub mod credit;
pub mod credit_page;
pub mod error_class;
pub mod fd_passing;
pub mod fdstore;
pub mod fence;
pub mod messages;
pub mod provisioner;
pub mod units;

/// The version of protocol that this build speaks. The agent answers a hello with the lower of
/// both versions, so that an upgraded agent serves the shims that running containers have mapped.
///
/// * 1: credit, reports
/// * 2: the welcome has a generation; a process reports poison
/// * 3: who opens a lease that is made is handed its memory before the vault has it
pub const VERSION: u16 = 3;

/// The first version whose agent takes a report of poison.
pub const POISON_SINCE: u16 = 2;

/// The first version whose processes are told that a lease is [made](wire::kept::KeptAnswer::Made).
pub const CREATED_SINCE: u16 = 3;

/// The folder of the agent's socket as a container sees it.
pub const CONTAINER_RUN_DIR: &str = "/run/bursar";

/// The name of the agent's socket inside its folder.
pub const SOCKET_NAME: &str = "agent.sock";
