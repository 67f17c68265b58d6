//! Tests the pool over the simulated driver.
#![allow(unsafe_code, reason = "launches kernels")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::alloc::Layout;
use std::thread;
use std::time::{Duration, Instant};

use bursar_runtime::adaptor::fault_injection::FaultPlan;
use bursar_runtime::driver::{Access, Context, Driver, Grid, Stream};
use bursar_runtime::{
    Block, BlockRef, BudgetSnapshot, DeviceMemoryResource as _, Direct, FaultInjection, FreeError,
    Pool, PoolSettings, ResourceError, Tag,
};
use bursar_sim_lab::{H200, ONE_GPU, TWO_GPUS, run_in_subprocess};

#[path = "../../../e2e/gpu/runtime-programs/src/runtime_bench/minstd.rs"]
mod minstd;
#[path = "../../../e2e/gpu/runtime-programs/src/runtime_bench/random.rs"]
mod random;

const MIB: u64 = 1 << 20;
const SPIN_TIME: Duration = Duration::from_millis(300);
/// Number of stream slots of a pool.
const SLOT_COUNT: usize = 64;
/// Duration of a race between two threads.
const RACE_TIME: Duration = Duration::from_secs(3);
/// Longer than a busy machine delays a thread.
const LONGEST_DELAY: Duration = Duration::from_secs(3);

fn context(ordinal: u32) -> Context {
    let device = Driver::get().unwrap().device(ordinal).unwrap();
    device.primary_context().unwrap()
}

fn pool_of(context: &Context, settings: PoolSettings) -> Pool<Direct> {
    Pool::new(Direct::new(context), context, settings).unwrap()
}

/// Creates a pool of exactly `mib` MiB, and the context of its streams.
fn pool(mib: u64) -> (Context, Pool<Direct>) {
    let context = context(0);
    let settings = PoolSettings {
        initial: mib * MIB,
        maximum: mib * MIB,
        ..PoolSettings::default()
    };
    let pool = pool_of(&context, settings);
    (context, pool)
}

fn bytes(size: u64) -> Layout {
    Layout::from_size_align(size as usize, 1).unwrap()
}

fn allocate(pool: &Pool<Direct>, size: u64, stream: &Stream) -> Block {
    pool.allocate(bytes(size), stream, Tag::default()).unwrap()
}

/// Keeps a stream busy.
fn spin(stream: &Stream) {
    spin_for(stream, SPIN_TIME);
}

fn spin_for(stream: &Stream, time: Duration) {
    let module = stream.context().load(c"").unwrap();
    let spin = module.function(c"spin").unwrap();
    let mut nanoseconds = time.as_nanos() as u64;
    // SAFETY: the kernel takes one integer and writes no memory.
    unsafe {
        spin.launch(
            stream,
            Grid::linear(1, 1),
            &mut [(&raw mut nanoseconds).cast()],
        )
    }
    .unwrap();
}

#[test]
fn stream_reuses_its_freed_block_without_a_wait() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(64);
        let stream = context.stream().unwrap();
        let warm = allocate(&pool, MIB, &stream);
        spin(&stream);
        let address = warm.address();
        pool.deallocate(warm, &stream).unwrap();
        let again = allocate(&pool, MIB, &stream);
        assert_eq!(again.address(), address);
        assert_eq!(pool.statistics().waits, 0);
        pool.deallocate(again, &stream).unwrap();
    });
}

#[test]
fn stolen_block_waits_for_the_stream_that_freed_it() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(2);
        let (first, second) = (context.stream().unwrap(), context.stream().unwrap());
        let block = allocate(&pool, 2 * MIB, &first);
        spin_for(&first, LONGEST_DELAY);
        pool.deallocate(block, &first).unwrap();
        let start = Instant::now();
        let stolen = allocate(&pool, 2 * MIB, &second);
        assert!(start.elapsed() < LONGEST_DELAY, "the host waited");
        assert!(!second.is_idle().unwrap());
        second.synchronize().unwrap();
        assert!(first.is_idle().unwrap());
        pool.deallocate(stolen, &second).unwrap();
    });
}

#[test]
fn one_event_covers_all_blocks_freed_before_it() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(8);
        let (first, second) = (context.stream().unwrap(), context.stream().unwrap());
        let blocks: Vec<_> = (0..8).map(|_| allocate(&pool, MIB, &first)).collect();
        // Every other block, so that the freed ones do not merge.
        let (kept, freed): (Vec<_>, Vec<_>) = blocks
            .into_iter()
            .enumerate()
            .partition(|(place, _)| place % 2 == 0);
        for (_, block) in freed {
            pool.deallocate(block, &first).unwrap();
        }
        let stolen: Vec<_> = (0..4).map(|_| allocate(&pool, MIB, &second)).collect();
        assert_eq!(pool.statistics().waits, 1);
        for block in stolen {
            pool.deallocate(block, &second).unwrap();
        }
        for (_, block) in kept {
            pool.deallocate(block, &first).unwrap();
        }
    });
}

#[test]
fn stolen_block_belongs_to_the_new_stream() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(2);
        let (first, second) = (context.stream().unwrap(), context.stream().unwrap());
        let block = allocate(&pool, 2 * MIB, &first);
        pool.deallocate(block, &first).unwrap();
        for round in 1..1000 {
            let block = allocate(&pool, round * 256, &second);
            pool.deallocate(block, &second).unwrap();
        }
        assert_eq!(pool.statistics().waits, 1);
    });
}

#[test]
fn block_freed_elsewhere_keeps_its_earlier_deps() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(2);
        let [first, second, third, fourth] = [0; 4].map(|_| context.stream().unwrap());
        let block = allocate(&pool, 2 * MIB, &first);
        spin(&first);
        pool.deallocate(block, &first).unwrap();
        // The second stream waits for the first. The third, which frees, waits for no stream.
        let block = allocate(&pool, 2 * MIB, &second);
        pool.deallocate(block, &third).unwrap();
        assert!(third.is_idle().unwrap());
        let block = allocate(&pool, 2 * MIB, &fourth);
        assert!(!fourth.is_idle().unwrap());
        pool.deallocate(block, &fourth).unwrap();
    });
}

#[test]
fn recorded_use_is_waited_for_when_the_block_is_reused() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(2);
        let [owner, reader, next] = [0; 3].map(|_| context.stream().unwrap());
        let block = allocate(&pool, 2 * MIB, &owner);
        spin(&reader);
        pool.record_block_use(block.as_ref(), &reader, Access::ReadWrite)
            .unwrap();
        pool.deallocate(block, &owner).unwrap();
        let block = allocate(&pool, 2 * MIB, &next);
        assert!(!next.is_idle().unwrap());
        pool.deallocate(block, &next).unwrap();
    });
}

#[test]
fn prepared_use_waits_for_the_allocating_stream() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(2);
        let (owner, reader) = (context.stream().unwrap(), context.stream().unwrap());
        let block = allocate(&pool, MIB, &owner);
        spin(&owner);
        let used = pool
            .prepare_block_use(block.as_ref(), &reader, Access::ReadWrite)
            .unwrap();
        assert!(!reader.is_idle().unwrap());
        let Err(FreeError::Refused { block, reason }) = pool.deallocate(block, &owner) else {
            panic!("it was freed");
        };
        assert_eq!(reason.reason(), "InUse");
        pool.finish_block_use(used, &reader).unwrap();
        let known = block.as_ref();
        pool.deallocate(block, &owner).unwrap();
        assert_eq!(
            pool.record_block_use(known, &reader, Access::ReadWrite)
                .unwrap_err()
                .reason(),
            "Stale"
        );
    });
}

#[test]
fn double_free_is_refused_when_the_range_was_reused() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(2);
        let stream = context.stream().unwrap();
        let block = allocate(&pool, MIB, &stream);
        let old = block.as_ref();
        pool.deallocate(block, &stream).unwrap();
        let new = allocate(&pool, MIB, &stream);
        assert_eq!(new.address(), old.address);
        let Err(FreeError::Refused { reason, .. }) = pool.deallocate(Block::new(old), &stream)
        else {
            panic!("it was freed");
        };
        assert_eq!(
            reason,
            ResourceError::Stale {
                generation: old.generation
            }
        );
        pool.deallocate(new, &stream).unwrap();
        assert_eq!(pool.bytes_outstanding().total(), 0);
    });
}

#[test]
fn foreign_block_is_refused_and_returned() {
    run_in_subprocess(TWO_GPUS, |_| {
        let (context, first) = pool(2);
        let (_, second) = pool(2);
        let stream = context.stream().unwrap();
        let other_gpu = self::context(1).stream().unwrap();
        let zero = first.allocate(bytes(0), &stream, Tag::default());
        assert_eq!(zero, Err(ResourceError::ZeroBytes { ordinal: 0 }));
        let wrong = first.allocate(bytes(1), &other_gpu, Tag::default());
        assert_eq!(wrong.unwrap_err().reason(), "WrongOrdinal");
        let block = allocate(&first, 1, &stream);
        let Err(FreeError::Refused { block, reason }) = second.deallocate(block, &stream) else {
            panic!("it was freed");
        };
        assert_eq!(reason.reason(), "Foreign");
        let Err(FreeError::Refused { block, reason }) = first.deallocate(block, &other_gpu) else {
            panic!("it was freed");
        };
        assert_eq!(reason.reason(), "WrongOrdinal");
        first.deallocate(block, &stream).unwrap();
    });
}

#[test]
fn blocks_are_aligned_as_requested() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(64);
        let stream = context.stream().unwrap();
        let blocks: Vec<_> = (0..=21)
            .map(|power| {
                let layout = Layout::from_size_align(300, 1 << power).unwrap();
                let block = pool.allocate(layout, &stream, Tag::default()).unwrap();
                assert_eq!(block.address() % (1 << power).max(256), 0);
                block
            })
            .collect();
        let too_coarse = Layout::from_size_align(300, 4 << 20).unwrap();
        let refused = pool.allocate(too_coarse, &stream, Tag::default());
        assert_eq!(refused.unwrap_err().reason(), "Alignment");
        for block in blocks {
            pool.deallocate(block, &stream).unwrap();
        }
        assert_eq!(pool.statistics().live, 0);
    });
}

#[test]
fn pool_grows_by_slabs_and_releases_empty_ones() {
    run_in_subprocess(ONE_GPU, |machine| {
        let context = context(0);
        let settings = PoolSettings {
            initial: 0,
            maximum: 96 * MIB,
            step: 32 * MIB,
            ..PoolSettings::default()
        };
        let pool = pool_of(&context, settings);
        let stream = context.stream().unwrap();
        let before = machine.used(0);
        let small = allocate(&pool, MIB, &stream);
        assert_eq!(machine.used(0) - before, 32 * MIB);
        let large = allocate(&pool, 40 * MIB, &stream);
        assert_eq!(pool.statistics().reserved, 32 * MIB + 40 * MIB);
        let refused = pool.allocate(bytes(60 * MIB), &stream, Tag::default());
        assert_eq!(refused.unwrap_err().reason(), "OverBudget");
        pool.deallocate(large, &stream).unwrap();
        // The large block's slab is too small, and is released for a larger one.
        let larger = allocate(&pool, 60 * MIB, &stream);
        assert_eq!(machine.used(0) - before, 32 * MIB + 60 * MIB);
        pool.deallocate(small, &stream).unwrap();
        assert_eq!(pool.trim(), Ok(32 * MIB));
        assert_eq!(machine.used(0) - before, 60 * MIB);
        pool.deallocate(larger, &stream).unwrap();
        drop(pool);
        assert_eq!(machine.used(0), before);
    });
}

#[test]
fn pool_serves_a_request_as_large_as_its_maximum() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let settings = PoolSettings {
            maximum: 64 * MIB,
            ..PoolSettings::default()
        };
        let stream = context.stream().unwrap();
        for align in [1, 256] {
            let pool = pool_of(&context, settings);
            let layout = Layout::from_size_align(64 << 20, align).unwrap();
            let block = pool.allocate(layout, &stream, Tag::default()).unwrap();
            assert_eq!(pool.statistics().reserved, 64 * MIB);
            pool.deallocate(block, &stream).unwrap();
        }
        // The driver's memory may start at any granule.
        let pool = pool_of(&context, settings);
        let coarse = Layout::from_size_align(63 << 20, 2 << 20).unwrap();
        let refused = pool.allocate(coarse, &stream, Tag::default());
        assert_eq!(refused.unwrap_err().reason(), "OverBudget");
    });
}

#[test]
fn pool_limit_is_exact_and_adjustable() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let settings = PoolSettings {
            limit: 10 * MIB,
            ..PoolSettings::default()
        };
        let pool = pool_of(&context, settings);
        let streams: Vec<_> = (0..10).map(|_| context.stream().unwrap()).collect();
        let mut blocks: Vec<_> = streams
            .iter()
            .map(|stream| allocate(&pool, MIB, stream))
            .collect();
        let used = BudgetSnapshot {
            limit: 10 * MIB,
            used: 10 * MIB,
        };
        assert_eq!(pool.budget_snapshot(), Some(used));
        let refused = pool.allocate(bytes(1), &streams[3], Tag::default());
        assert_eq!(refused.unwrap_err().reason(), "OverBudget");
        pool.set_limit(10 * MIB + 1);
        blocks.push(allocate(&pool, 1, &streams[3]));
        for block in blocks {
            pool.deallocate(block, &streams[0]).unwrap();
        }
        assert_eq!(pool.bytes_outstanding().total(), 0);
    });
}

#[test]
fn slab_is_released_after_the_work_that_uses_it() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(2);
        let stream = context.stream().unwrap();
        let block = allocate(&pool, MIB, &stream);
        spin(&stream);
        pool.deallocate(block, &stream).unwrap();
        pool.trim().unwrap();
        assert!(stream.is_idle().unwrap());
    });
}

#[test]
fn failed_steal_leaves_the_block_free() {
    run_in_subprocess(ONE_GPU, |machine| {
        let (context, pool) = pool(2);
        let (first, second) = (context.stream().unwrap(), context.stream().unwrap());
        let block = allocate(&pool, 2 * MIB, &first);
        let address = block.address();
        pool.deallocate(block, &first).unwrap();
        assert!(machine.inject_error(std::process::id(), 700));
        for _ in 0..2 {
            let refused = pool.allocate(bytes(2 * MIB), &second, Tag::default());
            assert_eq!(refused.unwrap_err().reason(), "Cuda");
            assert_eq!(pool.bytes_outstanding().total(), 0);
            assert_eq!(pool.statistics().free, 2 * MIB);
        }
        let again = allocate(&pool, 2 * MIB, &first);
        assert_eq!(again.address(), address, "its own stream needs no event");
        pool.deallocate(again, &first).unwrap();
    });
}

#[test]
fn failed_trim_keeps_the_slab_and_its_deps() {
    run_in_subprocess(ONE_GPU, |machine| {
        let (context, pool) = pool(2);
        let (first, second) = (context.stream().unwrap(), context.stream().unwrap());
        let block = allocate(&pool, MIB, &first);
        pool.deallocate(block, &first).unwrap();
        assert!(machine.inject_error(std::process::id(), 700));
        assert_eq!(pool.trim().unwrap_err().reason(), "Cuda");
        let left = pool.statistics();
        assert_eq!(
            (left.slabs, left.reserved, left.free),
            (1, 2 * MIB, 2 * MIB)
        );
        let whole = allocate(&pool, 2 * MIB, &first);
        pool.deallocate(whole, &first).unwrap();
        let stolen = pool.allocate(bytes(2 * MIB), &second, Tag::default());
        assert_eq!(stolen.unwrap_err().reason(), "Cuda");
    });
}

#[test]
fn slab_is_retired_when_its_free_fails_and_reaped() {
    run_in_subprocess(ONE_GPU, |machine| {
        let context = context(0);
        let before = machine.used(0);
        let plan = FaultPlan {
            frees: [Some(1)].into(),
            ..FaultPlan::default()
        };
        let source = FaultInjection::new(Direct::new(&context), plan);
        let pool = Pool::new(source, &context, PoolSettings::default()).unwrap();
        let stream = context.stream().unwrap();
        let block = pool.allocate(bytes(MIB), &stream, Tag::default()).unwrap();
        pool.deallocate(block, &stream).unwrap();
        let slab = pool.statistics().reserved;
        assert_eq!(pool.trim(), Ok(slab));
        assert_eq!(pool.statistics().reserved, 0);
        assert_eq!(pool.bytes_outstanding().retired, slab);
        assert_eq!(machine.used(0) - before, slab);
        assert_eq!(pool.reap_pending().unwrap().freed, slab);
        assert_eq!(machine.used(0), before);
    });
}

#[test]
fn lowered_limit_admits_nothing_until_enough_is_freed() {
    run_in_subprocess(ONE_GPU, |_| {
        const EACH: u64 = 64 << 10;
        let (context, pool) = pool(64);
        let stream = context.stream().unwrap();
        pool.set_limit(10 * EACH);
        let mut blocks: Vec<_> = (0..10).map(|_| allocate(&pool, EACH, &stream)).collect();
        pool.set_limit(9 * EACH);
        pool.deallocate(blocks.pop().unwrap(), &stream).unwrap();
        let refused = pool.allocate(bytes(1), &stream, Tag::default());
        assert_eq!(refused.unwrap_err().reason(), "OverBudget");
        pool.deallocate(blocks.pop().unwrap(), &stream).unwrap();
        blocks.push(allocate(&pool, EACH, &stream));
        for block in blocks {
            pool.deallocate(block, &stream).unwrap();
        }
    });
}

#[test]
fn only_a_full_device_is_out_of_memory() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let pool = pool_of(&context, PoolSettings::default());
        let stream = context.stream().unwrap();
        let block = allocate(&pool, 12 << 30, &stream);
        let error = pool
            .allocate(bytes(8 << 30), &stream, Tag::default())
            .unwrap_err();
        assert_eq!(error.reason(), "OutOfMemory");
        // A growth step exceeds the remaining memory, and one block does not.
        let rest = context.memory_info().unwrap().0 / MIB * MIB - 4 * MIB;
        let last = allocate(&pool, rest, &stream);
        for block in [block, last] {
            pool.deallocate(block, &stream).unwrap();
        }
    });
}

#[test]
fn eight_threads_share_the_pool_and_leave_it_whole() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(64);
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let (context, pool) = (&context, &pool);
                scope.spawn(move || {
                    let stream = context.stream().unwrap();
                    for round in 0..64 {
                        let sizes = (1..=7).map(|part| part * MIB / 7 + thread * 1000 + round);
                        let blocks: Vec<_> =
                            sizes.map(|size| allocate(pool, size, &stream)).collect();
                        for block in blocks {
                            pool.deallocate(block, &stream).unwrap();
                        }
                    }
                });
            }
        });
        assert_eq!(pool.bytes_outstanding().total(), 0);
        let stream = context.stream().unwrap();
        let all = allocate(&pool, 64 * MIB, &stream);
        assert_eq!(pool.statistics().slabs, 1);
        pool.deallocate(all, &stream).unwrap();
    });
}

#[test]
fn streams_beyond_the_slots_are_served_in_order() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(2);
        let streams: Vec<_> = (0..100).map(|_| context.stream().unwrap()).collect();
        for stream in &streams {
            let block = allocate(&pool, 2 * MIB, stream);
            pool.deallocate(block, stream).unwrap();
        }
        let (laned, other) = (&streams[0], &streams[99]);
        let block = allocate(&pool, 2 * MIB, laned);
        let known: BlockRef = block.as_ref();
        assert_eq!(
            pool.record_block_use(known, other, Access::ReadWrite)
                .unwrap_err()
                .reason(),
            "StreamMisuse"
        );
        spin(laned);
        pool.deallocate(block, laned).unwrap();
        let block = allocate(&pool, 2 * MIB, other);
        assert!(!other.is_idle().unwrap());
        pool.deallocate(block, other).unwrap();
        assert!(
            other.is_idle().unwrap(),
            "a stream without a lane is waited for"
        );
    });
}

#[test]
fn reused_slot_waits_for_its_previous_stream() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(2);
        for _ in 0..200 {
            let stream = context.stream().unwrap();
            let block = allocate(&pool, 2 * MIB, &stream);
            pool.deallocate(block, &stream).unwrap();
        }
        let busy = context.stream().unwrap();
        let block = allocate(&pool, 2 * MIB, &busy);
        spin(&busy);
        pool.deallocate(block, &busy).unwrap();
        pool.forget_stream(&busy).unwrap();
        drop(busy);
        let next = context.stream().unwrap();
        let block = allocate(&pool, 2 * MIB, &next);
        assert!(!next.is_idle().unwrap());
        pool.deallocate(block, &next).unwrap();
    });
}

#[test]
fn default_stream_keeps_its_slot() {
    run_in_subprocess(ONE_GPU, |_| {
        let (context, pool) = pool(64);
        let block = allocate(&pool, MIB, &context.default_stream());
        for _ in 0..2 * SLOT_COUNT {
            let stream = context.stream().unwrap();
            let another = allocate(&pool, MIB, &stream);
            pool.deallocate(another, &stream).unwrap();
        }
        spin_for(&context.default_stream(), LONGEST_DELAY);
        let reader = context.stream().unwrap();
        let used = pool
            .prepare_block_use(block.as_ref(), &reader, Access::ReadWrite)
            .unwrap();
        assert!(!reader.is_idle().unwrap(), "behind what writes the block");
        pool.finish_block_use(used, &reader).unwrap();
        pool.deallocate(block, &reader).unwrap();
    });
}

#[test]
fn forgotten_stream_gets_no_more_events() {
    run_in_subprocess(ONE_GPU, |_| {
        // Fewer blocks than threads, so that each thread takes blocks of others.
        let (context, pool) = pool(4);
        let try_once = |stream: &Stream| match pool.allocate(bytes(2 * MIB), stream, Tag::default())
        {
            Ok(block) => {
                pool.deallocate(block, stream).unwrap();
                true
            }
            Err(error) if error.reason() == "OverBudget" => false,
            Err(other) => panic!("{other}"),
        };
        let end = Instant::now() + RACE_TIME;
        let comes_and_goes = || {
            while Instant::now() < end {
                let owned = context.stream().unwrap();
                // SAFETY: the test destroys the stream after the last use of `stream`.
                let stream = unsafe { Stream::from_raw(&context, owned.as_raw()) };
                while !try_once(&stream) && Instant::now() < end {}
                pool.forget_stream(&stream).unwrap();
                drop(owned);
            }
        };
        let stays = || {
            let stream = context.stream().unwrap();
            while Instant::now() < end {
                try_once(&stream);
            }
        };
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(comes_and_goes);
                scope.spawn(stays);
            }
        });
    });
}

struct PoolSource(Pool<Direct>, Stream);

impl random::BenchAllocator for PoolSource {
    type Block = Block;

    fn allocate(&self, bytes: u64) -> Option<Block> {
        self.0
            .allocate(self::bytes(bytes), &self.1, Tag::default())
            .ok()
    }

    fn free(&self, block: Block) -> u64 {
        let bytes = block.bytes();
        self.0.deallocate(block, &self.1).unwrap();
        bytes
    }
}

#[test]
fn rmm_random_allocations_fit_in_half_of_a_gpu() {
    run_in_subprocess(H200, |_| {
        let context = context(0);
        let settings = PoolSettings {
            initial: 70 << 30,
            maximum: 70 << 30,
            limit: random::MAX_LIVE,
            ..PoolSettings::default()
        };
        let pool = PoolSource(pool_of(&context, settings), context.stream().unwrap());
        for allocations in [1000, 10_000] {
            for max_mib in [1, 64, 1024] {
                let cell = random::Cell {
                    allocations,
                    max_mib,
                    max_live: random::MAX_LIVE,
                    seed: 1,
                };
                assert_eq!(
                    random::run(&pool, cell),
                    0,
                    "{allocations} to {max_mib} MiB"
                );
            }
        }
        assert_eq!(pool.0.bytes_outstanding().total(), 0);
        assert_eq!(pool.0.statistics().waits, 0);
    });
}

#[test]
fn benchmark_rng_matches_libstdcxx() {
    // std::default_random_engine and std::uniform_int_distribution of g++ 12: sizes to 1 GiB,
    // percents, indices.
    let mut random = minstd::Minstd::new(1);
    let drawn = [0; 3]
        .map(|_| [(1, 1 << 30), (0, 99), (0, 99_999)].map(|(low, high)| random.within(low, high)));
    assert_eq!(
        drawn,
        [
            [16807, 13, 75563],
            [984_943_658, 53, 21896],
            [101_027_544, 67, 67932]
        ]
    );
}
