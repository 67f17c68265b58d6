//! Holds programs to their quota beyond the shim: attests containers, audits the driver, acts on faults.
//!
//! | module | job |
//! |---|---|
//! | [`attestation`] | checks that every container with a GPU runs under the shim |
//! | [`audit`] | compares the driver's figures with the accounts of the sessions |
//! | [`driver_limits`] | sets the driver's own memory limit of each container |
//! | [`faults`] | carries out what follows a fault of a GPU or a context |

pub mod attestation;
pub mod audit;
pub mod driver_limits;
pub mod faults;
