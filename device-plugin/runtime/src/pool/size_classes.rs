//! Maps sizes to free lists by two levels of size classes, each with a bitmap of nonempty lists.
//!
//! The first level is the power of two. The second level divides each power into 64 equal classes,
//! so that a class is at most 1/64 of its size wide. Sizes below 64 granules have a class each.
//! This is the index of TLSF ("a new dynamic memory allocator for real-time systems", Masmano et
//! al., ECRTS 2004). Two bit scans find the smallest nonempty class.

/// Number of second-level classes of a power of two, one for each bit of a word.
const SL_COUNT: u32 = u64::BITS;
const SL_BITS: u32 = SL_COUNT.trailing_zeros();
/// Number of first-level classes. Sizes below [`SL_COUNT`] share one, which makes 27; rounded to a
/// power of two, so that masked indices need no bounds check.
const FL_COUNT: usize = (u32::BITS - SL_BITS + 1).next_power_of_two() as usize;
const CLASS_COUNT: usize = FL_COUNT * SL_COUNT as usize;

pub(super) const NO_BLOCK: u32 = 0;

/// Size class: the first level, with the second level in the low bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SizeClass(u32);

impl SizeClass {
    /// Returns the class of a block of `size` granules.
    #[inline]
    pub(super) fn of(size: u32) -> SizeClass {
        // From first level 1 on, the size's leading bit adds one to the first level.
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

/// Heads of the free lists, with a bitmap for each level.
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

    /// Returns the first block of a class, or [`NO_BLOCK`].
    #[inline]
    pub(super) fn head(&self, class: SizeClass) -> u32 {
        self.heads[class.index()]
    }

    /// Puts a block at the head of a class and returns the previous head.
    #[inline]
    pub(super) fn push_front(&mut self, class: SizeClass, block: u32) -> u32 {
        let row = class.first_level();
        self.second_level_bitmaps[row] |= 1 << class.second_level();
        self.first_level_bitmap |= 1 << row;
        std::mem::replace(&mut self.heads[class.index()], block)
    }

    /// Replaces the head of a class by its second block; [`NO_BLOCK`] empties the class.
    /// Branch-free, because both cases are common.
    #[inline]
    pub(super) fn replace_head(&mut self, class: SizeClass, second: u32) {
        let row = class.first_level();
        self.heads[class.index()] = second;
        self.second_level_bitmaps[row] ^= u64::from(second == NO_BLOCK) << class.second_level();
        self.first_level_bitmap ^= u32::from(self.second_level_bitmaps[row] == 0) << row;
    }

    /// Returns the smallest nonempty class above `class`, whose blocks are all larger than those of
    /// `class`.
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

    /// Returns the smallest nonempty class.
    pub(super) fn smallest(&self) -> Option<SizeClass> {
        self.lowest_in(self.first_level_bitmap)
    }

    /// Returns the largest nonempty class.
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
