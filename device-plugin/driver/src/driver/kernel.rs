//! Declares the parameters of kernels, so that a launch is safe.

use std::ffi::{CStr, c_void};

use super::{Access, Context, Function, Grid, Stream};
use crate::error::CudaError;

const CHECKSUM_PTX: &CStr = text(concat!(include_str!("../kernels/checksum.ptx"), "\0").as_bytes());
const SPIN_PTX: &CStr = text(concat!(include_str!("../kernels/spin.ptx"), "\0").as_bytes());

const fn text(ptx: &'static [u8]) -> &'static CStr {
    match CStr::from_bytes_with_nul(ptx) {
        Ok(text) => text,
        Err(_) => panic!("PTX text has no zero in it"),
    }
}

/// `CUDA_ERROR_INVALID_VALUE`
const INVALID_VALUE: i32 = 1;

/// Parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// Number of this size in bytes, at most 8.
    Value(usize),
    /// Address of memory, with the kernel's access to that memory.
    Memory(Access),
}

/// Kernel with declared parameters.
#[derive(Clone, Debug)]
pub struct Kernel {
    function: Function,
    parameters: &'static [Parameter],
}

impl Function {
    /// Declares the kernel's parameters.
    ///
    /// # Safety
    /// The kernel has exactly these parameters in this order. For all values, the kernel uses no
    /// memory that the host can refer to, except the memory that it is passed. It uses that memory
    /// only as declared. If this depends on the values, a safe function around the launch must
    /// choose them.
    pub unsafe fn declare(self, parameters: &'static [Parameter]) -> Kernel {
        Kernel {
            function: self,
            parameters,
        }
    }
}

impl Kernel {
    /// Loads the checksum kernel. Its parameters are an address, a length, and the address of the
    /// sum.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn checksum(context: &Context) -> Result<Kernel, CudaError> {
        const PARAMETERS: &[Parameter] = &[
            Parameter::Memory(Access::Read),
            Parameter::Value(8),
            Parameter::Memory(Access::ReadWrite),
        ];
        let function = context.load(CHECKSUM_PTX)?.function(c"bursar_checksum")?;
        // SAFETY: the PTX text has these parameters, and `checksum` chooses the lengths.
        Ok(unsafe { function.declare(PARAMETERS) })
    }

    /// Loads a kernel that computes nothing for some time, which its number of turns decides. It
    /// uses no memory.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn spin(context: &Context) -> Result<Spin, CudaError> {
        let function = context.load(SPIN_PTX)?.function(c"bursar_spin")?;
        // SAFETY: the PTX text has this parameter, and uses no memory.
        Ok(Spin(unsafe { function.declare(&[Parameter::Value(8)]) }))
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> &'static [Parameter] {
        self.parameters
    }

    /// Returns the kernel's context.
    pub fn context(&self) -> &Context {
        self.function.context()
    }

    /// Launches the kernel in a stream.
    ///
    /// # Safety
    /// The arguments that are addresses are of memory that the host does not refer to before the
    /// work is done.
    ///
    /// # Errors
    /// The driver's error, or code 1 (invalid value) for another number of arguments.
    pub unsafe fn launch(
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
        // SAFETY: each declared parameter has 8 bytes here, and none is larger. A number lies at
        // the start of its bytes, because all CUDA hosts are little-endian. The declaration covers
        // the use of memory.
        unsafe { self.function.launch(stream, grid, &mut places) }
    }
}

/// The kernel of [`Kernel::spin`].
#[derive(Clone, Debug)]
pub struct Spin(Kernel);

impl Spin {
    /// Launches the kernel in a stream, in one warp.
    ///
    /// # Errors
    /// The driver's error.
    pub fn launch(&self, stream: &Stream, turns: u64) -> Result<(), CudaError> {
        // SAFETY: no argument is an address.
        unsafe {
            self.0
                .launch(stream, Grid::linear(1, 32), &mut [turns.max(1)])
        }
    }
}
