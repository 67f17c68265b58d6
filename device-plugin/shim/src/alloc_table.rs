//! What is allocated now: the size of every charged pointer, in a lock-free table.
//!
//! A free has a pointer and needs its size; asking the driver costs more than the whole of this.
//! A table is an array of slots; a pointer's window is a few neighbouring slots that its hash picks.
//! A full window leads to the next table, twice as large. A slot is claimed by one compare-and-swap
//! of its key, emptied by another, and by a store between them: whoever claimed it has it alone.
//!
//! Frees of stream-ordered memory come here too, for a program may free linear memory so, and find nothing.
//! Their pointers are noted when the driver gives them out, in a slot each, where there is no other.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Slots that are looked at for one pointer in one table: a cache line of keys.
const WINDOW: usize = 8;

/// Slots of the first table, as a power of two.
const FIRST_TABLE_BITS: u32 = 12;

/// Tables: the last has 2^27 slots, more than there are 512-byte blocks in most memories.
const MAX_TABLES: usize = 16;

/// Pointers that can be known to be in no table.
const POOL_POINTERS: usize = 256;

/// No pointer. The driver hands out none at zero.
const EMPTY: u64 = 0;

/// A slot whose value is being written. The driver hands out no odd pointer.
const CLAIMED: u64 = 1;

/// What is known about a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Charge {
    /// The account that was charged.
    pub(crate) account: u8,
    /// How much, in units.
    pub(crate) units: u32,
    /// The context that the memory ends with; zero where that is not known.
    pub(crate) context: u64,
    /// Whether others can come to hold the memory.
    pub(crate) share: ShareState,
}

/// How others can come to hold memory. Each way outweighs those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ShareState {
    /// Not at all.
    Private,
    /// By an IPC handle, which alone keeps nothing.
    IpcHandle,
    /// By a descriptor, which keeps the memory unseen.
    Descriptor,
}

struct Table {
    /// As many as a power of two.
    windows: Box<[Window]>,
    values: Box<[AtomicU64]>,
    contexts: Box<[AtomicU64]>,
}

/// The keys of neighbouring slots.
#[repr(align(64))]
struct Window([AtomicU64; WINDOW]);

/// The table of tables.
pub(crate) struct AllocTable {
    tables: [OnceLock<Table>; MAX_TABLES],
    /// Pointers that are in no table.
    pool_pointers: [AtomicU64; POOL_POINTERS],
}

impl AllocTable {
    /// Nothing allocated.
    pub(crate) const fn new() -> AllocTable {
        AllocTable {
            tables: [const { OnceLock::new() }; MAX_TABLES],
            pool_pointers: [const { AtomicU64::new(EMPTY) }; POOL_POINTERS],
        }
    }

    /// Notes that a pointer which the driver just gave out is not charged by itself.
    #[inline]
    pub(crate) fn note_pool_pointer(&self, pointer: u64) {
        self.pool_pointer_slot(pointer)
            .store(pointer, Ordering::Relaxed);
    }

    /// Forgets that; whether it was noted.
    #[inline]
    fn forget_pool_pointer(&self, pointer: u64) -> bool {
        let slot = self.pool_pointer_slot(pointer);
        let noted = slot.load(Ordering::Relaxed) == pointer;
        if noted {
            slot.store(EMPTY, Ordering::Relaxed);
        }
        noted
    }

    #[inline]
    fn pool_pointer_slot(&self, pointer: u64) -> &AtomicU64 {
        &self.pool_pointers[hash(pointer) as usize % POOL_POINTERS]
    }

    /// Notes a pointer that the driver just gave out; what was known about it before, if it is
    /// known still: the driver gave its memory back without a free (a context was destroyed).
    /// `Err` when every window is full.
    pub(crate) fn insert(&self, pointer: u64, charge: Charge) -> Result<Option<Charge>, ()> {
        self.forget_pool_pointer(pointer);
        let before = self.remove_charge(pointer);
        for (number, table) in self.tables.iter().enumerate() {
            let table = table.get_or_init(|| Table::new(number));
            if table.insert(pointer, charge) {
                return Ok(before);
            }
        }
        Err(())
    }

    /// Forgets a pointer; what was known about it. Of two threads one gets it.
    #[inline]
    pub(crate) fn remove(&self, pointer: u64) -> Option<Charge> {
        if self.forget_pool_pointer(pointer) {
            return None;
        }
        self.remove_charge(pointer)
    }

    #[inline]
    fn remove_charge(&self, pointer: u64) -> Option<Charge> {
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
            let keys = table.windows.iter().flat_map(|window| &window.0);
            keys.for_each(|key| key.store(EMPTY, Ordering::Relaxed));
        }
    }
}

impl Table {
    fn new(number: usize) -> Table {
        let count = 1_usize << (FIRST_TABLE_BITS as usize + number);
        let slots = || {
            let slots = std::iter::repeat_with(|| AtomicU64::new(0)).take(count);
            slots.collect()
        };
        let empty = || Window([const { AtomicU64::new(EMPTY) }; WINDOW]);
        let windows = std::iter::repeat_with(empty).take(count / WINDOW);
        Table {
            windows: windows.collect(),
            values: slots(),
            contexts: slots(),
        }
    }

    /// The slots of a pointer's window, with their keys.
    fn window(&self, pointer: u64) -> impl Iterator<Item = (usize, &AtomicU64)> {
        let window = hash(pointer) as usize & (self.windows.len() - 1);
        (window * WINDOW..).zip(&self.windows[window].0)
    }

    fn insert(&self, pointer: u64, charge: Charge) -> bool {
        for (place, key) in self.window(pointer) {
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
        self.window(pointer).find_map(|(place, key)| {
            if !claim(key, pointer) {
                return None;
            }
            let charge = self.read_charge(place);
            key.store(EMPTY, Ordering::Release);
            Some(charge)
        })
    }

    fn remove_context(&self, context: u64) -> impl Iterator<Item = (u64, Charge)> {
        let keys = self.windows.iter().flat_map(|window| &window.0);
        keys.enumerate().filter_map(move |(place, key)| {
            let pointer = key.load(Ordering::Acquire);
            if pointer == EMPTY
                || pointer == CLAIMED
                || self.contexts[place].load(Ordering::Relaxed) != context
                || !claim(key, pointer)
            {
                return None;
            }
            // Meanwhile the pointer may have been freed, and come again from another context.
            let charge = self.read_charge(place);
            let ends = charge.context == context;
            key.store(if ends { EMPTY } else { pointer }, Ordering::Release);
            ends.then_some((pointer, charge))
        })
    }

    /// What a claimed slot says.
    fn read_charge(&self, place: usize) -> Charge {
        let value = self.values[place].load(Ordering::Relaxed);
        Charge {
            account: (value >> 32) as u8,
            units: value as u32,
            context: self.contexts[place].load(Ordering::Relaxed),
            share: match value >> 40 {
                0 => ShareState::Private,
                1 => ShareState::IpcHandle,
                _ => ShareState::Descriptor,
            },
        }
    }
}

/// Fibonacci hashing: pointers differ in their middle bits, the product mixes them upwards.
#[inline]
fn hash(pointer: u64) -> u64 {
    (pointer >> 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

/// Claims the slot of a key, if it holds `pointer`.
fn claim(key: &AtomicU64, pointer: u64) -> bool {
    key.load(Ordering::Relaxed) == pointer
        && key
            .compare_exchange(pointer, CLAIMED, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
}

fn pack(charge: Charge) -> u64 {
    (charge.share as u64) << 40 | u64::from(charge.account) << 32 | u64::from(charge.units)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(units: u32) -> Charge {
        Charge {
            account: 3,
            units,
            context: 7,
            share: ShareState::Private,
        }
    }

    #[test]
    fn remove_returns_every_field_of_a_charge() {
        let live = AllocTable::new();
        for share in [
            ShareState::Private,
            ShareState::IpcHandle,
            ShareState::Descriptor,
        ] {
            let charge = Charge {
                account: u8::MAX,
                share,
                ..charge(u32::MAX)
            };
            live.insert(0x1000, charge).unwrap();
            assert_eq!(live.remove(0x1000), Some(charge));
        }
    }

    #[test]
    fn pointer_is_found_until_it_is_removed_once() {
        let live = AllocTable::new();
        assert_eq!(live.insert(0x7f00_0000_0200, charge(9)), Ok(None));
        assert_eq!(live.remove(0x7f00_0000_0200), Some(charge(9)));
        assert_eq!(live.remove(0x7f00_0000_0200), None);
    }

    #[test]
    fn insert_replaces_the_charge_of_a_reused_pointer() {
        let live = AllocTable::new();
        live.insert(0x1000, charge(1)).unwrap();
        assert_eq!(live.insert(0x1000, charge(2)), Ok(Some(charge(1))));
        assert_eq!(live.remove(0x1000), Some(charge(2)));
        assert_eq!(live.remove(0x1000), None);
    }

    #[test]
    fn remove_context_removes_only_that_contexts_pointers() {
        let live = AllocTable::new();
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
    fn table_holds_a_hundred_thousand_pointers() {
        let live = AllocTable::new();
        let pointers = || (0..100_000_u64).map(|number| 0x7f00_0000_0000 + number * 512);
        for (units, pointer) in (0..).zip(pointers()) {
            live.insert(pointer, charge(units)).unwrap();
        }
        for (units, pointer) in (0..).zip(pointers()) {
            assert_eq!(live.remove(pointer), Some(charge(units)));
        }
    }

    #[test]
    fn each_pointer_is_removed_by_one_of_racing_threads() {
        let live = AllocTable::new();
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
    fn pool_pointer_is_found_once_it_is_charged_itself() {
        let live = AllocTable::new();
        live.note_pool_pointer(0x1000);
        assert_eq!(live.remove(0x1000), None);
        live.note_pool_pointer(0x1000);
        live.insert(0x1000, charge(1)).unwrap();
        assert_eq!(live.remove(0x1000), Some(charge(1)));
        for pointer in (1..=1000).map(|number| number * 512) {
            live.note_pool_pointer(pointer);
            live.insert(pointer + (1 << 30), charge(1)).unwrap();
        }
        for pointer in (1..=1000).map(|number| number * 512) {
            assert_eq!(live.remove(pointer), None);
            assert_eq!(live.remove(pointer + (1 << 30)), Some(charge(1)));
        }
    }

    #[test]
    fn clear_removes_every_pointer() {
        let live = AllocTable::new();
        live.insert(0x1000, charge(1)).unwrap();
        live.clear();
        assert_eq!(live.remove(0x1000), None);
    }
}
