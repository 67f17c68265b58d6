//! Shows the quota as the size of the device's memory.
#![allow(non_snake_case)]

use std::ffi::c_int;

use super::{hooks, write_if_not_null};
use crate::curesult;
use crate::driver_calls::current_device;
use crate::pools::POOLS;
use crate::{accounting, session_state};

/// Returns the bytes that the container may still use of a device, and its quota; `None` without a
/// session.
fn free_and_quota(device: c_int) -> Option<(u64, u64)> {
    // The state comes first, because it resets the pools in a forked child.
    session_state::state()?;
    POOLS.reconcile();
    accounting::free_and_quota(device)
}

hooks! {
    /// `cuMemGetInfo` (CUDA 3.2): the quota, and what the container can still allocate.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) = |driver_call| {
        // The driver takes null for either output and for both.
        let (mut free_of_gpu, mut total_of_gpu) = (0, 0);
        let answer = driver_call(&raw mut free_of_gpu, &raw mut total_of_gpu);
        if answer != curesult::SUCCESS {
            return answer;
        }
        let device = match current_device() {
            Ok(device) => device,
            Err(code) => return code,
        };
        // Without a session nothing can be allocated.
        let (room, quota) = free_and_quota(device).unwrap_or((0, 0));
        let evictable = usize::try_from(accounting::evictable(device)).unwrap_or(usize::MAX);
        let obtainable = free_of_gpu.saturating_add(evictable);
        // SAFETY: by the prototype both are null or can be written.
        unsafe {
            write_if_not_null(free, obtainable.min(usize::try_from(room).unwrap_or(usize::MAX)));
            write_if_not_null(total, usize::try_from(quota).unwrap_or(usize::MAX));
        }
        answer
    };

    /// `cuDeviceTotalMem` (CUDA 3.2): the quota.
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) = |driver_call| {
        let answer = driver_call(bytes, device);
        if answer == curesult::SUCCESS && !bytes.is_null() {
            let (_, quota) = free_and_quota(device).unwrap_or((0, 0));
            // SAFETY: not null, and the driver has just written it.
            unsafe { *bytes = usize::try_from(quota).unwrap_or(usize::MAX) };
        }
        answer
    };
}
