//! Submits work in order with the earlier uses of its memories.
//!
//! From the read of earlier uses until the record of this work, no other thread submits work with
//! the same memory. The submission waits for nothing meanwhile, unless the driver's queue is full.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::driver::{Access, Stream};
use crate::error::ErrorClass;
use crate::memory::error::MemoryError;
use crate::memory::kernel_arg::DevSliceArg;
use crate::memory::multi_stream::{MultiStreamMemory, SyncGuard};
use crate::memory::write_token::WriteRefused;
use crate::resource::BlockUse;
use crate::state::StaleReason;

/// Reason for which work was not submitted, or for which it cannot be tracked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The memory's owner uses it in another stream.
    #[error(
        "failed to submit work: argument {index} belongs to another stream; move it to this stream"
    )]
    WrongStream {
        /// Index of the argument, from 0.
        index: usize,
    },
    /// An argument's memory is stale.
    #[error(transparent)]
    Stale(#[from] StaleReason),
    /// The write token of an argument was refused.
    #[error(transparent)]
    Refused(#[from] WriteRefused),
    /// An argument's use cannot be ordered or tracked.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl SubmitError {
    /// Returns the class of the failure.
    pub fn class(&self) -> ErrorClass {
        match self {
            SubmitError::WrongStream { .. } => ErrorClass::Caller,
            SubmitError::Stale(reason) => reason.class(),
            SubmitError::Refused(reason) => reason.class(),
            SubmitError::Memory(error) => error.class(),
        }
    }

    /// Returns whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
}

/// Calls `submit` with the addresses of memories, in order to submit foreign work that uses them.
///
/// The work follows the earlier uses, and later uses and the frees follow the work. `submit` must
/// not wait, and uses no other stream. The memories are locked meanwhile, so `submit` must not
/// submit, launch, copy or record with any shared memory, nor call
/// [`GpuRef::last_write`](crate::GpuRef::last_write): nested calls deadlock.
///
/// # Errors
/// The reason for which `submit` did not run, or for which its work cannot be tracked.
pub fn submit_in<const N: usize, R>(
    stream: &Stream,
    memories: [DevSliceArg<'_>; N],
    submit: impl FnOnce([u64; N]) -> R,
) -> Result<R, SubmitError> {
    let uses = PendingUses::begin(stream, memories.into_iter().enumerate())?;
    let addresses = memories.map(|memory| memory.address);
    let result = catch_unwind(AssertUnwindSafe(|| submit(addresses)));
    // A panic of `submit` may come after its work, and an open use would prevent the free.
    let ended = uses.end(true);
    let result = result.unwrap_or_else(|panic| resume_unwind(panic));
    ended?;
    Ok(result)
}

/// Begun uses of the memories that several streams share.
pub(crate) struct PendingUses<'a> {
    stream: &'a Stream,
    uses: Vec<PendingUse<'a>>,
}

/// Begun use of memory that several streams share.
struct PendingUse<'a> {
    memory: &'a MultiStreamMemory,
    access: Access,
    sync: SyncGuard<'a>,
    block: Option<BlockUse>,
}

impl<'a> PendingUses<'a> {
    /// Checks the memories, locks the shared ones, begins their uses, and then checks the write
    /// tokens.
    ///
    /// The locks come before the tokens, so that the next writer is ordered behind this work.
    pub(crate) fn begin(
        stream: &'a Stream,
        memories: impl Iterator<Item = (usize, DevSliceArg<'a>)>,
    ) -> Result<PendingUses<'a>, SubmitError> {
        let (mut shared, mut rights) = (Vec::new(), Vec::new());
        for (index, memory) in memories {
            memory.state.check()?;
            if memory.only_stream.is_some_and(|only| only != stream) {
                return Err(SubmitError::WrongStream { index });
            }
            if let Some(multi_stream) = memory.multi_stream {
                add_once(&mut shared, multi_stream, memory.access);
            }
            rights.extend(memory.write_right);
        }
        // All submissions lock memory by address, which prevents deadlocks.
        shared.sort_by_key(|(memory, _)| std::ptr::from_ref::<MultiStreamMemory>(memory).addr());
        let mut uses = PendingUses {
            stream,
            uses: Vec::with_capacity(shared.len()),
        };
        let admitted = shared
            .into_iter()
            .try_for_each(|(memory, access)| uses.begin_use(memory, access))
            .and_then(|()| {
                let mut rights = rights.into_iter();
                Ok(rights.try_for_each(|(gate, token)| gate.admit(token))?)
            });
        match admitted {
            Ok(()) => Ok(uses),
            Err(error) => {
                // The first error is the reason.
                let _ = uses.end(false);
                Err(error)
            }
        }
    }

    fn begin_use(
        &mut self,
        memory: &'a MultiStreamMemory,
        access: Access,
    ) -> Result<(), SubmitError> {
        let sync = memory.lock();
        let block = memory.begin_use(&sync, self.stream, access)?;
        self.uses.push(PendingUse {
            memory,
            access,
            sync,
            block,
        });
        Ok(())
    }

    /// Ends all uses; `submitted` says whether the work is in the stream.
    pub(crate) fn end(self, submitted: bool) -> Result<(), SubmitError> {
        let mut ended = Ok(());
        for mut used in self.uses {
            let access = submitted.then_some(used.access);
            let end = used
                .memory
                .end_use(&mut used.sync, used.block, self.stream, access);
            ended = ended.and(end);
        }
        Ok(ended?)
    }
}

/// Adds memory to a list without duplicates, in which a write counts more than a read.
fn add_once<'a>(
    memories: &mut Vec<(&'a MultiStreamMemory, Access)>,
    memory: &'a MultiStreamMemory,
    access: Access,
) {
    match memories
        .iter_mut()
        .find(|(known, _)| std::ptr::eq(*known, memory))
    {
        Some((_, known)) if access.writes() => *known = access,
        Some(_) => {}
        None => memories.push((memory, access)),
    }
}
