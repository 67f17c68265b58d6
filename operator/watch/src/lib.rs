//! Watches the objects of one kind for as long as the caller listens.
//!
//! ```text
//!   list: Init, InitApply.., InitDone ---> watch: Apply, Delete --ends--> newest revision? --not below--> watch again
//!     ^                                      |                                  |
//!     +-- 410, a revision that went back, a list that is due, a caller that asks, a revision below the last one --+
//! ```
//!
//! The `watcher` of kube resumes from its last `resourceVersion` for ever. After a restore of etcd
//! that version lies in the future, and the API server answers such a watch with silence. This
//! watch asks for the newest revision before it resumes, compares each revision that it is told,
//! and lists anew every 10 to 30 minutes in any case.
//!
//! Its pauses grow until a watch has made progress. A list alone resets nothing, for each attempt
//! begins with one.

mod follow;
mod history;
mod pauses;

pub use follow::watch;
pub use history::{History, is_below};
pub use pauses::Pauses;
