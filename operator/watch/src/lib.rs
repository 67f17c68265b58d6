//! Watches the objects of one kind for as long as the caller listens.
//!
//! ```text
//!   list: Init, InitApply.., InitDone --> watch: Apply, Delete --ends--> newest revision?
//!     ^                                     |      ^                       |    |
//!     |                                     |      +------- not below -----+    |
//!     +-- 410, list due or requested, or a revision below the last one ---------+
//! ```
//!
//! The `watcher` of kube resumes from its last `resourceVersion` for ever. After a restore of etcd
//! that version lies in the future, and the API server answers such a watch with silence. This
//! watch reads the newest revision before it resumes, and compares each revision that it receives.
//! It lists again every 10 to 30 minutes in any case.
//!
//! Its pauses grow until a watch has made progress. A list alone resets nothing, because each
//! attempt begins with one.

mod follow;
mod history;
mod pauses;

pub use follow::watch;
pub use history::{History, is_below};
pub use pauses::Pauses;
