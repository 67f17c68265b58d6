//! Reports the utilization of a device by the container's own processes only.
//!
//! The driver uses pids of the caller's pid namespace. Samples of other processes are removed in
//! the caller's buffer. A buffer of the shim's own would hide nothing from a program in its
//! process.

use super::{Device, HookResult, check, deref, driver, guarded, usage};
use crate::nvml_return::{self, NvmlReturn};

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct UtilizationSample {
    pid: u32,
    time: u64,
    engines: [u32; 4],
}

/// `nvmlProcessUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct UtilizationInfo {
    time: u64,
    pid: u32,
    engines: [u32; 6],
}

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Debug)]
struct UtilizationInfoList {
    version: u32,
    count: u32,
    last_seen: u64,
    entries: *mut UtilizationInfo,
}

const UTILIZATION_INFO_LIST_V1: u32 = size_of::<UtilizationInfoList>() as u32 | 1 << 24;

/// Keeps the entries whose pid is the container's, and counts them.
fn retain_own<T: Copy>(
    device: Device,
    count: &mut u32,
    places: *mut T,
    pid: impl Fn(&T) -> u32,
) -> HookResult {
    let written = *count as usize;
    *count = 0;
    if written == 0 {
        return Err(nvml_return::NOT_FOUND);
    }
    deref(places)?;
    // SAFETY: the real library has just written that many entries.
    let places = unsafe { std::slice::from_raw_parts_mut(places, written) };
    let own = usage(device)?.processes;
    let kept = retain_in_place(places, |place| {
        own.iter().any(|process| process.pid == pid(place))
    });
    *count = u32::try_from(kept).map_err(|_| nvml_return::UNKNOWN)?;
    if kept == 0 {
        Err(nvml_return::NOT_FOUND)
    } else {
        Ok(())
    }
}

/// Moves the wanted entries to the front, in order. Returns their number.
fn retain_in_place<T: Copy>(places: &mut [T], wanted: impl Fn(&T) -> bool) -> usize {
    let mut kept = 0;
    for index in 0..places.len() {
        if wanted(&places[index]) {
            places[kept] = places[index];
            kept += 1;
        }
    }
    kept
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetProcessUtilization(
    device: Device,
    places: *mut UtilizationSample,
    count: *mut u32,
    last_seen: u64,
) -> NvmlReturn {
    guarded(|| {
        check(driver!(nvmlDeviceGetProcessUtilization(
            device => Device,
            places => *mut UtilizationSample,
            count => *mut u32,
            last_seen => u64,
        )))?;
        retain_own(device, deref(count)?, places, |sample| sample.pid)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetProcessesUtilizationInfo(
    device: Device,
    list: *mut UtilizationInfoList,
) -> NvmlReturn {
    guarded(|| {
        let infos = deref(list)?;
        if infos.version != UTILIZATION_INFO_LIST_V1 {
            return Err(nvml_return::ARGUMENT_VERSION_MISMATCH);
        }
        check(driver!(nvmlDeviceGetProcessesUtilizationInfo(
            device => Device,
            &raw mut *infos => *mut UtilizationInfoList,
        )))?;
        retain_own(device, &mut infos.count, infos.entries, |info| info.pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retain_in_place_keeps_the_order() {
        let mut places = [1, 2, 3, 4, 5];
        assert_eq!(retain_in_place(&mut places, |place| place % 2 == 1), 3);
        assert_eq!(places[..3], [1, 3, 5]);
        assert_eq!(retain_in_place(&mut places, |_| false), 0);
        assert_eq!(retain_in_place(&mut [] as &mut [u8], |_| true), 0);
    }

    #[test]
    fn structures_have_the_headers_sizes() {
        let sizes = [
            size_of::<UtilizationSample>(),
            size_of::<UtilizationInfo>(),
            size_of::<UtilizationInfoList>(),
        ];
        assert_eq!(sizes, [32, 40, 24]);
    }
}
