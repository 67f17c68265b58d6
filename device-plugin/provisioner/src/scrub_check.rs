//! Checks whether freed memory comes back cleared.
//!
//! Bursar has no scrubber of its own. Between tenants memory goes back to the driver, which clears
//! it (F6 in docs/internals/facts.md), but not on every machine. Each round creates memory as the
//! provisioner does, reads every word of it, fills it and frees it, like one tenant after the
//! other.

use bursar_driver::driver::{Access, Context, Driver, DriverError, GpuUuid, Mapping};
use bursar_driver::error::{CudaError, ErrorClass, ResourceError};
use bursar_driver::physical::{Physical, PhysicalMemoryResource as _};
use bursar_driver::resource::Tag;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

/// How often memory is created and freed.
const ROUNDS: u32 = 12;

/// How much memory a round takes by default.
pub(crate) const MAX_BYTES: u64 = 256 << 20;

/// The least memory of a round.
pub(crate) const MIN_BYTES: u64 = 2 << 20;

/// How much memory is read at a time.
const READ_WINDOW: usize = 8 << 20;

/// How long the agent may take to ask NVML for the context's memory.
const MEASURE_TIMEOUT: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// A line of the output.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict")]
pub(crate) enum Verdict {
    /// The process has a context and no other memory: the agent may measure the context now.
    Context {},
    /// Every word of every round was zero.
    Scrubbed {
        rounds: u32,
        /// The bytes of each round.
        bytes: u64,
    },
    /// Some words were not zero.
    NotScrubbed {
        rounds: u32,
        /// The bytes of each round.
        bytes: u64,
        /// The number of 64-bit words that were not zero, in all rounds.
        old_words: u64,
    },
    /// The check failed.
    Failed { error: String },
}

/// Why the check failed.
#[derive(Debug, thiserror::Error)]
enum ScrubCheckError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Resource(#[from] ResourceError),
    #[error("round {round}: memory does not read back as it was filled")]
    ReadbackMismatch { round: u32 },
}

/// Checks a GPU's memory, at most `bytes` in a round; calls `tell` once the context exists and
/// before other memory does.
pub(crate) fn check(gpu: GpuUuid, bytes: u64, tell: impl FnOnce(&Verdict)) -> Verdict {
    match run_rounds(gpu, bytes, tell) {
        Ok((bytes, 0)) => Verdict::Scrubbed {
            rounds: ROUNDS,
            bytes,
        },
        Ok((bytes, old_words)) => Verdict::NotScrubbed {
            rounds: ROUNDS,
            bytes,
            old_words,
        },
        Err(error) => Verdict::Failed {
            error: error.to_string(),
        },
    }
}

fn run_rounds(
    gpu: GpuUuid,
    mut bytes: u64,
    tell: impl FnOnce(&Verdict),
) -> Result<(u64, u64), ScrubCheckError> {
    // A runtime would have a stream too, and the agent measures the context alone.
    let context = Driver::get()?.device_by_uuid(gpu)?.primary_context()?;
    tell(&Verdict::Context {});
    let source = Physical::new(context.device())?;
    let mut old_words = 0;
    for round in 1..=ROUNDS {
        // The first round finds out how much memory is free.
        let memory = loop {
            match Memory::create(&source, &context, bytes) {
                Err(error)
                    if round == 1
                        && bytes > MIN_BYTES
                        && error.class() == ErrorClass::OutOfMemory =>
                {
                    bytes = (bytes / 8).max(MIN_BYTES);
                }
                result => break result?,
            }
        };
        old_words += memory.count_words_unlike(0)?;
        let pattern = round as u8;
        let mapping = &memory.mapping;
        mapping.fill(&context, 0, pattern, memory.bytes())?;
        if memory.count_words_unlike(pattern)? > 0 {
            return Err(ScrubCheckError::ReadbackMismatch { round });
        }
    }
    Ok((bytes, old_words))
}

/// Waits until the agent closes standard input, or for [`MEASURE_TIMEOUT`].
pub(crate) fn wait_for_measurement() {
    let input = std::io::stdin();
    let mut fds = [PollFd::new(&input, PollFlags::IN)];
    // The agent measures again another time if this wait fails.
    let _ = poll(&mut fds, Some(&MEASURE_TIMEOUT));
}

/// Mapped memory that is created as retained memory is; freed when dropped.
struct Memory<'a> {
    context: &'a Context,
    mapping: Mapping,
}

impl Memory<'_> {
    fn create<'a>(
        source: &Physical,
        context: &'a Context,
        bytes: u64,
    ) -> Result<Memory<'a>, ResourceError> {
        let block = source.create(bytes, Tag("scrub check"))?;
        let mapping = block.map(context, Access::ReadWrite);
        // From here the mapping alone keeps the memory.
        source.release(block).map_err(|error| error.reason)?;
        Ok(Memory {
            context,
            mapping: mapping?,
        })
    }

    fn bytes(&self) -> usize {
        self.mapping.bytes() as usize
    }

    /// Counts the 64-bit words with a byte other than `byte`.
    fn count_words_unlike(&self, byte: u8) -> Result<u64, CudaError> {
        let (wanted, mut window) = ([byte; 8], vec![0; READ_WINDOW.min(self.bytes())]);
        let mut starts = (0..self.bytes()).step_by(window.len());
        starts.try_fold(0, |others, start| {
            self.mapping.read(self.context, start as u64, &mut window)?;
            let (words, _) = window.as_chunks::<8>();
            Ok(others + words.iter().filter(|word| **word != wanted).count() as u64)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdict_serializes_to_one_line_with_its_name() {
        let line = |verdict| serde_json::to_string(&verdict).unwrap();
        let verdict = Verdict::NotScrubbed {
            rounds: 12,
            bytes: 2 << 20,
            old_words: 3,
        };
        let text = r#"{"verdict":"NotScrubbed","rounds":12,"bytes":2097152,"old_words":3}"#;
        assert_eq!(line(verdict), text);
        assert_eq!(line(Verdict::Context {}), r#"{"verdict":"Context"}"#);
    }
}
