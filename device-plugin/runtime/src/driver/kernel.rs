//! Kernels whose parameters are known, so that launching one is safe.

use std::ffi::{CStr, c_void};

use super::{Access, Context, Function, Grid, Stream};
use crate::error::CudaError;

const CHECKSUM_PTX: &CStr = match CStr::from_bytes_with_nul(
    concat!(include_str!("../kernels/checksum.ptx"), "\0").as_bytes(),
) {
    Ok(text) => text,
    Err(_) => panic!("PTX text has no zero in it"),
};

/// `CUDA_ERROR_INVALID_VALUE`
const INVALID_VALUE: i32 = 1;

/// What a kernel takes in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// A number of so many bytes, at most 8.
    Value(usize),
    /// The address of memory, and what the kernel does there.
    Memory(Access),
}

/// A kernel with its parameters.
#[derive(Clone, Debug)]
pub struct Kernel {
    function: Function,
    parameters: &'static [Parameter],
}

impl Function {
    /// States what a kernel takes.
    ///
    /// # Safety
    /// It takes these and no others, in this order. Whatever values it is given, it uses no memory that the host can
    /// refer to but what it is passed, and that as stated. (Where this depends on the values, it is for
    /// a function around it to choose them.)
    pub unsafe fn declare(self, parameters: &'static [Parameter]) -> Kernel {
        Kernel {
            function: self,
            parameters,
        }
    }
}

impl Kernel {
    /// The kernel that takes the checksum of memory: its address, its length, and where the sum is added to.
    pub(crate) fn checksum(context: &Context) -> Result<Kernel, CudaError> {
        const PARAMETERS: &[Parameter] = &[
            Parameter::Memory(Access::Read),
            Parameter::Value(8),
            Parameter::Memory(Access::ReadWrite),
        ];
        let function = context.load(CHECKSUM_PTX)?.function(c"bursar_checksum")?;
        // SAFETY: the PTX text says so; the lengths are `checksum`'s to choose.
        Ok(unsafe { function.declare(PARAMETERS) })
    }

    /// What it takes.
    pub fn parameters(&self) -> &'static [Parameter] {
        self.parameters
    }

    /// The context that it is of.
    pub fn context(&self) -> &Context {
        self.function.context()
    }

    /// Launches it in a stream. Callers in this crate pass addresses of memory that nothing of the host refers to before
    /// the work is done.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        grid: Grid,
        arguments: &mut [u64],
    ) -> Result<(), CudaError> {
        if arguments.len() != self.parameters.len() {
            let (call, code) = ("cuLaunchKernel", INVALID_VALUE);
            return Err(CudaError { call, code });
        }
        let mut places: Vec<*mut c_void> = arguments
            .iter_mut()
            .map(|argument| std::ptr::from_mut(argument).cast())
            .collect();
        // SAFETY: there is a place of 8 bytes for each parameter that `declare` stated, and none is larger. Numbers lie
        // at the start of their places, for all hosts of CUDA are little endian. The memory is as stated above.
        unsafe { self.function.launch(stream, grid, &mut places) }
    }
}
