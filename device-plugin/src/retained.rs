//! Kept memory: leases that outlive the processes that use them.
//!
//! ```text
//! tenants --> sessions --> desk --> serve --> leases (pure: what each lease is, and what is to be done)
//!                                     |--> tokens (pure): what of a tenant's memory others may be told
//!                                     |--> workers: one process per GPU that makes the memory and keeps none of it
//!                                     |--> vault: the process that holds the descriptors; it is the truth
//!                                     +--> sessions: who is charged; the node's ledger: what nobody living is
//! ```

pub mod fdstore_client;
pub mod handle;
pub mod lease_ids;
pub mod leases;
pub mod provisioners;
pub mod scrub_check;
pub mod service;
pub mod status;
pub mod tokens;
