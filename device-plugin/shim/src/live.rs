//! What is allocated now: the size of every charged pointer, in a lock-free table.
//!
//! A free has a pointer and needs its size; asking the driver costs more than the whole of this.
//! A table is an array of slots; a pointer's window is a few neighbouring slots that its hash picks.
//! A full window leads to the next table, twice as large. A slot is claimed by one compare-and-swap
//! of its key, emptied by another, and by a store between them: whoever claimed it has it alone.

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
    /// The context that the memory ends with; zero where that is not known.
    pub(crate) context: u64,
    /// Whether others can come to hold the memory.
    pub(crate) lent: Lent,
}

/// How others can come to hold memory. Each way outweighs those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lent {
    /// Not at all.
    No,
    /// By an IPC handle, which alone keeps nothing.
    Handle,
    /// By a descriptor, which keeps the memory unseen.
    Descriptor,
}

struct Table {
    keys: Box<[AtomicU64]>,
    values: Box<[AtomicU64]>,
    contexts: Box<[AtomicU64]>,
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

    /// Forgets every pointer of a context; what was known about them.
    pub(crate) fn remove_context(&self, context: u64) -> Vec<(u64, Charge)> {
        self.tables
            .iter()
            .map_while(OnceLock::get)
            .flat_map(|table| table.remove_context(context))
            .collect()
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
            contexts: slots(()),
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
                self.contexts[place].store(charge.context, Ordering::Relaxed);
                key.store(pointer, Ordering::Release);
                return true;
            }
        }
        false
    }

    fn remove(&self, pointer: u64) -> Option<Charge> {
        self.window(pointer).find_map(|place| {
            if !self.claim(place, pointer) {
                return None;
            }
            let charge = self.charge(place);
            self.keys[place].store(EMPTY, Ordering::Release);
            Some(charge)
        })
    }

    fn remove_context(&self, context: u64) -> impl Iterator<Item = (u64, Charge)> {
        (0..self.keys.len()).filter_map(move |place| {
            let pointer = self.keys[place].load(Ordering::Acquire);
            if pointer == EMPTY
                || pointer == CLAIMED
                || self.contexts[place].load(Ordering::Relaxed) != context
                || !self.claim(place, pointer)
            {
                return None;
            }
            // Meanwhile the pointer may have been freed, and come again from another context.
            let charge = self.charge(place);
            let ends = charge.context == context;
            self.keys[place].store(if ends { EMPTY } else { pointer }, Ordering::Release);
            ends.then_some((pointer, charge))
        })
    }

    /// Claims the slot that holds `pointer`.
    fn claim(&self, place: usize, pointer: u64) -> bool {
        let key = &self.keys[place];
        key.load(Ordering::Relaxed) == pointer
            && key
                .compare_exchange(pointer, CLAIMED, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
    }

    /// What a claimed slot says.
    fn charge(&self, place: usize) -> Charge {
        let value = self.values[place].load(Ordering::Relaxed);
        Charge {
            slot: (value >> 32) as u8,
            units: value as u32,
            context: self.contexts[place].load(Ordering::Relaxed),
            lent: match value >> 40 {
                0 => Lent::No,
                1 => Lent::Handle,
                _ => Lent::Descriptor,
            },
        }
    }
}

fn pack(charge: Charge) -> u64 {
    (charge.lent as u64) << 40 | u64::from(charge.slot) << 32 | u64::from(charge.units)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(units: u32) -> Charge {
        Charge {
            slot: 3,
            units,
            context: 7,
            lent: Lent::No,
        }
    }

    #[test]
    fn everything_about_a_charge_is_known_again() {
        let live = Live::new();
        for lent in [Lent::No, Lent::Handle, Lent::Descriptor] {
            let charge = Charge {
                slot: u8::MAX,
                lent,
                ..charge(u32::MAX)
            };
            live.insert(0x1000, charge).unwrap();
            assert_eq!(live.remove(0x1000), Some(charge));
        }
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
    fn a_contexts_pointers_are_forgotten_together_and_no_others() {
        let live = Live::new();
        let context = |number: u64| number % 3;
        for number in 1..=10_000 {
            let charge = Charge {
                context: context(number),
                ..charge(1)
            };
            live.insert(number * 512, charge).unwrap();
        }
        let mut ended: Vec<u64> = live
            .remove_context(2)
            .into_iter()
            .map(|(pointer, _)| pointer / 512)
            .collect();
        ended.sort_unstable();
        let expected: Vec<u64> = (1..=10_000)
            .filter(|number| context(*number) == 2)
            .collect();
        assert_eq!(ended, expected);
        for number in 1..=10_000 {
            let known = live.remove(number * 512).is_some();
            assert_eq!(known, context(number) != 2, "{number}");
        }
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
