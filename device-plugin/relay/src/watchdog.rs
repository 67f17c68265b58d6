//! Ends the relay when its runtime hangs.
//!
//! The kubelet calls Allocate without a deadline, on the goroutine that admits every pod of the
//! node. A relay that hangs stops that node, and one that ends is started again.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How often the runtime ticks, and how often the watchdog looks at its ticks.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// The time between two ticks, and between two looks.
    pub interval: Duration,
    /// The number of looks without a new tick after which the runtime hangs.
    pub looks: u32,
}

/// Aborts after ten seconds, within which the relay's own calls time out.
pub const PACE: Pace = Pace {
    interval: Duration::from_secs(1),
    looks: 10,
};

/// Ticks on this runtime, and calls `hung` on a thread of its own when the ticks stop.
///
/// The watchdog counts its looks instead of the time, because a stopped process or a suspended
/// machine runs neither thread.
///
/// # Errors
/// There is no room for a thread.
pub fn start(pace: Pace, hung: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let ticks = Arc::new(AtomicU64::new(0));
    let watched = Arc::downgrade(&ticks);
    tokio::spawn(async move {
        loop {
            ticks.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(pace.interval).await;
        }
    });
    let watch = move || {
        let (mut last, mut silent) = (0, 0);
        // The ticks go with the runtime.
        while let Some(ticks) = watched.upgrade() {
            let now = ticks.load(Ordering::Relaxed);
            drop(ticks);
            silent = if now == last { silent + 1 } else { 0 };
            last = now;
            if silent >= pace.looks {
                return hung();
            }
            std::thread::sleep(pace.interval);
        }
    };
    let thread = std::thread::Builder::new().name("watchdog".to_owned());
    thread.spawn(watch).map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const FAST: Pace = Pace {
        interval: Duration::from_millis(20),
        looks: 10,
    };

    /// Starts a watchdog on a runtime of one thread, and returns what it says of `work`.
    fn said_during(work: impl Future<Output = ()>) -> Result<(), mpsc::RecvTimeoutError> {
        let (hung, is_hung) = mpsc::channel();
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_time().build().unwrap();
        runtime.block_on(async {
            start(FAST, move || hung.send(()).unwrap()).unwrap();
            work.await;
        });
        drop(runtime);
        // The watchdog ends with the runtime, and its channel with it.
        is_hung.recv_timeout(Duration::from_secs(60))
    }

    #[test]
    fn runtime_that_is_blocked_hangs() {
        // The test's own thread is the runtime's only one.
        let blocked = async { std::thread::sleep(Duration::from_secs(1)) };
        assert_eq!(said_during(blocked), Ok(()));
    }

    #[test]
    fn runtime_that_waits_does_not_hang() {
        async fn wait() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let ended = Err(mpsc::RecvTimeoutError::Disconnected);
        assert_eq!(said_during(wait()), ended);
    }
}
