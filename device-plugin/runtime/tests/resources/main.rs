//! Tests sources and adaptors over the simulated driver.
#![allow(unsafe_code, reason = "launches kernels")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod adaptors;
mod budget;
mod debug_guard;
mod direct;
mod histories;
mod physical;
#[path = "../support/raw.rs"]
mod raw;
mod runtime;
mod stream_ordered;
mod vmm;

use std::alloc::Layout;
use std::time::Duration;

use bursar_runtime::driver::{Context, Driver, Grid, Stream};

const MIB: usize = 1 << 20;

/// Longer than a busy machine delays a thread.
const SPIN_TIME: Duration = Duration::from_secs(3);

fn context(ordinal: u32) -> Context {
    let device = Driver::get().unwrap().device(ordinal).unwrap();
    device.primary_context().unwrap()
}

fn bytes(size: usize) -> Layout {
    Layout::from_size_align(size, 1).unwrap()
}

/// Keeps a stream busy.
fn spin(stream: &Stream, time: Duration) {
    let spin = stream
        .context()
        .load(c"")
        .unwrap()
        .function(c"spin")
        .unwrap();
    let mut nanoseconds = u64::try_from(time.as_nanos()).unwrap();
    let mut arguments = [(&raw mut nanoseconds).cast()];
    // SAFETY: spin(uint64_t nanoseconds)
    unsafe { spin.launch(stream, Grid::linear(1, 1), &mut arguments) }.unwrap();
}

/// Poisons the process image.
fn fault(stream: &Stream) {
    let fault = stream
        .context()
        .load(c"")
        .unwrap()
        .function(c"fault")
        .unwrap();
    // SAFETY: fault() has no arguments.
    unsafe { fault.launch(stream, Grid::linear(1, 1), &mut []) }.unwrap();
}
