//! Limits the memory of a program, and of one part of it, and logs each call.

use std::error::Error;
use std::sync::Arc;

use bursar_runtime::adaptor::logging::{Action, MemorySink};
use bursar_runtime::{Budget, DeviceRuntime, Tag, TrackedSlice};

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let runtime = DeviceRuntime::for_ordinal(0)?;
    // In a pod the limit is the container's quota, and follows it when the agent changes that.
    println!("at most {} bytes", runtime.budget().limit);
    runtime.set_limit(Some(8 << 20)); // in addition to the quota
    let log = Arc::new(MemorySink::default());
    runtime.set_log(Some(Arc::clone(&log) as _));
    let stream = runtime.streams().next()?;
    let half = TrackedSlice::<u8>::allocate(&runtime, 4 << 20, &stream, Tag("half"))?;
    let refused = TrackedSlice::<u8>::allocate(&runtime, 5 << 20, &stream, Tag("more"));
    println!("{}", refused.expect_err("9 of 8 MiB"));
    drop(half);
    runtime.set_log(None);
    let actions: Vec<_> = log.records().iter().map(|record| record.action).collect();
    let expected = [Action::Allocate, Action::AllocateFailure, Action::Free];
    assert_eq!(actions, expected);
    // A part of the program with a budget of its own, over the same pool.
    let part = runtime.with_resource(|resource| Budget::new(resource, 1 << 20));
    let refused = TrackedSlice::<u8>::allocate(&part, 2 << 20, &stream, Tag("part"));
    println!("{}", refused.expect_err("2 of 1 MiB"));
    assert_eq!(runtime.budget().used, 0);
    Ok(())
}
