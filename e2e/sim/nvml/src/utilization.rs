//! Implements utilization samples of processes. All values are 0, because no GPU time is simulated.

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
    engines: [u32; 4],
}

/// `nvmlProcessUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Info {
    time: u64,
    pid: u32,
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

/// The pids of a device, and the time in microseconds.
///
/// Writes the number of pids to `count`, and fails if the caller's array is smaller.
fn sample_pids(device: u64, count: &Out<u32>, has_places: bool) -> Result<(Vec<u32>, u64), Code> {
    let device = present_device(device)?;
    let pids: Vec<u32> = list_processes(&device)
        .iter()
        .map(|(process, _)| process.pid)
        .collect();
    let room = count.get()? as usize;
    count.set(pids.len() as u32)?;
    if pids.is_empty() {
        return Err(Code::NOT_FOUND);
    }
    if !has_places || pids.len() > room {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_err(|_| Code::UNKNOWN)?.as_micros();
    Ok((pids, u64::try_from(now).map_err(|_| Code::UNKNOWN)?))
}

fn version_1(device: u64, list: &Out<Infos>) -> NvmlResult {
    let mut infos = list.get()?;
    if infos.version != INFOS_1 {
        return Err(Code::ARGUMENT_VERSION_MISMATCH);
    }
    let count = Out::at_address(&raw mut infos.count as u64);
    let sampled = sample_pids(device, &count, infos.places != 0);
    list.set(infos)?;
    let (pids, time) = sampled?;
    Out::at_address(infos.places).set_all(pids.into_iter().map(|pid| Info {
        time,
        pid,
        engines: [0; 6],
    }))
}

exports! {
    fn nvmlDeviceGetProcessUtilization(device: u64, places: Out<Sample>, count: Out<u32>, _last_seen: u64) = {
        let (pids, time) = sample_pids(device, &count, !places.is_null())?;
        places.set_all(pids.into_iter().map(|pid| Sample { pid, time, engines: [0; 4] }))
    };
    fn nvmlDeviceGetProcessesUtilizationInfo(device: u64, list: Out<Infos>) = version_1(device, &list);
}
