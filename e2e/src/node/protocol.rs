//! What the harness and the node process say to each other: one JSON object a line.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What the harness asks for.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// This connection is the owner's: when it closes, the cluster ends.
    TakeOwnership,
    /// The cluster outlives its owner from now on.
    Detach,
    /// Start a program under a name that is not running.
    Spawn {
        /// What it is called from now on.
        name: String,
        /// The program's path.
        program: PathBuf,
        /// Its arguments.
        arguments: Vec<String>,
        /// Its environment, beside the node process's own.
        environment: BTreeMap<String, String>,
        /// The file that its output is appended to.
        log: PathBuf,
    },
    /// Send a signal to a program and wait for its end.
    End {
        /// Its name.
        name: String,
        /// SIGKILL at once, or SIGTERM first.
        kill: bool,
    },
    /// How a program fares.
    Status {
        /// Its name.
        name: String,
    },
    /// Take everything down and exit.
    Stop {
        /// Leave the run folder with its logs.
        keep_logs: bool,
    },
}

/// The node process's answer to each request.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// It is done.
    Done,
    /// The program runs.
    Running {
        /// Its process id.
        pid: i32,
    },
    /// The program has ended.
    Ended {
        /// How, in words.
        how: String,
    },
    /// It could not be done.
    Failed {
        /// Why.
        why: String,
    },
}
