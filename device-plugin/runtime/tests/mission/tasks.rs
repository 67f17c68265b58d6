//! Tests the runtime's operations for tasks, which never block a worker of Tokio.

use std::alloc::Layout;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use bursar_runtime::driver::{Attach, Stream};
use bursar_runtime::memory::async_runtime::{AsyncError, RunError};
use bursar_runtime::{
    AsyncRuntime, Block, DeviceMemoryResource, DeviceRuntime, Direct, FreeError, Origin,
    Outstanding, Reaped, ResourceError, Tag, TrackedSlice,
};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::{SPIN_TIME, spin};

/// Memory of a slow driver: each call takes [`SPIN_TIME`]. Records the threads of frees.
#[derive(Debug)]
struct FakeSlowDriver(Direct, Arc<Mutex<Vec<ThreadId>>>);

impl DeviceMemoryResource for FakeSlowDriver {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        thread::sleep(SPIN_TIME);
        self.0.allocate(layout, stream, tag)
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        thread::sleep(SPIN_TIME);
        self.1.lock().unwrap().push(thread::current().id());
        self.0.deallocate(block, stream)
    }

    fn reap_pending(&self) -> Result<Reaped, ResourceError> {
        thread::sleep(SPIN_TIME);
        self.0.reap_pending()
    }

    fn ordinal(&self) -> u32 {
        self.0.ordinal()
    }

    fn origin(&self) -> Origin {
        self.0.origin()
    }

    fn bytes_outstanding(&self) -> Outstanding {
        self.0.bytes_outstanding()
    }

    fn kind(&self) -> &'static str {
        "slow"
    }
}

/// Returns a runtime over a slow driver, and the threads of its frees so far.
fn slow_runtime() -> (AsyncRuntime, Arc<Mutex<Vec<ThreadId>>>) {
    let runtime = DeviceRuntime::for_ordinal(0).unwrap();
    let freed_in = Arc::default();
    let slow = FakeSlowDriver(Direct::new(runtime.context()), Arc::clone(&freed_in));
    let runtime = Arc::new(runtime.with_resource(|_| slow));
    (AsyncRuntime::from(runtime), freed_in)
}

/// Starts an operation, and returns its result. Fails unless the worker serves other tasks
/// meanwhile.
async fn beside_ticks<F: Future>(start: impl FnOnce() -> F) -> F::Output {
    let operation = start();
    tokio::pin!(operation);
    let mut ticks = 0;
    let done = loop {
        tokio::select! {
            done = &mut operation => break done,
            () = tokio::time::sleep(Duration::from_millis(5)) => ticks += 1,
        }
    };
    assert!(ticks > 2, "the worker was blocked");
    done
}

/// Runs a future on one worker, so that a blocked worker blocks everything.
fn on_one_worker<F: Future>(future: F) -> F::Output {
    let mut tasks = tokio::runtime::Builder::new_current_thread();
    tasks.enable_time().build().unwrap().block_on(future)
}

#[test]
fn operations_leave_the_worker_to_other_tasks() {
    run_in_subprocess(ONE_GPU, |_| {
        let (runtime, _) = slow_runtime();
        let stream = runtime.runtime().stream().unwrap();
        let (layout, tag) = (Layout::new::<[u32; 3]>(), Tag("slow"));
        on_one_worker(async {
            let memory = beside_ticks(|| runtime.allocate_async::<u32>(3, &stream, tag)).await;
            let memory = memory.unwrap();
            spin(&stream);
            let memory = beside_ticks(|| runtime.copy_from_host_async(memory, vec![1, 2, 3])).await;
            let memory = memory.unwrap();
            spin(&stream);
            let copied = beside_ticks(|| runtime.copy_to_host_async(memory)).await;
            let (memory, items) = copied.unwrap();
            assert_eq!(items, [1, 2, 3]);
            beside_ticks(|| runtime.free_async(memory)).await.unwrap();
            let block = beside_ticks(|| runtime.allocate_block_async(layout, &stream, tag)).await;
            let block = block.unwrap();
            let freed = beside_ticks(|| runtime.deallocate_async(block, &stream)).await;
            freed.unwrap();
            beside_ticks(|| runtime.reap_async()).await.unwrap();
            spin(&stream);
            let waited = beside_ticks(|| runtime.synchronize_async(&stream)).await;
            waited.unwrap();
            beside_ticks(|| runtime.run(|_| thread::sleep(SPIN_TIME)))
                .await
                .unwrap();
        });
        assert_eq!(runtime.runtime().resource().bytes_outstanding().total(), 0);
    });
}

/// Threads of the crate that run operations of tasks.
const OPERATION_THREADS: usize = 8;

#[test]
fn managed_memory_leaves_the_worker_to_other_tasks() {
    run_in_subprocess(ONE_GPU, |_| {
        let (runtime, _) = slow_runtime();
        let stream = runtime.runtime().stream().unwrap();
        on_one_worker(async {
            // The allocation waits for a thread, which it would not in the worker.
            for _ in 0..OPERATION_THREADS {
                drop(runtime.run(|_| thread::sleep(SPIN_TIME)));
            }
            let (attach, tag) = (Attach::Global, Tag("slow"));
            let memory =
                beside_ticks(|| runtime.allocate_managed_async::<u32>(3, attach, &stream, tag));
            let mut memory = memory.await.unwrap();
            memory.write().unwrap().fill(7);
            // The free waits for the work that uses the memory.
            spin(&stream);
            let freed = beside_ticks(|| runtime.free_managed_async(memory)).await;
            freed.unwrap();
            assert_eq!(stream.is_idle(), Ok(true));
        });
        let blocks = runtime.runtime().managed().statistics().blocks;
        assert_eq!((blocks.total, blocks.current), (1, 0));
    });
}

/// Waits until `is_so`, in a thread that may block.
fn wait_until(is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(30));
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn unpolled_future_frees_nothing_on_the_worker() {
    run_in_subprocess(ONE_GPU, |_| {
        let (runtime, freed_in) = slow_runtime();
        let (inner, stream) = (runtime.runtime(), runtime.runtime().stream().unwrap());
        let take = || TrackedSlice::<u32>::allocate(inner, 1, &stream, Tag("dropped")).unwrap();
        let (freed, written, read) = (take(), take(), take());
        drop(runtime.free_async(freed));
        drop(runtime.copy_from_host_async(written, vec![1]));
        drop(runtime.copy_to_host_async(read));
        drop(runtime.allocate_async::<u32>(1, &stream, Tag("dropped")));
        drop(runtime.allocate_managed_async::<u32>(1, Attach::Global, &stream, Tag("dropped")));
        wait_until(|| freed_in.lock().unwrap().len() == 4);
        assert!(!freed_in.lock().unwrap().contains(&thread::current().id()));
        wait_until(|| {
            let blocks = inner.managed().statistics().blocks;
            inner.resource().bytes_outstanding().total() == 0
                && (blocks.total, blocks.current) == (1, 0)
        });
    });
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
        wait_until(|| runtime.runtime().budget().used == 0);
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
            let begin = Instant::now();
            runtime.synchronize_async(&stream).await.unwrap();
            assert!(begin.elapsed() >= SPIN_TIME / 2);
        });
        assert_eq!(runtime.runtime().resource().bytes_outstanding().total(), 0);
    });
}
