//! Defines the command line of the harness.

use std::path::PathBuf;

use bursar_e2e::images::Template;
use bursar_e2e::release::{Destination, ReleaseOptions, Version};
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
    /// Build Kubernetes and its dependencies, once, into the cache.
    Build,
    /// Start a cluster with Bursar on it and leave it running.
    Up {
        #[command(flatten)]
        cluster: ClusterName,
        /// Start Kubernetes without Bursar; the options for Bursar have no effect then.
        #[arg(long)]
        bare: bool,
        #[command(flatten)]
        bursar: BursarArgs,
    },
    /// Show pods of two teams sharing GPUs, on a cluster of its own that is taken down after, or on
    /// that of KUBECONFIG.
    Demo {
        #[command(flatten)]
        cluster: ClusterName,
        #[command(flatten)]
        external: ExternalCluster,
        /// Leave everything running, and print how to use it.
        #[arg(long)]
        keep: bool,
        #[command(flatten)]
        bursar: BursarArgs,
    },
    /// Write one archive with everything, for another machine: unpack it there and call `run demo`.
    Pack {
        /// The archive.
        #[arg(long, default_value = "bursar-e2e.tar.xz")]
        out: PathBuf,
    },
    /// Write the archive of kubectl bursar for a release, and krew's manifest of all archives in
    /// the folder.
    CliArchive {
        /// The folder.
        #[arg(long, value_name = "DIR")]
        to: PathBuf,
        /// The target; by default that of this machine, with musl if rustup has it.
        #[arg(long, value_name = "TRIPLE")]
        target: Option<String>,
    },
    /// Build, sign and publish the images, the chart, the archives and their bills of materials.
    Release(ReleaseArgs),
    /// Let pods come and go on a cluster of `up` for a time, and compare what Bursar holds with its
    /// first part. May be called again and again.
    Soak {
        #[command(flatten)]
        cluster: ClusterName,
        /// The length of this part.
        #[arg(long, default_value_t = 20)]
        minutes: u64,
        /// The references of our images, as `up` prints them.
        #[arg(long, env = "BURSAR_IMAGES")]
        images: Template,
    },
    /// Take a cluster down.
    Down {
        #[command(flatten)]
        cluster: ClusterName,
    },
    /// Run the checks of this repository.
    Verify(VerifyArgs),
    /// Run the node process of a cluster. The other commands start it.
    #[command(hide = true)]
    Node {
        #[command(flatten)]
        cluster: ClusterName,
    },
}

/// The version, source and destinations of a release.
#[derive(Debug, clap::Args)]
pub(crate) struct ReleaseArgs {
    /// The version: that of Cargo.toml, or a pre-release of it.
    #[arg(long)]
    version: Version,
    /// A registry with the path of the repositories below it, such as host/bursar, or a folder.
    /// May be given several times. The chart names the first registry.
    #[arg(long = "to", value_name = "REGISTRY|FOLDER", required = true)]
    destinations: Vec<Destination>,
    /// The folder of a release that another machine has made for its architecture. May be given
    /// several times. Nothing is built then.
    #[arg(long = "from", value_name = "FOLDER")]
    parts: Vec<PathBuf>,
    /// The private key of `cosign generate-key-pair` that signs the release: a file, or env://NAME.
    /// COSIGN_PASSWORD has its password.
    #[arg(long, value_name = "FILE|env://NAME")]
    key: Option<String>,
}

impl ReleaseArgs {
    pub(crate) fn options(self) -> ReleaseOptions {
        let Self {
            version,
            destinations,
            parts,
            key,
        } = self;
        ReleaseOptions {
            version,
            destinations,
            parts,
            key,
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct ClusterName {
    /// The cluster's name; clusters of different names can run side by side.
    #[arg(long, default_value = "demo")]
    pub(crate) name: String,
}

/// The parts of Bursar that the harness installs on the cluster.
#[derive(Debug, clap::Args)]
pub(crate) struct BursarArgs {
    /// The chart's folder; this repository's unless given.
    #[arg(long)]
    pub(crate) chart: Option<PathBuf>,
    /// Compile in the release profile, as users get it, instead of the profile of the tests.
    #[arg(long)]
    pub(crate) release: bool,
}

/// A cluster of the user.
#[derive(Debug, clap::Args)]
pub(crate) struct ExternalCluster {
    /// Use this cluster, and start none.
    #[arg(long, env = "KUBECONFIG", value_parser = clap::builder::NonEmptyStringValueParser::new().map(PathBuf::from))]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// The references of our images for that cluster; `{name}` is replaced by agent, operator and
    /// probe.
    #[arg(long, env = "BURSAR_IMAGES")]
    pub(crate) images: Option<Template>,
}
