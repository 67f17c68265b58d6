//! Tests the holder's process over the simulated kernel module, with real processes as tenants.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod bounds;
mod fixture;
mod life;
mod shares;
