//! Runs the runtime's examples over the simulated driver, and tests the edge cases of each system
//! in a module of its own.
#![allow(unsafe_code, reason = "launches kernels")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod block_uses;
mod cudarc_interop;
mod examples;
mod managed;
mod peer_copy;
mod physical;
mod references;
mod stack;
mod state;
mod tasks;

use std::time::Duration;

use bursar_runtime::driver::{Access, Context, Grid, Kernel, Parameter, Stream};
use bursar_runtime::{DeviceRuntime, GpuRef, Launch, Tag, TrackedSlice};

/// Long enough for a test to notice a missing wait.
const SPIN_TIME: Duration = Duration::from_millis(300);

/// Expiry of write tokens.
const LASTS: Duration = Duration::from_secs(60);

fn slice(runtime: &DeviceRuntime, items: &[u32], stream: &Stream) -> TrackedSlice<u32> {
    let mut slice = TrackedSlice::allocate(runtime, items.len(), stream, Tag("test")).unwrap();
    slice.copy_from_host(items).unwrap();
    slice
}

/// Returns the items of shared memory.
fn items(memory: &GpuRef<u32>) -> Vec<u32> {
    let mut items = vec![0; memory.len()];
    memory.copy_to_host(&mut items).unwrap();
    items
}

/// fill(uint8_t *to, uint8_t value, size_t len)
fn fill_kernel(context: &Context) -> Kernel {
    const TAKES: &[Parameter] = &[
        Parameter::Memory(Access::Write),
        Parameter::Value(1),
        Parameter::Value(8),
    ];
    let fill = context.load(c"").unwrap().function(c"fill").unwrap();
    // SAFETY: the simulated driver's kernel has these parameters, and the tests pass the memory's
    // length.
    unsafe { fill.declare(TAKES) }
}

/// Keeps a stream busy for [`SPIN_TIME`].
fn spin(stream: &Stream) {
    const TAKES: &[Parameter] = &[Parameter::Value(8)];
    let spin = stream.context().load(c"").unwrap();
    // SAFETY: spin(uint64_t nanoseconds)
    let spin = unsafe { spin.function(c"spin").unwrap().declare(TAKES) };
    let nanoseconds = u64::try_from(SPIN_TIME.as_nanos()).unwrap();
    Launch::new(&spin, stream, Grid::linear(1, 1))
        .arg(nanoseconds)
        .submit()
        .unwrap();
}
