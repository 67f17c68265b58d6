//! Runs the commands over recorded objects: tables, causes, ills, and API calls.
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

#[path = "cli/api.rs"]
mod api;
#[path = "cli/causes.rs"]
mod causes;
#[path = "cli/changes.rs"]
mod changes;
#[path = "cli/completion.rs"]
mod completion;
#[path = "cli/fake_api.rs"]
mod fake_api;
#[path = "cli/fixtures.rs"]
mod fixtures;
#[path = "cli/ills.rs"]
mod ills;
#[path = "cli/tables.rs"]
mod tables;
