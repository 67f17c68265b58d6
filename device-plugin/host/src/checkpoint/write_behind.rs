//! Reads a file and writes its newest value in a thread of its own.
//!
//! A disk that hangs blocks this thread alone. A newer value replaces the one that waits for the
//! disk, so memory and threads stay bounded. Files on a tmpfs need no thread: their owners call
//! [`Checkpoint`] themselves.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::warn;

use super::{Checkpoint, LoadError, SaveError};

/// The pause of the thread after an error.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// The time for which a dropped file waits until the newest value is written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// After how long a missing write is reported.
const LATE_AFTER: Duration = Duration::from_secs(5);

/// A write that the disk has not completed for long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LateWrite {
    /// The file's directory.
    pub directory: PathBuf,
    /// How long the file has lacked its newest value, in whole seconds.
    pub lag: Duration,
}

/// The function that writes a value.
pub(crate) type SaveFn<T> = fn(&Checkpoint, &T) -> Result<(), SaveError>;

/// A file on a disk that may hang.
#[derive(Debug)]
pub struct WriteBehindFile<T> {
    directory: PathBuf,
    shared: Arc<Shared<T>>,
}

#[derive(Debug)]
struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    /// The value that the thread read, until the owner takes it.
    read: Option<T>,
    /// The thread has tried to read the file at least once.
    was_tried: bool,
    /// The value to write next.
    newest: Option<T>,
    /// The time since which the file lacks the newest value. Each completed write sets it anew,
    /// because the disk then works.
    dirty_since: Option<Instant>,
    /// The owner has dropped the file.
    closed: bool,
}

impl<T: Default + Serialize + DeserializeOwned + Send + 'static> WriteBehindFile<T> {
    /// Starts the thread, which reads `file` first and moves a malformed file aside.
    ///
    /// # Errors
    /// The operating system starts no thread.
    pub fn open(file: Checkpoint, save: SaveFn<T>) -> io::Result<Self> {
        let state = State {
            read: None,
            was_tried: false,
            newest: None,
            dirty_since: None,
            closed: false,
        };
        let directory = file.path().parent().map(PathBuf::from).unwrap_or_default();
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let thread = thread::Builder::new().name("disk".into());
        let thread_shared = Arc::clone(&shared);
        thread.spawn(move || {
            if thread_shared.read(&file) {
                thread_shared.write(&file, save);
            }
        })?;
        Ok(Self { directory, shared })
    }
}

impl<T> WriteBehindFile<T> {
    /// Takes the value that the file had. `None` where the disk does not answer within `patience`,
    /// where the last read failed, and where the value was taken before.
    ///
    /// After a failed read the thread tries again, and a later call returns the value.
    pub fn read(&self, patience: Duration) -> Option<T> {
        // The thread may be pausing after a failed read: this wakes the thread.
        self.shared.changed.notify_all();
        let state = self.shared.lock();
        let condition = |state: &mut State<T>| !state.was_tried;
        let (mut state, _) = wait_while(&self.shared.changed, state, patience, condition);
        state.read.take()
    }

    /// Queues `value` for writing and replaces a value that still waits. The thread writes nothing
    /// before it has read the file, or has moved a malformed file aside.
    pub fn write(&self, value: T) {
        let mut state = self.shared.lock();
        state.newest = Some(value);
        state.dirty_since.get_or_insert_with(Instant::now);
        self.shared.changed.notify_all();
    }

    /// The time for which the file has lacked the newest value.
    pub fn lag(&self) -> Duration {
        let since = self.shared.lock().dirty_since;
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// The write that the disk has not completed for at least 5 s.
    pub fn late_write(&self) -> Option<LateWrite> {
        let lag = self.lag();
        (lag >= LATE_AFTER).then(|| LateWrite {
            directory: self.directory.clone(),
            lag: Duration::from_secs(lag.as_secs()),
        })
    }

    /// Waits for at most `patience` until the file has the newest value; returns whether it has.
    pub fn flush(&self, patience: Duration) -> bool {
        let condition = |state: &mut State<T>| state.dirty_since.is_some();
        let state = self.shared.lock();
        let (state, _) = wait_while(&self.shared.changed, state, patience, condition);
        state.dirty_since.is_none()
    }
}

impl<T> Drop for WriteBehindFile<T> {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        self.flush(FLUSH_TIMEOUT);
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for [`RETRY_INTERVAL`] or for a change; returns false once the owner has dropped the
    /// file.
    fn pause(&self) -> bool {
        let state = self.lock();
        let (state, _) = self
            .changed
            .wait_timeout(state, RETRY_INTERVAL)
            .unwrap_or_else(PoisonError::into_inner);
        !state.closed
    }
}

impl<T: Default + Serialize + DeserializeOwned> Shared<T> {
    /// Reads the file until that succeeds; returns false once the owner has dropped the file.
    fn read(&self, file: &Checkpoint) -> bool {
        let mut warned = false;
        loop {
            let read = match file.load_or_set_aside::<T>() {
                Ok(read) => Some(read.unwrap_or_default()),
                Err(error @ LoadError::Malformed { .. }) => {
                    warn!(%error, "failed to read a malformed file; the agent starts with an empty one");
                    Some(T::default())
                }
                Err(error @ LoadError::Read { .. }) => {
                    if !std::mem::replace(&mut warned, true) {
                        warn!(%error, "failed to read a file; the agent tries again");
                    }
                    None
                }
            };
            let is_read = read.is_some();
            let mut state = self.lock();
            (state.read, state.was_tried) = (read, true);
            self.changed.notify_all();
            drop(state);
            if is_read {
                return true;
            }
            if !self.pause() {
                return false;
            }
        }
    }

    /// Writes the newest value until the owner has dropped the file and no value waits, or a write
    /// fails after the drop.
    fn write(&self, file: &Checkpoint, save: SaveFn<T>) {
        let mut warned = false;
        while let Some(value) = self.next() {
            let saved = save(file, &value);
            let failed = saved.is_err();
            let mut state = self.lock();
            match saved {
                Ok(()) => {
                    warned = false;
                    state.dirty_since = state.newest.as_ref().map(|_| Instant::now());
                }
                Err(error) => {
                    if !std::mem::replace(&mut warned, true) {
                        warn!(%error, "failed to write a file; the agent tries again");
                    }
                    state.newest.get_or_insert(value);
                }
            }
            self.changed.notify_all();
            drop(state);
            if failed && !self.pause() {
                return;
            }
        }
    }

    /// Waits for the next value; `None` once the owner has dropped the file and no value waits.
    fn next(&self) -> Option<T> {
        let condition = |state: &mut State<T>| state.newest.is_none() && !state.closed;
        let waited = self.changed.wait_while(self.lock(), condition);
        waited.unwrap_or_else(PoisonError::into_inner).newest.take()
    }
}

fn wait_while<'a, T>(
    changed: &Condvar,
    state: MutexGuard<'a, State<T>>,
    patience: Duration,
    condition: impl FnMut(&mut State<T>) -> bool,
) -> (MutexGuard<'a, State<T>>, std::sync::WaitTimeoutResult) {
    changed
        .wait_timeout_while(state, patience, condition)
        .unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// Makes each write hang until a reader opens the returned FIFO.
    fn make_writes_hang(file: &Path) -> PathBuf {
        let fifo = file.with_extension("new");
        let status = std::process::Command::new("mkfifo").arg(&fifo).status();
        assert!(status.unwrap().success());
        fifo
    }

    fn open(file: &Path) -> WriteBehindFile<u32> {
        WriteBehindFile::open(Checkpoint::new(file.to_owned()), Checkpoint::save).unwrap()
    }

    #[test]
    fn file_returns_the_newest_value() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file.json");
        let disk = open(&file);
        assert_eq!(disk.read(SOON), Some(0));
        assert_eq!(disk.read(SOON), None, "it is given once");
        (1..=100).for_each(|value| disk.write(value));
        drop(disk);
        assert_eq!(open(&file).read(SOON), Some(100));
    }

    #[test]
    fn file_blocks_no_caller_while_the_disk_hangs() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file.json");
        let fifo = make_writes_hang(&file);
        let disk = open(&file);
        assert_eq!(disk.read(SOON), Some(0));
        let started = Instant::now();
        for value in 1..=1_000 {
            disk.write(value);
        }
        assert!(started.elapsed() < SOON && !disk.flush(Duration::from_millis(50)));
        assert!(disk.lag() >= Duration::from_millis(50));
        // The read ends the write that hangs; the newer value then replaces the FIFO.
        std::fs::read(&fifo).unwrap();
        disk.write(1_001);
        assert!(disk.flush(SOON));
        assert_eq!(open(&file).read(SOON), Some(1_001));
    }

    #[test]
    fn file_that_cannot_be_read_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file.json");
        // The kernel refuses to open a link to itself.
        std::os::unix::fs::symlink("file.json", &file).unwrap();
        let disk = open(&file);
        assert_eq!(disk.read(SOON), None);
        Checkpoint::new(file).save(&7_u32).unwrap();
        let started = Instant::now();
        while started.elapsed() < SOON {
            if let Some(read) = disk.read(Duration::ZERO) {
                assert_eq!(read, 7);
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        panic!("not read");
    }
}
