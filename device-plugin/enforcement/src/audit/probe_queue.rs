//! Runs the probes of an audit on a few threads, and adds a thread while one hangs in the kernel.

use std::collections::VecDeque;
use std::num::NonZero;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::{Instant, interval, timeout_at};

/// The most threads without a probe that hangs.
const MAX_THREADS: usize = 4;

/// How long no probe may begin before a further thread takes the next one.
const STALL_TIME: Duration = Duration::from_millis(20);

/// Probes that no thread has begun.
#[derive(Debug)]
pub(super) struct ProbeQueue<P> {
    probes: Arc<Mutex<VecDeque<P>>>,
}

impl<P: Send + 'static> ProbeQueue<P> {
    /// A queue of `probes`, which begin in this order.
    pub(super) fn new(probes: impl IntoIterator<Item = P>) -> Self {
        Self {
            probes: Arc::new(Mutex::new(probes.into_iter().collect())),
        }
    }

    /// Begins the probes with `run`, until all have begun or `deadline` has passed.
    ///
    /// Returns the probes that no thread has begun.
    pub(super) async fn run_until(self, deadline: Instant, run: fn(P)) -> Vec<P> {
        let threads = available_parallelism().map_or(1, NonZero::get);
        for _ in 0..threads.min(MAX_THREADS).min(self.lock().len()) {
            self.add_thread(run);
        }
        let start_all = async {
            let mut ticks = interval(STALL_TIME);
            let mut waiting = usize::MAX;
            loop {
                ticks.tick().await;
                let left = self.lock().len();
                match left {
                    0 => return,
                    // Every thread hangs, or its probe has panicked.
                    _ if left == waiting => self.add_thread(run),
                    _ => waiting = left,
                }
            }
        };
        // At the deadline the queue keeps what has not begun.
        let _ = timeout_at(deadline, start_all).await;
        std::mem::take(&mut *self.lock()).into()
    }

    fn add_thread(&self, run: fn(P)) {
        let probes = Arc::clone(&self.probes);
        spawn_blocking(move || {
            loop {
                let next = lock(&probes).pop_front();
                let Some(probe) = next else { break };
                run(probe);
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<P>> {
        lock(&self.probes)
    }
}

fn lock<P>(probes: &Mutex<VecDeque<P>>) -> MutexGuard<'_, VecDeque<P>> {
    probes.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A probe that reports its number when it begins, and that may hang until the sender is gone.
    struct FakeProbe {
        number: u32,
        started_sender: mpsc::Sender<u32>,
        hang: Option<mpsc::Receiver<()>>,
    }

    fn run(probe: FakeProbe) {
        let _ = probe.started_sender.send(probe.number);
        if let Some(hang) = probe.hang {
            let _ = hang.recv();
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn probe_begins_when_all_before_it_hang() {
        let (started_sender, started) = mpsc::channel();
        let (releases, hangs): (Vec<_>, Vec<_>) = (0..20).map(|_| mpsc::channel()).unzip();
        let probes = (0..).zip(hangs).map(|(number, hang)| FakeProbe {
            number,
            started_sender: started_sender.clone(),
            hang: Some(hang),
        });
        let deadline = Instant::now() + 60 * SECOND;
        let left = ProbeQueue::new(probes).run_until(deadline, run).await;
        assert!(left.is_empty() && Instant::now() < deadline);
        let mut numbers: Vec<u32> = started.iter().take(20).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..20).collect::<Vec<_>>());
        drop(releases);
    }

    #[tokio::test]
    async fn probes_that_have_not_begun_are_returned_at_the_deadline() {
        let (started_sender, started) = mpsc::channel();
        let (releases, hangs): (Vec<_>, Vec<_>) = (0..500).map(|_| mpsc::channel()).unzip();
        let probes = (0..).zip(hangs).map(|(number, hang)| FakeProbe {
            number,
            started_sender: started_sender.clone(),
            hang: Some(hang),
        });
        let deadline = Instant::now() + SECOND / 5;
        let left = ProbeQueue::new(probes).run_until(deadline, run).await;
        // Each began or is returned, and none twice.
        let mut numbers: Vec<u32> = left.iter().map(|probe| probe.number).collect();
        assert!(!numbers.is_empty() && numbers.len() < 500);
        numbers.extend(started.iter().take(500 - numbers.len()));
        numbers.sort_unstable();
        assert_eq!(numbers, (0..500).collect::<Vec<_>>());
        drop(releases);
    }

    #[tokio::test]
    async fn probe_that_panics_ends_no_other() {
        let (sender, receiver) = mpsc::channel();
        let queue = ProbeQueue::new([None, Some(sender)]);
        let run = |probe: Option<mpsc::Sender<()>>| probe.expect("a probe").send(()).unwrap();
        let left = queue.run_until(Instant::now() + 60 * SECOND, run).await;
        assert!(left.is_empty());
        assert_eq!(receiver.recv(), Ok(()));
    }
}
