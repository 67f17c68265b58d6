//! Samples the memory and the processes of a GPU.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bursar_ledger::units::{Bytes, GpuUuid};
use nvml_wrapper::Device;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessUtilizationSample;

use crate::holders::{self, Holders};
use crate::memory_sample::{GpuMemorySample, ProcessMemory};

/// The age of the oldest utilization sample. The driver's samples are up to a second apart.
const UTILIZATION_WINDOW: Duration = Duration::from_secs(2);

/// Reads the memory first: a process whose memory it includes is listed then, or has ended. Reads
/// it again after the list, without the memory that was freed meanwhile. The driver is asked twice
/// each time, so that an answer has the memory of a process that allocates and frees all the while.
pub(super) fn sample_memory(
    device: &Device<'_>,
    gpu: &GpuUuid,
) -> Result<GpuMemorySample, NvmlError> {
    let memory = device.memory_info()?;
    let used_beside = device.memory_info()?.used;
    let compute = device.running_compute_processes()?;
    // NVML answers NotSupported for a GPU without graphics.
    let graphics = device.running_graphics_processes().unwrap_or_default();
    let charged = compute.into_iter().chain(graphics).map(|process| {
        let bytes = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(Bytes(bytes)),
            UsedGpuMemory::Unavailable => None,
        };
        (process.pid, bytes)
    });
    let charges: ProcessMemory = charged.collect();
    let used_beside = used_beside.max(device.memory_info()?.used);
    let used_after = Some(Bytes(device.memory_info()?.used));
    let holders = query_holders(gpu);
    let has_all_holders = holders.is_some();
    let Holders {
        owned: mut contextless,
        imported,
    } = holders.unwrap_or_default();
    contextless.retain(|pid, _| !charges.contains(*pid));
    Ok(GpuMemorySample {
        used: Bytes(memory.used),
        capacity: Bytes(memory.total.saturating_sub(memory.reserved)),
        used_after,
        used_beside: Bytes(used_beside),
        charges,
        contextless,
        imported,
        has_all_holders,
        sm_percents: None,
    })
}

/// The SM utilization of the listed processes in percent, from the newest sample of each.
pub(super) fn sm_percents(
    device: &Device<'_>,
    listed: &ProcessMemory,
) -> Result<BTreeMap<u32, u8>, NvmlError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let since = now.unwrap_or_default().saturating_sub(UTILIZATION_WINDOW);
    let since = u64::try_from(since.as_micros()).unwrap_or_default();
    match device.process_utilization_stats(since) {
        Ok(samples) => Ok(newest_percents(samples, listed)),
        // No process has used the GPU since.
        Err(NvmlError::NotFound) => Ok(BTreeMap::new()),
        Err(error) => Err(error),
    }
}

/// The driver's array has entries of ended processes, and entries that it has not filled.
fn newest_percents(
    mut samples: Vec<ProcessUtilizationSample>,
    listed: &ProcessMemory,
) -> BTreeMap<u32, u8> {
    samples.retain(|sample| sample.sm_util <= 100 && listed.contains(sample.pid));
    samples.sort_by_key(|sample| sample.timestamp);
    let percents = samples.into_iter();
    let percents =
        percents.filter_map(|sample| Some((sample.pid, u8::try_from(sample.sm_util).ok()?)));
    percents.collect()
}

/// The holders of a GPU's memory; none where the kernel module does not report all. A MIG instance
/// has none, since the kernel module reports the whole GPU.
fn query_holders(gpu: &GpuUuid) -> Option<Holders> {
    let holders = || holders::query_holders(gpu).ok();
    (!gpu.is_mig()).then(holders).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_has_the_percentage_of_its_newest_sample() {
        let sample = |pid, timestamp, sm_util| ProcessUtilizationSample {
            pid,
            timestamp,
            sm_util,
            mem_util: 0,
            enc_util: 0,
            dec_util: 0,
        };
        let listed = [7, 8, 9].map(|pid| (pid, Some(Bytes::mib(518))));
        let samples = vec![
            sample(7, 20, 60),
            sample(7, 10, 90),
            sample(8, 20, 4_000_000_000),
            sample(0, 0, 0),
            sample(77, 20, 5),
        ];
        let percents = newest_percents(samples, &listed.into_iter().collect());
        assert_eq!(percents, [(7, 60)].into());
    }
}
