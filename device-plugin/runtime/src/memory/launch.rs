//! Launches kernels: checks the arguments, orders the launch behind other streams, and records its
//! uses.
//!
//! From the read of earlier uses until the record of this launch, no other thread submits work with
//! the same memory. The launch waits for nothing meanwhile, unless the driver's queue is full.
#![forbid(unsafe_code)]

use crate::driver::{Access, Grid, Kernel, Parameter, Stream};
use crate::error::CudaError;
use crate::memory::error::MemoryError;
use crate::memory::kernel_arg::{DevSliceArg, KernelArg};
use crate::memory::multi_stream::{MultiStreamMemory, SyncGuard};
use crate::memory::write_token::WriteRefused;
use crate::resource::BlockUse;
use crate::state::StaleReason;

/// Reason for which a kernel was not launched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The number of arguments is wrong.
    #[error(
        "failed to launch the kernel: {given} arguments for {expected} parameters; pass one for each parameter"
    )]
    ArgumentCount {
        /// Number of the kernel's parameters.
        expected: usize,
        /// Number of given arguments.
        given: usize,
    },
    /// An argument has the wrong type.
    #[error(
        "failed to launch the kernel: argument {index} is not {expected:?}; pass the declared type"
    )]
    ArgumentType {
        /// Index of the argument, from 0.
        index: usize,
        /// Type of the kernel's parameter.
        expected: Parameter,
    },
    /// The memory's owner uses it in another stream.
    #[error(
        "failed to launch the kernel: argument {index} belongs to another stream; move it to this stream"
    )]
    WrongStream {
        /// Index of the argument, from 0.
        index: usize,
    },
    /// The stream belongs to another context than the kernel.
    #[error(
        "failed to launch the kernel: it is loaded on device {kernel} and the stream is of device {stream}; use a stream of the kernel's context"
    )]
    WrongContext {
        /// Device of the stream.
        stream: u32,
        /// Device of the kernel.
        kernel: u32,
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
    /// The driver refused the launch, or an earlier kernel failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// Builder of a launch.
#[derive(Debug)]
pub struct Launch<'a> {
    kernel: &'a Kernel,
    stream: &'a Stream,
    grid: Grid,
    arguments: Vec<KernelArg<'a>>,
}

/// Begun use of memory that several streams share.
struct PendingUse<'a> {
    memory: &'a MultiStreamMemory,
    access: Access,
    sync: SyncGuard<'a>,
    block: Option<BlockUse>,
}

impl<'a> Launch<'a> {
    /// Builds a launch of a kernel in a stream.
    pub fn new(kernel: &'a Kernel, stream: &'a Stream, grid: Grid) -> Launch<'a> {
        Launch {
            kernel,
            stream,
            grid,
            arguments: Vec::with_capacity(kernel.parameters().len()),
        }
    }

    /// Adds the next argument.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<KernelArg<'a>>) -> Launch<'a> {
        self.arguments.push(argument.into());
        self
    }

    /// Submits the launch.
    ///
    /// # Errors
    /// The reason for which the launch was not submitted. A later call returns the kernel's own
    /// fault.
    pub fn submit(self) -> Result<(), LaunchError> {
        let mut numbers = self.check()?;
        let mut uses = Vec::new();
        let submitted = self
            .begin_uses(&mut uses)
            .and_then(|()| Ok(self.kernel.launch(self.stream, self.grid, &mut numbers)?));
        // Ends all begun uses even if the launch failed; the error of the launch comes first.
        let mut ended = Ok(());
        for used in &mut uses {
            let access = submitted.is_ok().then_some(used.access);
            let block = used.block.take();
            let end = used
                .memory
                .end_use(&mut used.sync, block, self.stream, access);
            ended = ended.and(end);
        }
        submitted?;
        Ok(ended?)
    }

    /// Checks all arguments against the kernel's parameters and returns them as numbers.
    fn check(&self) -> Result<Vec<u64>, LaunchError> {
        let (stream, kernel) = (self.stream.context(), self.kernel.context());
        if stream != kernel {
            let (stream, kernel) = (stream.ordinal(), kernel.ordinal());
            return Err(LaunchError::WrongContext { stream, kernel });
        }
        let (expected, given) = (self.kernel.parameters().len(), self.arguments.len());
        if expected != given {
            return Err(LaunchError::ArgumentCount { expected, given });
        }
        let pairs = self.kernel.parameters().iter().zip(&self.arguments);
        pairs
            .enumerate()
            .map(
                |(index, (&expected, argument))| match (expected, argument) {
                    (Parameter::Value(bytes), KernelArg::Value { bits, size })
                        if bytes == *size =>
                    {
                        Ok(*bits)
                    }
                    (Parameter::Memory(access), KernelArg::Memory(memory))
                        if permits(memory, access) =>
                    {
                        memory.state.check()?;
                        match memory.only_stream {
                            Some(only) if only != self.stream => {
                                Err(LaunchError::WrongStream { index })
                            }
                            _ => Ok(memory.address),
                        }
                    }
                    _ => Err(LaunchError::ArgumentType { index, expected }),
                },
            )
            .collect()
    }

    /// Locks all shared memory, begins its uses, and then checks the write tokens.
    ///
    /// The locks come first, so that the next writer is ordered behind this launch.
    fn begin_uses(&self, uses: &mut Vec<PendingUse<'a>>) -> Result<(), LaunchError> {
        for (shared, access) in self.multi_stream_memory() {
            let order = shared.lock();
            let block = shared.begin_use(&order, self.stream, access)?;
            uses.push(PendingUse {
                memory: shared,
                access,
                sync: order,
                block,
            });
        }
        for argument in &self.arguments {
            if let KernelArg::Memory(DevSliceArg {
                write_right: Some((gate, token)),
                ..
            }) = argument
            {
                gate.admit(token)?;
            }
        }
        Ok(())
    }

    /// Returns the shared memory of the arguments without duplicates. All launches lock memory by
    /// address, which prevents deadlocks.
    fn multi_stream_memory(&self) -> Vec<(&'a MultiStreamMemory, Access)> {
        let mut memories: Vec<(&MultiStreamMemory, Access)> = Vec::new();
        for argument in &self.arguments {
            let KernelArg::Memory(DevSliceArg {
                multi_stream: Some(shared),
                access,
                ..
            }) = argument
            else {
                continue;
            };
            match memories
                .iter_mut()
                .find(|(known, _)| std::ptr::eq(*known, *shared))
            {
                Some((_, known)) if access.writes() => *known = *access,
                Some(_) => {}
                None => memories.push((shared, *access)),
            }
        }
        memories.sort_by_key(|(shared, _)| std::ptr::from_ref::<MultiStreamMemory>(shared).addr());
        memories
    }
}

/// Returns whether lent memory permits the access of a parameter.
fn permits(memory: &DevSliceArg<'_>, wanted: Access) -> bool {
    !wanted.writes() || memory.access.writes()
}
