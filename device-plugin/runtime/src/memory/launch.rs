//! Launches of kernels: what they are given is checked, put in order behind other streams, and recorded as used.
//!
//! Between the look at who used the memory last and the note that this launch does, nobody else submits work with the
//! same memory. Nothing is waited for meanwhile, but where the driver's queue is full.
#![forbid(unsafe_code)]

use crate::driver::{Access, Grid, Kernel, Parameter, Stream};
use crate::error::CudaError;
use crate::memory::kernel_arg::{DevSliceArg, KernelArg};
use crate::memory::multi_stream::{Held, SharedMemory};
use crate::memory::slice::MemoryError;
use crate::memory::write_token::WriteRefused;
use crate::resource::BlockUse;
use crate::state::Stale;

/// Why a kernel was not launched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// Too many arguments, or too few.
    #[error("{given} arguments for a kernel of {takes}")]
    Count {
        /// What the kernel takes.
        takes: usize,
        /// What it was given.
        given: usize,
    },
    /// An argument that is not what the kernel takes in its place.
    #[error("argument {place} is not what the kernel takes there: {takes:?}")]
    Argument {
        /// The place, from 0.
        place: usize,
        /// What the kernel takes.
        takes: Parameter,
    },
    /// Memory whose owner uses it in another stream.
    #[error("argument {place} is used in the order of another stream; move it to this one")]
    OtherStream {
        /// The place, from 0.
        place: usize,
    },
    /// A stream of another context than the kernel was loaded into.
    #[error("a stream of device {stream} for a kernel that is loaded on device {kernel}")]
    OtherContext {
        /// The stream's device.
        stream: u32,
        /// The kernel's device.
        kernel: u32,
    },
    /// An argument's memory cannot be used any more.
    #[error(transparent)]
    Stale(#[from] Stale),
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
struct Use<'a> {
    shared: &'a SharedMemory,
    access: Access,
    order: Held<'a>,
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
            .begin(&mut uses)
            .and_then(|()| Ok(self.kernel.launch(self.stream, self.grid, &mut numbers)?));
        // What was begun is ended, whatever became of the launch; that is told first.
        let mut ended = Ok(());
        for used in &mut uses {
            let access = submitted.is_ok().then_some(used.access);
            let block = used.block.take();
            let end = used.shared.end(&mut used.order, block, self.stream, access);
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
            return Err(LaunchError::OtherContext { stream, kernel });
        }
        let (takes, given) = (self.kernel.parameters().len(), self.arguments.len());
        if takes != given {
            return Err(LaunchError::Count { takes, given });
        }
        let pairs = self.kernel.parameters().iter().zip(&self.arguments);
        pairs
            .enumerate()
            .map(|(place, (&takes, argument))| match (takes, argument) {
                (Parameter::Value(bytes), KernelArg::Value { bits, size }) if bytes == *size => {
                    Ok(*bits)
                }
                (Parameter::Memory(access), KernelArg::Memory(memory)) if may(memory, access) => {
                    memory.state.check()?;
                    match memory.only {
                        Some(only) if only != self.stream => {
                            Err(LaunchError::OtherStream { place })
                        }
                        _ => Ok(memory.address),
                    }
                }
                _ => Err(LaunchError::Argument { place, takes }),
            })
            .collect()
    }

    /// Holds the order of all shared memory, and begins its uses. Who has no right to write any more is told only then:
    /// whoever has it next writes behind this launch.
    fn begin(&self, uses: &mut Vec<Use<'a>>) -> Result<(), LaunchError> {
        for (shared, access) in self.shared() {
            let order = shared.hold();
            let block = shared.begin(&order, self.stream, access)?;
            uses.push(Use {
                shared,
                access,
                order,
                block,
            });
        }
        for argument in &self.arguments {
            if let KernelArg::Memory(DevSliceArg {
                right: Some((gate, token)),
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
    fn shared(&self) -> Vec<(&'a SharedMemory, Access)> {
        let mut found: Vec<(&SharedMemory, Access)> = Vec::new();
        for argument in &self.arguments {
            let KernelArg::Memory(DevSliceArg {
                shared: Some(shared),
                access,
                ..
            }) = argument
            else {
                continue;
            };
            match found
                .iter_mut()
                .find(|(known, _)| std::ptr::eq(*known, *shared))
            {
                Some((_, known)) if *access == Access::ReadWrite => *known = *access,
                Some(_) => {}
                None => found.push((shared, *access)),
            }
        }
        found.sort_by_key(|(shared, _)| std::ptr::from_ref::<SharedMemory>(shared).addr());
        found
    }
}

/// Whether memory that is lent with its access can be used with that of a parameter.
fn may(memory: &DevSliceArg<'_>, wanted: Access) -> bool {
    wanted == Access::Read || memory.access == Access::ReadWrite
}
