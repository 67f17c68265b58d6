//! Finds live blocks by their addresses, so that a driver's defect is noticed.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use crate::error::ResourceError;
use crate::resource::BlockRef;

/// Blocks of one device that have an owner, by their addresses.
#[derive(Debug, Default)]
pub(crate) struct LiveBlocks(BTreeMap<u64, BlockRef>);

impl LiveBlocks {
    /// Adds a block of a device.
    ///
    /// The memory of a refused block must not be freed, because that would free the live block's.
    ///
    /// # Errors
    /// [`ResourceError::PointerCollision`] if a live block has some of the block's bytes.
    pub(crate) fn insert(&mut self, block: BlockRef, ordinal: u32) -> Result<(), ResourceError> {
        let end = block.address.saturating_add(block.bytes());
        let below = self.0.range(..end).next_back();
        match below {
            Some((_, live)) if live.address + live.bytes() > block.address => {
                Err(ResourceError::PointerCollision {
                    ordinal,
                    address: block.address,
                    generation: live.generation,
                })
            }
            _ => {
                self.0.insert(block.address, block);
                Ok(())
            }
        }
    }

    /// Removes a block, and returns whether it was live. Another block may have the address of a
    /// freed one.
    pub(crate) fn remove(&mut self, block: &BlockRef) -> bool {
        let is_live = self.0.get(&block.address) == Some(block);
        if is_live {
            self.0.remove(&block.address);
        }
        is_live
    }
}
