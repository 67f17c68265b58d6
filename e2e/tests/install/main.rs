//! Checks the chart as Helm renders it, and the files that are generated from its values.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod generated;
mod placement;
mod policies;
mod render;
mod settings;
mod simulated;
