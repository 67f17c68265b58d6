//! Loads modules and launches their functions.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUmodule};

use super::{Context, Stream, call};
use crate::error::CudaError;

/// Loaded module, unloaded with its last function.
#[derive(Clone)]
pub struct Module(Arc<LoadedModule>);

struct LoadedModule {
    context: Context,
    raw: CUmodule,
}

// SAFETY: any thread may use a module's handle.
unsafe impl Send for LoadedModule {}
// SAFETY: any thread may use a module's handle.
unsafe impl Sync for LoadedModule {}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({:p}, {:?})", self.0.raw, self.0.context)
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // If the unload fails, the context is lost and its modules with it.
            let _ = call!(self.context.driver(), cuModuleUnload(self.raw));
        }
    }
}

impl Context {
    /// Loads PTX text, which the driver compiles for the device.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn load(&self, ptx: &CStr) -> Result<Module, CudaError> {
        let _current = self.enter()?;
        let mut raw = std::ptr::null_mut();
        call!(
            self.driver(),
            cuModuleLoadData(&raw mut raw, ptx.as_ptr().cast())
        )?;
        Ok(Module(Arc::new(LoadedModule {
            context: self.clone(),
            raw,
        })))
    }
}

impl Module {
    /// Returns a function by its exported name.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn function(&self, name: &CStr) -> Result<Function, CudaError> {
        let _current = self.0.context.enter()?;
        let mut raw = std::ptr::null_mut();
        call!(
            self.0.context.driver(),
            cuModuleGetFunction(&raw mut raw, self.0.raw, name.as_ptr())
        )?;
        Ok(Function {
            module: self.clone(),
            raw,
        })
    }
}

/// Kernel function of a module.
#[derive(Clone)]
pub struct Function {
    module: Module,
    raw: CUfunction,
}

// SAFETY: any thread may use a function's handle, and its module lives as long.
unsafe impl Send for Function {}
// SAFETY: any thread may use a function's handle, and its module lives as long.
unsafe impl Sync for Function {}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({:p}, {:?})", self.raw, self.module)
    }
}

/// Dimensions of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block in x, y and z.
    pub threads: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
}

impl Grid {
    /// Returns a one-dimensional grid of `blocks` blocks. Each has `threads` threads and no dynamic
    /// shared memory.
    pub const fn linear(blocks: u32, threads: u32) -> Grid {
        Grid {
            blocks: [blocks, 1, 1],
            threads: [threads, 1, 1],
            shared: 0,
        }
    }
}

impl Function {
    /// Returns the function's context.
    pub fn context(&self) -> &Context {
        &self.module.0.context
    }

    /// Launches the function in a stream. The driver copies the arguments before it returns.
    ///
    /// # Safety
    /// Each argument points to a value of the kernel's parameter type. The kernel writes no memory
    /// that the host refers to meanwhile.
    ///
    /// # Errors
    /// The driver's error. A later call returns the kernel's own fault.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: Grid,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let _current = self.context().enter()?;
        let ([x, y, z], [a, b, c]) = (grid.blocks, grid.threads);
        call!(
            self.context().driver(),
            cuLaunchKernel(
                self.raw,
                x,
                y,
                z,
                a,
                b,
                c,
                grid.shared,
                stream.raw(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        )
    }
}
