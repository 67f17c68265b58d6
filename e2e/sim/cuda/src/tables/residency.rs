//! Records the advice (`cuMemAdvise`) and the last prefetch location of each managed page.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// `CU_DEVICE_CPU` and `CU_DEVICE_INVALID`.
pub(crate) const DEVICE_CPU: i32 = -1;
pub(crate) const DEVICE_INVALID: i32 = -2;

/// The last advice and prefetch of a page. Locations are device ordinals, `DEVICE_CPU` or
/// `DEVICE_INVALID`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PageHints {
    pub(crate) read_mostly: bool,
    pub(crate) preferred: i32,
    pub(crate) accessed_by: BTreeSet<i32>,
    pub(crate) prefetched: i32,
}

pub(crate) static NO_HINTS: PageHints = PageHints {
    read_mostly: false,
    preferred: DEVICE_INVALID,
    accessed_by: BTreeSet::new(),
    prefetched: DEVICE_INVALID,
};

/// All hints of this image, by page.
#[derive(Debug, Default)]
pub(crate) struct Residency(pub(crate) BTreeMap<u64, PageHints>);

const PAGE: u64 = 4096;

pub(crate) fn pages(address: u64, len: u64) -> RangeInclusive<u64> {
    address / PAGE..=(address + len.max(1) - 1) / PAGE
}

impl Residency {
    /// Removes the hints of freed memory.
    pub(crate) fn forget(&mut self, address: u64, len: u64) {
        for page in pages(address, len) {
            self.0.remove(&page);
        }
    }
}
