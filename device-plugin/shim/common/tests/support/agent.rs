//! Stands in for the machine that a test's own agent runs on.

use std::path::Path;

use bursar_gpu::memory_sample::{GpuMemorySample, MemorySampler};
use bursar_ledger::units::{Bytes, GpuUuid, PodUid};
use bursar_sessions::{CgroupResolver, ContainerResolver, Process};
use bursar_sim_state::Sim;

/// Reports every process as a member of every container, because cgroups have tests of their own.
pub struct Everyone {
    proc: CgroupResolver,
    /// The root process of every container; `None` where each process is a root process.
    root: Option<u32>,
}

impl Everyone {
    /// Reads the machine's own `/proc`.
    pub fn here() -> Everyone {
        Everyone {
            proc: CgroupResolver::new("/proc".into()),
            root: None,
        }
    }

    /// Reports that all processes descend from this one.
    pub fn below(root: u32) -> Everyone {
        Everyone {
            root: Some(root),
            ..Everyone::here()
        }
    }
}

impl ContainerResolver for Everyone {
    fn process(&self, pid: u32) -> Option<Process> {
        self.proc.process(pid)
    }

    fn root_process(&self, process: Process, _pod: &PodUid) -> Option<Process> {
        let is_there = self.process(process.pid)? == process;
        let root = self.root.map_or(Some(process), |root| self.process(root))?;
        is_there.then_some(root)
    }

    fn container(&self, _pid: u32, _pod: &PodUid) -> Option<String> {
        Some("here".to_owned())
    }

    fn namespace_pids(&self, pid: u32) -> Vec<u32> {
        self.proc.namespace_pids(pid)
    }
}

/// Reports what the simulated driver charges.
pub struct SimCharges(Sim);

impl SimCharges {
    /// Opens the simulated machine in a folder.
    pub fn of(folder: &Path) -> SimCharges {
        SimCharges(Sim::open(folder).unwrap())
    }
}

impl MemorySampler for SimCharges {
    fn sample(&self, gpu: &GpuUuid) -> Option<GpuMemorySample> {
        let unit = self.0.gpu_unit(self.0.find_gpu(gpu.as_str())?);
        let usage = self.0.usage(unit);
        let charged = usage.processes.iter();
        let charged = charged.map(|process| (process.pid, Some(Bytes(process.bytes))));
        Some(GpuMemorySample {
            used: Bytes(usage.used),
            charges: charged.collect(),
            ..GpuMemorySample::default()
        })
    }
}
