//! Charges linear, pitched and managed memory.
#![allow(non_snake_case)]

use std::ffi::c_uint;

use super::rounding::driver_size;
use super::{allocate, hooks};
use crate::accounting::{self, Account};
use crate::chunks::{self, MAX_PIECE};
use crate::curesult::{self, CuResult};
use crate::driver_calls::{current_device, driver};
use crate::eviction;

/// The largest pitch alignment of any GPU: what a pitched allocation is charged before its pitch is
/// known. `CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT` is 32, and allocations are aligned to 512.
const PITCH_ALIGNMENT: u64 = 512;

fn free(pointer: u64) -> CuResult {
    driver!(cuMemFree_v2(pointer => u64))
}

hooks! {
    /// `cuMemAlloc` (CUDA 3.2): linear memory of the current context's device.
    fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize) = |driver_call| {
        // The driver returns its own error for these.
        if pointer.is_null() || bytes == 0 {
            return driver_call(pointer, bytes);
        }
        let device = match current_device() {
            Ok(device) => device,
            Err(code) => return code,
        };
        let Some(size) = driver_size(bytes as u64) else {
            return curesult::OUT_OF_MEMORY;
        };
        let (account, function) = (Account::Device(device), "cuMemAlloc_v2");
        let is_piece = bytes as u64 <= MAX_PIECE;
        let mut allocated = 0;
        let call = || match driver_call(&raw mut allocated, bytes) {
            curesult::SUCCESS if is_piece => Ok((allocated, bytes as u64)),
            curesult::SUCCESS => Ok((allocated, size)),
            code => Err(code),
        };
        let call = || eviction::allocate(account, size, function, call);
        let answer = match is_piece {
            true => chunks::allocate(account, function, call, free),
            false => allocate(account, size, function, call, free),
        };
        if answer == curesult::SUCCESS {
            // SAFETY: not null, and by the prototype a pointer of this type.
            unsafe { pointer.write(allocated) };
        }
        answer
    };

    /// `cuMemAllocPitch` (CUDA 3.2): the driver chooses the pitch, and so the size.
    fn cuMemAllocPitch_v2(
        pointer: *mut u64,
        pitch: *mut usize,
        width: usize,
        height: usize,
        element: c_uint,
    ) = |driver_call| {
        if pointer.is_null() || pitch.is_null() || width == 0 || height == 0 {
            return driver_call(pointer, pitch, width, height, element);
        }
        let device = match current_device() {
            Ok(device) => device,
            Err(code) => return code,
        };
        let row = (width as u64).checked_next_multiple_of(PITCH_ALIGNMENT);
        let size = |row: u64| row.checked_mul(height as u64).and_then(driver_size);
        let Some(estimate) = row.and_then(size) else {
            return curesult::OUT_OF_MEMORY;
        };
        let (account, function) = (Account::Device(device), "cuMemAllocPitch_v2");
        let is_piece = row.and_then(|row| row.checked_mul(height as u64)) <= Some(MAX_PIECE);
        let (mut allocated, mut row) = (0, 0);
        let call = || match driver_call(&raw mut allocated, &raw mut row, width, height, element) {
            curesult::SUCCESS if is_piece => Ok((allocated, row as u64 * height as u64)),
            curesult::SUCCESS => Ok((allocated, size(row as u64).unwrap_or(u64::MAX))),
            code => Err(code),
        };
        let call = || eviction::allocate(account, estimate, function, call);
        let answer = match is_piece {
            true => chunks::allocate(account, function, call, free),
            false => allocate(account, estimate, function, call, free),
        };
        if answer == curesult::SUCCESS {
            // SAFETY: neither is null, and by the prototype they are of these types.
            unsafe {
                pointer.write(allocated);
                pitch.write(row);
            }
        }
        answer
    };

    /// `cuMemAllocManaged`: charged to the container's managed quota. Without such a quota that of
    /// each GPU covers it, by the agent's accounts.
    fn cuMemAllocManaged(pointer: *mut u64, bytes: usize, flags: c_uint) = |driver_call| {
        if pointer.is_null() || bytes == 0 || accounting::before_cuinit() {
            return driver_call(pointer, bytes, flags);
        }
        let mut allocated = 0;
        let call = || match driver_call(&raw mut allocated, bytes, flags) {
            curesult::SUCCESS => Ok((allocated, bytes as u64)),
            code => Err(code),
        };
        let function = "cuMemAllocManaged";
        let answer = match bytes as u64 <= MAX_PIECE {
            true => chunks::allocate(Account::Managed, function, call, free),
            false => allocate(Account::Managed, bytes as u64, function, call, free),
        };
        if answer == curesult::SUCCESS {
            // SAFETY: not null, and by the prototype a pointer of this type.
            unsafe { pointer.write(allocated) };
        }
        answer
    };

    /// `cuMemFree` (CUDA 3.2).
    fn cuMemFree_v2(pointer: u64) = |driver_call| accounting::free(pointer, || driver_call(pointer));
}
