//! Computes the checksum of retained memory: a commit states it, and a later reader compares it.
//!
//! Each little-endian word of 64 bits is added to a multiple of [`WEYL`] that encodes its place,
//! and mixed by a bijection. The sum of these, modulo 2^64, is mixed once more with the length. So
//! words can be read in any order and by any number of threads, and a GPU reads them at the speed
//! of its memory. Every change inside one word changes the result. Any other change is missed once
//! in 2^64 times. A last partial word is padded with zeros.
//!
//! The checksum finds accidents. A writer that means to deceive can make any sum come out right.
//!
//! The result is stored with memory that outlives programs and their versions, so it can never
//! change.
#![forbid(unsafe_code)]

/// Encodes places: the odd number next to 2^64 divided by the golden ratio.
pub const WEYL: u64 = 0x9e37_79b9_7f4a_7c15;

/// The mixer's multiplier (degski's 64-bit mixer, whose shifts by 32 cost a GPU one operation
/// each).
pub const FACTOR: u64 = 0xd6e8_feb8_6659_fd93;

/// Bytes of a word.
const WORD: usize = 8;

/// Returns the checksum of some bytes.
pub fn of(bytes: &[u8]) -> u64 {
    finish(partial(bytes, 0), bytes.len() as u64)
}

/// Returns the sum over a part that starts `first` words into the whole. The sums of all parts add
/// up to that of the whole. Only the last part may end with a partial word.
pub fn partial(bytes: &[u8], first: u64) -> u64 {
    let (words, rest) = bytes.as_chunks::<WORD>();
    let last = (!rest.is_empty()).then(|| {
        let mut word = [0; WORD];
        word[..rest.len()].copy_from_slice(rest);
        word
    });
    let mut place = first.wrapping_mul(WEYL);
    words.iter().chain(&last).fold(0, |sum: u64, word| {
        place = place.wrapping_add(WEYL);
        sum.wrapping_add(mix(u64::from_le_bytes(*word).wrapping_add(place)))
    })
}

/// Returns the checksum of `len` bytes with that sum.
pub fn finish(sum: u64, len: u64) -> u64 {
    mix(sum.wrapping_add(len))
}

fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 32)).wrapping_mul(FACTOR);
    word = (word ^ (word >> 32)).wrapping_mul(FACTOR);
    word ^ (word >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn checksum_equals_that_of_older_builds() {
        let counted: Vec<u8> = (0..=255).collect();
        let vectors: [(&[u8], u64); 5] = [
            (&[], 0x0000_0000_0000_0000),
            (&[0], 0x5fe9_b868_a5ea_9466),
            (b"bursar", 0x1f06_188f_3fda_ae29),
            (&counted, 0xc7d7_646c_b02e_13c6),
            (&counted[..251], 0x199d_af46_4242_00e6),
        ];
        for (bytes, expected) in vectors {
            assert_eq!(of(bytes), expected, "{:#018x} of {bytes:?}", of(bytes));
        }
    }

    #[test]
    fn checksum_differs_for_each_length_of_zeros() {
        let zeros = [0; 512];
        let sums: std::collections::BTreeSet<u64> =
            (0..=512).map(|len| of(&zeros[..len])).collect();
        assert_eq!(sums.len(), 513);
    }

    proptest! {
        #[test]
        fn checksum_finds_every_flipped_bit(mut bytes in prop::collection::vec(any::<u8>(), 1..200), position: prop::sample::Index, bit in 0..8) {
            let before = of(&bytes);
            let position = position.index(bytes.len());
            bytes[position] ^= 1u8 << bit;
            prop_assert_ne!(of(&bytes), before);
        }

        #[test]
        fn checksum_finds_a_bit_flipped_in_two_words(mut bytes in prop::collection::vec(any::<u8>(), 16..200), bit in 0..64usize) {
            let before = of(&bytes);
            bytes[bit / 8] ^= 1 << (bit % 8);
            bytes[8 + bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(of(&bytes), before);
        }

        #[test]
        fn checksum_finds_swapped_words(words in prop::collection::vec(any::<u64>(), 2..40), first: prop::sample::Index, second: prop::sample::Index) {
            let bytes = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
            let mut moved = words.clone();
            moved.swap(first.index(words.len()), second.index(words.len()));
            prop_assert_eq!(of(&bytes(&words)) == of(&bytes(&moved)), words == moved);
        }

        #[test]
        fn partial_sums_add_up_to_the_whole(bytes in prop::collection::vec(any::<u8>(), 0..300), cut: prop::sample::Index) {
            let cut = cut.index(bytes.len() / WORD + 1);
            let (head, tail) = bytes.split_at(cut * WORD);
            prop_assert_eq!(partial(head, 0).wrapping_add(partial(tail, cut as u64)), partial(&bytes, 0));
        }
    }
}
