//! The kernels that there are, and how they are launched.
//!
//! A launch runs the kernel once, whatever the grid, before it returns; only `spin` keeps its stream busy
//! afterwards. As with a GPU, a fault is not the launch's answer but every later call's.

use crate::abi::{Answer, Code, In};
use crate::context::{Current, current};
use crate::entry::exports;
use crate::process::lock;
use bursar_protocol::checksum;
use std::time::Duration;

/// A kernel of every module.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) name: &'static str,
    /// Local memory per thread, in bytes (F14).
    pub(crate) local_bytes: u64,
    run: fn(&Current, &Arguments, u64) -> Answer,
}

/// `void *kernelParams[]`.
#[derive(Debug)]
struct Arguments(In<u64>);

impl Arguments {
    /// The `place`th argument, of its own size.
    fn get<T: Copy>(&self, place: usize) -> Result<T, Code> {
        In::at_address(self.0.at(place)?).get()
    }

    fn three<A: Copy, B: Copy, C: Copy>(&self) -> Result<(A, B, C), Code> {
        Ok((self.get(0)?, self.get(1)?, self.get(2)?))
    }
}

/// A century: a `spin` without an end.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

pub(crate) static KERNELS: &[Kernel] = &[
    // fill(uint8_t *to, uint8_t value, size_t len)
    Kernel {
        name: "fill",
        local_bytes: 0,
        run: |current, arguments, _| {
            let (to, value, len) = arguments.three::<u64, u8, u64>()?;
            if current.may(to, len, true) {
                // SAFETY: `may` looked the range up.
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
            if current.may(from, len, false) && current.may(to, len, true) {
                // SAFETY: `may` looked both ranges up.
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
            sum(current, arguments, |bytes, _| {
                bytes.iter().map(|byte| u64::from(*byte)).sum()
            })
        },
    },
    // bursar_checksum(const uint8_t *from, size_t len, uint64_t *sum): adds what `partial` says
    Kernel {
        name: "bursar_checksum",
        local_bytes: 0,
        run: |current, arguments, _| {
            sum(current, arguments, |bytes, before| {
                before.wrapping_add(checksum::partial(bytes, 0))
            })
        },
    },
    // spin(uint64_t nanoseconds): 0 is for ever
    Kernel {
        name: "spin",
        local_bytes: 0,
        run: |current, arguments, stream| {
            let time = arguments.get::<u64>(0)?;
            current.occupy(
                stream,
                if time == 0 {
                    FOR_EVER
                } else {
                    Duration::from_nanos(time)
                },
            )
        },
    },
    // locals(): 64 KiB of local memory in every thread
    Kernel {
        name: "locals",
        local_bytes: 64 << 10,
        run: |_, _, _| Ok(()),
    },
    // fault(): writes to address 0
    Kernel {
        name: "fault",
        local_bytes: 0,
        run: |current, _, _| {
            current.may(0, 1, true);
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

/// A kernel of (const uint8_t *from, size_t len, uint64_t *sum): what the sum becomes, by the bytes and by what it was.
fn sum(current: &Current, arguments: &Arguments, of: impl Fn(&[u8], u64) -> u64) -> Answer {
    let (from, len, to) = arguments.three::<u64, u64, u64>()?;
    if current.may(from, len, false) && current.may(to, 8, true) {
        let to = to as *mut u64;
        // SAFETY: `may` looked both ranges up.
        unsafe { to.write_unaligned(of(crate::memory::bytes(from, len), to.read_unaligned())) };
    }
    Ok(())
}

impl Current {
    /// Whether a kernel may access a range; where not, that was its illegal address.
    fn may(&self, address: u64, len: u64, write: bool) -> bool {
        let allowed = lock(&self.process.space).allows(address, len, write);
        if !allowed {
            self.process.poison(self.device, Code::ILLEGAL_ADDRESS, 31);
        }
        allowed
    }

    fn launch(&self, function: u64, stream: u64, arguments: In<u64>) -> Answer {
        let kernel = crate::module::kernel(function)?;
        self.check_stream(stream)?;
        self.process
            .ensure_stack(self.context, kernel.local_bytes)?;
        (kernel.run)(self, &Arguments(arguments), stream)
    }
}

/// `CUlaunchConfig`, up to what is read.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Config {
    sizes: [u32; 7],
    stream: u64,
}

fn sized(sizes: &[u32], function: u64, stream: u64, arguments: In<u64>) -> Answer {
    if sizes.contains(&0) {
        return Err(Code::INVALID_VALUE);
    }
    current()?.launch(function, stream, arguments)
}

exports! {
    fn cuLaunchKernel(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        _shared: u32, stream: u64, arguments: In<u64>, _extra: u64,
    ) = sized(&[grid_x, grid_y, grid_z, block_x, block_y, block_z], function, stream, arguments);
    fn cuLaunchCooperativeKernel(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        _shared: u32, stream: u64, arguments: In<u64>,
    ) = sized(&[grid_x, grid_y, grid_z, block_x, block_y, block_z], function, stream, arguments);
    fn cuLaunchKernelEx(config: In<Config>, function: u64, arguments: In<u64>, _extra: u64) = {
        let config = config.get()?;
        sized(&config.sizes[..6], function, config.stream, arguments)
    };
}
