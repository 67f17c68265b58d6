//! Keeps retained memory: leases on device memory that outlive the processes that use them.
//!
//! ```text
//! tenants --> sessions --> handle --> service
//!                                       |--> leases (pure): the state and effects of each lease
//!                                       |--> tokens (pure): seals and redeems memory tokens
//!                                       |--> provisioners: one process per GPU creates memory
//!                                       |      ^-- supervision: keeps one for each healthy GPU
//!                                       |--> fd store: a process that holds the descriptors
//!                                       |--> sessions: charge containers
//!                                       +--> the node's ledger: counts leases without an owner
//! ```

pub mod fdstore_client;
pub mod lease_ids;
pub mod leases;
pub mod provisioners;
pub mod runtimes;
pub mod scrub_check;
pub mod service;
pub mod status;
pub mod supervision;
pub mod tokens;
