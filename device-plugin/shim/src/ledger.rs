//! Charges and discharges this process's memory against its credit page.

use std::sync::atomic::Ordering;

use bursar_protocol::page::Slot;
use bursar_protocol::units::Units;
use bursar_protocol::wire::{Account, Verdict};
use bursar_protocol::word::NoCredit;

use crate::codes::{self, CuResult};
use crate::link::{self, Answer};
use crate::live::{Charge, Lent, Live};
use crate::pools::POOLS;
use crate::state::{self, Held, State};

/// Every charged pointer of this process.
pub(crate) static LIVE: Live = Live::new();

/// Rounds of asking for credit that other threads then took.
const ROUNDS: usize = 64;

/// What memory is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
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
pub(crate) struct Pending {
    slot: u8,
    units: Units,
    kept: bool,
}

impl Pending {
    /// Charges more, or gives some back, so that the charge is for `bytes`.
    pub(crate) fn settle(&mut self, bytes: u64) -> Result<(), Denied> {
        let units = Units::holding(bytes).ok_or(Denied)?;
        let state = state::state().ok_or(Denied)?;
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
    pub(crate) fn keep(mut self, pointer: u64, context: u64) -> Result<(), Denied> {
        let charge = Charge {
            slot: self.slot,
            units: self.units.0,
            context,
            lent: Lent::No,
        };
        if let Some(before) = LIVE.insert(pointer, charge).map_err(|()| Denied)? {
            discharge(before);
        }
        self.kept = true;
        Ok(())
    }

    /// The charge stays until it is given back by [`discharge`].
    pub(crate) fn hold(mut self) -> Charge {
        self.kept = true;
        Charge {
            slot: self.slot,
            units: self.units.0,
            context: 0,
            lent: Lent::No,
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let (false, Some(state)) = (self.kept, state::state()) {
            discharge_units(state, self.slot, self.units);
        }
    }
}

/// Charges `bytes` before an allocation, and reports it to the agent if that is denied.
pub(crate) fn charge(kind: Kind, bytes: u64, function: &str) -> Result<Pending, Denied> {
    let state = state::state().ok_or(Denied)?;
    let slot = account_of(state, kind).ok_or(Denied)?;
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
        Ok(Pending {
            slot,
            units,
            kept: false,
        })
    });
    if charged.is_err() {
        report(slot, bytes, function);
    }
    charged
}

/// Whether nothing can be charged yet: before `cuInit` nobody knows which device an account is, and the driver refuses
/// whatever it is asked.
pub(crate) fn is_early() -> bool {
    let is_new = |state: &State| !state.welcomed.load(Ordering::Acquire);
    state::state().is_some_and(is_new) && crate::hooks::device_count() == 0
}

/// Says hello where that was not done yet. An agent that is away is not waited for.
pub(crate) fn begin() {
    if let Some(state) = state::state()
        && !state.welcomed.load(Ordering::Acquire)
        && let Some(held) = state.hold()
    {
        link::introduce(state, &held, map_devices);
    }
}

/// Reports a denial to the agent.
pub(crate) fn report(account: u8, bytes: u64, function: &str) {
    if let Some(state) = state::state()
        && let Some(held) = state.hold()
    {
        link::denied(state, &held, account, bytes, function);
    }
}

/// The account of `kind`, if the container has one.
pub(crate) fn account(kind: Kind) -> Option<u8> {
    account_of(state::state()?, kind)
}

/// Charges an account if the credit for it is idle: one compare-and-swap, and nobody is asked.
pub(crate) fn take_idle(account: u8, units: Units) -> bool {
    state::state()
        .and_then(|state| slot(state, account))
        .is_some_and(|slot| slot.charge(units).is_ok())
}

/// Charges an account, and asks the agent where it must.
pub(crate) fn take(account: u8, units: Units) -> Result<(), Denied> {
    charge_units(state::state().ok_or(Denied)?, account, units)
}

/// Gives units back that [`take`] or [`take_idle`] charged.
pub(crate) fn give_back(account: u8, units: Units) {
    if let Some(state) = state::state() {
        discharge_units(state, account, units);
    }
}

/// What the agent would grant, by what it last wrote on the page: it may be less by now.
pub(crate) fn room_ahead(account: u8) -> Units {
    let slot = state::state().and_then(|state| slot(state, account));
    slot.map_or(Units::ZERO, |slot| {
        let used = Units(slot.word().used).min(Units::MAX);
        slot.quota()
            .saturating_sub(used.saturating_add(slot.others()))
    })
}

/// Whether no other process of the container has a part in an account.
pub(crate) fn is_alone(account: u8) -> bool {
    let slot = state::state().and_then(|state| slot(state, account));
    slot.is_some_and(|slot| slot.siblings() == 0)
}

/// Gives back what a freed pointer was charged.
pub(crate) fn discharge(charge: Charge) {
    match charge.lent {
        Lent::No => {}
        Lent::Handle => unexport(charge),
        // Whoever has the descriptor has the memory.
        Lent::Descriptor => return,
    }
    give_back(charge.slot, Units(charge.units));
}

/// Counts a charge as exported, before any other process can hold its memory: it then stays charged
/// to the pod after this process's death until it is free (design F4, F13). `Err` when that cannot
/// be noted.
pub(crate) fn export(charge: Charge) -> Result<(), Denied> {
    let state = state::state().ok_or(Denied)?;
    let held = state.hold().ok_or(Denied)?;
    let slot = slot(state, charge.slot).ok_or(Denied)?;
    slot.export(Units(charge.units));
    // The agent takes it down, for the one after it.
    link::refresh(state, &held, map_devices);
    Ok(())
}

/// Counts a charge as exported no more: nobody else can hold its memory.
pub(crate) fn unexport(charge: Charge) {
    // The lock keeps the process from moving to another page meanwhile.
    if let Some((state, _held)) = state::state().and_then(|state| Some((state, state.hold()?)))
        && let Some(slot) = slot(state, charge.slot)
    {
        slot.unexport(Units(charge.units));
    }
}

/// Frees what a program hands back, by `call`. It is forgotten first: once it is freed, another thread
/// may be given the same address.
pub(crate) fn free(pointer: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let known = state::state().and_then(|_| LIVE.remove(pointer));
    let answer = call();
    match (known, answer) {
        (Some(charge), codes::SUCCESS) => discharge(charge),
        // Not freed, so still there.
        (Some(charge), _) => drop(LIVE.insert(pointer, charge)),
        (None, _) => {}
    }
    answer
}

/// What a context of a device is charged, in bytes; zero where contexts are not charged.
///
/// # Errors
/// There is no session, or the container has no such device.
pub(crate) fn context_size(device: i32) -> Result<u64, Denied> {
    let state = state::state().ok_or(Denied)?;
    let index = account_of(state, Kind::Device(device)).ok_or(Denied)?;
    Ok(slot(state, index).ok_or(Denied)?.context().bytes())
}

/// Tells the agent that a context was made; what one takes, in bytes, as far as it was measured.
pub(crate) fn context_made(device: i32) -> Option<u64> {
    let state = state::state()?;
    let index = account_of(state, Kind::Device(device))?;
    let held = state.hold()?;
    link::context_made(state, &held, map_devices, index).map(Units::bytes)
}

/// Reports that a fault poisoned this image, with a device current; what to do, where the agent says it.
pub(crate) fn poisoned(
    state: &State,
    held: &Held<'_>,
    device: i32,
    code: codes::CuResult,
    able: bool,
) -> Option<Verdict> {
    link::poisoned(state, held, map_devices, code, able, || {
        let place = state.devices.get(usize::try_from(device).ok()?)?;
        place.load(Ordering::Acquire).checked_sub(1)
    })
}

/// What the container may still use of a device and its quota, in bytes; `None` without a session.
pub(crate) fn room(device: i32) -> Option<(u64, u64)> {
    let state = state::state()?;
    POOLS.settle();
    let index = account_of(state, Kind::Device(device))?;
    if slot(state, index)?.siblings() > 0
        && let Some(held) = state.hold()
    {
        link::refresh(state, &held, map_devices);
    }
    // Read after the refresh: it may have moved the process to another page.
    let now = || slot(state, index).map(|slot| (slot, slot.word()));
    let (slot, word) = match now()? {
        // Another thread moves: its lock says when it is done.
        (_, word) if word.is_frozen() => {
            let _held = state.hold()?;
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

fn slot(state: &State, index: u8) -> Option<&'static Slot> {
    state.page()?.slot(usize::from(index))
}

/// The account of `kind`, after a hello where that was not said yet.
fn account_of(state: &State, kind: Kind) -> Option<u8> {
    if !state.welcomed.load(Ordering::Acquire) {
        let held = state.hold()?;
        if !link::ensure_welcomed(state, &held, map_devices) {
            return None;
        }
    }
    let place = match kind {
        Kind::Device(ordinal) => state.devices.get(usize::try_from(ordinal).ok()?)?,
        Kind::Managed => &state.managed,
    };
    place.load(Ordering::Acquire).checked_sub(1)
}

fn charge_units(state: &State, index: u8, units: Units) -> Result<(), Denied> {
    for _ in 0..ROUNDS {
        let missing = match slot(state, index).ok_or(Denied)?.charge(units) {
            Ok(()) => return Ok(()),
            Err(NoCredit::TooLarge) => return Err(Denied),
            // Another thread moves to another page: its lock says when it is done.
            Err(NoCredit::Frozen) => {
                drop(state.hold().ok_or(Denied)?);
                continue;
            }
            Err(NoCredit::Short(missing)) => Units(missing),
        };
        let held = state.hold().ok_or(Denied)?;
        // Another thread may have got enough meanwhile, or given it back.
        match slot(state, index).ok_or(Denied)?.charge(units) {
            Ok(()) => return Ok(()),
            Err(NoCredit::Short(now)) if Units(now) > missing => {}
            Err(_) => {}
        }
        match link::request(state, &held, map_devices, index, missing) {
            Answer::Granted => {}
            // What other threads of this process gave back since may be enough.
            Answer::Refused | Answer::Away => {
                return slot(state, index)
                    .ok_or(Denied)?
                    .charge(units)
                    .map_err(|_| Denied);
            }
        }
    }
    Err(Denied)
}

fn discharge_units(state: &State, index: u8, units: Units) {
    for _ in 0..ROUNDS {
        let Some(slot) = slot(state, index) else {
            return;
        };
        if slot.discharge(units) {
            return;
        }
        // Frozen: see above. Without the lock the bytes stay charged to this process until it ends.
        if state.hold().is_none() {
            return;
        }
    }
}

/// Finds each account's device by its UUID, as the real driver states it.
fn map_devices(accounts: &[Account], found: &mut dyn FnMut(usize, u8)) {
    for device in 0..crate::hooks::device_count() {
        let Some(uuid) = crate::hooks::device_uuid(device) else {
            continue;
        };
        let account = accounts.iter().position(|account| match account {
            Account::Device(text) => uuid_bytes(text) == Some(uuid),
            Account::Managed => false,
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
    fn a_uuid_is_its_32_hex_digits_in_order() {
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
