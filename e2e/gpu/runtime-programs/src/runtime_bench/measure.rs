//! Measures RMM's cells and the pair, over the pool with its exact limit and over the driver's
//! pool.

use std::alloc::Layout;
use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Context as _, Result};
use bursar_runtime::driver::{Context, Stream};
use bursar_runtime::{Block, Budget, DeviceMemoryResource, Direct, Pool, PoolSettings, Tag};
use serde_json::json;

use super::native::Native;
use super::random::{self, BenchAllocator, Cell, MAX_LIVE};

const MIB: u64 = 1 << 20;
const THREADS: u64 = 8;
const CELLS: [(u64, u64); 9] = [
    (1000, 1),
    (1000, 64),
    (1000, 1024),
    (10_000, 1),
    (10_000, 64),
    (10_000, 1024),
    (100_000, 1),
    (100_000, 64),
    (100_000, 1024),
];
/// Total allocations in the rounds of a cell.
const ALLOCATIONS_PER_CELL: u64 = 500_000;
/// Pairs in a block: shorter than a time slice, and in eight threads longer than their start.
const PAIRS: u64 = 2_000;
const PAIRS_OF_THREADS: u64 = 200_000;
const BLOCKS: usize = 301;
const BLOCKS_OF_THREADS: usize = 9;

/// Resource with a stream.
struct PoolSource<'a, R>(&'a R, &'a Stream);

impl<R: DeviceMemoryResource> BenchAllocator for PoolSource<'_, R> {
    type Block = Block;

    fn allocate(&self, bytes: u64) -> Option<Block> {
        let layout = Layout::from_size_align(bytes as usize, 256).ok()?;
        self.0.allocate(layout, self.1, Tag("benchmark")).ok()
    }

    fn free(&self, block: Block) -> u64 {
        let bytes = block.bytes();
        if let Err(error) = self.0.deallocate(block, self.1) {
            panic!("{error}");
        }
        bytes
    }
}

/// Creates a pool of fixed size with an exact limit. RMM's pool is half of the free memory, and the
/// limit applies to live bytes.
fn pool(context: &Context, capacity: u64) -> Result<Pool<Direct>> {
    let settings = PoolSettings {
        initial: capacity,
        maximum: capacity,
        limit: MAX_LIVE,
        ..PoolSettings::default()
    };
    Ok(Pool::new(Direct::new(context), context, settings)?)
}

/// Median and best of several measurements.
#[derive(Clone, Copy)]
struct Times {
    median: f64,
    best: f64,
}

impl Times {
    fn of(times: impl Iterator<Item = f64>) -> Times {
        let mut times: Vec<_> = times.collect();
        times.sort_by(f64::total_cmp);
        Times {
            median: times[times.len() / 2],
            best: times[0],
        }
    }
}

/// Returns half of the free memory, as RMM's own benchmark does.
fn capacity(context: &Context) -> Result<u64> {
    Ok(whole_steps(context.memory_info()?.0 / 2))
}

/// Rounds to the driver's steps of linear memory.
fn whole_steps(bytes: u64) -> u64 {
    bytes / (2 * MIB) * (2 * MIB)
}

/// Measures RMM's cells in one thread and in eight; no allocation may fail.
pub(crate) fn random(context: &Context) -> Result<bool> {
    let _current = context.enter()?;
    let stream = context.stream()?;
    let pool = pool(context, capacity(context)?)?;
    let mut right = true;
    for (allocations, max_mib) in CELLS {
        let (ms, failed) = alone(&PoolSource(&pool, &stream), allocations, max_mib);
        right &= row("pool", allocations, max_mib, ms, failed);
    }
    for (allocations, max_mib) in CELLS {
        let (ms, failed) = shared(context, &pool, allocations, max_mib)?;
        right &= row("pool, 8 threads", allocations, max_mib, ms, failed);
    }
    let left = pool.bytes_outstanding().total();
    println!(
        "{}",
        json!({"row": "left", "bytes": left, "waits": pool.statistics().waits})
    );
    Ok(right && left == 0)
}

/// Measures one cell for each line of standard input, in turn with another program.
pub(crate) fn turns(context: &Context, percent: u64) -> Result<bool> {
    let _current = context.enter()?;
    let stream = context.stream()?;
    let total = context.memory_info()?.1;
    let pool = pool(context, whole_steps(total / 100 * percent))?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let (allocations, max_mib) = line.split_once(' ').context("ALLOCATIONS MIB")?;
        let cell = Cell {
            allocations: allocations.parse()?,
            max_mib: max_mib.parse()?,
            max_live: MAX_LIVE,
            seed: 1,
        };
        let start = Instant::now();
        let failed = random::run(&PoolSource(&pool, &stream), cell);
        let ms = start.elapsed().as_secs_f64() * 1e3;
        println!("{}", json!({"row": "turn", "ms": ms, "failed": failed}));
    }
    Ok(true)
}

/// Measures RMM's cells from the driver's pool.
pub(crate) fn native(context: &Context) -> Result<bool> {
    let _current = context.enter()?;
    let stream = context.stream()?;
    let native = Native::new(context.ordinal(), &stream, capacity(context)?)?;
    let mut right = true;
    for (allocations, max_mib) in CELLS {
        let (ms, failed) = alone(&native, allocations, max_mib);
        right &= row("cuMemAllocAsync", allocations, max_mib, ms, failed);
    }
    Ok(right)
}

fn row(source: &str, allocations: u64, max_mib: u64, ms: Times, failed: u64) -> bool {
    let ns = ms.median * 1e6 / (2 * allocations) as f64;
    println!(
        "{}",
        json!({"row": "random", "source": source, "allocations": allocations, "max_mib": max_mib, "ms": ms.median, "best_ms": ms.best, "ns_a_step": ns, "failed": failed})
    );
    failed == 0
}

/// Returns the milliseconds of a cell's rounds and the number of failed allocations.
fn alone<S: BenchAllocator>(source: &S, allocations: u64, max_mib: u64) -> (Times, u64) {
    let cell = Cell {
        allocations,
        max_mib,
        max_live: MAX_LIVE,
        seed: 1,
    };
    rounds(allocations, || {
        let start = Instant::now();
        let failed = random::run(source, cell);
        (start.elapsed().as_secs_f64() * 1e3, failed)
    })
}

fn rounds(allocations: u64, mut once: impl FnMut() -> (f64, u64)) -> (Times, u64) {
    let _warm = once();
    let count = (ALLOCATIONS_PER_CELL / allocations).clamp(5, 101);
    let (times, failed): (Vec<_>, Vec<_>) = (0..count).map(|_| once()).unzip();
    (Times::of(times.into_iter()), failed.iter().sum())
}

/// Measures a cell in eight threads, each with an eighth of the allocations and live bytes and a
/// stream of its own.
fn shared<R: DeviceMemoryResource>(
    context: &Context,
    resource: &R,
    allocations: u64,
    max_mib: u64,
) -> Result<(Times, u64)> {
    let streams = (0..THREADS)
        .map(|_| context.stream())
        .collect::<Result<Vec<_>, _>>()?;
    Ok(rounds(allocations, || {
        let each = |thread: u64| Cell {
            allocations: allocations / THREADS,
            max_mib,
            max_live: MAX_LIVE / THREADS,
            seed: 1 + thread,
        };
        together(&streams, |thread, stream| {
            random::run(&PoolSource(resource, stream), each(thread))
        })
    }))
}

/// Runs a thread for each stream. Returns the milliseconds from the first start to the last end,
/// and the sum of the results.
fn together(streams: &[Stream], work: impl Fn(u64, &Stream) -> u64 + Sync) -> (f64, u64) {
    let gate = Barrier::new(streams.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(streams)
            .map(|(number, stream)| {
                let (gate, work) = (&gate, &work);
                scope.spawn(move || {
                    gate.wait();
                    let start = Instant::now();
                    let sum = work(number, stream);
                    (start, Instant::now(), sum)
                })
            })
            .collect();
        let ended: Vec<_> = threads
            .into_iter()
            .map(|thread| thread.join().expect("a thread ends"))
            .collect();
        let first = ended.iter().map(|&(start, ..)| start).min();
        let last = ended.iter().map(|&(_, ended, _)| ended).max();
        let time = first.zip(last).map(|(first, last)| last - first);
        let sum = ended.iter().map(|&(.., sum)| sum).sum();
        (time.unwrap_or_default().as_secs_f64() * 1e3, sum)
    })
}

/// Measures an allocation with its free.
pub(crate) fn pair(context: &Context) -> Result<bool> {
    let _current = context.enter()?;
    let stream = context.stream()?;
    {
        let pool = pool(context, capacity(context)?)?;
        for bytes in [256, MIB, 64 * MIB] {
            pair_row("pool", bytes, 1, pairs(&PoolSource(&pool, &stream), bytes));
        }
        for (streams, name) in [(THREADS, "a stream each"), (1, "one stream")] {
            let streams = (0..streams)
                .map(|_| context.stream())
                .collect::<Result<Vec<_>, _>>()?;
            let ns = pairs_together(&pool, &streams);
            pair_row(&format!("pool, {name}"), MIB, THREADS, ns);
        }
        let budget = Budget::new(pool, MAX_LIVE);
        pair_row(
            "budget over the pool",
            MIB,
            1,
            pairs(&PoolSource(&budget, &stream), MIB),
        );
    }
    let native = Native::new(context.ordinal(), &stream, 1 << 30)?;
    for bytes in [256, MIB, 64 * MIB] {
        pair_row("cuMemAllocAsync", bytes, 1, pairs(&native, bytes));
    }
    Ok(true)
}

/// Returns the nanoseconds of a pair in each of eight threads.
fn pairs_together<R: DeviceMemoryResource>(resource: &R, streams: &[Stream]) -> Times {
    let streams: Vec<_> = streams
        .iter()
        .cycle()
        .take(THREADS as usize)
        .cloned()
        .collect();
    let block = |_: u64, stream: &Stream| {
        block_of_pairs(&PoolSource(resource, stream), MIB, PAIRS_OF_THREADS);
        0
    };
    let pairs = PAIRS_OF_THREADS as f64;
    Times::of((0..BLOCKS_OF_THREADS).map(|_| together(&streams, block).0 * 1e6 / pairs))
}

fn pair_row(source: &str, bytes: u64, threads: u64, ns: Times) {
    println!(
        "{}",
        json!({"row": "pair", "source": source, "bytes": bytes, "threads": threads, "ns": ns.median, "best_ns": ns.best})
    );
}

fn pairs<S: BenchAllocator>(source: &S, bytes: u64) -> Times {
    let times = (0..BLOCKS).map(|_| {
        let start = Instant::now();
        block_of_pairs(source, bytes, PAIRS);
        start.elapsed().as_secs_f64() * 1e9 / PAIRS as f64
    });
    Times::of(times)
}

fn block_of_pairs<S: BenchAllocator>(source: &S, bytes: u64, pairs: u64) {
    for _ in 0..pairs {
        match source.allocate(bytes) {
            Some(block) => {
                source.free(std::hint::black_box(block));
            }
            None => panic!("{bytes} bytes failed"),
        }
    }
}
