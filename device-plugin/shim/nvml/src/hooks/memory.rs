//! How much memory there is: the container's quota.

use super::{Answer, Device, given, hooked, real, succeeded, usage};
use crate::codes::{self, Code};

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const VERSION_2: u32 = size_of::<MemoryV2>() as u32 | 2 << 24;

/// The quota as the total. After a quota was lowered below what is used, that is shown as full: programs take
/// total to be free and used together.
fn within(quota: u64, used: u64) -> Memory {
    let used = used.min(quota);
    Memory {
        total: quota,
        free: quota - used,
        used,
    }
}

fn memory(device: Device) -> Result<Memory, Code> {
    usage(device).map(|usage| within(usage.quota, usage.used))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo(device: Device, info: *mut Memory) -> Code {
    hooked(|| {
        let info = given(info)?;
        let mut card = Memory::default();
        succeeded(real!(nvmlDeviceGetMemoryInfo(
            device => Device,
            &raw mut card => *mut Memory,
        )))?;
        *info = memory(device)?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, info: *mut MemoryV2) -> Code {
    hooked(|| version_2(device, given(info)?))
}

fn version_2(device: Device, info: &mut MemoryV2) -> Answer {
    if info.version != VERSION_2 {
        return Err(codes::ARGUMENT_VERSION_MISMATCH);
    }
    let mut card = *info;
    succeeded(real!(nvmlDeviceGetMemoryInfo_v2(
        device => Device,
        &raw mut card => *mut MemoryV2,
    )))?;
    let Memory { total, free, used } = memory(device)?;
    *info = MemoryV2 {
        version: VERSION_2,
        total,
        // What driver and firmware reserve is outside of every quota.
        reserved: 0,
        free,
        used,
    };
    Ok(())
}

/// Memory that confidential computing protects: all of the card's or none.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetConfComputeProtectedMemoryUsage(
    device: Device,
    info: *mut Memory,
) -> Code {
    hooked(|| {
        let info = given(info)?;
        let mut card = Memory::default();
        succeeded(real!(nvmlDeviceGetConfComputeProtectedMemoryUsage(
            device => Device,
            &raw mut card => *mut Memory,
        )))?;
        *info = match card.total {
            0 => card,
            _ => memory(device)?,
        };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_and_used_are_the_total_whatever_became_of_the_quota() {
        let expected = |total, free, used| Memory { total, free, used };
        assert_eq!(within(16, 5), expected(16, 11, 5));
        assert_eq!(within(16, 16), expected(16, 0, 16));
        assert_eq!(within(4, 5), expected(4, 0, 4));
        assert_eq!(within(0, 0), expected(0, 0, 0));
    }
}
