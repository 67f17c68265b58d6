//! Checks that the data of a stream survives when it takes a block from another stream.

use std::alloc::Layout;

use anyhow::{Result, ensure};
use bursar_runtime::driver::{Context, Stream};
use bursar_runtime::{DeviceMemoryResource as _, Direct, Pool, PoolSettings, Tag};
use serde_json::json;

use super::raw::Raw as _;

const BYTES: usize = 256 << 20;
const FILLS: usize = 100;
const ROUNDS: u64 = 20;
const MINE: u8 = 0x5a;
const THEIRS: u8 = 0xa5;

/// The first stream fills the block a hundred times and frees it; the second takes and fills it
/// once.
///
/// A run without the pool, where nothing orders the streams, shows how often the check would find
/// wrong data.
pub(crate) fn run(context: &Context) -> Result<bool> {
    let settings = PoolSettings {
        initial: BYTES as u64,
        maximum: BYTES as u64,
        ..PoolSettings::default()
    };
    let pool = Pool::new(Direct::new(context), context, settings)?;
    let streams = [context.stream()?, context.stream()?];
    let layout = Layout::from_size_align(BYTES, 256)?;
    let (mut wrong, mut unordered, mut busy) = (0, 0, 0);
    for _ in 0..ROUNDS {
        let [first, second] = &streams;
        let block = pool.allocate(layout, first, Tag("first"))?;
        let address = block.address();
        occupy(context, address, first)?;
        pool.deallocate(block, first)?;
        let block = pool.allocate(layout, second, Tag("second"))?;
        ensure!(block.address() == address, "it is another block");
        busy += u64::from(!first.is_idle()?);
        wrong += data_is_lost(context, address, &streams)?;
        occupy(context, address, first)?;
        unordered += data_is_lost(context, address, &streams)?;
        pool.deallocate(block, second)?;
    }
    let waits = pool.statistics().waits;
    println!(
        "{}",
        json!({"row": "steal", "rounds": ROUNDS, "wrong": wrong, "first_still_busy": busy, "waits": waits, "wrong_without_order": unordered})
    );
    Ok(wrong == 0 && waits >= ROUNDS)
}

fn occupy(context: &Context, address: u64, stream: &Stream) -> Result<()> {
    for _ in 0..FILLS {
        context.fill_async(address, THEIRS, BYTES, stream)?;
    }
    Ok(())
}

/// Returns 1 if a byte of the second stream is lost once both are done.
fn data_is_lost(context: &Context, address: u64, [first, second]: &[Stream; 2]) -> Result<u64> {
    context.fill_async(address, MINE, BYTES, second)?;
    second.synchronize()?;
    first.synchronize()?;
    let mut found = vec![0; BYTES];
    context.copy_from_device(&mut found, address)?;
    Ok(u64::from(found.iter().any(|&byte| byte != MINE)))
}
