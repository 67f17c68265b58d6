//! What the driver takes for a request, measured on an H200 with driver 580.
//!
//! More than 1 MiB takes whole multiples of 2 MiB. Less is cut from chunks of 2 MiB, of which each serves
//! requests of one size.

/// What the driver takes of a GPU at a time.
const CHUNK: u64 = 2 << 20;
/// The largest request that shares a chunk with others.
const LARGEST_PIECE: u64 = 1 << 20;
/// Pieces of a chunk start at multiples of this.
const GRAIN: u64 = 512;

/// Bytes that a request of `bytes` takes of the GPU; `None` beyond what a GPU could have.
pub(crate) fn taken(bytes: u64) -> Option<u64> {
    if bytes > LARGEST_PIECE {
        return bytes.checked_next_multiple_of(CHUNK);
    }
    let pieces = CHUNK / bytes.next_multiple_of(GRAIN).max(GRAIN);
    Some(CHUNK.div_ceil(pieces))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    #[test]
    fn a_request_above_a_mebibyte_takes_whole_chunks() {
        assert_eq!(taken(MIB + 1), Some(2 * MIB));
        assert_eq!(taken(2 * MIB), Some(2 * MIB));
        assert_eq!(taken(2 * MIB + 1), Some(4 * MIB));
        assert_eq!(taken(10 * MIB + 1), Some(12 * MIB));
        assert_eq!(taken(u64::MAX), None);
    }

    #[test]
    fn a_small_request_takes_its_share_of_a_chunk() {
        assert_eq!(taken(MIB), Some(MIB));
        assert_eq!(taken(768 * KIB), Some(MIB));
        assert_eq!(taken(512 * KIB + 1), Some((2 * MIB).div_ceil(3)));
        assert_eq!(taken(256 * KIB + 1), Some((2 * MIB).div_ceil(7)));
        assert_eq!(taken(256 * KIB), Some(256 * KIB));
        assert!(taken(1).is_some_and(|bytes| bytes <= KIB));
    }
}
