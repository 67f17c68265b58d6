//! Launches of kernels: what they are given is checked, put in order behind other streams, and recorded as used.
//!
//! Between the look at who used the memory last and the note that this launch does, nobody else submits work with the
//! same memory. Nothing is waited for meanwhile, but where the driver's queue is full.
#![forbid(unsafe_code)]

use crate::driver::{Access, Grid, Kernel, Parameter, Stream};
use crate::error::CudaError;
use crate::memory::kernel_arg::{DevSliceArg, KernelArg};
use crate::memory::multi_stream::{MultiStreamMemory, SyncGuard};
use crate::memory::slice::MemoryError;
use crate::memory::write_token::WriteRefused;
use crate::resource::BlockUse;
use crate::state::StaleReason;

/// Why a kernel was not launched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// Too many arguments, or too few.
    #[error("{given} arguments for a kernel of {expected}")]
    ArgumentCount {
        /// What the kernel takes.
        expected: usize,
        /// What it was given.
        given: usize,
    },
    /// An argument that is not what the kernel takes in its place.
    #[error("argument {index} is not what the kernel takes there: {expected:?}")]
    ArgumentType {
        /// The place, from 0.
        index: usize,
        /// What the kernel takes.
        expected: Parameter,
    },
    /// Memory whose owner uses it in another stream.
    #[error("argument {index} is used in the order of another stream; move it to this one")]
    WrongStream {
        /// The place, from 0.
        index: usize,
    },
    /// A stream of another context than the kernel was loaded into.
    #[error("a stream of device {stream} for a kernel that is loaded on device {kernel}")]
    WrongContext {
        /// The stream's device.
        stream: u32,
        /// The kernel's device.
        kernel: u32,
    },
    /// An argument's memory cannot be used any more.
    #[error(transparent)]
    Stale(#[from] StaleReason),
    /// The right to write an argument's memory has ended.
    #[error(transparent)]
    Refused(#[from] WriteRefused),
    /// An argument's use cannot be put in order or tracked.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The driver refused, or an earlier kernel failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// A launch that is being put together.
#[derive(Debug)]
pub struct Launch<'a> {
    kernel: &'a Kernel,
    stream: &'a Stream,
    grid: Grid,
    arguments: Vec<KernelArg<'a>>,
}

/// Memory of a launch that several streams use.
struct PendingUse<'a> {
    memory: &'a MultiStreamMemory,
    access: Access,
    sync: SyncGuard<'a>,
    block: Option<BlockUse>,
}

impl<'a> Launch<'a> {
    /// Of a kernel in a stream.
    pub fn new(kernel: &'a Kernel, stream: &'a Stream, grid: Grid) -> Launch<'a> {
        Launch {
            kernel,
            stream,
            grid,
            arguments: Vec::with_capacity(kernel.parameters().len()),
        }
    }

    /// The next argument.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<KernelArg<'a>>) -> Launch<'a> {
        self.arguments.push(argument.into());
        self
    }

    /// Submits it.
    ///
    /// # Errors
    /// Why it was not submitted; a fault of the kernel is a later call's answer.
    pub fn submit(self) -> Result<(), LaunchError> {
        let mut numbers = self.check()?;
        let mut uses = Vec::new();
        let submitted = self
            .begin_uses(&mut uses)
            .and_then(|()| Ok(self.kernel.launch(self.stream, self.grid, &mut numbers)?));
        // What was begun is ended, whatever became of the launch; that is told first.
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

    /// The arguments as numbers, where each is what the kernel takes and can be used in the stream.
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

    /// Holds the order of all shared memory, and begins its uses. Who has no right to write any more is told only then:
    /// whoever has it next writes behind this launch.
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

    /// The shared memory of the arguments, each once, in one order for all launches: two that hold several cannot wait for
    /// each other.
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
                Some((_, known)) if *access == Access::ReadWrite => *known = *access,
                Some(_) => {}
                None => memories.push((shared, *access)),
            }
        }
        memories.sort_by_key(|(shared, _)| std::ptr::from_ref::<MultiStreamMemory>(shared).addr());
        memories
    }
}

/// Whether memory that is lent with its access can be used with that of a parameter.
fn permits(memory: &DevSliceArg<'_>, wanted: Access) -> bool {
    wanted == Access::Read || memory.access == Access::ReadWrite
}
