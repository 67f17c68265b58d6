//! Checks that the driver of each GPU clears freed memory, and measures contexts.

use std::time::{Duration, Instant};

use bursar_ledger::units::GpuUuid;

use super::keep_alive::KeepAlive;
use super::{Completion, State};
use bursar_supervision::scrub_check::{self, DriverEpoch, ScrubCheckResult, Verdict};

/// The delay between two scrub checks of a GPU without a verdict.
const SCRUB_CHECK_RETRY: Duration = Duration::from_secs(60);

/// How often the agent checks whether the process of a scrub check has exited.
const EXIT_POLL: Duration = Duration::from_secs(1);

/// The delay between two measurements of a context, when NVML reports no plausible memory of the
/// process.
const MEASURE_RETRY: Duration = Duration::from_secs(3600);

impl State {
    /// Starts a scrub check or a measurement if the GPU lacks one, and creates the keep-alive on
    /// the first scrubbed GPU.
    pub(super) fn ensure_scrub_checked(&mut self, gpu: GpuUuid) {
        let verdict = self.service.scrub_cache.get(&gpu, &self.driver_epoch(&gpu));
        let is_checked = matches!(verdict, Some(Verdict::Scrubbed | Verdict::NotScrubbed));
        if verdict == Some(&Verdict::Scrubbed)
            && self.keep_alive == KeepAlive::None
            && self.may_have_keep_alive(&gpu)
        {
            self.create_keep_alive(gpu.clone());
        }
        let failed = self.failed_checks.get(&gpu);
        let is_due = failed.is_none_or(|failed| failed.elapsed() >= SCRUB_CHECK_RETRY);
        let has_room = self.leases.free(&gpu) >= scrub_check::MAX_MEMORY;
        // The check takes only memory that is bound to no pod.
        if (!is_checked || self.needs_measurement(&gpu))
            && is_due
            && has_room
            && self.scrub_checks.insert(gpu.clone())
        {
            self.start_scrub_check(gpu);
        }
    }

    /// The state that a verdict on a GPU must be valid for.
    pub(super) fn driver_epoch(&self, gpu: &GpuUuid) -> DriverEpoch {
        DriverEpoch {
            driver: self.driver_version.clone(),
            generation: self.leases.generation(gpu),
        }
    }

    fn needs_measurement(&self, gpu: &GpuUuid) -> bool {
        let tried = self.unmeasured.get(gpu);
        tried.is_none_or(|tried| tried.elapsed() >= MEASURE_RETRY)
            && self
                .service
                .sessions
                .lacks_context_size(gpu, &self.driver_version)
    }

    fn start_scrub_check(&mut self, gpu: GpuUuid) {
        let (program, epoch) = (self.service.program.clone(), self.driver_epoch(&gpu));
        let charges = self.service.sessions.sampler();
        self.jobs.spawn(async move {
            let result = scrub_check::run_check(program, gpu.clone(), charges).await;
            Completion::ScrubChecked(gpu, epoch, result)
        });
    }

    /// Records the result of a scrub check. The check counts as running until its process has
    /// exited: a process that hangs in the driver holds its GPU.
    pub(super) fn finish_scrub_check(
        &mut self,
        gpu: GpuUuid,
        epoch: DriverEpoch,
        result: ScrubCheckResult,
    ) {
        let ScrubCheckResult {
            verdict,
            context,
            mut process,
        } = result;
        let checked = gpu.clone();
        self.jobs.spawn(async move {
            while !process.has_ended() {
                tokio::time::sleep(EXIT_POLL).await;
            }
            Completion::ScrubProcessEnded(checked)
        });
        // The verdict may be of a driver that is replaced once the GPU is released.
        if self.drained.contains(&gpu) {
            return;
        }
        let sessions = &self.service.sessions;
        let is_measured =
            context.is_some_and(|bytes| sessions.record_context_size(&gpu, &epoch.driver, bytes));
        if !is_measured {
            self.unmeasured.insert(gpu.clone(), Instant::now());
        }
        if matches!(verdict, Verdict::Unknown(_)) {
            self.failed_checks.insert(gpu.clone(), Instant::now());
        }
        self.service.scrub_cache.record(gpu, epoch, verdict);
    }
}
