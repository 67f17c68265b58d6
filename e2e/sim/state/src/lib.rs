//! The simulated GPUs: what both driver libraries and the `simgpu` command share.
//!
//! # What is where
//! A folder (`/run/simgpu`, or `SIMGPU_DIR`) holds the whole machine room:
//!
//! | path | what |
//! |---|---|
//! | `config.toml` | the GPUs ([`config`]) |
//! | `state/table` | the books: one shared mapping with every image, object and event ([`table`]) |
//! | `state/images.lock` | one byte per process image, locked by that image as long as it lives ([`image`]) |
//! | `state/pids.lock` | the same bytes, locked so that an observer in another pid namespace learns the pid |
//! | `state/mem/` | one sparse file per shared allocation, locked by everything that refers to it ([`api`]) |
//! | `state/log` | calls that the libraries do not know |
//! | `dev/`, `driver/` | device nodes and the two libraries, as a node's `/dev` and driver root would have them |
//!
//! # Why no daemon
//! Every fact about life and death comes from a kernel lock that the kernel itself drops: a process
//! image holds an open-file-description lock that a forked child inherits, and that `execve` and
//! SIGKILL end; an allocation lives as long as some descriptor, mapping or message in flight pins a
//! description that locks its file. Whoever looks next collects what is dead. The books are held by a
//! robust mutex, and are rebuilt from their parts when its owner died inside.

pub mod collect;
pub mod config;
pub mod ffi;
pub mod folder;
pub mod image;
pub mod lock;
pub mod object;
pub mod residue;
pub mod sim;
pub mod table;
pub mod usage;
pub mod xid;

pub use config::Config;
pub use folder::MachineDir;
pub use image::{Charge, Image};
pub use sim::{Sim, SimError, Unit};
