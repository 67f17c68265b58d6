//! Charges small arrays by the most chunks of the driver that they can lie in.
//!
//! Small arrays share chunks of 2 MiB as pieces of linear memory do, and holes fill first (fact
//! F28). An array has no address, so the chunk of each is unknown. Arrays of one size have never
//! had more chunks than their largest number needs, and have no chunk without an array.

use std::collections::BTreeMap;

use crate::accounting::{self, Account, Denied};
use crate::alloc_table::{Charge, ShareState};
use crate::chunks::CHUNK;
use crate::curesult::{self, CuResult};
use crate::driver_calls::context_ids;
use crate::fork_local::ForkLocal;

/// The arrays of a context of which the same number fill a chunk.
#[derive(Default)]
struct Class {
    live: u64,
    /// The most that lived at a time since there was none.
    peak: u64,
    charges: Vec<Charge>,
}

/// The account and the context of a class, and how many of its arrays fill a chunk.
type Key = (u8, u64, u32);

static CLASSES: ForkLocal<BTreeMap<Key, Class>> = ForkLocal::new();

/// Forgets the parent's arrays, in a forked child.
pub(crate) fn reset() {
    CLASSES.reset();
}

impl Class {
    /// Changes the number of arrays. Returns the most chunks that they can lie in.
    fn set_live(&mut self, live: u64, pieces: u32) -> usize {
        self.live = live;
        self.peak = self.peak.max(live);
        let most = self.peak.div_ceil(u64::from(pieces.max(1))).min(live);
        usize::try_from(most).unwrap_or(usize::MAX)
    }
}

fn key(array: Charge) -> Key {
    (array.account, array.context, array.units)
}

/// Charges and creates an array by `call`; `pieces` of its size fill a chunk.
pub(crate) fn allocate(
    account: Account,
    pieces: u32,
    function: &str,
    call: impl FnOnce() -> Result<u64, CuResult>,
    free: impl FnOnce(u64) -> CuResult,
) -> CuResult {
    let Some(slot) = accounting::account_index(account) else {
        return curesult::OUT_OF_MEMORY;
    };
    let array = Charge {
        account: slot,
        units: pieces,
        context: context_ids::current_id(),
        share: ShareState::OfArrays,
    };
    if reserve(account, array).is_err() {
        release(array);
        accounting::report_denial(slot, CHUNK, function);
        return curesult::OUT_OF_MEMORY;
    }
    let handle = match call() {
        Ok(handle) => handle,
        Err(code) => {
            release(array);
            return code;
        }
    };
    if accounting::record(handle, array).is_err() {
        let _ = free(handle);
        release(array);
        return curesult::OUT_OF_MEMORY;
    }
    curesult::SUCCESS
}

/// Counts an array, and charges the chunk that it may need. The lock is held over a request to the
/// agent, for seconds at most.
fn reserve(account: Account, array: Charge) -> Result<(), Denied> {
    let mut classes = CLASSES.lock();
    let class = classes.entry(key(array)).or_default();
    if class.set_live(class.live + 1, array.units) > class.charges.len() {
        let charge = accounting::charge_unreported(account, CHUNK)?;
        class.charges.push(charge.into_charge());
    }
    Ok(())
}

/// Takes an array that the driver has freed out of its class, and discharges the chunks that have
/// none any more.
pub(crate) fn release(array: Charge) {
    let mut classes = CLASSES.lock();
    let Some(class) = classes.get_mut(&key(array)) else {
        return;
    };
    let kept = class.set_live(class.live - 1, array.units);
    let freed = class.charges.split_off(kept.min(class.charges.len()));
    if class.live == 0 {
        classes.remove(&key(array));
    }
    drop(classes);
    freed.into_iter().for_each(accounting::discharge);
}
