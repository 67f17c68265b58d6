//! Watches the objects of one kind for as long as the caller listens.
//!
//! ```text
//!   list: Init, InitApply.., InitDone --> watch: Apply, Delete --ends--> newest revision?
//!     ^                                     |      ^                       |    |
//!     |                                     |      +------- not below -----+    |
//!     +--- 410, list requested, or a revision below the last one ---------------+
//! ```
//!
//! The `watcher` of kube resumes from its last `resourceVersion` for ever. After a restore of etcd
//! that version lies in the future, and the API server answers such a watch with silence. This
//! watch reads the newest revision before it resumes, and compares each revision that it receives.
//!
//! A list once a day, and 10 to 30 minutes after a watch broke off, finds what that misses: a
//! restored etcd whose revisions have passed the last one. Such a list runs beside the open watch,
//! so that no event waits for it. The last events of the watch win over a list that is older.
//!
//! Its pauses grow until a watch has made progress. A list alone resets nothing, because each
//! attempt begins with one.

mod follow;
mod history;
mod list;
mod pauses;

pub use follow::watch;
pub use history::{History, is_below};
pub use pauses::Pauses;
