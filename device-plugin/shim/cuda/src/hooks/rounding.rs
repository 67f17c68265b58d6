//! Rounds a request of linear memory or of an array to the bytes that the driver takes for it.
//!
//! Requests above 1 MiB take whole multiples of 2 MiB. Smaller ones are cut from chunks of 2 MiB,
//! each of which serves requests of one size. This was measured on an H200 with driver 580. Another
//! driver may round differently, which the agent's audit notices (`docs/adr/0026-*`).

/// The granularity in which the driver takes memory of a GPU.
const CHUNK: u64 = 2 << 20;
/// The largest request that shares a chunk with others.
const MAX_SUBALLOCATION: u64 = 1 << 20;
/// Suballocations of a chunk start at multiples of this.
const SUBALLOCATION_ALIGNMENT: u64 = 512;

/// Returns the bytes that a request of `bytes` takes of the GPU, or `None` on overflow.
pub(crate) fn driver_size(bytes: u64) -> Option<u64> {
    if bytes > MAX_SUBALLOCATION {
        return bytes.checked_next_multiple_of(CHUNK);
    }
    // The driver cuts a chunk into as many equal pieces as fit, of at least 512 bytes.
    let pieces = CHUNK
        / bytes
            .next_multiple_of(SUBALLOCATION_ALIGNMENT)
            .max(SUBALLOCATION_ALIGNMENT);
    Some(CHUNK.div_ceil(pieces))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    #[test]
    fn request_above_a_mebibyte_takes_whole_chunks() {
        assert_eq!(driver_size(MIB + 1), Some(2 * MIB));
        assert_eq!(driver_size(2 * MIB), Some(2 * MIB));
        assert_eq!(driver_size(2 * MIB + 1), Some(4 * MIB));
        assert_eq!(driver_size(10 * MIB + 1), Some(12 * MIB));
        assert_eq!(driver_size(u64::MAX), None);
    }

    #[test]
    fn small_request_takes_its_share_of_a_chunk() {
        assert_eq!(driver_size(MIB), Some(MIB));
        assert_eq!(driver_size(768 * KIB), Some(MIB));
        assert_eq!(driver_size(512 * KIB + 1), Some((2 * MIB).div_ceil(3)));
        assert_eq!(driver_size(256 * KIB + 1), Some((2 * MIB).div_ceil(7)));
        assert_eq!(driver_size(256 * KIB), Some(256 * KIB));
        assert!(driver_size(1).is_some_and(|bytes| bytes <= KIB));
    }
}
