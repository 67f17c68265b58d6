//! Records CUDA arrays with the sizes of their memory layouts.
//!
//! The sizes follow measurements on an H200.

use crate::abi::Code;
use crate::granularity::{CHUNK, is_piece, whole_chunks};
use crate::tables::pieces::Pieces;
use crate::tables::vmm::PinnedObject;
use std::collections::BTreeMap;

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Array3dDescriptor {
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
    pub(crate) format: u32,
    pub(crate) channels: u32,
    pub(crate) flags: u32,
}

const LAYERED: u32 = 0x01;
pub(crate) const SPARSE: u32 = 0x40;
pub(crate) const DEFERRED: u32 = 0x80;

/// An array of this image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Array {
    pub(crate) shape: Array3dDescriptor,
    /// Mipmap levels; zero for an array that is not mipmapped.
    pub(crate) levels: u32,
    /// Bytes of the array's memory layout.
    pub(crate) size: u64,
    pub(crate) unit: usize,
    pub(crate) context: u64,
    /// Its address among the chunks of arrays, if it is a piece.
    pub(crate) piece: Option<u64>,
}

/// All arrays of this image, by handle.
#[derive(Debug, Default)]
pub(crate) struct Arrays {
    pub(crate) live: BTreeMap<u64, Array>,
    /// Memory mapped into sparse arrays, by array and subresource.
    pub(crate) tiles: BTreeMap<(u64, [u64; 4]), PinnedObject>,
    pub(crate) handle_count: u64,
    /// The chunks of arrays, at addresses that nothing uses.
    pub(crate) pieces: Pieces,
    pub(crate) chunk_count: u64,
}

impl Array3dDescriptor {
    /// Bytes of the layout: rows in multiples of 64 bytes, blocks of 8 to 128 rows and 1 to 16
    /// slices.
    pub(crate) fn size(&self, level: u32) -> Result<u64, Code> {
        let element = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            0x03 | 0x0a | 0x20 => 4,
            _ => return Err(Code::NOT_SUPPORTED),
        };
        let half = |side: u64| (side >> level).max(1);
        let (width, height) = (half(self.width), half(self.height));
        let rows = height.next_power_of_two().clamp(8, 128);
        let deep = if self.flags & LAYERED != 0 {
            self.depth.max(1)
        } else {
            let depth = half(self.depth);
            depth.next_multiple_of(depth.next_power_of_two().min(16))
        };
        width
            .checked_mul(element * u64::from(self.channels))
            .and_then(|row| row.checked_next_multiple_of(64))
            .and_then(|row| row.checked_mul(height.next_multiple_of(rows)))
            .and_then(|slice| slice.checked_mul(deep))
            .ok_or(Code::INVALID_VALUE)
    }
}

/// The least that the driver states for an array with deferred mapping, and its granularity.
const STATED_GRANULARITY: u64 = 64 << 10;

impl Array {
    /// The size that the driver states.
    pub(crate) fn stated_size(&self) -> u64 {
        self.size.next_multiple_of(STATED_GRANULARITY)
    }
}

impl Arrays {
    /// Gives an array its memory, and returns the bytes that the GPU takes for it; none for an
    /// array into which memory is mapped later.
    pub(crate) fn place(&mut self, array: &mut Array) -> u64 {
        if array.shape.flags & (SPARSE | DEFERRED) != 0 {
            return 0;
        }
        if !is_piece(array.size) {
            return whole_chunks(array.size);
        }
        if let Some((at, _)) = self.pieces.place(array.context, array.size) {
            array.piece = Some(at);
            return 0;
        }
        self.chunk_count += 1;
        let base = self.chunk_count * CHUNK;
        self.pieces.add(base, array.context, array.size);
        array.piece = Some(base);
        CHUNK
    }

    /// Takes an array's memory, and returns the bytes that the GPU has free then.
    pub(crate) fn release(&mut self, array: &Array) -> u64 {
        match array.piece {
            _ if array.shape.flags & (SPARSE | DEFERRED) != 0 => 0,
            None => whole_chunks(array.size),
            Some(at) => self.pieces.remove(at).map_or(0, |_| CHUNK),
        }
    }
}
