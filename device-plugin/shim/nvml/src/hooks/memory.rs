//! Shows the container's quota as the device's memory.

use super::{Device, HookResult, check, deref, driver, guarded, usage};
use crate::nvml_return::{self, NvmlReturn};

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct MemoryInfoV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const MEMORY_INFO_V2: u32 = size_of::<MemoryInfoV2>() as u32 | 2 << 24;

/// Shows the quota as the total. Usage above a lowered quota is shown as full, because programs
/// expect free and used to add up to the total.
fn capped(quota: u64, used: u64) -> MemoryInfo {
    let used = used.min(quota);
    MemoryInfo {
        total: quota,
        free: quota - used,
        used,
    }
}

fn container_memory(device: Device) -> Result<MemoryInfo, NvmlReturn> {
    usage(device).map(|usage| capped(usage.quota, usage.used))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo(device: Device, info: *mut MemoryInfo) -> NvmlReturn {
    guarded(|| {
        let info = deref(info)?;
        let mut card = MemoryInfo::default();
        check(driver!(nvmlDeviceGetMemoryInfo(
            device => Device,
            &raw mut card => *mut MemoryInfo,
        )))?;
        *info = container_memory(device)?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, info: *mut MemoryInfoV2) -> NvmlReturn {
    guarded(|| memory_info_v2(device, deref(info)?))
}

fn memory_info_v2(device: Device, info: &mut MemoryInfoV2) -> HookResult {
    if info.version != MEMORY_INFO_V2 {
        return Err(nvml_return::ARGUMENT_VERSION_MISMATCH);
    }
    let mut card = *info;
    check(driver!(nvmlDeviceGetMemoryInfo_v2(
        device => Device,
        &raw mut card => *mut MemoryInfoV2,
    )))?;
    let MemoryInfo { total, free, used } = container_memory(device)?;
    *info = MemoryInfoV2 {
        version: MEMORY_INFO_V2,
        total,
        // The reserve of driver and firmware is outside of every quota.
        reserved: 0,
        free,
        used,
    };
    Ok(())
}

/// Reports memory protected by confidential computing: all of the card's or none.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetConfComputeProtectedMemoryUsage(
    device: Device,
    info: *mut MemoryInfo,
) -> NvmlReturn {
    guarded(|| {
        let info = deref(info)?;
        let mut card = MemoryInfo::default();
        check(driver!(nvmlDeviceGetConfComputeProtectedMemoryUsage(
            device => Device,
            &raw mut card => *mut MemoryInfo,
        )))?;
        *info = match card.total {
            0 => card,
            _ => container_memory(device)?,
        };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_plus_used_equals_total_when_the_quota_was_lowered() {
        let expected = |total, free, used| MemoryInfo { total, free, used };
        assert_eq!(capped(16, 5), expected(16, 11, 5));
        assert_eq!(capped(16, 16), expected(16, 0, 16));
        assert_eq!(capped(4, 5), expected(4, 0, 4));
        assert_eq!(capped(0, 0), expected(0, 0, 0));
    }
}
