//! The command line.

use std::path::PathBuf;

use bursar_e2e::images::Template;
use bursar_e2e::verify::VerifyArgs;
use clap::builder::TypedValueParser;
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
    /// Start a cluster with Bursar on it and leave it running.
    Up {
        #[command(flatten)]
        cluster: ClusterName,
        /// Kubernetes only.
        #[arg(long)]
        bare: bool,
        #[command(flatten)]
        bursar: BursarArgs,
    },
    /// Show pods of two teams sharing GPUs, on a cluster that is started for it and taken down after.
    Demo {
        #[command(flatten)]
        cluster: ClusterName,
        #[command(flatten)]
        yours: ExternalCluster,
        /// Leave everything running and say how to use it.
        #[arg(long)]
        keep: bool,
        #[command(flatten)]
        bursar: BursarArgs,
    },
    /// Write one archive with everything, for another machine: there, unpack it and say `run demo`.
    Pack {
        /// The archive.
        #[arg(long, default_value = "bursar-e2e.tar.xz")]
        out: PathBuf,
    },
    /// Take a cluster down.
    Down {
        #[command(flatten)]
        cluster: ClusterName,
    },
    /// Run the checks of this repository.
    Verify(VerifyArgs),
    /// The process that a cluster descends from. Started by the other commands.
    #[command(hide = true)]
    Node {
        #[command(flatten)]
        cluster: ClusterName,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct ClusterName {
    /// The cluster's name; clusters of different names can run side by side.
    #[arg(long, default_value = "demo")]
    pub(crate) name: String,
}

/// What of Bursar is put on the cluster.
#[derive(Debug, clap::Args)]
pub(crate) struct BursarArgs {
    /// The chart's folder; this repository's unless given.
    #[arg(long)]
    pub(crate) chart: Option<PathBuf>,
    /// Compile as users get it, not as the tests are.
    #[arg(long)]
    pub(crate) release: bool,
}

/// A cluster of the user's.
#[derive(Debug, clap::Args)]
pub(crate) struct ExternalCluster {
    /// Use this cluster, and start none.
    #[arg(long, env = "KUBECONFIG", value_parser = clap::builder::NonEmptyStringValueParser::new().map(PathBuf::from))]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Where that cluster's nodes find our images; `{name}` stands for agent, operator and probe.
    #[arg(long, env = "BURSAR_IMAGES", default_value = concat!("ghcr.io/bursar/{name}:", env!("CARGO_PKG_VERSION")))]
    pub(crate) images: Template,
}
