//! Keeps retained memory: leases on device memory that outlive the processes that use them.
//!
//! ```text
//! tenants --> sessions --> handle --> service
//!                                       |--> leases (pure): the state and effects of each lease
//!                                       |--> tokens (pure): seals and redeems memory tokens
//!                                       |--> bursar-supervision: a GPU's process creates memory
//!                                       |--> fd store: a process that holds the descriptors
//!                                       |--> sessions: charge containers
//!                                       +--> the node's ledger: counts leases without an owner
//! ```

pub mod fdstore_client;
pub mod lease_ids;
pub mod leases;
pub mod service;
pub mod status;
pub mod tokens;
