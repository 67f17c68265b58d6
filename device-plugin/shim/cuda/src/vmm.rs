//! Tracks the references to memory of `cuMemCreate`, and its charges.
//!
//! The driver frees such memory when its last handle, mapping and binding is gone, and only then
//! the charge may be discharged. A descriptor that no process lists can keep exported memory (fact
//! F4). So this process never discharges it; the agent does once the memory is proven free.

use std::collections::{BTreeMap, HashMap};

use crate::alloc_table::Charge;

/// The references to memory that this process created.
#[derive(Clone, Copy, Debug)]
struct Allocation {
    charge: Charge,
    handles: u32,
    mappings: u32,
    bindings: u32,
    exported: bool,
}

/// A mapped range.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    bytes: u64,
    handle: u64,
}

/// A binding to a multicast object: its handle, the account of the memory's device, and the offset.
type Binding = (u64, u8, u64);

/// All memory that this process created and still refers to, by handle. The driver keeps a handle's
/// number while its memory is mapped (`cuMemRetainAllocationHandle`).
#[derive(Debug, Default)]
pub(crate) struct VmmTable {
    allocations: HashMap<u64, Allocation>,
    mappings: BTreeMap<u64, Mapping>,
    bindings: BTreeMap<Binding, u64>,
}

impl VmmTable {
    /// Records memory that was created with one handle.
    pub(crate) fn created(&mut self, handle: u64, charge: Charge) {
        let memory = Allocation {
            charge,
            handles: 1,
            mappings: 0,
            bindings: 0,
            exported: false,
        };
        self.allocations.insert(handle, memory);
    }

    /// Drops a handle's reference. Returns the charge to discharge, if that was the last reference.
    pub(crate) fn released(&mut self, handle: u64) -> Option<Charge> {
        self.update(handle, |memory| {
            memory.handles = memory.handles.saturating_sub(1)
        })
    }

    /// Adds a reference to the handle of mapped memory.
    pub(crate) fn retained(&mut self, handle: u64) {
        self.update(handle, |memory| memory.handles += 1);
    }

    /// Records a mapping. Memory of other processes is not in the table.
    pub(crate) fn mapped(&mut self, address: u64, bytes: u64, handle: u64) {
        if self.allocations.contains_key(&handle) {
            self.mappings.insert(address, Mapping { bytes, handle });
            self.update(handle, |memory| memory.mappings += 1);
        }
    }

    /// Drops every mapping inside a range. Returns the charges to discharge.
    pub(crate) fn unmapped(&mut self, address: u64, bytes: u64) -> Vec<Charge> {
        let end = address.saturating_add(bytes);
        let inside: Vec<(u64, u64)> = self
            .mappings
            .range(address..end)
            .filter(|(at, mapping)| at.saturating_add(mapping.bytes) <= end)
            .map(|(at, mapping)| (*at, mapping.handle))
            .collect();
        let charges = inside.into_iter().filter_map(|(at, handle)| {
            self.mappings.remove(&at);
            self.update(handle, |memory| {
                memory.mappings = memory.mappings.saturating_sub(1)
            })
        });
        charges.collect()
    }

    /// Records a binding of memory to a multicast object.
    pub(crate) fn bound(&mut self, (object, offset): (u64, u64), handle: u64) {
        let Some(memory) = self.allocations.get(&handle) else {
            return;
        };
        let binding = (object, memory.charge.account, offset);
        if self.bindings.insert(binding, handle).is_none() {
            self.update(handle, |memory| memory.bindings += 1);
        }
    }

    /// Drops the bindings of a multicast object's range for the device of an account. Returns the
    /// charges to discharge.
    pub(crate) fn unbound(
        &mut self,
        object: u64,
        account: u8,
        offset: u64,
        bytes: u64,
    ) -> Vec<Charge> {
        let end = offset.saturating_add(bytes);
        let range = (object, account, offset)..(object, account, end);
        let inside: Vec<(Binding, u64)> = self
            .bindings
            .range(range)
            .map(|(binding, handle)| (*binding, *handle))
            .collect();
        let charges = inside.into_iter().filter_map(|(binding, handle)| {
            self.bindings.remove(&binding);
            self.update(handle, |memory| {
                memory.bindings = memory.bindings.saturating_sub(1)
            })
        });
        charges.collect()
    }

    /// Returns the handle of the memory mapped at an address.
    pub(crate) fn handle_at(&self, address: u64) -> Option<u64> {
        let (at, mapping) = self.mappings.range(..=address).next_back()?;
        (address - at < mapping.bytes).then_some(mapping.handle)
    }

    /// Marks memory as exported before the export. Returns its charge, if it was not marked before.
    pub(crate) fn export(&mut self, handle: u64) -> Option<Charge> {
        let memory = self.allocations.get_mut(&handle)?;
        (!std::mem::replace(&mut memory.exported, true)).then_some(memory.charge)
    }

    /// Takes the mark back, because the driver refused the export.
    pub(crate) fn unexport(&mut self, handle: u64) {
        if let Some(memory) = self.allocations.get_mut(&handle) {
            memory.exported = false;
        }
    }

    /// Changes an allocation's references, and removes the allocation with its last reference.
    fn update(&mut self, handle: u64, change: impl FnOnce(&mut Allocation)) -> Option<Charge> {
        let memory = self.allocations.get_mut(&handle)?;
        change(memory);
        let Allocation {
            charge,
            handles,
            mappings,
            bindings,
            exported,
        } = *memory;
        if handles != 0 || mappings != 0 || bindings != 0 {
            return None;
        }
        self.allocations.remove(&handle);
        (!exported).then_some(charge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc_table::ShareState;

    const SIZE: u64 = 2 << 20;

    fn charge(units: u32) -> Charge {
        Charge {
            account: 0,
            units,
            context: 0,
            share: ShareState::Private,
        }
    }

    #[test]
    fn charge_is_returned_with_the_last_reference() {
        let mut table = VmmTable::default();
        table.created(16, charge(1));
        assert_eq!(table.released(16), Some(charge(1)));
        assert_eq!(table.released(16), None, "it is gone");

        table.created(16, charge(2));
        table.mapped(SIZE, SIZE, 16);
        table.mapped(8 * SIZE, SIZE, 16);
        assert_eq!(table.released(16), None);
        assert_eq!(table.unmapped(SIZE, SIZE), []);
        table.retained(16);
        assert_eq!(table.unmapped(8 * SIZE, SIZE), []);
        assert_eq!(table.released(16), Some(charge(2)));

        table.created(32, charge(3));
        table.bound((64, 0), 32);
        assert_eq!(table.released(32), None);
        assert_eq!(table.unbound(64, 0, SIZE, SIZE), []);
        assert_eq!(table.unbound(64, 0, 0, SIZE), [charge(3)]);
    }

    #[test]
    fn unmap_ends_every_mapping_inside_its_range_and_no_other() {
        let mut table = VmmTable::default();
        for number in 0..4 {
            table.created(number, charge(number as u32));
            table.mapped(number * SIZE, SIZE, number);
            assert_eq!(table.released(number), None);
        }
        assert_eq!(table.unmapped(SIZE, 2 * SIZE), [charge(1), charge(2)]);
        assert_eq!(table.handle_at(SIZE), None);
        assert_eq!(table.handle_at(3 * SIZE + 1), Some(3));
        assert_eq!(table.handle_at(4 * SIZE), None);
        assert_eq!(table.unmapped(0, SIZE / 2), []);
        assert_eq!(table.unmapped(0, 4 * SIZE), [charge(0), charge(3)]);
    }

    #[test]
    fn exported_memory_is_never_discharged() {
        let mut table = VmmTable::default();
        table.created(16, charge(1));
        assert_eq!(table.export(16), Some(charge(1)));
        assert_eq!(table.export(16), None, "it is counted once");
        assert_eq!(table.released(16), None);
        table.created(16, charge(2));
        assert_eq!(table.export(16), Some(charge(2)));
        table.unexport(16);
        assert_eq!(table.released(16), Some(charge(2)));
    }

    #[test]
    fn bindings_of_two_devices_at_one_offset_are_distinct() {
        let mut table = VmmTable::default();
        for slot in [0, 1] {
            let charge = Charge {
                account: slot,
                ..charge(7)
            };
            table.created(slot.into(), charge);
            table.bound((64, 0), slot.into());
            assert_eq!(table.released(slot.into()), None, "it is bound");
        }
        for slot in [1, 0] {
            let charge = Charge {
                account: slot,
                ..charge(7)
            };
            assert_eq!(table.unbound(64, slot, 0, SIZE), [charge]);
        }
    }

    #[test]
    fn memory_of_other_processes_is_not_tracked() {
        let mut table = VmmTable::default();
        table.mapped(SIZE, SIZE, 99);
        table.retained(99);
        table.bound((64, 0), 99);
        assert_eq!(table.handle_at(SIZE), None);
        assert_eq!(table.export(99), None);
        assert_eq!(table.unmapped(SIZE, SIZE), []);
        assert_eq!(table.released(99), None);
    }
}
