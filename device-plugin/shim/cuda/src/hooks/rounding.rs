//! Rounds a request of linear memory or of an array to the bytes that the driver takes for it.
//!
//! Requests above 1 MiB take whole multiples of 2 MiB (fact F22). Smaller ones are pieces of
//! chunks, which `chunks` and `array_chunks` charge. Another driver may round differently, which
//! the agent's audit notices (`docs/internals/adr/0026-*`).

use crate::chunks::{CHUNK, MAX_PIECE};

/// Pieces take multiples of this.
const PIECE_GRANULARITY: u64 = 512;

/// Returns the bytes of the whole chunks that hold a request, or `None` on overflow.
pub(crate) fn driver_size(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(CHUNK)
}

/// Returns how many pieces of `bytes` fill a chunk; `None` for a request that is no piece.
pub(crate) fn pieces_of_chunk(bytes: u64) -> Option<u32> {
    let piece = bytes.max(1).next_multiple_of(PIECE_GRANULARITY);
    let pieces = CHUNK / piece;
    (bytes <= MAX_PIECE).then(|| u32::try_from(pieces).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    #[test]
    fn request_takes_whole_chunks() {
        assert_eq!(driver_size(1), Some(2 * MIB));
        assert_eq!(driver_size(MIB + 1), Some(2 * MIB));
        assert_eq!(driver_size(2 * MIB), Some(2 * MIB));
        assert_eq!(driver_size(2 * MIB + 1), Some(4 * MIB));
        assert_eq!(driver_size(10 * MIB + 1), Some(12 * MIB));
        assert_eq!(driver_size(u64::MAX), None);
    }

    #[test]
    fn pieces_fill_a_chunk_as_measured() {
        for (bytes, pieces) in [
            (1, 4096),
            (513, 2048),
            (64 * KIB, 32),
            (768 * KIB, 2),
            (MIB, 2),
        ] {
            assert_eq!(pieces_of_chunk(bytes), Some(pieces), "{bytes}");
        }
        assert_eq!(pieces_of_chunk(MIB + 1), None);
    }
}
