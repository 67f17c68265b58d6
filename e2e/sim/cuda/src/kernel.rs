//! Defines the available kernels.
//!
//! A kernel ends before its launch returns; only `spin` keeps its stream busy afterwards.

use bursar_protocol::checksum;
use bursar_sim_state::rm::ENDLESS;

use crate::abi::{Code, DriverResult, In};
use crate::context_stack::CurrentContext;
use std::time::Duration;

/// A kernel, which every module has.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) name: &'static str,
    /// Local memory per thread, in bytes (F14 in docs/internals/facts.md).
    pub(crate) local_bytes: u64,
    pub(crate) run: fn(&CurrentContext, &Arguments, u64) -> DriverResult,
}

/// `void *kernelParams[]`.
#[derive(Debug)]
pub(crate) struct Arguments(pub(crate) In<u64>);

impl Arguments {
    /// Reads the argument with index `place`, of the size of `T`.
    fn get<T: Copy>(&self, place: usize) -> Result<T, Code> {
        In::at_address(self.0.at(place)?).get()
    }

    fn three<A: Copy, B: Copy, C: Copy>(&self) -> Result<(A, B, C), Code> {
        Ok((self.get(0)?, self.get(1)?, self.get(2)?))
    }
}

/// A century, for a `spin` without an end.
const UNBOUNDED_SPIN: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// How long a turn of the loop of `bursar_spin` takes (0.3 ms for 16,384 on an H200).
const TURN_NANOS: u64 = 18;

pub(crate) static KERNELS: &[Kernel] = &[
    // fill(uint8_t *to, uint8_t value, size_t len)
    Kernel {
        name: "fill",
        local_bytes: 0,
        run: |current, arguments, _| {
            let (to, value, len) = arguments.three::<u64, u8, u64>()?;
            if current.check_access(to, len, true) {
                // SAFETY: `check_access` found the range accessible.
                unsafe { std::ptr::write_bytes(to as *mut u8, value, len as usize) };
            }
            Ok(())
        },
    },
    // copy(uint8_t *to, const uint8_t *from, size_t len)
    Kernel {
        name: "copy",
        local_bytes: 0,
        run: |current, arguments, _| {
            let (to, from, len) = arguments.three::<u64, u64, u64>()?;
            if current.check_access(from, len, false) && current.check_access(to, len, true) {
                // SAFETY: `check_access` found both ranges accessible.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len as usize) };
            }
            Ok(())
        },
    },
    // checksum(const uint8_t *from, size_t len, uint64_t *sum): the sum of all bytes
    Kernel {
        name: "checksum",
        local_bytes: 0,
        run: |current, arguments, _| {
            run_checksum(current, arguments, |bytes, _| {
                bytes.iter().map(|byte| u64::from(*byte)).sum()
            })
        },
    },
    // bursar_checksum(const uint8_t *from, size_t len, uint64_t *sum): adds `checksum::partial`
    Kernel {
        name: "bursar_checksum",
        local_bytes: 0,
        run: |current, arguments, _| {
            run_checksum(current, arguments, |bytes, before| {
                before.wrapping_add(checksum::partial(bytes, 0))
            })
        },
    },
    // spin(uint64_t nanoseconds): 0 spins without an end
    Kernel {
        name: "spin",
        local_bytes: 0,
        run: |current, arguments, stream| run_spin(current, arguments.get(0)?, stream),
    },
    // bursar_spin(uint64_t turns): spins for the turns of a loop
    Kernel {
        name: "bursar_spin",
        local_bytes: 0,
        run: |current, arguments, stream| {
            let turns = arguments.get::<u64>(0)?.max(1);
            run_spin(current, turns.saturating_mul(TURN_NANOS), stream)
        },
    },
    // locals(): 64 KiB of local memory in every thread
    Kernel {
        name: "locals",
        local_bytes: 64 << 10,
        run: |_, _, _| Ok(()),
    },
    // heap(): uses device-side malloc
    Kernel {
        name: "heap",
        local_bytes: 0,
        run: |current, _, _| current.process.ensure_heap(current.context),
    },
    // touch(uint8_t *at, size_t len): accesses memory without a change
    Kernel {
        name: "touch",
        local_bytes: 0,
        run: |current, arguments, _| {
            let (at, len): (u64, u64) = (arguments.get(0)?, arguments.get(1)?);
            current.check_access(at, len, false);
            Ok(())
        },
    },
    // add(uint32_t *to, uint32_t number, size_t len): adds to each of `len` numbers
    Kernel {
        name: "add",
        local_bytes: 0,
        run: |current, arguments, _| {
            let (to, number, len) = arguments.three::<u64, u32, u64>()?;
            let size = len.checked_mul(4).ok_or(Code::INVALID_VALUE)?;
            if current.check_access(to, size, true) {
                for place in (to..to + size).step_by(4) {
                    let place = place as *mut u32;
                    // SAFETY: `check_access` found the range accessible.
                    unsafe {
                        place.write_unaligned(place.read_unaligned().wrapping_add(number));
                    }
                }
            }
            Ok(())
        },
    },
    // fault(): writes to address 0
    Kernel {
        name: "fault",
        local_bytes: 0,
        run: |current, _, _| {
            current.check_access(0, 1, true);
            Ok(())
        },
    },
    // trap(): the trap instruction
    Kernel {
        name: "trap",
        local_bytes: 0,
        run: |current, _, _| {
            current
                .process
                .poison(current.device, Code::LAUNCH_FAILED, 43);
            Ok(())
        },
    },
    // misaligned(): reads 4 bytes at an odd address
    Kernel {
        name: "misaligned",
        local_bytes: 0,
        run: |current, _, _| {
            current
                .process
                .poison(current.device, Code::MISALIGNED_ADDRESS, 13);
            Ok(())
        },
    },
    // assertion(): a device-side assert that fails
    Kernel {
        name: "assertion",
        local_bytes: 0,
        run: |current, _, _| {
            current.process.poison(current.device, Code::ASSERT, 43);
            Ok(())
        },
    },
];

/// Keeps a stream busy for this many nanoseconds; 0 without an end. Over a kernel module the GPU
/// gives the time in turns.
fn run_spin(current: &CurrentContext, nanos: u64, stream: u64) -> DriverResult {
    let (work, time) = match nanos {
        0 => (ENDLESS, UNBOUNDED_SPIN),
        nanos => (nanos, Duration::from_nanos(nanos)),
    };
    match current.process.submit_work(current.context, work)? {
        Some(work) => current.extend_work(stream, work),
        None => current.extend_busy(stream, time),
    }
}

/// Runs a kernel of (const uint8_t *from, size_t len, uint64_t *sum).
///
/// `of` computes the new sum from the bytes and the old sum.
fn run_checksum(
    current: &CurrentContext,
    arguments: &Arguments,
    of: impl Fn(&[u8], u64) -> u64,
) -> DriverResult {
    let (from, len, to) = arguments.three::<u64, u64, u64>()?;
    if current.check_access(from, len, false) && current.check_access(to, 8, true) {
        let to = to as *mut u64;
        // SAFETY: `check_access` found both ranges accessible.
        unsafe { to.write_unaligned(of(crate::memory::bytes(from, len), to.read_unaligned())) };
    }
    Ok(())
}

impl CurrentContext {
    /// Whether a kernel may access a range. If not, poisons the image with an illegal address.
    fn check_access(&self, address: u64, len: u64, write: bool) -> bool {
        let allowed = self.process.access(self.unit(), address, len, write);
        if !allowed {
            self.process.poison(self.device, Code::ILLEGAL_ADDRESS, 31);
        }
        allowed
    }
}
