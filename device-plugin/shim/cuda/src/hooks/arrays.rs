//! Charges arrays and mipmapped arrays, whose layout and size the driver chooses.
//!
//! The driver tells the size only of an array whose memory is mapped later
//! (`CUDA_ARRAY3D_DEFERRED_MAPPING`, `cuArrayGetMemoryRequirements` in cuda.h). So the shim creates
//! a deferred twin, which takes no memory, and queries its size before the array itself is created.
//! Sparse and deferred arrays take no memory: what is mapped into them was charged at
//! `cuMemCreate`.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint};

use super::rounding::{driver_size, pieces_of_chunk};
use super::{allocate, hooks};
use crate::accounting::{self, Account};
use crate::array_chunks;
use crate::curesult::{self, CuResult};
use crate::driver_calls::{current_device, driver};
use crate::eviction;

/// `CUDA_ARRAY_DESCRIPTOR` (CUDA 3.2).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ArrayDescriptor {
    width: usize,
    height: usize,
    format: c_uint,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR` (CUDA 3.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Array3dDescriptor {
    width: usize,
    height: usize,
    depth: usize,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[repr(C)]
#[derive(Default)]
struct MemoryRequirements {
    size: usize,
    alignment: usize,
    reserved: [c_uint; 4],
}

/// `CUDA_ARRAY3D_LAYERED`.
const LAYERED: c_uint = 0x01;
/// `CUDA_ARRAY3D_SPARSE`.
const SPARSE: c_uint = 0x40;
/// `CUDA_ARRAY3D_DEFERRED_MAPPING`.
const DEFERRED: c_uint = 0x80;

/// The driver states multiples of this for an array whose memory is mapped later.
const STATED_GRANULARITY: u64 = 64 << 10;

/// Estimates the size where the driver cannot tell it (before CUDA 11.6).
fn estimate(shape: Array3dDescriptor, levels: c_uint) -> Option<u64> {
    (0..levels.clamp(1, u64::BITS)).try_fold(0_u64, |sum, level| {
        let half = |side: usize| ((side as u64) >> level).max(1);
        let depth = match shape.flags & LAYERED {
            0 => half(shape.depth),
            _ => shape.depth.max(1) as u64,
        };
        sum.checked_add(block_linear_bytes(
            half(shape.width).checked_mul(element_bytes(shape.format, shape.channels))?,
            half(shape.height),
            depth,
        )?)
    })
}

/// Returns the bytes of a block-linear layout, as measured. Rows are in multiples of 64 bytes, and
/// a block has 8 to 128 rows and 1 to 16 slices.
fn block_linear_bytes(row: u64, height: u64, depth: u64) -> Option<u64> {
    let (rows, slices) = (
        height.next_power_of_two().clamp(8, 128),
        depth.next_power_of_two().clamp(1, 16),
    );
    row.checked_next_multiple_of(64)?
        .checked_mul(height.checked_next_multiple_of(rows)?)?
        .checked_mul(depth.checked_next_multiple_of(slices)?)
}

/// Returns the bytes of an element (`CUarray_format`). An unknown format counts as one of the
/// largest.
fn element_bytes(format: c_uint, channels: c_uint) -> u64 {
    let channel = match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        _ => 4,
    };
    channel * u64::from(channels.max(1))
}

/// Queries the size of a deferred twin of an array without mipmap levels.
fn query_size(twin: Array3dDescriptor, device: c_int) -> Option<u64> {
    let (mut array, mut needs) = (0, MemoryRequirements::default());
    if driver!(cuArray3DCreate_v2(&raw mut array => *mut u64, &raw const twin => *const Array3dDescriptor))
        != curesult::SUCCESS
    {
        return None;
    }
    let code = driver!(cuArrayGetMemoryRequirements(
        &raw mut needs => *mut MemoryRequirements, array => u64, device => c_int,
    ));
    let _ = driver!(cuArrayDestroy(array => u64));
    (code == curesult::SUCCESS).then_some(needs.size as u64)
}

/// Queries the size of a deferred twin of a mipmapped array.
fn query_mipmapped_size(twin: Array3dDescriptor, levels: c_uint, device: c_int) -> Option<u64> {
    let (mut array, mut needs) = (0, MemoryRequirements::default());
    if driver!(cuMipmappedArrayCreate(
        &raw mut array => *mut u64, &raw const twin => *const Array3dDescriptor, levels => c_uint,
    )) != curesult::SUCCESS
    {
        return None;
    }
    let code = driver!(cuMipmappedArrayGetMemoryRequirements(
        &raw mut needs => *mut MemoryRequirements, array => u64, device => c_int,
    ));
    let _ = driver!(cuMipmappedArrayDestroy(array => u64));
    (code == curesult::SUCCESS).then_some(needs.size as u64)
}

/// Charges and creates an array; `levels` is zero for one without mipmap levels.
fn create(
    function: &str,
    out: *mut u64,
    shape: Array3dDescriptor,
    levels: c_uint,
    call: impl Fn(*mut u64) -> CuResult,
) -> CuResult {
    if shape.flags & (SPARSE | DEFERRED) != 0 {
        return call(out);
    }
    let device = match current_device() {
        Ok(device) => device,
        Err(code) => return code,
    };
    let twin = Array3dDescriptor {
        flags: shape.flags | DEFERRED,
        ..shape
    };
    let queried = match levels {
        0 => query_size(twin, device),
        _ => query_mipmapped_size(twin, levels, device),
    };
    // The driver states a size padded to 64 KiB, and takes one that is not (fact F28).
    let estimated = estimate(shape, levels);
    let size = match queried {
        Some(stated) if stated <= STATED_GRANULARITY => estimated.map(|bytes| bytes.min(stated)),
        Some(stated) => Some(stated),
        None => estimated,
    };
    let Some((size, bytes)) = size.and_then(|size| Some((size, driver_size(size)?))) else {
        return curesult::OUT_OF_MEMORY;
    };
    let (account, mut array) = (Account::Device(device), 0);
    let call = || match call(&raw mut array) {
        curesult::SUCCESS => Ok(array),
        code => Err(code),
    };
    let call = || eviction::allocate(account, bytes, function, call);
    let free = |array| match levels {
        0 => driver!(cuArrayDestroy(array => u64)),
        _ => driver!(cuMipmappedArrayDestroy(array => u64)),
    };
    let answer = match pieces_of_chunk(size) {
        Some(pieces) => array_chunks::allocate(account, pieces, function, call, free),
        None => allocate(account, bytes, function, || Ok((call()?, bytes)), free),
    };
    if answer == curesult::SUCCESS {
        // SAFETY: not null, and by the prototype a place for a handle.
        unsafe { out.write(array) };
    }
    answer
}

hooks! {
    /// `cuArrayCreate` (CUDA 3.2): one or two dimensions.
    fn cuArrayCreate_v2(array: *mut u64, flat: *const ArrayDescriptor) = |driver_call| {
        if array.is_null() || flat.is_null() {
            return driver_call(array, flat);
        }
        // SAFETY: not null, and by the prototype a descriptor.
        let ArrayDescriptor { width, height, format, channels } = unsafe { flat.read() };
        let shape = Array3dDescriptor { width, height, depth: 0, format, channels, flags: 0 };
        create("cuArrayCreate_v2", array, shape, 0, |array| driver_call(array, flat))
    };

    /// `cuArray3DCreate` (CUDA 3.2): also layered, cubemap and sparse arrays.
    fn cuArray3DCreate_v2(array: *mut u64, shape: *const Array3dDescriptor) = |driver_call| {
        if array.is_null() || shape.is_null() {
            return driver_call(array, shape);
        }
        // SAFETY: not null, and by the prototype a descriptor.
        let wanted = unsafe { shape.read() };
        create("cuArray3DCreate_v2", array, wanted, 0, |array| driver_call(array, shape))
    };

    /// `cuMipmappedArrayCreate` (CUDA 5.0).
    fn cuMipmappedArrayCreate(array: *mut u64, shape: *const Array3dDescriptor, levels: c_uint) = |driver_call| {
        if array.is_null() || shape.is_null() || levels == 0 {
            return driver_call(array, shape, levels);
        }
        // SAFETY: not null, and by the prototype a descriptor.
        let wanted = unsafe { shape.read() };
        create("cuMipmappedArrayCreate", array, wanted, levels, |array| driver_call(array, shape, levels))
    };

    /// `cuArrayDestroy` (CUDA 2.0).
    fn cuArrayDestroy(array: u64) = |driver_call| accounting::free(array, || driver_call(array));

    /// `cuMipmappedArrayDestroy` (CUDA 5.0).
    fn cuMipmappedArrayDestroy(array: u64) = |driver_call| accounting::free(array, || driver_call(array));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn shape(width: usize, height: usize, depth: usize, flags: c_uint) -> Array3dDescriptor {
        Array3dDescriptor {
            width,
            height,
            depth,
            format: 0x20,
            channels: 1,
            flags,
        }
    }

    #[test]
    fn estimate_equals_the_measured_size() {
        assert_eq!(estimate(shape(65536, 1, 0, 0), 0), Some(2 * MIB));
        assert_eq!(estimate(shape(2048, 2048, 17, 0), 0), Some(512 * MIB));
    }

    #[test]
    fn estimate_of_levels_is_their_sum() {
        let first_level = estimate(shape(256, 256, 0, 0), 1).unwrap();
        let second_level = estimate(shape(128, 128, 0, 0), 1).unwrap();
        assert_eq!(
            estimate(shape(256, 256, 0, 0), 2),
            Some(first_level + second_level)
        );
        assert!(estimate(shape(256, 256, 0, 0), u32::MAX).is_some());
    }

    #[test]
    fn estimate_is_none_on_overflow() {
        assert_eq!(estimate(shape(usize::MAX, usize::MAX, 1, 0), 0), None);
        assert_eq!(estimate(shape(usize::MAX, 1, 1, 0), 0), None);
    }
}
