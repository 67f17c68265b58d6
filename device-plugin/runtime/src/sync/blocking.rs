//! Runs work that may block on threads of its own, so that tasks need not block theirs.
//!
//! At most [`MAX_THREADS`] threads run at a time; further work waits in a queue. A thread ends
//! after [`IDLE_TIME`] without work.
#![forbid(unsafe_code)]

use std::any::Any;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use crate::error::ErrorClass;

/// Largest number of threads.
const MAX_THREADS: usize = 8;
/// Time after which an idle thread ends.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// Reason for which work has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// The system refused to start a thread.
    #[error("failed to start a thread for GPU work: {0}; raise the limit of threads")]
    NoThread(String),
    /// The work panicked.
    #[error("failed to run GPU work: it panicked: {0}; see the panic's message")]
    Panicked(String),
}

impl RunError {
    /// Returns the class of the failure.
    pub fn class(&self) -> ErrorClass {
        match self {
            RunError::NoThread(_) => ErrorClass::NotReady,
            // The panic does not say whether it depends on the call.
            RunError::Panicked(_) => ErrorClass::Unknown,
        }
    }

    /// Returns whether the same call may succeed later in this process image.
    pub fn retryable(&self) -> bool {
        self.class().retryable()
    }
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue {
    jobs: VecDeque::new(),
    threads: 0,
    idle: 0,
});
static ADDED: Condvar = Condvar::new();

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Result of work in another thread, as a future for every executor. The work runs to its end even
/// if the future is dropped, and such a thread drops the result then. A result may own memory,
/// whose free waits for the device.
#[derive(Debug)]
#[must_use = "the work runs anyway, but its result is lost"]
pub(crate) struct Running<R: Send + 'static>(Arc<Mutex<Outcome<R>>>);

#[derive(Debug)]
struct Outcome<R> {
    result: Option<Result<R, RunError>>,
    waker: Option<Waker>,
}

impl<R: Send + 'static> Drop for Running<R> {
    fn drop(&mut self) {
        let mut outcome = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let unread = outcome.result.take();
        drop(outcome);
        if unread.is_some() && std::mem::needs_drop::<R>() {
            // Without a thread the result is dropped here.
            let _ = submit(Box::new(|| drop(unread)));
        }
    }
}

impl<R: Send + 'static> Future for Running<R> {
    type Output = Result<R, RunError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut outcome = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                outcome.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// Runs work in another thread.
pub(crate) fn run<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Running<R> {
    let outcome = Arc::new(Mutex::new(Outcome {
        result: None,
        waker: None,
    }));
    let shared = Arc::clone(&outcome);
    let job = Box::new(move || {
        let result = catch_unwind(AssertUnwindSafe(work))
            .map_err(|panic| RunError::Panicked(panic_message(&*panic)));
        complete(&shared, result);
    });
    if let Err(error) = submit(job) {
        complete(&outcome, Err(RunError::NoThread(error.to_string())));
    }
    Running(outcome)
}

fn complete<R>(outcome: &Mutex<Outcome<R>>, result: Result<R, RunError>) {
    let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
    outcome.result = Some(result);
    let waker = outcome.waker.take();
    drop(outcome);
    if let Some(waker) = waker {
        waker.wake();
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

/// Adds a job to the queue, and starts a thread if none is idle.
fn submit(job: Job) -> io::Result<()> {
    let mut queue = queue();
    if queue.idle <= queue.jobs.len() && queue.threads < MAX_THREADS {
        let thread = thread::Builder::new().name("bursar-blocking".to_owned());
        match thread.spawn(run_jobs) {
            Ok(_) => queue.threads += 1,
            Err(error) if queue.threads == 0 => return Err(error),
            // Another thread runs the job later.
            Err(_) => {}
        }
    }
    queue.jobs.push_back(job);
    ADDED.notify_one();
    Ok(())
}

/// Runs jobs until there was none for a while.
fn run_jobs() {
    let mut guard = queue();
    loop {
        if let Some(job) = guard.jobs.pop_front() {
            drop(guard);
            // A waker may panic, and the thread still counts as one that takes jobs.
            let _ = catch_unwind(AssertUnwindSafe(job));
            guard = queue();
            continue;
        }
        guard.idle += 1;
        let (waited, timeout) = ADDED
            .wait_timeout(guard, IDLE_TIME)
            .unwrap_or_else(PoisonError::into_inner);
        guard = waited;
        guard.idle -= 1;
        if timeout.timed_out() && guard.jobs.is_empty() {
            guard.threads -= 1;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Polls a future in this thread until it is ready.
    fn block_on<F: Future>(future: F) -> F::Output {
        struct Unpark(thread::Thread);
        impl std::task::Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut future = std::pin::pin!(future);
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(done) => return done,
                Poll::Pending => thread::park(),
            }
        }
    }

    #[test]
    fn work_beside_blocked_work_goes_on() {
        let (release, blocked) = mpsc::channel::<()>();
        let first = run(move || blocked.recv());
        assert_eq!(block_on(run(|| 7)), Ok(7));
        release.send(()).expect("the first still waits");
        assert_eq!(block_on(first), Ok(Ok(())));
    }

    #[test]
    fn unread_result_is_dropped_in_a_thread_for_work() {
        struct SendThreadOnDrop(mpsc::Sender<thread::ThreadId>);
        impl Drop for SendThreadOnDrop {
            fn drop(&mut self) {
                let _ = self.0.send(thread::current().id());
            }
        }
        let (sender, dropping_threads) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let value = SendThreadOnDrop(sender.clone());
        let before_the_end = run(move || {
            released.recv().expect("the test tells");
            value
        });
        drop(before_the_end);
        release.send(()).expect("the work waits");
        assert_ne!(dropping_threads.recv(), Ok(thread::current().id()));
        let after_the_end = run(move || SendThreadOnDrop(sender));
        while after_the_end.0.lock().expect("no panic").result.is_none() {
            thread::yield_now();
        }
        drop(after_the_end);
        assert_ne!(dropping_threads.recv(), Ok(thread::current().id()));
    }

    #[test]
    fn panic_of_work_is_an_error() {
        let panicked = block_on(run(|| panic!("no luck")));
        assert_eq!(
            panicked,
            Err::<(), _>(RunError::Panicked("no luck".to_owned()))
        );
    }

    #[test]
    fn work_goes_on_after_wakers_panicked() {
        struct Panic;
        impl std::task::Wake for Panic {
            fn wake(self: Arc<Self>) {
                panic!("the executor has ended");
            }
        }
        let waker = Waker::from(Arc::new(Panic));
        for _ in 0..MAX_THREADS {
            let (release, blocked) = mpsc::channel::<()>();
            let mut work = std::pin::pin!(run(move || blocked.recv()));
            let polled = work.as_mut().poll(&mut Context::from_waker(&waker));
            assert!(polled.is_pending());
            release.send(()).expect("the work still waits");
        }
        assert_eq!(block_on(run(|| 7)), Ok(7));
    }

    #[test]
    fn more_work_than_threads_is_all_done() {
        let all: Vec<_> = (0..100).map(|number| run(move || number)).collect();
        let sum: i32 = all
            .into_iter()
            .filter_map(|running| block_on(running).ok())
            .sum();
        assert_eq!(sum, 4950);
        assert!(queue().threads <= MAX_THREADS);
    }
}
