//! Charges and discharges this process's memory against its credit page.

use std::sync::atomic::Ordering;

use bursar_protocol::page::Slot;
use bursar_protocol::units::Units;
use bursar_protocol::wire::{self, Verdict};
use bursar_protocol::word::NoCredit;

use crate::agent_client::{self, CreditOutcome};
use crate::alloc_table::{AllocTable, Charge, ShareState};
use crate::curesult::{self, CuResult};
use crate::pools::POOLS;
use crate::session_state::{self, SessionGuard, SessionState};

/// Every charged pointer of this process.
pub(crate) static ALLOC_TABLE: AllocTable = AllocTable::new();

/// Rounds of asking for credit that other threads then took.
const MAX_ATTEMPTS: usize = 64;

/// What memory is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Account {
    /// The device with this ordinal.
    Device(i32),
    /// Managed memory.
    Managed,
}

/// The quota does not allow it, or nobody could be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Denied;

/// A charge that is not settled yet: given back unless it is kept.
#[derive(Debug)]
pub(crate) struct PendingCharge {
    slot: u8,
    units: Units,
    committed: bool,
}

impl PendingCharge {
    /// Charges more, or gives some back, so that the charge is for `bytes`.
    pub(crate) fn adjust(&mut self, bytes: u64) -> Result<(), Denied> {
        let units = Units::holding(bytes).ok_or(Denied)?;
        let state = session_state::state().ok_or(Denied)?;
        if units > self.units {
            charge_units(state, self.slot, units.saturating_sub(self.units))?;
        } else {
            discharge_units(state, self.slot, self.units.saturating_sub(units));
        }
        self.units = units;
        Ok(())
    }

    /// The allocation succeeded: the charge stays until `pointer` is freed or `context` ends. `Err` when it cannot be
    /// noted; the charge is then given back, and the caller frees the pointer.
    pub(crate) fn commit(mut self, pointer: u64, context: u64) -> Result<(), Denied> {
        let charge = Charge {
            account: self.slot,
            units: self.units.0,
            context,
            share: ShareState::Private,
        };
        if let Some(before) = ALLOC_TABLE.insert(pointer, charge).map_err(|()| Denied)? {
            discharge(before);
        }
        self.committed = true;
        Ok(())
    }

    /// The charge stays until it is given back by [`discharge`].
    pub(crate) fn into_charge(mut self) -> Charge {
        self.committed = true;
        Charge {
            account: self.slot,
            units: self.units.0,
            context: 0,
            share: ShareState::Private,
        }
    }
}

impl Drop for PendingCharge {
    fn drop(&mut self) {
        if let (false, Some(state)) = (self.committed, session_state::state()) {
            discharge_units(state, self.slot, self.units);
        }
    }
}

/// Charges `bytes` before an allocation, and reports it to the agent if that is denied.
pub(crate) fn charge(
    account: Account,
    bytes: u64,
    function: &str,
) -> Result<PendingCharge, Denied> {
    let state = session_state::state().ok_or(Denied)?;
    let slot = index_of(state, account).ok_or(Denied)?;
    let charged = Units::holding(bytes).ok_or(Denied).and_then(|units| {
        charge_units(state, slot, units).or_else(|denied| {
            // What pools have cached is the program's to use in another way.
            let pools = POOLS.reclaim();
            if crate::graphs::reclaim() || pools {
                charge_units(state, slot, units)
            } else {
                Err(denied)
            }
        })?;
        Ok(PendingCharge {
            slot,
            units,
            committed: false,
        })
    });
    if charged.is_err() {
        report_denial(slot, bytes, function);
    }
    charged
}

/// Whether nothing can be charged yet: before `cuInit` nobody knows which device an account is, and the driver refuses
/// whatever it is asked.
pub(crate) fn before_cuinit() -> bool {
    let is_new = |state: &SessionState| !state.session_established.load(Ordering::Acquire);
    session_state::state().is_some_and(is_new) && crate::hooks::device_count() == 0
}

/// Says hello where that was not done yet. An agent that is away is not waited for.
pub(crate) fn open_session() {
    if let Some(state) = session_state::state()
        && !state.session_established.load(Ordering::Acquire)
        && let Some(guard) = state.lock()
    {
        agent_client::connect_once(state, &guard, map_devices);
    }
}

/// Reports a denial to the agent.
pub(crate) fn report_denial(account: u8, bytes: u64, function: &str) {
    if let Some(state) = session_state::state()
        && let Some(guard) = state.lock()
    {
        agent_client::report_denial(state, &guard, account, bytes, function);
    }
}

/// The account of `kind`, if the container has one.
pub(crate) fn account_index(account: Account) -> Option<u8> {
    index_of(session_state::state()?, account)
}

/// Charges an account if the credit for it is idle: one compare-and-swap, and nobody is asked.
pub(crate) fn try_charge(account: u8, units: Units) -> bool {
    session_state::state()
        .and_then(|state| slot(state, account))
        .is_some_and(|slot| slot.charge(units).is_ok())
}

/// Charges an account, and asks the agent where it must.
pub(crate) fn charge_account(account: u8, units: Units) -> Result<(), Denied> {
    charge_units(session_state::state().ok_or(Denied)?, account, units)
}

/// Gives units back that [`take`] or [`take_idle`] charged.
pub(crate) fn discharge_account(account: u8, units: Units) {
    if let Some(state) = session_state::state() {
        discharge_units(state, account, units);
    }
}

/// What the agent would grant, by what it last wrote on the page: it may be less by now.
pub(crate) fn grantable(account: u8) -> Units {
    let slot = session_state::state().and_then(|state| slot(state, account));
    slot.map_or(Units::ZERO, |slot| {
        let used = Units(slot.word().used).min(Units::MAX);
        slot.quota()
            .saturating_sub(used.saturating_add(slot.others()))
    })
}

/// Whether no other process of the container has a part in an account.
pub(crate) fn is_sole_process(account: u8) -> bool {
    let slot = session_state::state().and_then(|state| slot(state, account));
    slot.is_some_and(|slot| slot.siblings() == 0)
}

/// Gives back what a freed pointer was charged.
pub(crate) fn discharge(charge: Charge) {
    match charge.share {
        ShareState::Private => {}
        ShareState::IpcHandle => unmark_exported(charge),
        // Whoever has the descriptor has the memory.
        ShareState::Descriptor => return,
    }
    discharge_account(charge.account, Units(charge.units));
}

/// Counts a charge as exported, before any other process can hold its memory: it then stays charged
/// to the pod after this process's death until it is free (design F4, F13). `Err` when that cannot
/// be noted.
pub(crate) fn mark_exported(charge: Charge) -> Result<(), Denied> {
    let state = session_state::state().ok_or(Denied)?;
    let guard = state.lock().ok_or(Denied)?;
    let slot = slot(state, charge.account).ok_or(Denied)?;
    slot.export(Units(charge.units));
    // The agent takes it down, for the one after it.
    agent_client::refresh_usage(state, &guard, map_devices);
    Ok(())
}

/// Counts a charge as exported no more: nobody else can hold its memory.
pub(crate) fn unmark_exported(charge: Charge) {
    // The lock keeps the process from moving to another page meanwhile.
    if let Some((state, _guard)) =
        session_state::state().and_then(|state| Some((state, state.lock()?)))
        && let Some(slot) = slot(state, charge.account)
    {
        slot.unexport(Units(charge.units));
    }
}

/// Frees what a program hands back, by `call`. It is forgotten first: once it is freed, another thread
/// may be given the same address.
pub(crate) fn free(pointer: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let known = session_state::state().and_then(|_| ALLOC_TABLE.remove(pointer));
    let answer = call();
    match (known, answer) {
        (Some(charge), curesult::SUCCESS) => discharge(charge),
        // Not freed, so still there.
        (Some(charge), _) => drop(ALLOC_TABLE.insert(pointer, charge)),
        (None, _) => {}
    }
    answer
}

/// What a context of a device is charged, in bytes; zero where contexts are not charged.
///
/// # Errors
/// There is no session, or the container has no such device.
pub(crate) fn context_size(device: i32) -> Result<u64, Denied> {
    let state = session_state::state().ok_or(Denied)?;
    let index = index_of(state, Account::Device(device)).ok_or(Denied)?;
    Ok(slot(state, index).ok_or(Denied)?.context().bytes())
}

/// Tells the agent that a context was made; what one takes, in bytes, as far as it was measured.
pub(crate) fn report_context(device: i32) -> Option<u64> {
    let state = session_state::state()?;
    let index = index_of(state, Account::Device(device))?;
    let guard = state.lock()?;
    agent_client::report_context(state, &guard, map_devices, index).map(Units::bytes)
}

/// Reports that a fault poisoned this image, with a device current; what to do, where the agent says it.
pub(crate) fn report_poison(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    device: i32,
    code: curesult::CuResult,
    able: bool,
) -> Option<Verdict> {
    agent_client::report_poison(state, guard, map_devices, code, able, || {
        let place = state.devices.get(usize::try_from(device).ok()?)?;
        place.load(Ordering::Acquire).checked_sub(1)
    })
}

/// What the container may still use of a device and its quota, in bytes; `None` without a session.
pub(crate) fn free_and_quota(device: i32) -> Option<(u64, u64)> {
    let state = session_state::state()?;
    POOLS.reconcile();
    let index = index_of(state, Account::Device(device))?;
    if slot(state, index)?.siblings() > 0
        && let Some(guard) = state.lock()
    {
        agent_client::refresh_usage(state, &guard, map_devices);
    }
    // Read after the refresh: it may have moved the process to another page.
    let now = || slot(state, index).map(|slot| (slot, slot.word()));
    let (slot, word) = match now()? {
        // Another thread moves: its lock says when it is done.
        (_, word) if word.is_frozen() => {
            let _guard = state.lock()?;
            now()?
        }
        now => now,
    };
    let quota = slot.quota();
    let used = Units(word.used)
        .min(Units::MAX)
        .saturating_add(slot.others());
    Some((quota.saturating_sub(used).bytes(), quota.bytes()))
}

fn slot(state: &SessionState, index: u8) -> Option<&'static Slot> {
    state.page()?.slot(usize::from(index))
}

/// The account of `kind`, after a hello where that was not said yet.
fn index_of(state: &SessionState, account: Account) -> Option<u8> {
    if !state.session_established.load(Ordering::Acquire) {
        let guard = state.lock()?;
        if !agent_client::ensure_session(state, &guard, map_devices) {
            return None;
        }
    }
    let place = match account {
        Account::Device(ordinal) => state.devices.get(usize::try_from(ordinal).ok()?)?,
        Account::Managed => &state.managed,
    };
    place.load(Ordering::Acquire).checked_sub(1)
}

fn charge_units(state: &SessionState, index: u8, units: Units) -> Result<(), Denied> {
    for _ in 0..MAX_ATTEMPTS {
        let missing = match slot(state, index).ok_or(Denied)?.charge(units) {
            Ok(()) => return Ok(()),
            Err(NoCredit::TooLarge) => return Err(Denied),
            // Another thread moves to another page: its lock says when it is done.
            Err(NoCredit::Frozen) => {
                drop(state.lock().ok_or(Denied)?);
                continue;
            }
            Err(NoCredit::Short(missing)) => Units(missing),
        };
        let guard = state.lock().ok_or(Denied)?;
        // Another thread may have got enough meanwhile, or given it back.
        match slot(state, index).ok_or(Denied)?.charge(units) {
            Ok(()) => return Ok(()),
            Err(NoCredit::Short(now)) if Units(now) > missing => {}
            Err(_) => {}
        }
        match agent_client::request_credit(state, &guard, map_devices, index, missing) {
            CreditOutcome::Granted => {}
            // What other threads of this process gave back since may be enough.
            CreditOutcome::Refused | CreditOutcome::Unavailable => {
                return slot(state, index)
                    .ok_or(Denied)?
                    .charge(units)
                    .map_err(|_| Denied);
            }
        }
    }
    Err(Denied)
}

fn discharge_units(state: &SessionState, index: u8, units: Units) {
    for _ in 0..MAX_ATTEMPTS {
        let Some(slot) = slot(state, index) else {
            return;
        };
        if slot.discharge(units) {
            return;
        }
        // Frozen: see above. Without the lock the bytes stay charged to this process until it ends.
        if state.lock().is_none() {
            return;
        }
    }
}

/// Finds each account's device by its UUID, as the real driver states it.
fn map_devices(accounts: &[wire::Account], found: &mut dyn FnMut(usize, u8)) {
    for device in 0..crate::hooks::device_count() {
        let Some(uuid) = crate::hooks::device_uuid(device) else {
            continue;
        };
        let account = accounts.iter().position(|account| match account {
            wire::Account::Device(text) => uuid_bytes(text) == Some(uuid),
            wire::Account::Managed => false,
        });
        let account = account.and_then(|index| u8::try_from(index).ok());
        if let (Some(account), Ok(device)) = (account, usize::try_from(device)) {
            found(device, account);
        }
    }
}

/// The 16 bytes of `GPU-<uuid>` or `MIG-<uuid>`.
fn uuid_bytes(text: &str) -> Option<[u8; 16]> {
    let digits = text
        .strip_prefix("GPU-")
        .or_else(|| text.strip_prefix("MIG-"))?
        .replace('-', "");
    if digits.len() != 32 {
        return None;
    }
    u128::from_str_radix(&digits, 16)
        .ok()
        .map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_bytes_are_the_32_hex_digits_in_order() {
        let mut expected = [0; 16];
        expected[0] = 0x5e;
        expected[15] = 0x01;
        assert_eq!(
            uuid_bytes("GPU-5e000000-0000-0000-0000-000000000001"),
            Some(expected)
        );
        assert_eq!(
            uuid_bytes("MIG-5e000000-0000-0000-0000-000000000001"),
            Some(expected)
        );
        for bad in [
            "",
            "GPU-",
            "GPU-5e",
            "5e000000-0000-0000-0000-000000000001",
            "GPU-zz000000-0000-0000-0000-000000000001",
        ] {
            assert_eq!(uuid_bytes(bad), None, "{bad}");
        }
    }
}
