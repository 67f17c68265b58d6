//! Tests the generation of a device's memory, and who is told when it becomes stale.

use std::time::Duration;

use anyhow::Result;
use bursar_runtime::{DeviceRuntime, StaleReason, StateSubscription};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

/// Restarts a worker's GPU work whenever its memory is lost: one task waits, and no one polls.
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

/// Waits for the same changes in a thread.
fn supervise_in_a_thread(runtime: &DeviceRuntime) -> Option<StaleReason> {
    let mut changes = runtime.state().subscribe();
    changes.wait(Duration::from_secs(60))
}

#[test]
fn subscribers_are_told_and_generations_grow() {
    run_in_subprocess(ONE_GPU, |_| {
        example().unwrap();
    });
}

fn example() -> Result<()> {
    let first = DeviceRuntime::for_ordinal(0)?;
    let tasks = tokio::runtime::Builder::new_current_thread().build()?;
    let reason = std::thread::scope(|scope| {
        let thread = scope.spawn(|| supervise_in_a_thread(&first));
        let task = scope.spawn(|| tasks.block_on(supervise(&first)));
        first.state().drain();
        assert_eq!(thread.join().unwrap(), Some(StaleReason::Draining));
        first.shut_down();
        task.join().unwrap()
    });
    assert_eq!(reason, Some(StaleReason::ShutDown));
    let second = DeviceRuntime::for_ordinal(0)?;
    // Outside of a container the process generation is 0.
    assert!(second.generation() > first.generation());
    assert_eq!(second.generation().to_string(), "0.2");
    Ok(())
}
