//! Reads from one probe what happened to each GPU.

use bursar_ledger::units::GpuUuid;

use super::super::health::HealthEvent;
use super::super::{Gpu, NoDriver};

/// The result of one probe of all GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProbeResult {
    /// NVML cannot be used. Known GPUs may be there still, unless the driver is not loaded.
    NoDriver(NoDriver),
    /// NVML answered.
    Listed {
        /// The driver's version.
        driver: Option<String>,
        /// GPUs that answered.
        gpus: Vec<Gpu>,
        /// GPUs that NVML knows and that did not answer. In this list and the next two, a MIG
        /// instance is represented by its parent.
        unresponsive: Vec<GpuUuid>,
        /// GPUs that NVML calls lost.
        lost: Vec<GpuUuid>,
        /// GPUs about which a call hangs.
        timed_out: Vec<GpuUuid>,
        /// Whether each GPU that failed is named. If not, an unlisted GPU may be the one that
        /// failed.
        failures_named: bool,
        /// Whether each GPU whose call hangs is named. If not, an unlisted GPU may be that one.
        timeouts_named: bool,
    },
}

impl ProbeResult {
    /// The event that this probe means for `gpu`, with the new description where there is one.
    pub(super) fn event_of(&self, gpu: &Gpu) -> (HealthEvent, Option<&Gpu>) {
        let Self::Listed {
            gpus,
            unresponsive,
            lost,
            timed_out,
            failures_named,
            timeouts_named,
            driver: _,
        } = self
        else {
            let is_unloaded = matches!(self, Self::NoDriver(NoDriver::NotLoaded(_)));
            let event = if is_unloaded {
                HealthEvent::ProbeFailed
            } else {
                HealthEvent::NvmlUnavailable
            };
            return (event, None);
        };
        let is_in = |list: &[GpuUuid]| {
            list.contains(&gpu.uuid) || gpu.mig_parent.as_ref().is_some_and(|p| list.contains(p))
        };
        match gpus.iter().find(|found| found.uuid == gpu.uuid) {
            Some(found) => (HealthEvent::ProbeSucceeded, Some(found)),
            None if is_in(lost) => (HealthEvent::NotListed, None),
            None if is_in(timed_out) => (HealthEvent::CallTimedOut, None),
            None if is_in(unresponsive) || !failures_named => (HealthEvent::ProbeFailed, None),
            None if !timeouts_named => (HealthEvent::CallTimedOut, None),
            None => (HealthEvent::NotListed, None),
        }
    }
}
