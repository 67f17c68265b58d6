//! Calls the kernel module past libcuda, as a tenant process of its own making does.

use std::fs::{self, File};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use bursar_sim_state::Sim;
use bursar_sim_state::rm::{self, ContextGroups, RmClient};

/// The clients and groups that this process made without libcuda.
#[derive(Debug, Default)]
pub struct RmTenant {
    clients: Vec<RmClient>,
    groups: Option<(RmClient, ContextGroups)>,
    nodes: Vec<File>,
}

/// A directory that the environment of a lab's program names.
fn folder(variable: &str) -> Result<PathBuf> {
    let value = std::env::var_os(variable);
    value
        .map(PathBuf::from)
        .with_context(|| format!("{variable} is not set"))
}

impl RmTenant {
    /// Makes a context's groups on the first GPU, whose handles begin with `first`. Returns the
    /// client and the group for kernels.
    ///
    /// # Errors
    /// The machine has no kernel module, or a handle is in use.
    pub fn create_groups(&mut self, first: u32) -> Result<(u32, u32)> {
        let dev = folder("SIMGPU_DEV")?;
        let sim = Sim::open(&folder("SIMGPU_DIR")?)?;
        let gpu = sim.config.gpu.first().context("the machine has no GPU")?;
        self.nodes
            .push(File::open(dev.join(format!("nvidia{}", gpu.minor)))?);
        let mut client = RmClient::open(&dev.join("nvidiactl"), first)?;
        let groups = client.create_context(&gpu.uuid)?;
        let made = (client.root(), groups.computing);
        self.groups = Some((client, groups));
        Ok(made)
    }

    /// Gives the newest group work of this many nanoseconds.
    ///
    /// # Errors
    /// There is none.
    pub fn submit(&self, nanos: u64) -> Result<()> {
        let (client, groups) = self.groups.as_ref().context("there is no group")?;
        client.submit(groups.computing, nanos)?;
        Ok(())
    }

    /// Opens the control node this many times, for a client without an object each.
    ///
    /// # Errors
    /// The machine has no kernel module, or the process too many files.
    pub fn open_clients(&mut self, count: u64) -> Result<()> {
        let node = folder("SIMGPU_DEV")?.join("nvidiactl");
        for _ in 0..count {
            self.clients.push(RmClient::open(&node, rm::FIRST_OBJECT)?);
        }
        Ok(())
    }

    /// Opens a file and keeps it, by its name alone if it cannot be read.
    ///
    /// # Errors
    /// There is no such file.
    pub fn open_file(&mut self, path: &str) -> Result<()> {
        use std::os::unix::fs::OpenOptionsExt as _;
        let by_name = || {
            let mut options = File::options();
            options.read(true).custom_flags(libc::O_PATH).open(path)
        };
        self.nodes.push(File::open(path).or_else(|_| by_name())?);
        Ok(())
    }

    /// Sets the slice of a group of this process's, whichever library made it. Returns whether a
    /// control file of this process has the client.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn set_slice(&self, client: u32, group: u32, micros: u64) -> Result<bool> {
        for entry in fs::read_dir("/proc/self/fd")? {
            let path = entry?.path();
            let is_control = fs::read_link(&path)
                .is_ok_and(|link| link.file_name().is_some_and(|name| name == "nvidiactl"));
            let descriptor = path
                .file_name()
                .and_then(|name| name.to_str()?.parse().ok());
            let Some(descriptor) = descriptor.filter(|_| is_control) else {
                continue;
            };
            // SAFETY: the process is single-threaded and closes no control file.
            let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(descriptor) };
            let mut slice = micros.to_ne_bytes();
            if rm::control(file, client, group, rm::SET_TIMESLICE, &mut slice).is_ok() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
