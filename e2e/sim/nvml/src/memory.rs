//! Implements the queries of memory in use.

use crate::abi::{Code, Out, exports};
use crate::device::present_device;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const VERSION_2: u32 = size_of::<MemoryV2>() as u32 | 2 << 24;

fn memory(device: u64) -> Result<Memory, Code> {
    let device = present_device(device)?;
    let used = device.library.sim.used(device.unit.index);
    Ok(Memory {
        total: device.unit.total,
        free: device.unit.total.saturating_sub(used),
        used,
    })
}

exports! {
    fn nvmlDeviceGetMemoryInfo(device: u64, info: Out<Memory>) = info.set(memory(device)?);
    fn nvmlDeviceGetMemoryInfo_v2(device: u64, info: Out<MemoryV2>) = {
        let Memory { total, free, used } = memory(device)?;
        let version = info.get()?.version;
        if version != VERSION_2 {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        info.set(MemoryV2 { version, total, reserved: 0, free, used })
    };
}
