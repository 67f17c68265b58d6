//! The provisioner of one GPU: `bursar-provisioner --gpu UUID` creates retained memory for the
//! agent that started it.
//!
//! The provisioner never has a CUDA context, so no kernel's fault reaches it (F3 in
//! docs/internals/facts.md), and it holds no memory after its answer.
//! `bursar-provisioner scrub-check --gpu UUID` is the scrub check, a process of another kind. It
//! creates a context, lets the agent measure that and checks whether freed memory comes back
//! cleared. Then it prints the verdict and exits. `bursar-provisioner check-quota --bytes N` runs
//! in a pod of the chart's `helm test`.
//!
//! * `compute_load` keeps a GPU busy while the agent checks time slices
//! * `quota_check` is the check of that pod
//! * `scrub_check` is the scrub check
//! * `server` answers the agent

mod compute_load;
mod quota_check;
mod scrub_check;
mod server;

use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use anyhow::Context as _;
use bursar_driver::driver::GpuUuid;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(version, about, args_conflicts_with_subcommands = true)]
struct Args {
    #[command(flatten)]
    serve: Option<Gpu>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Checks whether freed memory comes back cleared; prints one line of JSON.
    ScrubCheck {
        #[command(flatten)]
        gpu: Gpu,
        /// The memory of a round in bytes, if the GPU has as much free.
        #[arg(long, default_value_t = scrub_check::MAX_BYTES,
              value_parser = clap::value_parser!(u64).range(scrub_check::MIN_BYTES..))]
        bytes: u64,
    },
    /// Keeps the GPU busy until standard input is closed; prints lines of JSON with the finished
    /// work.
    ComputeLoad {
        #[command(flatten)]
        gpu: Gpu,
    },
    /// Checks in a pod that its GPU has the size of its quota; prints a sentence.
    CheckQuota {
        /// The quota that the pod requested.
        #[arg(long)]
        bytes: u64,
    },
}

#[derive(clap::Args)]
struct Gpu {
    /// The UUID of the GPU or MIG instance; `CUDA_VISIBLE_DEVICES` should name it alone.
    #[arg(long, value_name = "UUID")]
    gpu: GpuUuid,
}

fn main() -> anyhow::Result<()> {
    // Confinement comes before the driver's code runs and before a second thread exists.
    bursar_confine::restrict_driver_process()?;
    match Args::parse() {
        Args {
            command:
                Some(Command::ScrubCheck {
                    gpu: Gpu { gpu },
                    bytes,
                }),
            ..
        } => {
            let verdict = scrub_check::check(gpu, bytes, |context| {
                if print_line(context).is_ok() {
                    scrub_check::wait_for_measurement();
                }
            });
            print_line(&verdict)
        }
        Args {
            command: Some(Command::ComputeLoad { gpu: Gpu { gpu } }),
            ..
        } => Ok(compute_load::run(gpu)?),
        Args {
            command: Some(Command::CheckQuota { bytes }),
            ..
        } => {
            let sentence = quota_check::check(bytes).context("failed to check the quota")?;
            writeln!(std::io::stdout(), "{sentence}").context("failed to print the outcome")
        }
        Args {
            serve: Some(Gpu { gpu }),
            ..
        } => server::serve(&agent_socket()?, gpu).context("failed to serve the agent"),
        Args { .. } => anyhow::bail!("failed to choose a GPU: none was given; add --gpu UUID"),
    }
}

/// Prints a line of JSON for the agent.
fn print_line(line: &impl serde::Serialize) -> anyhow::Result<()> {
    let line = serde_json::to_string(line)?;
    let mut out = std::io::stdout();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .context("failed to print a line for the agent")
}

/// The agent's socket, which is standard input.
fn agent_socket() -> anyhow::Result<UnixStream> {
    let input = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .context("failed to duplicate standard input")?;
    Ok(UnixStream::from(input))
}
