//! Keeps a GPU busy, and tells how much it has finished: one of two processes by whose shares the
//! agent sees whether the driver holds time slices.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use bursar_driver::driver::{Driver, DriverError, GpuUuid, Kernel};
use bursar_driver::error::CudaError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Kernels that wait for the GPU, so that a turn never ends for want of work: one takes about 0.3
/// ms, and a turn of the check 8 ms.
const QUEUED: usize = 96;
const TURNS: u64 = 16_384;

/// The pace of the lines that tell how many kernels have finished.
const PACE: Duration = Duration::from_millis(20);

/// An agent that hangs gets no more than this.
const AT_MOST: Duration = Duration::from_secs(60);

/// Why the load ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("failed to tell the finished work: {0}")]
    Told(#[from] io::Error),
}

/// Runs kernels until the agent closes standard input.
pub(crate) fn run(gpu: GpuUuid) -> Result<(), LoadError> {
    let context = Driver::get()?.device_by_uuid(gpu)?.primary_context()?;
    let (kernel, stream) = (Kernel::spin(&context)?, context.stream()?);
    let mut queue = VecDeque::new();
    let (mut finished, begun, mut told) = (0_u64, Instant::now(), Instant::now());
    while begun.elapsed() < AT_MOST {
        let event = match queue.len() {
            QUEUED => {
                let oldest: bursar_driver::driver::Event =
                    queue.pop_front().unwrap_or(context.event()?);
                oldest.synchronize()?;
                finished += 1;
                oldest
            }
            _ => context.event()?,
        };
        kernel.launch(&stream, TURNS)?;
        event.record(&stream)?;
        queue.push_back(event);
        if told.elapsed() >= PACE {
            told = Instant::now();
            let mut output = io::stdout().lock();
            writeln!(output, "{{\"finished\":{finished}}}")?;
            output.flush()?;
            if is_closed(&io::stdin()) {
                break;
            }
        }
    }
    Ok(())
}

fn is_closed(input: &io::Stdin) -> bool {
    let mut fds = [PollFd::new(input, PollFlags::IN)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // The agent writes nothing, so that all there is to read is the end.
    poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0)
}
