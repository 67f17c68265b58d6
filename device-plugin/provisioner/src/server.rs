//! Answers the agent's requests in order, until the agent exits.
//!
//! All memory comes from a runtime without a context. Its budget is what the GPU may still lend, as
//! the agent says with each request. The agent charges memory to its owner, and the fd store keeps
//! it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bursar_driver::NoContextRuntime;
use bursar_driver::driver::{DriverError, GpuUuid};
use bursar_driver::error::{CudaError, ErrorClass, ResourceError};
use bursar_driver::physical::{PhysicalBlock, PhysicalMemoryResource as _};
use bursar_driver::resource::Tag;
use bursar_driver::state::StaleReason;
use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::messages::MAX_NAME;
use bursar_protocol::provisioner::{ProvisionerRequest, ProvisionerResponse};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The rate of the driver's scrubbing, in bytes per second (F6 in docs/internals/facts.md).
const SCRUB_RATE: u64 = 350_000_000_000;

/// How long the provisioner keeps its handle of new memory if no request comes. Releasing it takes
/// locks of the driver that the tenant's process needs to map the memory.
const KEEP_HANDLE_FOR: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};

/// The code of a failure that has no `CUresult`.
const NO_CUDA_CODE: i32 = -1;

/// `CUDA_ERROR_INVALID_VALUE`
const INVALID_VALUE: i32 = 1;

/// `CUDA_ERROR_OUT_OF_MEMORY`
const OUT_OF_MEMORY: i32 = 2;

/// Serves one agent until it closes the socket.
///
/// # Errors
/// The socket failed, a message is malformed, or the process image is poisoned or could not release
/// a handle: the handles end with the process.
pub(crate) fn serve(agent: &UnixStream, gpu: GpuUuid) -> io::Result<()> {
    let provisioner = match Provisioner::new(gpu) {
        Ok(provisioner) => provisioner,
        Err(error) => return send_message(agent, &failure_response(&error), None),
    };
    send_message(agent, &provisioner.ready(), None)?;
    let mut previous: Option<CreatedMemory> = None;
    loop {
        if let Some(previous) = previous.take() {
            wait_for_request(agent, &KEEP_HANDLE_FOR)?;
            provisioner
                .release(previous.block)
                .map_err(io::Error::other)?;
        }
        let message = match receive_message(agent) {
            Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            received => received?.0,
        };
        let (answer, created) = provisioner
            .answer(message)
            .unwrap_or_else(|error| (failure_response(&error.into()), None));
        let descriptor = created.as_ref().map(|created| created.descriptor.as_fd());
        send_message(agent, &answer, descriptor)?;
        previous = created;
        // A poisoned process image creates nothing more; the agent starts another.
        let state = provisioner.runtime.state();
        state.check().map_err(io::Error::other)?;
    }
}

/// Waits for a request, at most for `timeout`.
fn wait_for_request(agent: &UnixStream, timeout: &Timespec) -> io::Result<()> {
    let mut fds = [PollFd::new(agent, PollFlags::IN)];
    match poll(&mut fds, Some(timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// New memory with its exported descriptor.
struct CreatedMemory {
    descriptor: OwnedFd,
    block: PhysicalBlock,
}

/// The GPU's runtime and its constant properties.
struct Provisioner {
    runtime: NoContextRuntime,
    version: i32,
    total: u64,
    concurrent_managed_access: bool,
}

impl Provisioner {
    fn new(gpu: GpuUuid) -> Result<Provisioner, DriverError> {
        let runtime = NoContextRuntime::start(gpu)?;
        Ok(Provisioner {
            version: runtime.driver_version()?,
            total: runtime.total_memory()?,
            concurrent_managed_access: runtime.has_concurrent_managed_access()?,
            runtime,
        })
    }

    fn ready(&self) -> ProvisionerResponse {
        ProvisionerResponse::Ready {
            driver: self.version,
            granularity: self.runtime.physical().granularity(),
            total: self.total,
            concurrent_managed_access: self.concurrent_managed_access,
        }
    }

    fn answer(
        &self,
        message: ProvisionerRequest,
    ) -> Result<(ProvisionerResponse, Option<CreatedMemory>), ResourceError> {
        match message {
            ProvisionerRequest::Create { bytes, lendable } => {
                self.runtime.set_limit(lendable.min(self.total));
                let created = self.create(bytes)?;
                let bytes = created.block.bytes();
                Ok((ProvisionerResponse::Created { bytes }, Some(created)))
            }
            ProvisionerRequest::AwaitScrub { bytes } => {
                // A create that arrives meanwhile would wait in the driver for as long.
                std::thread::sleep(scrub_time(bytes.min(self.total)));
                let memory = self.runtime.physical();
                let block = memory.create(memory.granularity(), Tag("scrub"))?;
                self.release(block)?;
                Ok((ProvisionerResponse::Scrubbed, None))
            }
        }
    }

    fn create(&self, bytes: u64) -> Result<CreatedMemory, ResourceError> {
        let memory = self.runtime.physical();
        let block = memory.create(memory.round_up(bytes)?, Tag("retained"))?;
        match block.export() {
            Ok(descriptor) => Ok(CreatedMemory { descriptor, block }),
            Err(error) => {
                self.release(block)?;
                Err(error.into())
            }
        }
    }

    fn release(&self, block: PhysicalBlock) -> Result<(), ResourceError> {
        let released = self.runtime.physical().release(block);
        released.map_err(|error| error.reason)
    }
}

/// How long the driver takes to scrub `bytes`.
fn scrub_time(bytes: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / SCRUB_RATE as f64)
}

fn failure_response(error: &DriverError) -> ProvisionerResponse {
    use ResourceError as Failure;
    let (code, mut call) = match error {
        DriverError::Cuda(CudaError { code, call })
        | DriverError::Resource(
            Failure::OutOfMemory {
                source: CudaError { code, call },
                ..
            }
            | Failure::Cuda(CudaError { code, call }),
        ) => (*code, (*call).to_owned()),
        DriverError::Resource(Failure::OverBudget { .. }) => (OUT_OF_MEMORY, "budget".to_owned()),
        DriverError::Resource(Failure::Ended(StaleReason::Poisoned(code))) => {
            (*code, "cuMemCreate".to_owned())
        }
        DriverError::Resource(other) if other.class() == ErrorClass::Caller => {
            (INVALID_VALUE, "cuMemCreate".to_owned())
        }
        other => (NO_CUDA_CODE, other.to_string()),
    };
    call.truncate(call.floor_char_boundary(MAX_NAME));
    ProvisionerResponse::Failed { code, call }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrub_time_of_35_gigabytes_is_a_tenth_of_a_second() {
        assert_eq!(scrub_time(35_000_000_000), Duration::from_millis(100));
        assert_eq!(scrub_time(0), Duration::ZERO);
    }
}
