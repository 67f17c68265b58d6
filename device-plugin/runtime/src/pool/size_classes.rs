//! Which list a free block of a size stands in: two levels of size classes, each with a bit that says "not empty".
//!
//! The first level is the power of two, the second cuts each power into 64 equal classes, so that a class is at
//! most 1/64 of its size wide. Sizes below 64 granules have a class each. This is the index of TLSF ("a new
//! dynamic memory allocator for real-time systems", Masmano et al., ECRTS 2004); two bit scans find the smallest
//! class that has a block.

/// How many classes a power of two is cut into: the bits of a word.
const CUTS: u32 = u64::BITS;
const CUT_BITS: u32 = CUTS.trailing_zeros();
/// Powers of two of a size in granules, those below [`CUTS`] being one: 27, and a power of two, so that a row is in its array
/// by its bits.
const ROWS: usize = (u32::BITS - CUT_BITS + 1).next_power_of_two() as usize;
const SLOTS: usize = ROWS * CUTS as usize;

/// No block.
pub(super) const NONE: u32 = 0;

/// One size class: its row, and its cut of that in the low bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class(u32);

impl Class {
    /// The class that a block of `size` granules stands in.
    #[inline]
    pub(super) fn of(size: u32) -> Class {
        // From row 1 on the size's leading bit counts the row up by one.
        let shift = (size | (2 * CUTS - 1)).ilog2() - CUT_BITS;
        Class((shift << CUT_BITS) + (size >> shift))
    }

    #[inline]
    fn at(row: u32, cut: u32) -> Class {
        Class(row << CUT_BITS | cut)
    }

    fn row(self) -> usize {
        (self.0 >> CUT_BITS) as usize % ROWS
    }

    fn cut(self) -> u32 {
        self.0 & (CUTS - 1)
    }

    fn slot(self) -> usize {
        self.0 as usize % SLOTS
    }
}

/// The first block of each class.
#[derive(Debug)]
pub(super) struct Classes {
    first: Box<[u32; SLOTS]>,
    rows: u32,
    cuts: [u64; ROWS],
}

impl Classes {
    pub(super) fn new() -> Classes {
        Classes {
            first: Box::new([NONE; SLOTS]),
            rows: 0,
            cuts: [0; ROWS],
        }
    }

    /// The first block of a class, or [`NONE`].
    #[inline]
    pub(super) fn first(&self, class: Class) -> u32 {
        self.first[class.slot()]
    }

    /// Puts a block before the first of a class, and answers that one.
    #[inline]
    pub(super) fn put_first(&mut self, class: Class, block: u32) -> u32 {
        let row = class.row();
        self.cuts[row] |= 1 << class.cut();
        self.rows |= 1 << row;
        std::mem::replace(&mut self.first[class.slot()], block)
    }

    /// Puts the second block of a class in the place of its first; [`NONE`] empties the class. Which of the two it is nobody
    /// can foresee: no branch.
    #[inline]
    pub(super) fn take_first(&mut self, class: Class, second: u32) {
        let row = class.row();
        self.first[class.slot()] = second;
        self.cuts[row] ^= u64::from(second == NONE) << class.cut();
        self.rows ^= u32::from(self.cuts[row] == 0) << row;
    }

    /// The smallest class above `class` that has a block: each block there is larger than every one of `class`.
    #[inline]
    pub(super) fn above(&self, class: Class) -> Option<Class> {
        let (row, cut) = (class.row(), class.cut());
        let cuts = self.cuts[row] & (u64::MAX << cut) & !(1 << cut);
        if cuts != 0 {
            return Some(Class::at(row as u32, cuts.trailing_zeros()));
        }
        self.lowest_of(self.rows & (u32::MAX << row) & !(1 << row))
    }

    #[inline]
    fn lowest_of(&self, rows: u32) -> Option<Class> {
        (rows != 0).then(|| {
            let row = rows.trailing_zeros();
            Class::at(row, self.cuts[row as usize].trailing_zeros())
        })
    }

    /// The class of the smallest blocks.
    pub(super) fn smallest(&self) -> Option<Class> {
        self.lowest_of(self.rows)
    }

    /// The class of the largest blocks.
    pub(super) fn largest(&self) -> Option<Class> {
        (self.rows != 0).then(|| {
            let row = self.rows.ilog2();
            Class::at(row, self.cuts[row as usize].ilog2())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_larger_block_never_stands_in_a_smaller_class(one in 1u32.., other in 1u32..) {
            let (small, large) = (one.min(other), one.max(other));
            prop_assert!(Class::of(small).slot() <= Class::of(large).slot());
        }

        #[test]
        fn a_class_is_at_most_a_64th_of_its_size_wide(size in 1u32..) {
            let class = Class::of(size);
            let wide = (size / CUTS).max(1);
            if let Some(far) = size.checked_add(wide) {
                prop_assert_ne!(Class::of(far), class);
            }
        }

        #[test]
        fn the_next_class_is_the_smallest_that_has_a_block(
            sizes in proptest::collection::vec(1u32.., 0..40),
            asked in 1u32..,
        ) {
            let mut classes = Classes::new();
            for (block, &size) in (1..).zip(&sizes) {
                classes.put_first(Class::of(size), block);
            }
            let slots = sizes.iter().map(|&size| Class::of(size).slot());
            let expected = slots.clone().filter(|&slot| slot > Class::of(asked).slot()).min();
            prop_assert_eq!(classes.above(Class::of(asked)).map(Class::slot), expected);
            prop_assert_eq!(classes.smallest().map(Class::slot), slots.clone().min());
            prop_assert_eq!(classes.largest().map(Class::slot), slots.max());
        }
    }

    #[test]
    fn an_emptied_class_is_passed_over() {
        let mut classes = Classes::new();
        classes.put_first(Class::of(100), 1);
        classes.put_first(Class::of(1000), 2);
        classes.take_first(Class::of(100), NONE);
        assert_eq!(classes.above(Class::of(1)), Some(Class::of(1000)));
    }
}
