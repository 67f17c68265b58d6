//! Accounts for the memory of a container: its credit, and the processes that have it.

use std::collections::BTreeMap;

use bursar_protocol::units::Units;

use super::super::{Account, CreditAccounts};
use super::ProcessState;

/// The accounts of a container, and the processes that are granted credit of them.
pub(super) struct ContainerMemory {
    pub(super) accounts: Vec<Account>,
    pub(super) credit: CreditAccounts,
    pub(super) processes: BTreeMap<u32, ProcessState>,
    /// The managed memory that the driver moves away for device memory, by account.
    pub(super) evictable: Vec<Units>,
}
