//! Maps every charged pointer to its charge, in a lock-free table.
//!
//! A free has a pointer and needs its size; a query of the driver costs more than this table.
//! A table is an array of slots. A pointer's hash selects its window, a few neighbouring slots.
//! A full window leads to the next table, which is twice as large. A thread claims a slot by one
//! compare-and-swap of its key, and is then its only user until it stores the next key.
//!
//! Frees of stream-ordered memory look here too, because a program may free linear memory so.
//! The pointers of pools are noted in a small array of their own when the driver returns them, so
//! that their frees skip the table.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Slots of a window: a cache line of keys.
const WINDOW: usize = 8;

/// Slots of the first table, as a power of two.
const FIRST_TABLE_BITS: u32 = 12;

/// Tables: the last has 2^27 slots, more than there are 512-byte blocks in most memories.
const MAX_TABLES: usize = 16;

/// Pointers of pools that can be noted at a time.
const POOL_POINTERS: usize = 256;

/// An empty slot. The driver returns no pointer that is zero.
const EMPTY: u64 = 0;

/// A slot whose value is being written. The driver returns no odd pointer.
const CLAIMED: u64 = 1;

/// The charge of a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Charge {
    /// The index of the charged account.
    pub(crate) account: u8,
    /// The charged amount, in units; of a part, the number that [`ShareState`] says.
    pub(crate) units: u32,
    /// The context that owns the memory; zero where that is unknown.
    pub(crate) context: u64,
    /// Whether other processes can hold the memory.
    pub(crate) share: ShareState,
}

/// How other processes can come to hold memory. Each variant outweighs those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ShareState {
    /// The memory was not exported.
    Private,
    /// By an IPC handle, which alone keeps no memory alive.
    IpcHandle,
    /// By a descriptor, which keeps the memory alive unseen.
    Descriptor,
    /// As the chunk's, of which this is a piece, and whose number the units are.
    OfChunk,
    /// Never: an array that shares chunks with others. The units are how many fill one.
    OfArrays,
}

impl ShareState {
    /// Returns the state of a number that was one.
    pub(crate) fn from_bits(bits: u64) -> ShareState {
        match bits {
            0 => ShareState::Private,
            1 => ShareState::IpcHandle,
            2 => ShareState::Descriptor,
            3 => ShareState::OfChunk,
            _ => ShareState::OfArrays,
        }
    }
}

struct Table {
    /// Their number is a power of two.
    windows: Box<[Window]>,
    values: Box<[AtomicU64]>,
    contexts: Box<[AtomicU64]>,
}

/// The keys of neighbouring slots.
#[repr(align(64))]
struct Window([AtomicU64; WINDOW]);

/// A series of tables that grows by doubling.
pub(crate) struct AllocTable {
    tables: [OnceLock<Table>; MAX_TABLES],
    /// Recent pointers of pools, which have no charge of their own.
    pool_pointers: [AtomicU64; POOL_POINTERS],
}

impl AllocTable {
    /// Creates an empty table.
    pub(crate) const fn new() -> AllocTable {
        AllocTable {
            tables: [const { OnceLock::new() }; MAX_TABLES],
            pool_pointers: [const { AtomicU64::new(EMPTY) }; POOL_POINTERS],
        }
    }

    /// Notes that a pointer which the driver just returned belongs to a pool.
    #[inline]
    pub(crate) fn note_pool_pointer(&self, pointer: u64) {
        self.pool_pointer_slot(pointer)
            .store(pointer, Ordering::Relaxed);
    }

    /// Forgets a pool's pointer. Returns whether the pointer was noted.
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

    /// Records the charge of a new pointer. Returns a charge still recorded under the pointer: the
    /// driver took that memory back without a free, as it does when a context is destroyed. Fails
    /// when every window is full.
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

    /// Removes a pointer and returns its charge. Of two threads only one gets the charge.
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

    /// Removes every pointer of a context and returns their charges.
    pub(crate) fn remove_context(&self, context: u64) -> Vec<(u64, Charge)> {
        self.tables
            .iter()
            .map_while(OnceLock::get)
            .flat_map(|table| table.remove_context(context))
            .collect()
    }

    /// Removes everything, because a forked child has none of its parent's memory.
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

    /// Returns the slots of a pointer's window, with their keys.
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
            // The pointer may have been freed meanwhile, and allocated again by another context.
            let charge = self.read_charge(place);
            let ends = charge.context == context;
            key.store(if ends { EMPTY } else { pointer }, Ordering::Release);
            ends.then_some((pointer, charge))
        })
    }

    /// Reads the charge of a claimed slot.
    fn read_charge(&self, place: usize) -> Charge {
        let value = self.values[place].load(Ordering::Relaxed);
        Charge {
            account: (value >> 32) as u8,
            units: value as u32,
            context: self.contexts[place].load(Ordering::Relaxed),
            share: ShareState::from_bits(value >> 40),
        }
    }
}

/// Fibonacci hashing: pointers differ in their middle bits, and the product mixes these upwards.
#[inline]
fn hash(pointer: u64) -> u64 {
    (pointer >> 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

/// Claims the slot of a key, if the slot holds `pointer`.
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
            ShareState::OfChunk,
            ShareState::OfArrays,
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
