//! Tests typed device memory, its users and their order over the simulated driver.
#![allow(unsafe_code, reason = "says what kernels take")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod checksum;
mod gpu_ref;
mod launch;
mod managed_ref;
mod peer_copy;
#[path = "../support/raw.rs"]
mod raw;
mod reservation;
mod slice;
mod state;
mod stream_pool;
mod submission;

use std::sync::Arc;
use std::time::Duration;

use bursar_runtime::driver::{Access, Context, Function, Grid, Kernel, Parameter, Stream};
use bursar_runtime::{DeviceChecksum, DeviceRuntime, Direct, Launch, Tag, TrackedSlice};

/// Long enough for a test to notice a missing wait.
const SPIN_TIME: Duration = Duration::from_millis(300);

/// Longer than a busy machine delays a thread.
const LONGEST_DELAY: Duration = Duration::from_secs(3);

fn runtime(ordinal: u32) -> Arc<DeviceRuntime> {
    DeviceRuntime::for_ordinal(ordinal).unwrap()
}

/// Creates a runtime whose resource does not track uses.
fn untracked() -> DeviceRuntime {
    let runtime = runtime(0);
    runtime.with_resource(|_| Direct::new(runtime.context()))
}

fn slice(runtime: &DeviceRuntime, items: &[u32], stream: &Stream) -> TrackedSlice<u32> {
    let mut slice = TrackedSlice::allocate(runtime, items.len(), stream, Tag("test")).unwrap();
    slice.copy_from_host(items).unwrap();
    slice
}

fn function(context: &Context, name: &std::ffi::CStr) -> Function {
    context.load(c"").unwrap().function(name).unwrap()
}

/// fill(uint8_t *to, uint8_t value, size_t len)
fn fill_kernel(context: &Context) -> Kernel {
    const TAKES: &[Parameter] = &[
        Parameter::Memory(Access::ReadWrite),
        Parameter::Value(1),
        Parameter::Value(8),
    ];
    // SAFETY: the simulated driver's kernel has these parameters, and the tests pass the memory's
    // length.
    unsafe { function(context, c"fill").declare(TAKES) }
}

/// copy(uint8_t *to, const uint8_t *from, size_t len)
fn copy_kernel(context: &Context) -> Kernel {
    const TAKES: &[Parameter] = &[
        Parameter::Memory(Access::ReadWrite),
        Parameter::Memory(Access::Read),
        Parameter::Value(8),
    ];
    // SAFETY: the simulated driver's kernel has these parameters, and the tests pass the memory's
    // length.
    unsafe { function(context, c"copy").declare(TAKES) }
}

/// Keeps a stream busy for [`SPIN_TIME`].
fn spin(stream: &Stream) {
    spin_for(stream, SPIN_TIME);
}

fn spin_for(stream: &Stream, time: Duration) {
    const TAKES: &[Parameter] = &[Parameter::Value(8)];
    // SAFETY: spin(uint64_t nanoseconds)
    let spin = unsafe { function(stream.context(), c"spin").declare(TAKES) };
    let nanoseconds = u64::try_from(time.as_nanos()).unwrap();
    Launch::new(&spin, stream, Grid::linear(1, 1))
        .arg(nanoseconds)
        .submit()
        .unwrap();
}

/// Poisons the process image.
fn fault(context: &Context) {
    let nowhere = 1 << 50;
    let mut checksum = DeviceChecksum::new(context).unwrap();
    let answer = checksum.of(nowhere, 16, &context.default_stream());
    answer.unwrap_err();
}
