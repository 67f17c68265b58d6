//! Holds the state of the simulated GPUs, which both driver libraries and `simgpu` share.
//!
//! # Layout
//! A directory (`/run/simgpu`, or `SIMGPU_DIR`) holds the state of a machine:
//!
//! | path | contents |
//! |---|---|
//! | `config.toml` | the GPUs ([`config`]) |
//! | `state/table` | a shared mapping with every image, object and event ([`table`]) |
//! | `state/images.lock` | one byte per process image, locked while the image lives ([`image`]) |
//! | `state/pids.lock` | the same bytes, locked so that another pid namespace can read the pid |
//! | `state/mem/` | one sparse file per shared allocation, locked by its references ([`object`]) |
//! | `state/log` | calls that the libraries do not support |
//! | `dev/`, `driver/` | device nodes and driver libraries, laid out like a node's |
//!
//! # Liveness without a daemon
//! The kernel's file locks say which processes and allocations are alive:
//!
//! - A process image holds an open-file-description lock. A forked child inherits the lock;
//!   `execve` and SIGKILL end it.
//! - An allocation lives while a descriptor, a mapping or a message in flight refers to an open
//!   file description that locks its file.
//!
//! Each process that reads the table removes dead entries first. A robust mutex guards the table.
//! If its owner dies while it holds the mutex, the next owner recomputes the sums.

pub mod collect;
pub mod config;
pub mod ffi;
pub mod folder;
pub mod image;
pub mod init_fault;
pub mod lock;
pub mod managed;
pub mod object;
pub mod residue;
pub mod rm;
pub mod sim;
pub mod table;
pub mod usage;
pub mod xid;

pub use config::Config;
pub use folder::MachineDir;
pub use image::{Charge, Image};
pub use sim::{Sim, SimError, Unit};
