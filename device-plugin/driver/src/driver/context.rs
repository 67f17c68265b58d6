//! Retains a device's primary context.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::CUcontext;

use super::{Device, Driver, GpuUuid, call};
use crate::error::CudaError;

/// Primary context, released with the last clone.
#[derive(Clone)]
pub struct Context(Arc<PrimaryContext>);

struct PrimaryContext {
    device: Device,
    uuid: GpuUuid,
    raw: CUcontext,
}

// SAFETY: any thread may use a context's handle.
unsafe impl Send for PrimaryContext {}
// SAFETY: any thread may use a context's handle.
unsafe impl Sync for PrimaryContext {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({}, {})", self.0.device.ordinal(), self.0.uuid)
    }
}

impl PartialEq for Context {
    fn eq(&self, other: &Self) -> bool {
        self.0.raw == other.0.raw
    }
}

impl Eq for Context {}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // A release fails only for a poisoned context or during the driver's shutdown.
        let _ = call!(
            self.device.driver(),
            cuDevicePrimaryCtxRelease_v2(self.device.raw())
        );
    }
}

impl Device {
    /// Retains the primary context, which the CUDA runtime and PyTorch use too.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn primary_context(&self) -> Result<Context, CudaError> {
        Context::retain(self)
    }
}

impl Context {
    fn retain(device: &Device) -> Result<Context, CudaError> {
        let uuid = device.uuid()?;
        let mut raw = std::ptr::null_mut();
        call!(
            device.driver(),
            cuDevicePrimaryCtxRetain(&raw mut raw, device.raw())
        )?;
        Ok(Context(Arc::new(PrimaryContext {
            device: *device,
            uuid,
            raw,
        })))
    }

    /// Returns the context's device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Returns the device's ordinal.
    pub fn ordinal(&self) -> u32 {
        self.0.device.ordinal()
    }

    /// Returns the UUID of the GPU or MIG instance.
    pub fn uuid(&self) -> GpuUuid {
        self.0.uuid
    }

    /// Returns the driver.
    pub fn driver(&self) -> &'static Driver {
        self.0.device.driver()
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.0.raw
    }

    /// Makes the context current in the calling thread until the guard is dropped. Every method
    /// that needs a current context calls this.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn enter(&self) -> Result<ContextGuard<'_>, CudaError> {
        let driver = self.driver();
        let mut current = std::ptr::null_mut();
        call!(driver, cuCtxGetCurrent(&raw mut current))?;
        let pushed = current != self.0.raw;
        if pushed {
            call!(driver, cuCtxPushCurrent_v2(self.0.raw))?;
        }
        Ok(ContextGuard {
            context: self,
            pushed,
            thread: PhantomData,
        })
    }

    /// Waits for all work of the context. Callers must hold no lock.
    ///
    /// # Errors
    /// The driver's error, which may be that of an earlier launch.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(self.driver(), cuCtxSynchronize())
    }

    /// Returns the free and total bytes of `cuMemGetInfo`. Under the shim these are the quota's.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn memory_info(&self) -> Result<(u64, u64), CudaError> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        call!(
            self.driver(),
            cuMemGetInfo_v2(&raw mut free, &raw mut total)
        )?;
        Ok((free as u64, total as u64))
    }

    /// Permits kernels of this context to access linear memory of another device.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn enable_peer_access(&self, peer: &Context) -> Result<(), CudaError> {
        /// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`
        const ALREADY: i32 = 704;
        let _current = self.enter()?;
        match call!(self.driver(), cuCtxEnablePeerAccess(peer.0.raw, 0)) {
            Err(CudaError { code: ALREADY, .. }) => Ok(()),
            other => other,
        }
    }
}

/// Keeps a context current in the calling thread.
#[derive(Debug)]
pub struct ContextGuard<'a> {
    context: &'a Context,
    pushed: bool,
    /// Not `Send`, because each thread has its own current context.
    thread: PhantomData<*const ()>,
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // A pop fails only during the driver's shutdown.
            let _ = call!(self.context.driver(), cuCtxPopCurrent_v2(&raw mut popped));
        }
    }
}
