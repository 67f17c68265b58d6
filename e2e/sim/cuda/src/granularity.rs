//! Rounds allocation sizes to the driver's granularity.

use crate::abi::Code;

/// Sizes are multiples of this.
const ALLOCATION_GRANULARITY: u64 = 512;
/// Granularity of the memory that the driver takes from a GPU.
pub(crate) const CHUNK: u64 = 2 << 20;

pub(crate) fn round_up(bytes: u64) -> Result<u64, Code> {
    bytes
        .checked_next_multiple_of(ALLOCATION_GRANULARITY)
        .ok_or(Code::OUT_OF_MEMORY)
}

/// Whether an allocation of this size is cut from a chunk.
pub(crate) fn is_piece(len: u64) -> bool {
    len <= CHUNK / 2
}

/// Bytes of the whole chunks that an allocation takes which is no piece.
pub(crate) fn whole_chunks(len: u64) -> u64 {
    len.checked_next_multiple_of(CHUNK).unwrap_or(u64::MAX)
}
