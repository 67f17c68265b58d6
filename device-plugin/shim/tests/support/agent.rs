//! What the agent knows of the machine it is on, for agents that tests run themselves.

use std::path::Path;

use bursar_device_plugin::sessions::{Cgroups, DriverCharges, Look, Membership, Process};
use bursar_device_plugin::units::{Bytes, GpuUuid, PodUid};
use bursar_sim_state::Sim;

/// Every process is in every container: cgroups have tests of their own.
pub struct Everyone(Cgroups);

impl Everyone {
    /// By the machine's own `/proc`.
    pub fn here() -> Everyone {
        Everyone(Cgroups::new("/proc".into()))
    }
}

impl Membership for Everyone {
    fn process(&self, pid: u32) -> Option<Process> {
        self.0.process(pid)
    }

    fn container(&self, _pid: u32, _pod: &PodUid) -> Option<String> {
        Some("here".to_owned())
    }

    fn pids(&self, pid: u32) -> Vec<u32> {
        self.0.pids(pid)
    }
}

/// What the simulated driver charges.
pub struct SimCharges(Sim);

impl SimCharges {
    /// On the machine with this folder.
    pub fn of(folder: &Path) -> SimCharges {
        SimCharges(Sim::open(folder).unwrap())
    }
}

impl DriverCharges for SimCharges {
    fn look(&self, gpu: &GpuUuid) -> Option<Look> {
        let unit = self.0.gpu_unit(self.0.find_gpu(gpu.as_str())?);
        let usage = self.0.usage(unit);
        let charged = usage.processes.iter();
        let charged = charged.map(|process| (process.pid, Some(Bytes(process.bytes))));
        Some(Look {
            used: Bytes(usage.used),
            charges: charged.collect(),
            ..Look::default()
        })
    }
}
