//! Defines the messages between the harness and the node process: one JSON object per line.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A request of the harness.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Takes ownership: the cluster ends when this connection closes.
    TakeOwnership,
    /// Detaches the cluster from its owner, so that the cluster outlives the connection.
    Detach,
    /// Starts a program under a name that is not running.
    Spawn {
        /// The name in later requests.
        name: String,
        /// The program's path.
        program: PathBuf,
        /// Its arguments.
        arguments: Vec<String>,
        /// Variables in addition to those of the node process.
        environment: BTreeMap<String, String>,
        /// The file to which the program's output is appended.
        log: PathBuf,
    },
    /// Sends a signal to a program and waits for its exit.
    End {
        /// Its name.
        name: String,
        /// Whether SIGKILL is sent at once instead of SIGTERM first.
        kill: bool,
    },
    /// Asks for the state of a program.
    Status {
        /// Its name.
        name: String,
    },
    /// Kills every process of the node and removes what a machine loses with its power. Its disks
    /// stay.
    PowerOff,
    /// Takes everything down and exits.
    Stop {
        /// Whether the run folder stays with its logs.
        keep_logs: bool,
    },
}

/// The node process's reply to a request.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The request was carried out.
    Done,
    /// The program runs.
    Running {
        /// Its process id.
        pid: i32,
    },
    /// The program has ended.
    Ended {
        /// A description of the exit.
        how: String,
    },
    /// The request failed.
    Failed {
        /// The cause.
        why: String,
    },
}
