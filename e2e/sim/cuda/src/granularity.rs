//! Rounds allocation sizes to the driver's granularity.

use crate::abi::Code;

/// Sizes are multiples of this.
const ALLOCATION_GRANULARITY: u64 = 512;
/// Granularity of the memory that the driver takes from a GPU.
const CHUNK: u64 = 2 << 20;

pub(crate) fn round_up(bytes: u64) -> Result<u64, Code> {
    bytes
        .checked_next_multiple_of(ALLOCATION_GRANULARITY)
        .ok_or(Code::OUT_OF_MEMORY)
}

/// Bytes charged for a request: whole chunks above 1 MiB, and a share of a chunk below.
///
/// The real driver keeps a chunk while a piece of it lives; here each piece is released alone.
pub(crate) fn charged_bytes(len: u64) -> u64 {
    if len > CHUNK / 2 {
        len.checked_next_multiple_of(CHUNK).unwrap_or(u64::MAX)
    } else {
        let pieces = CHUNK / len.max(ALLOCATION_GRANULARITY);
        (CHUNK / pieces).next_multiple_of(ALLOCATION_GRANULARITY)
    }
}
