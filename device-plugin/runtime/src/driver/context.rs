//! A device's primary context, retained.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::CUcontext;

use super::stream::{self, Stream};
use super::{Device, Driver, GpuUuid, call};
use crate::error::CudaError;

/// A primary context; released with the last clone.
#[derive(Clone)]
pub struct Context(Arc<PrimaryContext>);

struct PrimaryContext {
    device: Device,
    uuid: GpuUuid,
    raw: CUcontext,
}

// SAFETY: a context's handle may be used by any thread.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above.
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
        // A context that is poisoned, or a driver that is shutting down: there is nothing left to release.
        let _ = call!(
            self.device.driver(),
            cuDevicePrimaryCtxRelease_v2(self.device.raw())
        );
    }
}

impl Context {
    pub(super) fn retain(device: &Device) -> Result<Context, CudaError> {
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

    /// The device that it is of.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The device's ordinal.
    pub fn ordinal(&self) -> u32 {
        self.0.device.ordinal()
    }

    /// The GPU's UUID, or the MIG instance's.
    pub fn uuid(&self) -> GpuUuid {
        self.0.uuid
    }

    /// The driver that it belongs to.
    pub fn driver(&self) -> &'static Driver {
        self.0.device.driver()
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.0.raw
    }

    /// Makes the context the calling thread's, until the answer is dropped; then what was current before is
    /// current again. Every call below that needs it does this by itself.
    ///
    /// # Errors
    /// What the driver answered.
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

    /// Waits until all work of the context is done. Hold no lock over it.
    ///
    /// # Errors
    /// What the driver answered, the error of an earlier launch too.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.enter()?;
        call!(self.driver(), cuCtxSynchronize())
    }

    /// Free and total bytes as `cuMemGetInfo` shows them: of the quota, in a container of ours.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn memory_info(&self) -> Result<(u64, u64), CudaError> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        call!(
            self.driver(),
            cuMemGetInfo_v2(&raw mut free, &raw mut total)
        )?;
        Ok((free as u64, total as u64))
    }

    /// Lets kernels of this context use linear memory of another device's.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn enable_peer_access(&self, peer: &Context) -> Result<(), CudaError> {
        /// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`
        const ALREADY: i32 = 704;
        let _current = self.enter()?;
        match call!(self.driver(), cuCtxEnablePeerAccess(peer.0.raw, 0)) {
            Err(CudaError { code: ALREADY, .. }) => Ok(()),
            other => other,
        }
    }

    /// The context's default stream, which waits for the work of all blocking streams, as they do for its.
    pub fn default_stream(&self) -> Stream {
        stream::default_of(self)
    }
}

/// The calling thread's context is the one that was entered, until this is dropped.
#[derive(Debug)]
pub struct ContextGuard<'a> {
    context: &'a Context,
    pushed: bool,
    /// What is current is a thread's own matter.
    thread: PhantomData<*const ()>,
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // It fails only where the driver is shutting down.
            let _ = call!(self.context.driver(), cuCtxPopCurrent_v2(&raw mut popped));
        }
    }
}
