//! Runs `sim-kernel-module`, which serves the control node of a simulated machine.
//!
//! The machine's `dev/nvidiactl` leads to the served file while the process lives. A request is a
//! line of standard input, and its answer a line of standard output. The process ends with its
//! standard input, which a test that is killed closes too.
//!
//! | request | answer |
//! |---|---|
//! | `inert on`, `inert off` | slices have no effect, or have one again |
//! | `groups GPU` | `PID CLIENT GROUP MICROS BUSY FINISHED` for each group, separated by commas |
//! | `clients`, `calls` | the number of clients; of calls so far |

use std::fmt::Write as _;
use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::{io, process, thread};

use anyhow::{Context as _, Result, bail};
use bursar_sim_kernel::calls::{Calls, Timed};
use bursar_sim_kernel::fuse::Folder;
use bursar_sim_kernel::module::Module;
use bursar_sim_state::{Config, MachineDir};
use clap::Parser;

/// Serves the control node of a simulated machine.
#[derive(Debug, Parser)]
#[command(name = "sim-kernel-module", version)]
struct Args {
    /// The machine's directory.
    #[arg(long, env = "SIMGPU_DIR", default_value = "/run/simgpu")]
    dir: PathBuf,
}

fn main() -> Result<()> {
    let machine = MachineDir::at(Args::parse().dir);
    let config = Config::read(&machine.config())?;
    let uuids = config.gpu.iter().map(|gpu| gpu.uuid.clone()).collect();
    let minors: Vec<u32> = config.gpu.iter().map(|gpu| gpu.minor).collect();
    let module: &Timed = Box::leak(Box::new(Timed::new(Module::new(uuids))));
    let mut folder = Folder::mount("nvidiactl")
        .context("failed to mount the control node; run as root where /dev/fuse is")?;
    // SAFETY: the process has started no thread.
    unsafe { folder.start_keeper() }.context("failed to start the keeper of the folder")?;
    machine.lead_control_node_to(&folder.file(), &minors)?;
    let mut calls = Calls::new(module, minors);
    thread::spawn(move || {
        let ended = folder.serve(&mut calls, &AtomicBool::new(false));
        eprintln!("failed to serve the control node: the mount ended: {ended:?}");
        process::exit(1);
    });
    println!("ready");
    for line in io::stdin().lock().lines() {
        let answer = answer(module, &line?)?;
        writeln!(io::stdout(), "{answer}")?;
        io::stdout().flush()?;
    }
    Ok(())
}

fn answer(module: &Timed, line: &str) -> Result<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let mut text = String::new();
    match words[..] {
        ["inert", state @ ("on" | "off")] => module.with(|module| module.set_inert(state == "on")),
        ["clients"] => write!(text, "{}", module.with(|module| module.clients()))?,
        ["calls"] => write!(text, "{}", module.calls())?,
        ["groups", gpu] => {
            let gpu = gpu.parse().context("failed to parse a GPU's position")?;
            for group in module.with(|module| module.groups(gpu)) {
                let (client, handle) = group.key;
                write!(
                    text,
                    "{} {client} {handle} {} {} {},",
                    group.pid,
                    group.note,
                    u8::from(group.is_busy),
                    group.finished.as_nanos(),
                )?;
            }
        }
        _ => bail!("failed to answer `{line}`: no such request"),
    }
    Ok(text)
}
