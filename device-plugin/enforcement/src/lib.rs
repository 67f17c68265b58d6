//! Enforces quotas beyond the shim: attests containers, audits the driver, acts on faults.
//!
//! | module | job |
//! |---|---|
//! | [`attestation`] | checks that every container with a GPU runs under the shim |
//! | [`audit`] | compares the driver's figures with the accounts of the sessions |
//! | [`drain`] | ends every use of the GPUs that are drained |
//! | [`driver_limits`] | sets the driver's own memory limit of each pod |
//! | [`faults`] | acts on faults of contexts by each container's policy |
//! | `leftovers` | ends processes that outlive their pod |

pub mod attestation;
pub mod audit;
pub mod drain;
pub mod driver_limits;
pub mod faults;
mod leftovers;
