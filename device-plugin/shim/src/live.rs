//! What is allocated now: the size of every charged pointer, in a lock-free table.
//!
//! A free has a pointer and needs its size; asking the driver costs more than the whole of this.
//! A table is an array of slots; a pointer's window is a few neighbouring slots that its hash picks.
//! A full window leads to the next table, twice as large. A slot is claimed by one compare-and-swap
//! of its key, and emptied by another, so that nothing is left behind by a thread that dies.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Slots that are looked at for one pointer in one table: two cache lines of keys.
const WINDOW: usize = 16;

/// Slots of the first table, as a power of two.
const FIRST: u32 = 12;

/// Tables: the last has 2^27 slots, more than there are 512-byte blocks in most memories.
const TABLES: usize = 16;

/// No pointer. The driver hands out none at zero.
const EMPTY: u64 = 0;

/// A slot whose value is being written. The driver hands out no odd pointer.
const CLAIMED: u64 = 1;

/// What is known about a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Charge {
    /// The account that was charged.
    pub(crate) slot: u8,
    /// How much, in units.
    pub(crate) units: u32,
}

struct Table {
    keys: Box<[AtomicU64]>,
    values: Box<[AtomicU64]>,
}

/// The table of tables.
pub(crate) struct Live {
    tables: [OnceLock<Table>; TABLES],
}

impl Live {
    /// Nothing allocated.
    pub(crate) const fn new() -> Live {
        Live {
            tables: [const { OnceLock::new() }; TABLES],
        }
    }

    /// Notes a pointer that the driver just gave out; what was known about it before, if it is
    /// known still: the driver gave its memory back without a free (a context was destroyed).
    /// `Err` when every window is full.
    pub(crate) fn insert(&self, pointer: u64, charge: Charge) -> Result<Option<Charge>, ()> {
        let before = self.remove(pointer);
        for (number, table) in self.tables.iter().enumerate() {
            let table = table.get_or_init(|| Table::new(number));
            if table.insert(pointer, charge) {
                return Ok(before);
            }
        }
        Err(())
    }

    /// Forgets a pointer; what was known about it. Of two threads one gets it.
    pub(crate) fn remove(&self, pointer: u64) -> Option<Charge> {
        self.tables
            .iter()
            .map_while(OnceLock::get)
            .find_map(|table| table.remove(pointer))
    }

    /// Forgets everything: a forked child has none of its parent's memory.
    pub(crate) fn clear(&self) {
        for table in self.tables.iter().map_while(OnceLock::get) {
            table
                .keys
                .iter()
                .for_each(|key| key.store(EMPTY, Ordering::Relaxed));
        }
    }
}

impl Table {
    fn new(number: usize) -> Table {
        let slots = |_| {
            let count = 1_usize << (FIRST as usize + number);
            std::iter::repeat_with(|| AtomicU64::new(EMPTY))
                .take(count)
                .collect()
        };
        Table {
            keys: slots(()),
            values: slots(()),
        }
    }

    fn window(&self, pointer: u64) -> std::ops::Range<usize> {
        // Fibonacci hashing: pointers differ in their middle bits, the product mixes them upwards.
        let hash = (pointer >> 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let windows = self.keys.len() / WINDOW;
        let first = (hash as usize % windows) * WINDOW;
        first..first + WINDOW
    }

    fn insert(&self, pointer: u64, charge: Charge) -> bool {
        for place in self.window(pointer) {
            let key = &self.keys[place];
            if key.load(Ordering::Relaxed) == EMPTY
                && key
                    .compare_exchange(EMPTY, CLAIMED, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                self.values[place].store(pack(charge), Ordering::Relaxed);
                key.store(pointer, Ordering::Release);
                return true;
            }
        }
        false
    }

    fn remove(&self, pointer: u64) -> Option<Charge> {
        self.window(pointer).find_map(|place| {
            let key = &self.keys[place];
            if key.load(Ordering::Acquire) != pointer {
                return None;
            }
            let value = self.values[place].load(Ordering::Relaxed);
            key.compare_exchange(pointer, EMPTY, Ordering::AcqRel, Ordering::Relaxed)
                .ok()?;
            Some(unpack(value))
        })
    }
}

fn pack(Charge { slot, units }: Charge) -> u64 {
    u64::from(slot) << 32 | u64::from(units)
}

fn unpack(value: u64) -> Charge {
    Charge {
        slot: (value >> 32) as u8,
        units: value as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(units: u32) -> Charge {
        Charge { slot: 3, units }
    }

    #[test]
    fn a_pointer_is_known_until_it_is_freed_once() {
        let live = Live::new();
        assert_eq!(live.insert(0x7f00_0000_0200, charge(9)), Ok(None));
        assert_eq!(live.remove(0x7f00_0000_0200), Some(charge(9)));
        assert_eq!(live.remove(0x7f00_0000_0200), None);
    }

    #[test]
    fn a_pointer_that_comes_again_replaces_what_was_known() {
        let live = Live::new();
        live.insert(0x1000, charge(1)).unwrap();
        assert_eq!(live.insert(0x1000, charge(2)), Ok(Some(charge(1))));
        assert_eq!(live.remove(0x1000), Some(charge(2)));
        assert_eq!(live.remove(0x1000), None);
    }

    #[test]
    fn a_hundred_thousand_pointers_are_all_known() {
        let live = Live::new();
        let pointers = || (0..100_000_u64).map(|number| 0x7f00_0000_0000 + number * 512);
        for (units, pointer) in (0..).zip(pointers()) {
            live.insert(pointer, charge(units)).unwrap();
        }
        for (units, pointer) in (0..).zip(pointers()) {
            assert_eq!(live.remove(pointer), Some(charge(units)));
        }
    }

    #[test]
    fn of_threads_that_free_the_same_pointers_each_is_got_by_one() {
        let live = Live::new();
        let pointers: Vec<u64> = (1..20_000).map(|number| number * 4096).collect();
        for pointer in &pointers {
            live.insert(*pointer, charge(1)).unwrap();
        }
        let freed: usize = std::thread::scope(|scope| {
            let free = || {
                pointers
                    .iter()
                    .filter(|pointer| live.remove(**pointer).is_some())
                    .count()
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(free)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        assert_eq!(freed, pointers.len());
    }

    #[test]
    fn a_forked_child_starts_with_nothing() {
        let live = Live::new();
        live.insert(0x1000, charge(1)).unwrap();
        live.clear();
        assert_eq!(live.remove(0x1000), None);
    }
}
