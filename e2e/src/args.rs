//! The command line.

use bursar_e2e::verify::VerifyArgs;
use clap::{Parser, Subcommand};

/// A real Kubernetes on this machine with Bursar on it.
#[derive(Debug, Parser)]
#[command(name = "bursar-e2e", version)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Build Kubernetes and what it stands on, once, into the cache.
    Build,
    /// Start a cluster and leave it running.
    Up {
        #[command(flatten)]
        cluster: Name,
    },
    /// Take a cluster down.
    Down {
        #[command(flatten)]
        cluster: Name,
    },
    /// Run the checks of this repository.
    Verify(VerifyArgs),
    /// The process that a cluster descends from. Started by the other commands.
    #[command(hide = true)]
    Node {
        #[command(flatten)]
        cluster: Name,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Name {
    /// The cluster's name; clusters of different names can run side by side.
    #[arg(long, default_value = "demo")]
    pub(crate) name: String,
}
