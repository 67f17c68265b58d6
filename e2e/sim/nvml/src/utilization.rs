//! Implements utilization samples of processes. No GPU time is simulated: `simgpu utilize` sets the
//! values.

use crate::abi::{Code, NvmlResult, Out, exports};
use crate::device::present_device;
use crate::processes::list_processes;
use std::time::{SystemTime, UNIX_EPOCH};

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pid: u32,
    time: u64,
    /// Percent of the SMs, the memory, the encoder and the decoder.
    engines: [u32; 4],
}

/// `nvmlProcessUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Info {
    time: u64,
    pid: u32,
    /// Percent of the SMs, the memory, the encoder, the decoder and two more.
    engines: [u32; 6],
}

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Infos {
    version: u32,
    count: u32,
    last_seen: u64,
    places: u64,
}

const INFOS_1: u32 = size_of::<Infos>() as u32 | 1 << 24;

/// The processes of a device with a sample, each with its SM utilization in percent, and the time
/// in microseconds.
///
/// Writes the number of processes to `count`, and fails if the caller's array is smaller.
fn sample_processes(
    device: u64,
    count: &Out<u32>,
    has_places: bool,
) -> Result<(Vec<(u32, u32)>, u64), Code> {
    let device = present_device(device)?;
    if !device.library.sim.config.process_utilization || device.unit.mig.is_some() {
        return Err(Code::NOT_SUPPORTED);
    }
    let sampled: Vec<(u32, u32)> = list_processes(&device)
        .iter()
        .filter_map(|(process, _)| Some((process.pid, process.sm_percent?)))
        .collect();
    let room = count.get()? as usize;
    count.set(sampled.len() as u32)?;
    if sampled.is_empty() {
        return Err(Code::NOT_FOUND);
    }
    if !has_places || sampled.len() > room {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_err(|_| Code::UNKNOWN)?.as_micros();
    Ok((sampled, u64::try_from(now).map_err(|_| Code::UNKNOWN)?))
}

fn version_1(device: u64, list: &Out<Infos>) -> NvmlResult {
    let mut infos = list.get()?;
    if infos.version != INFOS_1 {
        return Err(Code::ARGUMENT_VERSION_MISMATCH);
    }
    let count = Out::at_address(&raw mut infos.count as u64);
    let sampled = sample_processes(device, &count, infos.places != 0);
    list.set(infos)?;
    let (sampled, time) = sampled?;
    Out::at_address(infos.places).set_all(sampled.into_iter().map(|(pid, sm_percent)| Info {
        time,
        pid,
        engines: [sm_percent, 0, 0, 0, 0, 0],
    }))
}

exports! {
    fn nvmlDeviceGetProcessUtilization(device: u64, places: Out<Sample>, count: Out<u32>, _last_seen: u64) = {
        let (sampled, time) = sample_processes(device, &count, !places.is_null())?;
        let sample = |(pid, sm_percent)| Sample { pid, time, engines: [sm_percent, 0, 0, 0] };
        places.set_all(sampled.into_iter().map(sample))
    };
    fn nvmlDeviceGetProcessesUtilizationInfo(device: u64, list: Out<Infos>) = version_1(device, &list);
}
