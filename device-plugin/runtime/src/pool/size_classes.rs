//! Which list a free block of a size stands in: two levels of size classes, each with a bit that says "not empty".
//!
//! The first level is the power of two, the second cuts each power into 64 equal classes, so that a class is at
//! most 1/64 of its size wide. Sizes below 64 granules have a class each. This is the index of TLSF ("a new
//! dynamic memory allocator for real-time systems", Masmano et al., ECRTS 2004); two bit scans find the smallest
//! class that has a block.

/// How many classes a power of two is cut into: the bits of a word.
const SL_COUNT: u32 = u64::BITS;
const SL_BITS: u32 = SL_COUNT.trailing_zeros();
/// Powers of two of a size in granules, those below [`CUTS`] being one: 27, and a power of two, so that a row is in its array
/// by its bits.
const FL_COUNT: usize = (u32::BITS - SL_BITS + 1).next_power_of_two() as usize;
const CLASS_COUNT: usize = FL_COUNT * SL_COUNT as usize;

/// No block.
pub(super) const NO_BLOCK: u32 = 0;

/// One size class: its row, and its cut of that in the low bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SizeClass(u32);

impl SizeClass {
    /// The class that a block of `size` granules stands in.
    #[inline]
    pub(super) fn of(size: u32) -> SizeClass {
        // From row 1 on the size's leading bit counts the row up by one.
        let shift = (size | (2 * SL_COUNT - 1)).ilog2() - SL_BITS;
        SizeClass((shift << SL_BITS) + (size >> shift))
    }

    #[inline]
    fn from_levels(row: u32, cut: u32) -> SizeClass {
        SizeClass(row << SL_BITS | cut)
    }

    fn first_level(self) -> usize {
        (self.0 >> SL_BITS) as usize % FL_COUNT
    }

    fn second_level(self) -> u32 {
        self.0 & (SL_COUNT - 1)
    }

    fn index(self) -> usize {
        self.0 as usize % CLASS_COUNT
    }
}

/// The first block of each class.
#[derive(Debug)]
pub(super) struct ClassLists {
    heads: Box<[u32; CLASS_COUNT]>,
    first_level_bitmap: u32,
    second_level_bitmaps: [u64; FL_COUNT],
}

impl ClassLists {
    pub(super) fn new() -> ClassLists {
        ClassLists {
            heads: Box::new([NO_BLOCK; CLASS_COUNT]),
            first_level_bitmap: 0,
            second_level_bitmaps: [0; FL_COUNT],
        }
    }

    /// The first block of a class, or [`NONE`].
    #[inline]
    pub(super) fn head(&self, class: SizeClass) -> u32 {
        self.heads[class.index()]
    }

    /// Puts a block before the first of a class, and answers that one.
    #[inline]
    pub(super) fn push_front(&mut self, class: SizeClass, block: u32) -> u32 {
        let row = class.first_level();
        self.second_level_bitmaps[row] |= 1 << class.second_level();
        self.first_level_bitmap |= 1 << row;
        std::mem::replace(&mut self.heads[class.index()], block)
    }

    /// Puts the second block of a class in the place of its first; [`NONE`] empties the class. Which of the two it is nobody
    /// can foresee: no branch.
    #[inline]
    pub(super) fn replace_head(&mut self, class: SizeClass, second: u32) {
        let row = class.first_level();
        self.heads[class.index()] = second;
        self.second_level_bitmaps[row] ^= u64::from(second == NO_BLOCK) << class.second_level();
        self.first_level_bitmap ^= u32::from(self.second_level_bitmaps[row] == 0) << row;
    }

    /// The smallest class above `class` that has a block: each block there is larger than every one of `class`.
    #[inline]
    pub(super) fn above(&self, class: SizeClass) -> Option<SizeClass> {
        let (row, cut) = (class.first_level(), class.second_level());
        let cuts = self.second_level_bitmaps[row] & (u64::MAX << cut) & !(1 << cut);
        if cuts != 0 {
            return Some(SizeClass::from_levels(row as u32, cuts.trailing_zeros()));
        }
        self.lowest_in(self.first_level_bitmap & (u32::MAX << row) & !(1 << row))
    }

    #[inline]
    fn lowest_in(&self, rows: u32) -> Option<SizeClass> {
        (rows != 0).then(|| {
            let row = rows.trailing_zeros();
            SizeClass::from_levels(
                row,
                self.second_level_bitmaps[row as usize].trailing_zeros(),
            )
        })
    }

    /// The class of the smallest blocks.
    pub(super) fn smallest(&self) -> Option<SizeClass> {
        self.lowest_in(self.first_level_bitmap)
    }

    /// The class of the largest blocks.
    pub(super) fn largest(&self) -> Option<SizeClass> {
        (self.first_level_bitmap != 0).then(|| {
            let row = self.first_level_bitmap.ilog2();
            SizeClass::from_levels(row, self.second_level_bitmaps[row as usize].ilog2())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn size_class_grows_with_the_size(one in 1u32.., other in 1u32..) {
            let (small, large) = (one.min(other), one.max(other));
            prop_assert!(SizeClass::of(small).index() <= SizeClass::of(large).index());
        }

        #[test]
        fn size_class_is_at_most_a_64th_of_its_size_wide(size in 1u32..) {
            let class = SizeClass::of(size);
            let wide = (size / SL_COUNT).max(1);
            if let Some(far) = size.checked_add(wide) {
                prop_assert_ne!(SizeClass::of(far), class);
            }
        }

        #[test]
        fn above_finds_the_smallest_nonempty_class(
            sizes in proptest::collection::vec(1u32.., 0..40),
            asked in 1u32..,
        ) {
            let mut classes = ClassLists::new();
            for (block, &size) in (1..).zip(&sizes) {
                classes.push_front(SizeClass::of(size), block);
            }
            let slots = sizes.iter().map(|&size| SizeClass::of(size).index());
            let expected = slots.clone().filter(|&slot| slot > SizeClass::of(asked).index()).min();
            prop_assert_eq!(classes.above(SizeClass::of(asked)).map(SizeClass::index), expected);
            prop_assert_eq!(classes.smallest().map(SizeClass::index), slots.clone().min());
            prop_assert_eq!(classes.largest().map(SizeClass::index), slots.max());
        }
    }

    #[test]
    fn above_skips_an_emptied_class() {
        let mut classes = ClassLists::new();
        classes.push_front(SizeClass::of(100), 1);
        classes.push_front(SizeClass::of(1000), 2);
        classes.replace_head(SizeClass::of(100), NO_BLOCK);
        assert_eq!(classes.above(SizeClass::of(1)), Some(SizeClass::of(1000)));
    }
}
