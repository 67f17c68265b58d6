//! Implements the subcommands of `simgpu`.

use crate::ending;
use anyhow::{Context as _, Result};
use bursar_sim_state::config::parse_quantity;
use bursar_sim_state::init_fault::{self, InitFault};
use bursar_sim_state::{MachineDir, Sim, xid::Xid};
use clap::{Parser, Subcommand, ValueEnum};
use std::fmt::Write as _;
use std::path::PathBuf;

/// Create, inspect and break simulated GPUs.
#[derive(Debug, Parser)]
#[command(name = "simgpu", version)]
pub(crate) struct Args {
    /// The machine's directory.
    #[arg(long, global = true, env = "SIMGPU_DIR", default_value = "/run/simgpu")]
    dir: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Create the directory: configuration, empty state, device nodes, libraries.
    Init {
        /// The configuration file to copy.
        #[arg(long)]
        config: PathBuf,
        /// A driver library to install (twice: libbursar_sim_cuda.so, libbursar_sim_nvml.so).
        #[arg(long = "lib")]
        libraries: Vec<PathBuf>,
    },
    /// Create the directory unless this machine has it already, and wait for SIGTERM: a DaemonSet's
    /// container, which a restart does not take the GPUs from.
    Serve {
        /// The configuration file to copy.
        #[arg(long)]
        config: PathBuf,
        /// A driver library to install (twice: libcuda.so.1, libnvidia-ml.so.1).
        #[arg(long = "lib")]
        libraries: Vec<PathBuf>,
    },
    /// Show GPUs, memory, processes and the last XIDs.
    Status,
    /// Take a GPU off the bus (XID 79). GPU: its position or UUID.
    Lose {
        /// Position or UUID.
        gpu: String,
    },
    /// Put a lost GPU back.
    Restore {
        /// Position or UUID.
        gpu: String,
    },
    /// Make NVML's calls about a GPU hang, in every process, until `release`.
    Hang {
        /// Position, UUID, or `all`. With `all`, calls that name no GPU hang too.
        gpu: String,
    },
    /// Let hanging calls return.
    Release {
        /// Position, UUID, or `all`.
        gpu: String,
    },
    /// Make cuInit fail or hang in processes that see a GPU, until `accept`. NVML is not affected.
    Refuse {
        /// Position or UUID.
        gpu: String,
        /// A CUresult, such as 802, or `hang`.
        fault: InitFault,
    },
    /// Let cuInit succeed again.
    Accept {
        /// Position or UUID.
        gpu: String,
    },
    /// Raise an XID event.
    Xid {
        /// Position or UUID.
        gpu: String,
        /// The XID, from NVIDIA's XID catalogue.
        code: u32,
        /// The pid that the event reports; 0 for none.
        #[arg(long, default_value_t = 0)]
        pid: u32,
    },
    /// Give a process a sticky CUDA error: every later call that needs a context returns it.
    Poison {
        /// The process, by its pid in the caller's pid namespace.
        pid: u32,
        /// A CUresult, such as 700.
        code: i32,
    },
    /// Set the SM utilization of a process, in percent. Without a percentage NVML has no sample of
    /// the process, as of one that did not use the GPU.
    Utilize {
        /// The process, by its pid in the caller's pid namespace.
        pid: u32,
        /// From 0 to 100.
        #[arg(value_parser = clap::value_parser!(u32).range(..=100))]
        percent: Option<u32>,
    },
    /// Switch the scrubbing of freed memory on or off.
    Scrub {
        /// `on` or `off`.
        state: Switch,
    },
    /// Change how the driver evicts managed memory, on all GPUs.
    #[command(subcommand)]
    Uvm(Uvm),
}

#[derive(Debug, Subcommand)]
enum Uvm {
    /// Refuse the next evictions: the allocations that need them are out of memory.
    Pinned {
        /// The number of evictions; 0 refuses none.
        count: u32,
    },
    /// Let evictions take time, within the call that needs them.
    Delay {
        /// Milliseconds for each GiB.
        milliseconds: u32,
    },
    /// Limit the host memory of a process: an eviction beyond it kills the process and fails.
    HostRoom {
        /// The process, by its pid in the caller's pid namespace.
        pid: u32,
        /// The bytes that can be evicted from now on, such as `2Gi`.
        bytes: String,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Switch {
    On,
    Off,
}

pub(crate) fn run(args: Args) -> Result<String> {
    if let Command::Init { config, libraries } = &args.command {
        MachineDir::at(&args.dir).init(config, libraries)?;
        return Ok(String::new());
    }
    if let Command::Serve { config, libraries } = &args.command {
        // The signals are blocked first, so that none ends the process half-way.
        let signals = ending::block_signals();
        MachineDir::at(&args.dir).init_or_keep(config, libraries)?;
        print!("{}", status(&Sim::open(&args.dir)?));
        ending::wait_for(&signals);
        return Ok(String::new());
    }
    let sim = Sim::open(&args.dir)?;
    let gpu = |name: &str| {
        sim.find_gpu(name)
            .with_context(|| format!("there is no GPU `{name}`"))
    };
    let raise = |gpu, code, pid| {
        sim.raise_xid(Xid {
            unit: sim.gpu_unit(gpu),
            code,
            pid,
        })
    };
    match args.command {
        Command::Init { .. } | Command::Serve { .. } => {}
        Command::Status => return Ok(status(&sim)),
        Command::Lose { gpu: name } => {
            sim.set_lost(gpu(&name)?, true);
            raise(gpu(&name)?, 79, 0);
        }
        Command::Restore { gpu: name } => sim.set_lost(gpu(&name)?, false),
        Command::Hang { gpu: name } => set_hung(&sim, &name, gpu, true)?,
        Command::Release { gpu: name } => set_hung(&sim, &name, gpu, false)?,
        Command::Refuse { gpu: name, fault } => {
            init_fault::set(&sim, sim.gpu_unit(gpu(&name)?), Some(fault))?;
        }
        Command::Accept { gpu: name } => init_fault::set(&sim, sim.gpu_unit(gpu(&name)?), None)?,
        Command::Xid {
            gpu: name,
            code,
            pid,
        } => raise(gpu(&name)?, code, pid),
        Command::Poison { pid, code } => {
            anyhow::ensure!(code > 0, "{code} is not an error of CUDA's");
            anyhow::ensure!(
                sim.inject_error(pid, code),
                "process {pid} does not use a GPU"
            );
        }
        Command::Utilize { pid, percent } => {
            anyhow::ensure!(
                sim.set_sm_percent(pid, percent),
                "process {pid} does not use a GPU"
            );
        }
        Command::Uvm(Uvm::Pinned { count }) => sim.refuse_evictions(count),
        Command::Uvm(Uvm::Delay { milliseconds }) => sim.set_eviction_delay(milliseconds),
        Command::Uvm(Uvm::HostRoom { pid, bytes }) => {
            let room = parse_quantity(&bytes)
                .with_context(|| format!("`{bytes}` is not an amount of bytes such as `2Gi`"))?;
            anyhow::ensure!(
                sim.set_host_room(pid, room),
                "process {pid} does not use a GPU"
            );
        }
        Command::Scrub { state } => sim.set_scrub_enabled(matches!(state, Switch::On)),
    }
    Ok(String::new())
}

fn set_hung(sim: &Sim, name: &str, gpu: impl Fn(&str) -> Result<usize>, hung: bool) -> Result<()> {
    if name != "all" {
        sim.set_hung(Some(gpu(name)?), hung);
        return Ok(());
    }
    for gpu in 0..sim.config.gpu.len() {
        sim.set_hung(Some(gpu), hung);
    }
    sim.set_hung(None, hung);
    Ok(())
}

fn status(sim: &Sim) -> String {
    let mut text = format!(
        "{:<4} {:<42} {:<20} {:>10} {:>10}  STATE\n",
        "GPU", "UUID", "NAME", "USED MiB", "TOTAL MiB"
    );
    for unit in &sim.units {
        let (gpu_config, usage) = (&sim.config.gpu[unit.gpu], sim.usage(unit.index));
        let (place, name) = match unit.mig {
            Some(mig) => (format!(".{mig}"), gpu_config.mig[mig].profile.as_str()),
            None => (unit.gpu.to_string(), gpu_config.name.as_str()),
        };
        let state = if sim.is_lost(unit.index) {
            "lost"
        } else if sim.is_hung(Some(unit.gpu)) {
            "hung"
        } else {
            "ok"
        };
        let (used, total) = (mebibytes(usage.used), mebibytes(usage.total));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{place:<4} {:<42} {name:<20} {used:>10} {total:>10}  {state}",
            sim.uuid(unit)
        );
        for process in usage.processes {
            let _ = writeln!(
                text,
                "     pid {:<10} {:>10} MiB",
                process.pid,
                mebibytes(process.bytes)
            );
        }
    }
    for xid in sim.recent_xids(16) {
        let _ = writeln!(
            text,
            "xid {} on {} pid {}",
            xid.code,
            sim.uuid(&sim.units[xid.unit]),
            xid.pid
        );
    }
    let _ = writeln!(
        text,
        "scrub {}",
        if sim.is_scrub_enabled() { "on" } else { "off" }
    );
    text
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 20))
}
