//! Implements the lists of processes with a context.

use bursar_sim_state::usage::ProcessUsage;

use crate::abi::{Code, NvmlResult, Out, exports};
use crate::device::{Device, present_device};

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Process {
    pid: u32,
    bytes: u64,
}

/// `nvmlProcessInfo_v2_t`, which version 3 of the call uses too.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProcessV2 {
    pid: u32,
    bytes: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// `nvmlProcessDetail_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Detail {
    process: ProcessV2,
    protected: u64,
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Details {
    version: u32,
    mode: u32,
    count: u32,
    places: u64,
}

const DETAILS_1: u32 = size_of::<Details>() as u32 | 1 << 24;

/// `nvmlProcessMode_t`.
const COMPUTE: u32 = 0;
const ALL: u32 = 3;

/// The instance id outside MIG instances.
const NO_INSTANCE: u32 = u32::MAX;

/// The processes of a device, each with its instance. A GPU in MIG mode lists its instances'
/// processes.
pub(crate) fn list_processes(device: &Device) -> Vec<(ProcessUsage, u32)> {
    let sim = &device.library.sim;
    let parts = sim.units.iter().filter(|unit| match device.unit.mig {
        Some(_) => unit.index == device.unit.index,
        None => unit.gpu == device.unit.gpu,
    });
    let with_instance = |unit: &bursar_sim_state::Unit| {
        let instance = unit.mig.map_or(NO_INSTANCE, |mig| mig as u32 + 1);
        sim.usage(unit.index)
            .processes
            .into_iter()
            .map(move |process| (process, instance))
    };
    parts.flat_map(with_instance).collect()
}

/// Fills the caller's array of `count` entries, or returns the required number.
fn put_processes<T>(
    device: u64,
    count: &Out<u32>,
    places: &Out<T>,
    convert: fn((ProcessUsage, u32)) -> T,
) -> NvmlResult {
    let processes = list_processes(&present_device(device)?);
    let room = count.get()? as usize;
    count.set(processes.len() as u32)?;
    if processes.len() > room {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    if processes.is_empty() {
        Ok(())
    } else {
        places.set_all(processes.into_iter().map(convert))
    }
}

fn to_v1((process, _): (ProcessUsage, u32)) -> Process {
    Process {
        pid: process.pid,
        bytes: process.bytes,
    }
}

fn to_v2((process, instance): (ProcessUsage, u32)) -> ProcessV2 {
    let compute_instance = if instance == NO_INSTANCE {
        NO_INSTANCE
    } else {
        0
    };
    ProcessV2 {
        pid: process.pid,
        bytes: process.bytes,
        gpu_instance: instance,
        compute_instance,
    }
}

fn details(device: u64, list: &Out<Details>) -> NvmlResult {
    let mut details = list.get()?;
    if details.version != DETAILS_1 {
        return Err(Code::ARGUMENT_VERSION_MISMATCH);
    }
    let processes = match details.mode {
        COMPUTE | ALL => list_processes(&present_device(device)?),
        mode if mode < ALL => Vec::new(),
        _ => return Err(Code::INVALID_ARGUMENT),
    };
    let room = std::mem::replace(&mut details.count, processes.len() as u32);
    list.set(details)?;
    if details.count > room {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    if processes.is_empty() {
        return Ok(());
    }
    let detail = |process| Detail {
        process: to_v2(process),
        protected: 0,
    };
    Out::at_address(details.places).set_all(processes.into_iter().map(detail))
}

/// Returns an empty list, for graphics and MPS processes.
fn put_no_processes(device: u64, count: &Out<u32>) -> NvmlResult {
    present_device(device)?;
    count.set(0)
}

exports! {
    fn nvmlDeviceGetComputeRunningProcesses(device: u64, count: Out<u32>, places: Out<Process>) = put_processes(device, &count, &places, to_v1);
    fn nvmlDeviceGetComputeRunningProcesses_v2(device: u64, count: Out<u32>, places: Out<ProcessV2>) = put_processes(device, &count, &places, to_v2);
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: u64, count: Out<u32>, places: Out<ProcessV2>) = put_processes(device, &count, &places, to_v2);
    fn nvmlDeviceGetGraphicsRunningProcesses(device: u64, count: Out<u32>, _places: Out<Process>) = put_no_processes(device, &count);
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: u64, count: Out<u32>, _places: Out<ProcessV2>) = put_no_processes(device, &count);
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: u64, count: Out<u32>, _places: Out<ProcessV2>) = put_no_processes(device, &count);
    fn nvmlDeviceGetRunningProcessDetailList(device: u64, list: Out<Details>) = details(device, &list);
    fn nvmlDeviceGetMPSComputeRunningProcesses(device: u64, count: Out<u32>, _places: Out<Process>) = put_no_processes(device, &count);
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: u64, count: Out<u32>, _places: Out<ProcessV2>) = put_no_processes(device, &count);
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: u64, count: Out<u32>, _places: Out<ProcessV2>) = put_no_processes(device, &count);
}
