//! Answers the agent's requests in order, until the agent exits.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bursar_protocol::fd_passing::{receive_message, send_message};
use bursar_protocol::provisioner::{ProvisionerRequest, ProvisionerResponse};
use bursar_runtime::driver::{Device, Driver, DriverError, GpuUuid, Handle};
use bursar_runtime::error::CudaError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The rate of the driver's scrubbing, in bytes per second (F6 in docs/facts.md).
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

/// Serves one agent until it closes the socket.
///
/// # Errors
/// The socket failed, or a message is malformed.
pub(crate) fn serve(agent: &UnixStream, gpu: GpuUuid) -> io::Result<()> {
    let provisioner = match Provisioner::new(gpu) {
        Ok(provisioner) => provisioner,
        Err(error) => return send_message(agent, &failure_response(&error), None),
    };
    send_message(agent, &provisioner.ready(), None)?;
    let mut made: Option<CreatedMemory> = None;
    loop {
        if let Some(made) = made.take() {
            wait_for_request(agent, &KEEP_HANDLE_FOR)?;
            drop(made);
        }
        let message = match receive_message(agent) {
            Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            received => received?.0,
        };
        let (answer, created) = provisioner
            .answer(message)
            .unwrap_or_else(|error| (failure_response(&DriverError::Cuda(error)), None));
        send_message(agent, &answer, created.as_ref().map(|(fd, _)| fd.as_fd()))?;
        made = created;
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

/// New memory: the exported descriptor and the provisioner's own handle.
type CreatedMemory = (OwnedFd, Handle);

/// Constant properties of the GPU.
struct Provisioner {
    device: Device,
    version: i32,
    granularity: u64,
    total: u64,
}

impl Provisioner {
    fn new(gpu: GpuUuid) -> Result<Provisioner, DriverError> {
        let driver = Driver::get()?;
        let device = driver.device_by_uuid(gpu)?;
        Ok(Provisioner {
            device,
            version: driver.version()?,
            granularity: device.granularity()?,
            total: device.total_memory()?,
        })
    }

    fn ready(&self) -> ProvisionerResponse {
        ProvisionerResponse::Ready {
            driver: self.version,
            granularity: self.granularity,
            total: self.total,
        }
    }

    fn answer(
        &self,
        message: ProvisionerRequest,
    ) -> Result<(ProvisionerResponse, Option<CreatedMemory>), CudaError> {
        match message {
            ProvisionerRequest::Create { bytes } => {
                let made = self.create(bytes)?;
                let bytes = made.1.bytes();
                Ok((ProvisionerResponse::Created { bytes }, Some(made)))
            }
            ProvisionerRequest::AwaitScrub { bytes } => {
                // A create that arrives meanwhile would wait in the driver for as long.
                std::thread::sleep(scrub_time(bytes.min(self.total)));
                self.device.create(self.granularity)?;
                Ok((ProvisionerResponse::Scrubbed, None))
            }
        }
    }

    fn create(&self, bytes: u64) -> Result<CreatedMemory, CudaError> {
        let whole = bytes.checked_next_multiple_of(self.granularity);
        let bytes = whole.filter(|bytes| *bytes > 0).ok_or(CudaError {
            call: "cuMemCreate",
            code: INVALID_VALUE,
        })?;
        let handle = self.device.create(bytes)?;
        Ok((handle.export()?, handle))
    }
}

/// How long the driver takes to scrub `bytes`.
fn scrub_time(bytes: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / SCRUB_RATE as f64)
}

fn failure_response(error: &DriverError) -> ProvisionerResponse {
    let (code, call) = match error {
        DriverError::Cuda(CudaError { code, call }) => (*code, (*call).to_owned()),
        other => (NO_CUDA_CODE, other.to_string()),
    };
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
