//! Waits in a task and in a thread until the memory of a GPU becomes stale, without polls.

use std::error::Error;
use std::time::Duration;

use bursar_runtime::{DeviceRuntime, StaleReason, StateSubscription};

/// Tells of each change until the memory is lost, in a task of any executor.
async fn supervise(runtime: &DeviceRuntime) -> Option<StaleReason> {
    let mut changes: StateSubscription = runtime.state().subscribe();
    while let Some(reason) = changes.changed().await {
        match reason {
            // The memory can still be freed; allocate again later.
            StaleReason::Draining => println!("{} drains", runtime.generation()),
            // Only a new process image can use the GPU; or this runtime was shut down.
            StaleReason::Poisoned(_) | StaleReason::ShutDown => return Some(reason),
        }
    }
    None
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let first = DeviceRuntime::for_ordinal(0)?;
    let tasks = tokio::runtime::Builder::new_current_thread().build()?;
    let mut changes = first.state().subscribe();
    std::thread::scope(|scope| {
        let task = scope.spawn(|| tasks.block_on(supervise(&first)));
        first.state().drain(); // the agent's part, when it drains the GPU
        let change = changes.wait(Duration::from_secs(60));
        assert_eq!(change, Some(StaleReason::Draining));
        first.shut_down();
        assert_eq!(task.join().ok(), Some(Some(StaleReason::ShutDown)));
    });
    // The next start has a later generation.
    let second = DeviceRuntime::for_ordinal(0)?;
    assert!(second.generation() > first.generation());
    Ok(())
}
