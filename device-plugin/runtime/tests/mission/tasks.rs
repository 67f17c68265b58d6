//! Tests the runtime's operations for tasks, which never block a worker of Tokio.

use std::alloc::Layout;
use std::time::{Duration, Instant};

use anyhow::Result;
use bursar_runtime::driver::Attach;
use bursar_runtime::memory::async_runtime::{AsyncError, RunError};
use bursar_runtime::{AsyncRuntime, DeviceMemoryResource as _, DeviceRuntime, Tag};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::{SPIN_TIME, spin};

async fn example() -> Result<()> {
    let runtime = AsyncRuntime::from(DeviceRuntime::for_ordinal(0)?);
    let stream = runtime.runtime().streams().next()?;
    let memory = runtime
        .allocate_async::<u32>(3, &stream, Tag("request"))
        .await?;
    let memory = runtime.copy_from_host_async(memory, vec![1, 2, 3]).await?;
    spin(&stream); // stands for kernels
    // The worker serves other tasks while the driver waits.
    let mut ticks = 0;
    let done = runtime.copy_to_host_async(memory);
    tokio::pin!(done);
    let (memory, items) = loop {
        tokio::select! {
            copied = &mut done => break copied?,
            () = tokio::time::sleep(Duration::from_millis(5)) => ticks += 1,
        }
    };
    assert_eq!(items, [1, 2, 3]);
    assert!(ticks > 2, "the worker was blocked");
    runtime.free_async(memory).await?;
    // Any other operation that may block.
    let free = runtime
        .run(|runtime| runtime.context().memory_info())
        .await??;
    assert!(free.0 < free.1);
    Ok(())
}

/// Runs a future on one worker, so that a blocked worker blocks everything.
fn on_one_worker<F: Future>(future: F) -> F::Output {
    let mut tasks = tokio::runtime::Builder::new_current_thread();
    tasks.enable_time().build().unwrap().block_on(future)
}

#[test]
fn operations_leave_the_worker_to_other_tasks() {
    run_in_subprocess(ONE_GPU, |_| on_one_worker(example()).unwrap());
}

#[test]
fn dropped_future_leaks_no_memory() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = AsyncRuntime::from(DeviceRuntime::for_ordinal(0).unwrap());
        let stream = runtime.runtime().stream().unwrap();
        on_one_worker(async {
            for _ in 0..32 {
                let allocated = runtime.allocate_async::<u8>(4096, &stream, Tag("dropped"));
                let _ = tokio::time::timeout(Duration::ZERO, allocated).await;
                let layout = Layout::new::<[u8; 4096]>();
                let block = tokio::select! {
                    biased;
                    block = runtime.allocate_block_async(layout, &stream, Tag("b")) => block.unwrap(),
                    () = std::future::ready(()) => {
                        let resource = runtime.runtime().resource();
                        resource.allocate(layout, &stream, Tag("b")).unwrap()
                    }
                };
                drop(runtime.deallocate_async(block, &stream));
            }
        });
        let begun = Instant::now();
        while runtime.runtime().budget().used > 0 {
            assert!(begun.elapsed() < Duration::from_secs(30));
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}

#[test]
fn errors_and_panics_come_back_to_the_task() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = AsyncRuntime::from(DeviceRuntime::for_ordinal(0).unwrap());
        let stream = runtime.runtime().stream().unwrap();
        on_one_worker(async {
            let none = runtime.allocate_async::<u8>(0, &stream, Tag("none")).await;
            assert!(matches!(none, Err(AsyncError::Memory(_))), "{none:?}");
            let panicked = runtime.run(|_| panic!("no luck")).await;
            assert_eq!(
                panicked,
                Err::<(), _>(RunError::Panicked("no luck".to_owned()))
            );
            let managed =
                runtime.allocate_managed_async::<u32>(4, Attach::Global, &stream, Tag("m"));
            assert_eq!(managed.await.unwrap().read().unwrap(), [0; 4]);
            let layout = Layout::new::<u64>();
            let block = runtime
                .allocate_block_async(layout, &stream, Tag("b"))
                .await
                .unwrap();
            let known = bursar_runtime::Block::new(block.as_ref());
            runtime.deallocate_async(block, &stream).await.unwrap();
            let again = runtime.deallocate_async(known, &stream).await;
            assert!(matches!(again, Err(AsyncError::Free(_))), "{again:?}");
            runtime.reap_async().await.unwrap();
            spin(&stream);
            let begun = Instant::now();
            runtime.synchronize_async(&stream).await.unwrap();
            assert!(begun.elapsed() >= SPIN_TIME / 2);
        });
        assert_eq!(runtime.runtime().resource().bytes_outstanding().total(), 0);
    });
}
