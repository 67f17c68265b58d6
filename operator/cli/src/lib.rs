//! `kubectl bursar`: shows and manages shared GPU memory.
//!
//! A command reads a [`snapshot::Snapshot`], as far as the user's rights go, and pure functions
//! make tables, JSON and explanations from it.

pub mod act;
pub mod agent_metrics;
pub mod amounts;
pub mod args;
pub mod completion;
pub mod connect;
pub mod doctor;
pub mod explain;
pub mod objects;
pub mod read;
pub mod run;
pub mod show;
pub mod snapshot;
pub mod support;
pub mod table;
pub mod uninstall;
pub mod version;
