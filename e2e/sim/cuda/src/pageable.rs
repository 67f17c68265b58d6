//! Checks a device's accesses to memory, with pageable host memory (HMM) where it is configured.

use crate::process::{Process, lock};

impl Process {
    /// Whether a device may access a range. If so, moves managed and pageable memory to the unit.
    pub(crate) fn access(&self, unit: usize, address: u64, len: u64, write: bool) -> bool {
        let space = lock(&self.space);
        if space.is_accessible(address, len, write) {
            drop(space);
            self.populate_managed(unit, address, len);
            return true;
        }
        let is_pageable = self.sim.config.pageable_memory && !space.overlaps(address, len);
        drop(space);
        if !is_pageable {
            return false;
        }
        let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
        let is_mapped = covers(&String::from_utf8_lossy(&maps), address, len, write);
        if is_mapped {
            lock(&self.chunks).populate_pageable(&self.image, unit, address, len);
        }
        is_mapped
    }
}

/// Whether a program with these `/proc/PID/maps` may read or write every byte of a range.
fn covers(maps: &str, address: u64, len: u64, write: bool) -> bool {
    let Some(end) = address.checked_add(len) else {
        return false;
    };
    let wanted = if write { "rw" } else { "r" };
    let mut next = address;
    for (from, to, access) in maps.lines().filter_map(parse_mapping) {
        if (from..to).contains(&next) && access.starts_with(wanted) {
            next = to;
        }
    }
    next >= end
}

/// The addresses of a mapping and its permissions, of a line such as
/// `7f0000000000-7f0000001000 rw-p 00000000 00:00 0`.
fn parse_mapping(line: &str) -> Option<(u64, u64, &str)> {
    let (range, rest) = line.split_once(' ')?;
    let (from, to) = range.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some((number(from)?, number(to)?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_pageable_if_mappings_without_a_gap_permit_it() {
        let maps = "1000-3000 rw-p 00000000 00:00 0\n\
                    3000-4000 r--p 00000000 08:01 7 /lib\n\
                    4000-5000 ---p 00000000 00:00 0\n\
                    6000-7000 rw-p 00000000 00:00 0 [heap]\n";
        assert!(covers(maps, 0x1001, 0x1fff, true));
        assert!(covers(maps, 0x1001, 0x2fff, false));
        assert!(covers(maps, 0x6fff, 1, true));
        for (address, len, write) in [
            (0xfff, 2, false),
            (0x2000, 0x1001, true),
            (0x3fff, 2, false),
            (0x5000, 1, false),
            (0x6fff, 2, true),
            (0x1000, u64::MAX, false),
        ] {
            assert!(!covers(maps, address, len, write), "{address:x} {len:x}");
        }
    }
}
