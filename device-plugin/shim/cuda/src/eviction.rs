//! Tries an allocation again that the driver refuses although its memory is charged.
//!
//! For device memory the driver evicts managed memory of any process. It refuses an allocation
//! whose eviction fails. Examples are memory in transfer, and memory of a process that is being
//! killed for lack of host memory. A moment later the driver may have the room.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use crate::accounting::{self, Account};
use crate::curesult::{self, CuResult};
use crate::driver_calls::{captures, current_device, driver};
use crate::session_state;

/// The pauses before the further tries.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(20),
    Duration::from_millis(180),
    Duration::from_millis(600),
];

/// No try begins later than this after the first refusal.
const RETRY_TIME: Duration = Duration::from_secs(1);

/// Makes an allocation by `call`, whose memory is charged to `account`. Tries again where the
/// driver refuses it beside managed memory. The caller holds no lock.
#[inline]
pub(crate) fn allocate<T>(
    account: Account,
    bytes: u64,
    function: &str,
    mut call: impl FnMut() -> Result<T, CuResult>,
) -> Result<T, CuResult> {
    match call() {
        Err(curesult::OUT_OF_MEMORY) => retry(account, bytes, bytes, function, call),
        result => result,
    }
}

/// Tries an allocation again that the driver has refused, and reports a refusal that stays. The
/// driver needs room for `missing` of its bytes. See [`allocate`].
#[cold]
#[inline(never)]
pub(crate) fn retry<T>(
    account: Account,
    bytes: u64,
    missing: u64,
    function: &str,
    mut call: impl FnMut() -> Result<T, CuResult>,
) -> Result<T, CuResult> {
    let start = Instant::now();
    let mut pauses = PAUSES.into_iter();
    while may_repeat() && can_make_room(account, missing) {
        let pause = pauses.next();
        let Some(pause) = pause.filter(|pause| start.elapsed() + *pause <= RETRY_TIME) else {
            accounting::report_refusal(account, bytes, function);
            break;
        };
        std::thread::sleep(pause);
        if !may_repeat() {
            break;
        }
        match call() {
            Err(curesult::OUT_OF_MEMORY) => {}
            result => return result,
        }
    }
    Err(curesult::OUT_OF_MEMORY)
}

/// Returns whether a call may be repeated. A fenced process gets no more memory, and an active
/// capture may not see a call twice.
fn may_repeat() -> bool {
    let page = session_state::state().and_then(|state| state.page());
    let is_fenced = page.is_none_or(|page| page.fence() != 0);
    !is_fenced && !captures::may_be_active()
}

/// Returns whether the eviction of managed memory can make room for `missing` bytes. The driver
/// tells what is free of the current device alone.
fn can_make_room(account: Account, missing: u64) -> bool {
    let Account::Device(device) = account else {
        return false;
    };
    let evictable = accounting::evictable(device);
    let is_enough = |free: u64| free.saturating_add(evictable) >= missing;
    evictable > 0 && free_memory(device).is_none_or(is_enough)
}

/// Returns the bytes that the driver has free on a device, if that is the current one.
fn free_memory(device: c_int) -> Option<u64> {
    let (mut free, mut total) = (0_usize, 0_usize);
    let code = captures::with_relaxed_capture(|| match current_device() {
        Ok(current) if current == device => {
            driver!(cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize))
        }
        _ => curesult::NOT_SUPPORTED,
    });
    (code == curesult::SUCCESS).then_some(free as u64)
}
