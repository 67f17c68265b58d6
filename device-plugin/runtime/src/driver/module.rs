//! Modules, their functions, and launches.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUmodule};

use super::{Context, Stream, call};
use crate::error::CudaError;

/// A loaded module; unloaded with the last function of it.
#[derive(Clone)]
pub struct Module(Arc<LoadedModule>);

struct LoadedModule {
    context: Context,
    raw: CUmodule,
}

// SAFETY: a module's handle may be used by any thread.
unsafe impl Send for LoadedModule {}
// SAFETY: as above.
unsafe impl Sync for LoadedModule {}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({:p}, {:?})", self.0.raw, self.0.context)
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // Where it fails the context is lost, and the module with it.
            let _ = call!(self.context.driver(), cuModuleUnload(self.raw));
        }
    }
}

impl Context {
    /// Loads PTX text, compiled by the driver for the device.
    ///
    /// # Errors
    /// What the driver answered.
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
    /// A function by the name that the module exports it under.
    ///
    /// # Errors
    /// What the driver answered.
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

/// A kernel.
#[derive(Clone)]
pub struct Function {
    module: Module,
    raw: CUfunction,
}

// SAFETY: a function's handle may be used by any thread, and its module lives as long.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({:p}, {:?})", self.raw, self.module)
    }
}

/// The shape of a launch.
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
    /// So many blocks of so many threads.
    pub const fn linear(blocks: u32, threads: u32) -> Grid {
        Grid {
            blocks: [blocks, 1, 1],
            threads: [threads, 1, 1],
            shared: 0,
        }
    }
}

impl Function {
    /// The context that it is of.
    pub fn context(&self) -> &Context {
        &self.module.0.context
    }

    /// Launches it in a stream. The driver copies the arguments before it returns.
    ///
    /// # Safety
    /// Each argument points to a value of the type that the kernel has in that place, and what the kernel writes
    /// is no memory that the host refers to meanwhile.
    ///
    /// # Errors
    /// What the driver answered; a fault of the kernel is a later call's answer.
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
