//! Charges and discharges this process's memory against its credit page.

use std::sync::atomic::Ordering;

use bursar_protocol::credit::CreditError;
use bursar_protocol::credit_page::AccountSlot;
use bursar_protocol::messages::{self, REFUSED_BY_DRIVER, Recovery};
use bursar_protocol::units::Units;

use crate::agent_client::{self, CreditOutcome};
use crate::alloc_table::{AllocTable, Charge, ShareState};
use crate::curesult::{self, CuResult};
use crate::driver_calls;
use crate::session_state::{self, SessionGuard, SessionState};
use crate::{array_chunks, chunks};

/// The charge of every allocated pointer of this process.
pub(crate) static ALLOC_TABLE: AllocTable = AllocTable::new();

/// The most attempts to charge credit that other threads take first.
const MAX_ATTEMPTS: usize = 64;

/// The account of the container that memory is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Account {
    /// Device memory of the device with this ordinal.
    Device(i32),
    /// Managed memory.
    Managed,
}

/// The quota does not allow the charge, or the agent could not be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Denied;

/// A charge before its allocation succeeded: discharged on drop unless it was committed.
#[derive(Debug)]
pub(crate) struct PendingCharge {
    slot: u8,
    units: Units,
    committed: bool,
}

impl PendingCharge {
    /// Returns the charged bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.units.bytes()
    }

    /// Returns the page's index of the charged account.
    pub(crate) fn account(&self) -> u8 {
        self.slot
    }

    /// Charges more or discharges some, so that the charge covers `bytes`.
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

    /// Records the charge until `pointer` is freed or `context` is destroyed. Where the charge
    /// cannot be recorded it is discharged, and the caller frees the pointer.
    pub(crate) fn commit(mut self, pointer: u64, context: u64) -> Result<(), Denied> {
        let charge = Charge {
            account: self.slot,
            units: self.units.0,
            context,
            share: ShareState::Private,
        };
        record(pointer, charge)?;
        self.committed = true;
        Ok(())
    }

    /// Turns the charge into one that the caller gives back by [`discharge`].
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

/// Charges `bytes` before an allocation. Reports a denial to the agent.
pub(crate) fn charge(
    account: Account,
    bytes: u64,
    function: &str,
) -> Result<PendingCharge, Denied> {
    let state = session_state::state().ok_or(Denied)?;
    let slot = index_of(state, account).ok_or(Denied)?;
    let charged = charge_or_reclaim(state, slot, bytes);
    if charged.is_err() {
        report_denial(slot, bytes, function);
    }
    charged
}

/// Charges `bytes` before an allocation. The caller tries again or reports a denial.
pub(crate) fn charge_unreported(account: Account, bytes: u64) -> Result<PendingCharge, Denied> {
    let state = session_state::state().ok_or(Denied)?;
    let slot = index_of(state, account).ok_or(Denied)?;
    charge_or_reclaim(state, slot, bytes)
}

fn charge_or_reclaim(state: &SessionState, slot: u8, bytes: u64) -> Result<PendingCharge, Denied> {
    let units = Units::holding(bytes).ok_or(Denied)?;
    charge_units(state, slot, units).or_else(|denied| {
        // The program may use the memory that its pools have cached for another kind of
        // allocation.
        if reclaim() {
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
}

/// Reclaims what the process has cached. Returns whether that discharged anything.
fn reclaim() -> bool {
    let mut discharged = false;
    for reclaim in crate::RECLAIMERS {
        discharged |= reclaim();
    }
    discharged
}

/// Forgets the parent's allocations, in a forked child.
pub(crate) fn reset() {
    ALLOC_TABLE.clear();
}

/// Returns whether the process has not called `cuInit` yet. Accounts cannot be mapped to devices
/// before that, and the driver fails every call.
pub(crate) fn before_cuinit() -> bool {
    let is_new = |state: &SessionState| !state.session_established.load(Ordering::Acquire);
    session_state::state().is_some_and(is_new) && driver_calls::device_count() == 0
}

/// Opens a session unless there is one. Does not wait for an agent that is down.
pub(crate) fn open_session() {
    if let Some(state) = session_state::state()
        && !state.session_established.load(Ordering::Acquire)
        && let Some(guard) = state.lock()
    {
        agent_client::connect_once(state, &guard, map_devices);
    }
}

/// Reports a denied allocation to the agent.
pub(crate) fn report_denial(account: u8, bytes: u64, function: &str) {
    if let Some(state) = session_state::state()
        && let Some(guard) = state.lock()
    {
        agent_client::report_denial(state, &guard, account, bytes, function);
    }
}

/// Reports to the agent that the driver refused an allocation that the quota allowed.
pub(crate) fn report_refusal(account: Account, bytes: u64, function: &str) {
    if let Some(account) = account_index(account) {
        report_denial(account, bytes, &format!("{REFUSED_BY_DRIVER}{function}"));
    }
}

/// Returns the page's index of an account, if the container has that account.
pub(crate) fn account_index(account: Account) -> Option<u8> {
    index_of(session_state::state()?, account)
}

/// Charges an account from idle credit: one compare-and-swap, without the agent.
pub(crate) fn try_charge(account: u8, units: Units) -> bool {
    session_state::state()
        .and_then(|state| slot(state, account))
        .is_some_and(|slot| slot.charge(units).is_ok())
}

/// Charges an account, and requests credit from the agent where needed.
pub(crate) fn charge_account(account: u8, units: Units) -> Result<(), Denied> {
    charge_units(session_state::state().ok_or(Denied)?, account, units)
}

/// Discharges what [`try_charge`] or [`charge_account`] charged.
pub(crate) fn discharge_account(account: u8, units: Units) {
    if let Some(state) = session_state::state() {
        discharge_units(state, account, units);
    }
}

/// Returns what the agent would grant by the values it last wrote into the page. The true amount
/// may be less by now.
pub(crate) fn grantable(account: u8) -> Units {
    let slot = session_state::state().and_then(|state| slot(state, account));
    slot.map_or(Units::ZERO, |slot| {
        let used = Units(slot.word().used).min(Units::MAX);
        slot.quota()
            .saturating_sub(used.saturating_add(slot.others()))
    })
}

/// Returns whether no other process of the container uses an account.
pub(crate) fn is_sole_process(account: u8) -> bool {
    let slot = session_state::state().and_then(|state| slot(state, account));
    slot.is_some_and(|slot| slot.siblings() == 0)
}

/// Records a charge until `pointer` is freed. Discharges what was recorded for it before.
///
/// # Errors
/// There is no room for it.
pub(crate) fn record(pointer: u64, charge: Charge) -> Result<(), Denied> {
    let before = ALLOC_TABLE.insert(pointer, charge).map_err(|()| Denied)?;
    before.into_iter().for_each(discharge);
    Ok(())
}

/// Discharges a freed allocation.
pub(crate) fn discharge(charge: Charge) {
    match charge.share {
        ShareState::Private => {}
        ShareState::IpcHandle => unmark_exported(charge),
        // The memory may live on in an exported descriptor, so the charge stays.
        ShareState::Descriptor => return,
        ShareState::OfChunk => return chunks::release(charge.units),
        ShareState::OfArrays => return array_chunks::release(charge),
    }
    discharge_account(charge.account, Units(charge.units));
}

/// Counts a charge as exported before another process can hold the memory. The agent then keeps it
/// charged after this process exits, until the memory is free (facts F4, F13). Fails where the
/// export cannot be recorded.
pub(crate) fn mark_exported(charge: Charge) -> Result<(), Denied> {
    let state = session_state::state().ok_or(Denied)?;
    let guard = state.lock().ok_or(Denied)?;
    let slot = slot(state, charge.account).ok_or(Denied)?;
    slot.export(Units(charge.units));
    // The agent copies the exported amount from the page, so that the next agent knows it.
    agent_client::refresh_usage(state, &guard, map_devices);
    Ok(())
}

/// Takes back [`mark_exported`], because no other process can hold the memory.
pub(crate) fn unmark_exported(charge: Charge) {
    // The lock keeps the process from migrating to another page meanwhile.
    if let Some((state, _guard)) =
        session_state::state().and_then(|state| Some((state, state.lock()?)))
        && let Some(slot) = slot(state, charge.account)
    {
        slot.unexport(Units(charge.units));
    }
}

/// Frees a pointer by `call`. The pointer is forgotten before the call, because another thread may
/// get the same address once it is freed.
pub(crate) fn free(pointer: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let known = session_state::state().and_then(|_| ALLOC_TABLE.remove(pointer));
    let answer = call();
    match (known, answer) {
        (Some(charge), curesult::SUCCESS) => discharge(charge),
        // The driver did not free the memory, so the charge stays.
        (Some(charge), _) => drop(ALLOC_TABLE.insert(pointer, charge)),
        (None, _) => {}
    }
    answer
}

/// Returns the bytes that a context of a device is charged; zero where contexts are not charged.
///
/// # Errors
/// There is no session, or the container has no such device.
pub(crate) fn context_size(device: i32) -> Result<u64, Denied> {
    let state = session_state::state().ok_or(Denied)?;
    let index = index_of(state, Account::Device(device)).ok_or(Denied)?;
    Ok(slot(state, index).ok_or(Denied)?.context().bytes())
}

/// Reports a new context to the agent. Returns the measured size of a context in bytes, if the
/// agent knows it.
pub(crate) fn report_context(device: i32) -> Option<u64> {
    let state = session_state::state()?;
    let index = index_of(state, Account::Device(device))?;
    let guard = state.lock()?;
    agent_client::report_context(state, &guard, map_devices, index).map(Units::bytes)
}

/// Reports a sticky error with its current device, and returns the agent's decision.
pub(crate) fn report_poison(
    state: &SessionState,
    guard: &SessionGuard<'_>,
    device: i32,
    code: curesult::CuResult,
    able: bool,
) -> Option<Recovery> {
    agent_client::report_poison(state, guard, map_devices, code, able, || {
        let place = state.devices.get(usize::try_from(device).ok()?)?;
        place.load(Ordering::Acquire).checked_sub(1)
    })
}

/// Returns the managed memory on a device that the driver moves away for other memory, and does not
/// report as free.
pub(crate) fn evictable(device: i32) -> u64 {
    let state = session_state::state();
    let slot = state.and_then(|state| slot(state, index_of(state, Account::Device(device))?));
    slot.map_or(0, |slot| slot.evictable().bytes())
}

/// Returns the bytes that the container may still use of a device, and its quota; `None` without a
/// session. The caller has reconciled the pools.
pub(crate) fn free_and_quota(device: i32) -> Option<(u64, u64)> {
    let state = session_state::state()?;
    let index = index_of(state, Account::Device(device))?;
    if slot(state, index)?.siblings() > 0
        && let Some(guard) = state.lock()
    {
        agent_client::refresh_usage(state, &guard, map_devices);
    }
    // Read after the refresh, which may have migrated the process to another page.
    let now = || slot(state, index).map(|slot| (slot, slot.word()));
    let (slot, word) = match now()? {
        // Another thread migrates to another page; the lock is free when it is done.
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

fn slot(state: &SessionState, index: u8) -> Option<&'static AccountSlot> {
    state.page()?.slot(usize::from(index))
}

/// Returns the page's index of an account. Opens a session unless there is one.
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
            Err(CreditError::TooLarge) => return Err(Denied),
            // Another thread migrates to another page; the lock is free when it is done.
            Err(CreditError::Frozen) => {
                drop(state.lock().ok_or(Denied)?);
                continue;
            }
            Err(CreditError::Short(missing)) => Units(missing),
        };
        let guard = state.lock().ok_or(Denied)?;
        // Another thread may have received credit, or returned it, meanwhile.
        match slot(state, index).ok_or(Denied)?.charge(units) {
            Ok(()) => return Ok(()),
            Err(CreditError::Short(now)) if Units(now) > missing => {}
            Err(_) => {}
        }
        match agent_client::request_credit(state, &guard, map_devices, index, missing) {
            CreditOutcome::Granted => {}
            // Credit that other threads of this process have returned since may be enough.
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
        // Another thread migrates to another page. Without the lock the units stay charged until
        // the process exits.
        if state.lock().is_none() {
            return;
        }
    }
}

/// Maps accounts to devices by the UUIDs that the real driver reports.
fn map_devices(accounts: &[messages::Account], found: &mut dyn FnMut(usize, u8)) {
    for device in 0..driver_calls::device_count() {
        let Some(uuid) = driver_calls::device_uuid(device) else {
            continue;
        };
        let is_of_device = |text: &str| text.parse() == Ok(uuid);
        let account = accounts
            .iter()
            .position(|account| account.device_uuid().is_some_and(is_of_device));
        let account = account.and_then(|index| u8::try_from(index).ok());
        if let (Some(account), Ok(device)) = (account, usize::try_from(device)) {
            found(device, account);
        }
    }
}
