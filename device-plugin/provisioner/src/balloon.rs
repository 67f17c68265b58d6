//! Holds device memory for a moment, which displaces managed memory from the GPU.
//!
//! The agent samples the GPU meanwhile (`sessions/src/balloon.rs`). The process has no context (F3
//! in docs/facts.md), and the driver frees the memory when it exits. It exits soon whatever becomes
//! of the agent.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use bursar_runtime::driver::{Driver, GpuUuid};
use bursar_runtime::{Physical, PhysicalBlock, PhysicalMemoryResource, Tag};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use crate::print_line;

/// The largest piece: the driver takes long for one that it has to evict memory for.
const MAX_PIECE: u64 = 256 << 20;

/// How long the process holds the memory at most.
const HOLD_TIMEOUT: Timespec = Timespec {
    tv_sec: 5,
    tv_nsec: 0,
};

/// A line of the output: the memory that the process holds.
#[derive(Serialize)]
struct Held {
    bytes: u64,
}

/// Allocates at most `bytes` for at most that time. Prints the amount, and prints it again once the
/// agent has closed standard input.
///
/// # Errors
/// The driver has no such GPU, or the agent did not close standard input in time.
pub(crate) fn hold(gpu: GpuUuid, bytes: u64, time: Duration) -> anyhow::Result<()> {
    let device = Driver::get()?.device_by_uuid(gpu)?;
    let memory = Physical::new(&device)?;
    let _blocks = inflate(&memory, bytes, Instant::now() + time);
    let held = Held {
        bytes: memory.bytes_outstanding(),
    };
    print_line(&held)?;
    let input = std::io::stdin();
    let mut fds = [PollFd::new(&input, PollFlags::IN)];
    let closed = poll(&mut fds, Some(&HOLD_TIMEOUT)).context("failed to wait for the agent")?;
    anyhow::ensure!(
        closed > 0,
        "failed to wait for the agent: it takes too long"
    );
    print_line(&held)
}

/// Allocates at most `bytes` in pieces, smaller ones after a refusal. The blocks end with the
/// process.
fn inflate(memory: &impl PhysicalMemoryResource, bytes: u64, until: Instant) -> Vec<PhysicalBlock> {
    let granularity = memory.granularity();
    let whole = |bytes: u64| bytes - bytes % granularity;
    let (mut blocks, mut left, mut piece) = (Vec::new(), whole(bytes), whole(MAX_PIECE));
    while left > 0 && Instant::now() < until {
        let size = piece.min(left);
        match memory.create(size, Tag("balloon")) {
            Ok(block) => {
                left -= size;
                blocks.push(block);
            }
            Err(_) if size > granularity => piece = whole(size / 2).max(granularity),
            Err(_) => break,
        }
    }
    blocks
}
