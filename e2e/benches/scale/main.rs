//! Measures the operator on a large cluster: a real API server, with nodes and pods as objects
//! only.
//!
//! ```text
//!   fleet (acts for kubelets and agents) --> etcd, kube-apiserver, controller manager
//!                                                            ^
//!                                                            |
//!                                              bursar-operator, a process of its own
//! ```
//!
//! The fleet creates its objects before the operator starts. The benchmark reads the operator's
//! work from its `/metrics`, and its resources from `/proc`. Each size has a control plane of its
//! own. All processes share this machine's processors.
//!
//! `cargo bench -p bursar-e2e --bench scale`, or one size only: `... -- --nodes 250 --pods 2500
//! --budgets 125`. With `--relist` no operator runs.

mod fleet;
mod operator;
mod phases;
mod relist;
mod table;

use std::path::PathBuf;

use anyhow::Context as _;
use bursar_e2e::control_plane::ControlPlane;
use bursar_e2e::paths;
use bursar_e2e::progress::Progress;
use bursar_e2e::workspace::{self, Profile};
use clap::Parser;

use fleet::Size;
use phases::Bench;

const CLUSTER: &str = "scale";
const SIZES: [Size; 3] = [
    Size {
        nodes: 250,
        pods: 2_500,
        budgets: 125,
    },
    Size {
        nodes: 500,
        pods: 5_000,
        budgets: 250,
    },
    Size {
        nodes: 1_000,
        pods: 10_000,
        budgets: 500,
    },
];

#[derive(Parser)]
struct Args {
    #[arg(long, requires_all = ["pods", "budgets"])]
    nodes: Option<usize>,
    #[arg(long)]
    pods: Option<usize>,
    #[arg(long)]
    budgets: Option<usize>,
    /// Measure only the list of all pods beside a watch
    #[arg(long)]
    relist: bool,
    /// An operator program that is already built
    #[arg(long, value_name = "FILE")]
    operator: Option<PathBuf>,
    /// The argument that cargo passes
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let progress = Progress::start();
    let size = args.nodes.zip(args.pods).zip(args.budgets);
    let sizes = size.map_or(SIZES.to_vec(), |((nodes, pods), budgets)| {
        vec![Size {
            nodes,
            pods,
            budgets,
        }]
    });
    let program = match args.operator {
        Some(program) => program,
        None if args.relist => PathBuf::new(),
        None => build()?,
    };
    let mut measured = Vec::new();
    for size in sizes {
        let harness = PathBuf::from(env!("CARGO_BIN_EXE_bursar-e2e"));
        let plane = ControlPlane::start(CLUSTER, harness, &progress).await?;
        let log = paths::runs().join(CLUSTER).join("logs/operator.log");
        let files = (program.clone(), log);
        let bench = Bench::make(&plane, &progress, files, size).await?;
        measured.push((size, bench.run(args.relist).await?));
        plane.stop().await;
    }
    println!("{}", table::table(&measured));
    Ok(())
}

/// Builds the operator in the release profile.
fn build() -> anyhow::Result<PathBuf> {
    const NAME: &str = "bursar-operator";
    let binaries = workspace::build_packages(Profile::Release, &[NAME])?;
    let operator = binaries.get(NAME);
    Ok(operator.context("the operator is built")?.to_path_buf())
}
