//! Charges small arrays by the most chunks of the driver that they can lie in.
//!
//! Small arrays share chunks of 2 MiB as pieces of linear memory do, and holes fill first (fact
//! F28). An array has no address, so the chunk of each is unknown. Arrays of one size have never
//! had more chunks than their largest number needs, and have no chunk without an array.

use std::collections::BTreeMap;

use crate::accounting::{self, ALLOC_TABLE, Account, Denied};
use crate::alloc_table::{Charge, ShareState};
use crate::chunks::CHUNK;
use crate::curesult::{self, CuResult};
use crate::fork_local::ForkLocal;
use crate::hooks::contexts;

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
    /// Returns the most chunks that the arrays can lie in.
    fn chunks(&self, pieces: u32) -> usize {
        let most = self.peak.div_ceil(u64::from(pieces.max(1))).min(self.live);
        usize::try_from(most).unwrap_or(usize::MAX)
    }

    /// Counts an array more, and returns whether that needs another chunk.
    fn add(&mut self, pieces: u32) -> bool {
        self.live += 1;
        self.peak = self.peak.max(self.live);
        self.chunks(pieces) > self.charges.len()
    }

    /// Counts an array less, and returns the charges of chunks that have none any more.
    fn remove(&mut self, pieces: u32) -> Vec<Charge> {
        self.live -= 1;
        if self.live == 0 {
            self.peak = 0;
        }
        let kept = self.chunks(pieces).min(self.charges.len());
        self.charges.split_off(kept)
    }
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
    let context = contexts::current_id();
    let array = Charge {
        account: slot,
        units: pieces,
        context,
        share: ShareState::OfArrays,
    };
    if reserve(account, (slot, context, pieces)).is_err() {
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
    match ALLOC_TABLE.insert(handle, array) {
        Ok(before) => {
            before.into_iter().for_each(accounting::discharge);
            curesult::SUCCESS
        }
        Err(()) => {
            let _ = free(handle);
            release(array);
            curesult::OUT_OF_MEMORY
        }
    }
}

/// Counts an array, and charges the chunk that it may need. The lock is held over a request to the
/// agent, for seconds at most.
fn reserve(account: Account, key: Key) -> Result<(), Denied> {
    let mut classes = CLASSES.lock();
    let class = classes.entry(key).or_default();
    if class.add(key.2) {
        match accounting::charge_unreported(account, CHUNK) {
            Ok(charge) => class.charges.push(charge.into_charge()),
            Err(Denied) => {
                drop(classes);
                release_key(key);
                return Err(Denied);
            }
        }
    }
    Ok(())
}

/// Takes an array that the driver has freed out of its class.
pub(crate) fn release(array: Charge) {
    release_key((array.account, array.context, array.units));
}

fn release_key(key: Key) {
    let mut classes = CLASSES.lock();
    let freed = classes.get_mut(&key).map(|class| class.remove(key.2));
    if classes.get(&key).is_some_and(|class| class.live == 0) {
        classes.remove(&key);
    }
    drop(classes);
    freed.into_iter().flatten().for_each(accounting::discharge);
}
