//! Adds regions to a heap and removes them, whole or from an edge.

use super::super::epoch::StreamDeps;
use super::super::size_classes::NO_BLOCK;
use super::header::{Header, UNUSED, is_free};
use super::{BlockId, GRANULE, HeapBlock, TlsfHeap, to_bytes};

/// Region that is entirely free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct EmptyRegion {
    /// Region's number.
    pub(in super::super) region: u32,
    /// Header of the block that spans the region.
    pub(in super::super) index: u32,
}

/// Free block at an edge of a region that is not entirely free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct EdgeBlock {
    /// Region's number.
    pub(in super::super) region: u32,
    /// Header of the block.
    pub(super) index: u32,
    /// Size in bytes.
    pub(in super::super) bytes: u64,
    /// Whether the block is at the lower edge.
    pub(in super::super) low: bool,
    /// Streams that may still use the block.
    pub(in super::super) deps: StreamDeps,
}

impl TlsfHeap {
    /// Adds a free region of whole granules. `None` if the region is empty or has 1 TiB or more, or
    /// if all indices of headers are used.
    pub(in super::super) fn add_region(
        &mut self,
        region: u32,
        address: u64,
        size: u64,
        deps: StreamDeps,
    ) -> Option<EmptyRegion> {
        let size = u32::try_from(size / GRANULE)
            .ok()
            .filter(|&size| size > 0)?;
        let index = self.take_header()?;
        let header = &mut self.headers[index as usize];
        *header = Header {
            address,
            size,
            region,
            ..UNUSED
        };
        header.set_deps(deps);
        self.total_bytes += to_bytes(size);
        self.free_bytes += to_bytes(size);
        self.link(index);
        Some(EmptyRegion { region, index })
    }

    /// Returns the deps of a region that is entirely free. The region's lowest header never
    /// changes, because merges and splits keep the lower header.
    pub(in super::super) fn empty_region_deps(&self, region: EmptyRegion) -> Option<StreamDeps> {
        let header = self.headers.get(region.index as usize)?;
        let spans = header.size > 0 && header.below == NO_BLOCK && header.above == NO_BLOCK;
        (spans && is_free(header) && header.region == region.region).then_some(header.deps())
    }

    /// Removes a region that is entirely free, and returns its deps.
    pub(in super::super) fn remove_region(&mut self, region: EmptyRegion) -> Option<StreamDeps> {
        self.merge_last_freed();
        let deps = self.empty_region_deps(region)?;
        let size = to_bytes(self.headers[region.index as usize].size);
        self.unlink(region.index);
        self.total_bytes -= size;
        self.free_bytes -= size;
        self.recycle_header(region.index);
        Some(deps)
    }

    /// Returns the free blocks at the edges of regions that are not entirely free.
    pub(in super::super) fn edge_blocks(&mut self) -> Vec<EdgeBlock> {
        self.merge_last_freed();
        let Some(first) = self.classes.smallest() else {
            return Vec::new();
        };
        let edges = self.list_from(first).filter_map(|index| {
            let header = &self.headers[index as usize];
            let (low, high) = (header.below == NO_BLOCK, header.above == NO_BLOCK);
            (low != high).then_some(EdgeBlock {
                region: header.region,
                index,
                bytes: to_bytes(header.size),
                low,
                deps: header.deps(),
            })
        });
        edges.collect()
    }

    /// Removes the free edge of a region, and returns the rest of the region.
    pub(in super::super) fn remove_edge(
        &mut self,
        edge: &EdgeBlock,
        region: EmptyRegion,
    ) -> EmptyRegion {
        let Header {
            above, below, size, ..
        } = self.headers[edge.index as usize];
        self.unlink(edge.index);
        self.recycle_header(edge.index);
        self.total_bytes -= to_bytes(size);
        self.free_bytes -= to_bytes(size);
        if edge.low {
            self.headers[above as usize].below = NO_BLOCK;
            return EmptyRegion {
                index: above,
                ..region
            };
        }
        self.headers[below as usize].above = NO_BLOCK;
        region
    }

    /// Allocates a block that another heap will suballocate. It counts no requested bytes.
    pub(in super::super) fn allocate_chunk(&mut self, bytes: u64) -> Option<HeapBlock> {
        let size = u32::try_from(bytes / GRANULE)
            .ok()
            .filter(|&size| size > 0)?;
        let class = self.find_class(size)?;
        let index = self.take_low(self.classes.head(class), size);
        Some(self.finish_allocation(index, 0))
    }

    /// Splits a chunk at a free edge that the heap of its shard reports. Returns the rest of the
    /// chunk and the edge, both allocated.
    pub(in super::super) fn split_chunk(
        &mut self,
        id: BlockId,
        edge: &EdgeBlock,
    ) -> Option<(BlockId, BlockId)> {
        let size = self.live(id).ok()?.size;
        let split_at = u32::try_from(edge.bytes / GRANULE)
            .ok()
            .filter(|&split_at| 0 < split_at && split_at < size)?;
        let index = self.split(id.index, if edge.low { split_at } else { size - split_at })?;
        self.allocations += 1;
        let upper = &mut self.headers[index as usize];
        upper.serial = self.allocations;
        upper.previous = 0;
        let (lower, upper) = (
            id,
            BlockId {
                index,
                serial: self.allocations,
            },
        );
        Some(if edge.low {
            (upper, lower)
        } else {
            (lower, upper)
        })
    }
}
