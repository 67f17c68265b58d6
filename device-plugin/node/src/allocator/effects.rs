//! Remembers the steps on the host that the allocator still has to take.

use std::collections::BTreeSet;

use bursar_ledger::Binding;
use bursar_ledger::units::AllocationId;

/// The allocations whose files and sockets do not match the ledger yet. An allocation stays until
/// its step has succeeded, so that each tick repeats what failed.
#[derive(Debug, Default)]
pub(crate) struct PendingEffects {
    /// Bound allocations that lack their socket or CDI file.
    setup: BTreeSet<AllocationId>,
    /// Ended allocations whose files and sockets are not removed yet.
    teardown: BTreeSet<AllocationId>,
}

impl PendingEffects {
    /// Whether the host matches the ledger.
    pub(crate) fn is_empty(&self) -> bool {
        self.setup.is_empty() && self.teardown.is_empty()
    }

    /// Bound allocations need their socket and CDI file.
    pub(crate) fn begin_setup(&mut self, allocations: impl IntoIterator<Item = AllocationId>) {
        self.setup.extend(allocations);
    }

    /// An allocation gets its effects now. One of an init container that had ended may start
    /// again, and must not be taken down later.
    pub(crate) fn cancel_teardown(&mut self, allocation: AllocationId) {
        self.teardown.remove(&allocation);
    }

    /// An allocation has its socket and CDI file.
    pub(crate) fn finish_setup(&mut self, allocation: AllocationId) {
        self.setup.remove(&allocation);
    }

    /// Whether an allocation lacks its socket or CDI file.
    pub(crate) fn lacks_setup(&self, allocation: AllocationId) -> bool {
        self.setup.contains(&allocation)
    }

    /// Whether an allocation of a binding lacks its socket or CDI file.
    pub(crate) fn lacks_setup_of(&self, binding: &Binding) -> bool {
        let mut allocations = binding.allocations.iter();
        allocations.any(|allocation| self.lacks_setup(*allocation))
    }

    /// Ended allocations are to be taken down.
    pub(crate) fn begin_teardown(&mut self, allocations: impl IntoIterator<Item = AllocationId>) {
        self.teardown.extend(allocations);
    }

    /// The allocations to take down.
    pub(crate) fn teardowns(&self) -> Vec<AllocationId> {
        self.teardown.iter().copied().collect()
    }

    /// An allocation has no files and sockets any more.
    pub(crate) fn finish_teardown(&mut self, allocation: AllocationId) {
        self.teardown.remove(&allocation);
        self.setup.remove(&allocation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_stays_until_its_step_has_succeeded() {
        let id = AllocationId::from_bits;
        let mut effects = PendingEffects::default();
        effects.begin_setup([id(1), id(2)]);
        effects.finish_setup(id(1));
        assert!(!effects.lacks_setup(id(1)) && effects.lacks_setup(id(2)));
        effects.begin_teardown([id(2), id(3)]);
        effects.cancel_teardown(id(3));
        assert_eq!(effects.teardowns(), [id(2)]);
        // An ended allocation lacks nothing, although its setup had failed.
        effects.finish_teardown(id(2));
        assert!(effects.is_empty());
    }
}
