//! Launches kernels, after a check of their arguments.
#![forbid(unsafe_code)]

use crate::driver::{Access, Grid, Kernel, Parameter, Stream};
use crate::error::{CudaError, ErrorClass};
use crate::memory::kernel_arg::{DevSliceArg, KernelArg};
use crate::memory::submission::{PendingUses, SubmitError};
use crate::vouched;

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
    /// An argument's memory cannot be used, or its use cannot be tracked.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The driver refused the launch, or an earlier kernel failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl LaunchError {
    /// Returns the class of the failure.
    pub fn class(&self) -> ErrorClass {
        match self {
            LaunchError::ArgumentCount { .. }
            | LaunchError::ArgumentType { .. }
            | LaunchError::WrongContext { .. } => ErrorClass::Caller,
            LaunchError::Submit(error) => error.class(),
            LaunchError::Cuda(error) => error.class(),
        }
    }

    /// Returns whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
}

/// Builder of a launch.
#[derive(Debug)]
pub struct Launch<'a> {
    kernel: &'a Kernel,
    stream: &'a Stream,
    grid: Grid,
    arguments: Vec<KernelArg<'a>>,
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
        let arguments = self.arguments.iter().enumerate();
        let memories = arguments.filter_map(|(index, argument)| match argument {
            KernelArg::Memory(memory) => Some((index, *memory)),
            KernelArg::Value { .. } => None,
        });
        let uses = PendingUses::begin(self.stream, memories)?;
        let submitted = vouched::launch(self.kernel, self.stream, self.grid, &mut numbers);
        // Ends all uses even if the launch failed; the error of the launch comes first.
        let ended = uses.end(submitted.is_ok());
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
                        Ok(memory.address)
                    }
                    _ => Err(LaunchError::ArgumentType { index, expected }),
                },
            )
            .collect()
    }
}

/// Returns whether lent memory permits the access of a parameter.
fn permits(memory: &DevSliceArg<'_>, wanted: Access) -> bool {
    !wanted.writes() || memory.access.writes()
}
