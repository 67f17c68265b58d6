//! Passes requests of the agent's tasks to the watcher.

use std::path::Path;

use bursar_ledger::units::{Bytes, GpuUuid};
use tokio::sync::{mpsc, oneshot};

use super::process::Job;
use super::protocol::{CallError, Request};
use crate::cgroup_limit::CgroupLimit;
use crate::memory_sample::{GpuMemorySample, MemorySampler};

/// Why NVML did not answer a request.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// No driver is available at present.
    #[error("NVML is not available")]
    NotAvailable,
    /// NVML answered with an error.
    #[error("NVML does not answer about {gpu}")]
    Nvml {
        /// The GPU of the request.
        gpu: GpuUuid,
        /// NVML's error.
        source: CallError,
    },
}

/// The channel of an answer.
pub(super) type Answer<T> = oneshot::Sender<Result<T, QueryError>>;
/// The receiver of an answer.
pub(super) type Answered<T> = oneshot::Receiver<Result<T, QueryError>>;

/// Sends requests to NVML; the watcher ends when the last handle is dropped.
#[derive(Debug, Clone)]
pub struct NvmlHandle {
    pub(super) requests: mpsc::UnboundedSender<(GpuUuid, Job)>,
}

impl MemorySampler for NvmlHandle {
    fn sample(&self, gpu: &GpuUuid) -> Option<GpuMemorySample> {
        self.request(gpu, false).blocking_recv().ok()?.ok()
    }
}

impl NvmlHandle {
    /// Requests a GPU's memory and processes, with their SM utilization. The channel closes without
    /// an answer if the GPU's NVML process is absent, ends, or exceeds [`ANSWER`](super::ANSWER).
    pub fn request_sample(&self, gpu: &GpuUuid) -> Answered<GpuMemorySample> {
        self.request(gpu, true)
    }

    fn request(&self, gpu: &GpuUuid, with_utilization: bool) -> Answered<GpuMemorySample> {
        let request = Request::Sample {
            gpu: gpu.clone(),
            with_utilization,
        };
        self.send(gpu, request, Job::Sample)
    }

    /// Requests the driver's limit for the processes in `cgroup`, after `hard` was set if given.
    /// The channel may close without an answer, as with [`request_sample`](Self::request_sample).
    pub fn request_limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        hard: Option<Bytes>,
    ) -> Answered<CgroupLimit> {
        let request = Request::Limit {
            gpu: gpu.clone(),
            cgroup: cgroup.to_owned(),
            hard,
        };
        self.send(gpu, request, Job::Limit)
    }

    fn send<T>(
        &self,
        gpu: &GpuUuid,
        request: Request,
        job: fn(Request, Answer<T>) -> Job,
    ) -> Answered<T> {
        let (answer, answered) = oneshot::channel();
        // After the watcher's end the receiver reports the closed channel.
        let _ = self.requests.send((gpu.clone(), job(request, answer)));
        answered
    }
}
