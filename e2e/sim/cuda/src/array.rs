//! Implements CUDA arrays (`cuArray*`, `cuMipmappedArray*`), as far as memory is concerned.
//!
//! For the tiles of sparse arrays, only the mapped memory is recorded.

use bursar_sim_state::Charge;

use crate::abi::{Code, DriverResult, In, Out};
use crate::context_stack::{CurrentContext, current_context};
use crate::entry::exports;
use crate::process::{Process, lock};
use crate::tables::arrays::{Array, Array3dDescriptor, Arrays, DEFERRED, SPARSE};
use std::collections::BTreeMap;

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ArrayDescriptor {
    width: u64,
    height: u64,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MemoryRequirements {
    size: u64,
    alignment: u64,
    reserved: [u32; 4],
}

/// `CUarrayMapInfo`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ArrayMapInfo {
    resource_kind: i32,
    resource: u64,
    subresource_kind: i32,
    subresource: [u64; 4],
    operation: i32,
    handle_kind: i32,
    handle: u64,
    offset: u64,
    devices: u32,
    flags: u32,
    reserved: [u32; 2],
}

const _: () = assert!(size_of::<ArrayMapInfo>() == 96);

/// `CUmemOperationType`.
const MAP: i32 = 1;
const UNMAP: i32 = 2;

const FIRST: u64 = 0x51a7_0000_0000;
const STEP: u64 = 0x100;
/// Distance between the handles of a mipmapped array's levels; level 0 has the array's handle.
const LEVEL: u64 = 0x8;

impl Process {
    fn create_array(
        &self,
        current: &CurrentContext,
        shape: Array3dDescriptor,
        levels: u32,
    ) -> Result<u64, Code> {
        if shape.width == 0 || ![1, 2, 4].contains(&shape.channels) {
            return Err(Code::INVALID_VALUE);
        }
        let mut size = 0_u64;
        for level in 0..levels.max(1) {
            size = size
                .checked_add(shape.size(level)?)
                .ok_or(Code::INVALID_VALUE)?;
        }
        let mut array = Array {
            shape,
            levels,
            size,
            unit: current.unit(),
            context: current.context,
            piece: None,
        };
        let mut arrays = lock(&self.arrays);
        let taken = arrays.place(&mut array);
        if let Err(error) = self.image.charge(array.unit, Charge::Memory, taken) {
            arrays.release(&array);
            return Err(error.into());
        }
        arrays.handle_count += 1;
        let handle = FIRST + arrays.handle_count * STEP;
        arrays.live.insert(handle, array);
        Ok(handle)
    }

    fn destroy_array(&self, handle: u64, mipmapped: bool) -> DriverResult {
        let mut arrays = lock(&self.arrays);
        let known = arrays
            .live
            .get(&handle)
            .filter(|array| (array.levels > 0) == mipmapped);
        let array = *known.ok_or(Code::INVALID_HANDLE)?;
        arrays.live.remove(&handle);
        self.unpin_tiles(&mut arrays, handle);
        let freed = arrays.release(&array);
        Ok(self.image.release(array.unit, Charge::Memory, freed)?)
    }

    fn unpin_tiles(&self, arrays: &mut Arrays, handle: u64) {
        let parts = (handle, [0; 4])..=(handle, [u64::MAX; 4]);
        let removed = arrays.tiles.extract_if(parts, |_, _| true);
        removed.for_each(|(_, removed)| self.unpin(removed));
    }

    /// Maps memory into a subresource of a sparse array, or unmaps it.
    fn map_tile(&self, mapping: &ArrayMapInfo) -> DriverResult {
        let ArrayMapInfo {
            resource,
            subresource,
            operation,
            handle,
            ..
        } = *mapping;
        let sparse = |array: &Array| array.shape.flags & SPARSE != 0;
        if !lock(&self.arrays).live.get(&resource).is_some_and(sparse) {
            return Err(Code::INVALID_VALUE);
        }
        let part = (resource, subresource);
        let before = match operation {
            MAP => {
                let memory = self.pin_handle(handle)?;
                lock(&self.arrays).tiles.insert(part, memory)
            }
            UNMAP => lock(&self.arrays).tiles.remove(&part),
            _ => return Err(Code::INVALID_VALUE),
        };
        before.into_iter().for_each(|removed| self.unpin(removed));
        Ok(())
    }

    /// Frees the arrays of a destroyed context.
    pub(crate) fn free_context_arrays(&self, context: u64) {
        let mut arrays = lock(&self.arrays);
        let (removed, left) = std::mem::take(&mut arrays.live)
            .into_iter()
            .partition::<BTreeMap<_, _>, _>(|(_, array)| array.context == context);
        arrays.live = left;
        for (handle, array) in removed {
            self.unpin_tiles(&mut arrays, handle);
            let freed = arrays.release(&array);
            self.release_memory(array.unit, freed);
        }
    }
}

fn create(out: &Out<u64>, shape: Array3dDescriptor, levels: u32) -> DriverResult {
    let current = current_context()?;
    if out.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    out.set(current.process.create_array(&current, shape, levels)?)
}

/// Finds an array by its handle, or by the handle of one of its levels.
fn find(handle: u64) -> Result<Array, Code> {
    let current = current_context()?;
    let found = lock(&current.process.arrays)
        .live
        .get(&(handle - handle % STEP))
        .copied();
    found.ok_or(Code::INVALID_HANDLE)
}

fn requirements(out: &Out<MemoryRequirements>, handle: u64, mipmapped: bool) -> DriverResult {
    let array = find(handle)?;
    if (array.levels > 0) != mipmapped || array.shape.flags & DEFERRED == 0 {
        return Err(Code::INVALID_VALUE);
    }
    out.set(MemoryRequirements {
        size: array.stated_size(),
        alignment: 64 << 10,
        reserved: [0; 4],
    })
}

exports! {
    fn cuMemMapArrayAsync(list: In<ArrayMapInfo>, count: u32, stream: u64) = {
        let current = current_context()?;
        current.check_stream(stream)?;
        (0..count as usize).try_for_each(|place| current.process.map_tile(&list.at(place)?))
    };
    fn cuArrayCreate_v2(array: Out<u64>, flat: In<ArrayDescriptor>) = {
        let ArrayDescriptor { width, height, format, channels } = flat.get()?;
        create(&array, Array3dDescriptor { width, height, depth: 0, format, channels, flags: 0 }, 0)
    };
    fn cuArray3DCreate_v2(array: Out<u64>, shape: In<Array3dDescriptor>) = create(&array, shape.get()?, 0);
    fn cuMipmappedArrayCreate(array: Out<u64>, shape: In<Array3dDescriptor>, levels: u32) = {
        create(&array, shape.get()?, levels.clamp(1, 31))
    };
    fn cuArrayDestroy(array: u64) = current_context()?.process.destroy_array(array, false);
    fn cuMipmappedArrayDestroy(array: u64) = current_context()?.process.destroy_array(array, true);
    fn cuArrayGetDescriptor_v2(flat: Out<ArrayDescriptor>, array: u64) = {
        let Array3dDescriptor { width, height, format, channels, .. } = find(array)?.shape;
        flat.set(ArrayDescriptor { width, height, format, channels })
    };
    fn cuArray3DGetDescriptor_v2(shape: Out<Array3dDescriptor>, array: u64) = shape.set(find(array)?.shape);
    fn cuMipmappedArrayGetLevel(level: Out<u64>, array: u64, number: u32) = {
        if number >= find(array)?.levels {
            return Err(Code::INVALID_VALUE);
        }
        level.set(array + u64::from(number) * LEVEL)
    };
    fn cuArrayGetMemoryRequirements(needs: Out<MemoryRequirements>, array: u64, _device: i32) = requirements(&needs, array, false);
    fn cuMipmappedArrayGetMemoryRequirements(needs: Out<MemoryRequirements>, array: u64, _device: i32) = {
        requirements(&needs, array, true)
    };
}
