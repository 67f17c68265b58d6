//! A layer that writes down what passes through it.
//!
//! A free is written before it is done, an allocation after: so an address is never written as allocated again before
//! its free.
#![forbid(unsafe_code)]

mod csv;

use std::alloc::Layout;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

pub use csv::CsvSink;

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::{Stream, StreamKey};
use crate::error::{FreeError, ResourceError};
use crate::resource::{Block, DeviceMemoryResource, Tag, check_origin};

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A block was made.
    Allocate,
    /// None was.
    AllocateFailure,
    /// A block is freed.
    Free,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRecord {
    /// When.
    pub time: SystemTime,
    /// The thread, by a number of this process.
    pub thread: u64,
    /// What.
    pub action: Action,
    /// The first address; 0 where there is none.
    pub address: u64,
    /// Bytes as asked for.
    pub bytes: u64,
    /// The stream.
    pub stream: StreamKey,
    /// What for; of an allocation only.
    pub tag: Tag,
}

/// Where lines go.
pub trait Sink: Send + Sync + fmt::Debug {
    /// Takes a line. It cannot fail: what happens to a log must not happen to memory.
    fn write(&self, event: LogRecord);
}

/// Keeps every line in memory.
#[derive(Debug, Default)]
pub struct MemorySink(Mutex<Vec<LogRecord>>);

impl MemorySink {
    /// The lines so far.
    pub fn records(&self) -> Vec<LogRecord> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Sink for MemorySink {
    fn write(&self, event: LogRecord) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(event);
    }
}

impl<S: Sink + ?Sized> Sink for Arc<S> {
    fn write(&self, event: LogRecord) {
        (**self).write(event);
    }
}

/// A log over a resource.
#[derive(Debug)]
pub struct Logging<R, S> {
    upstream: Upstream<R>,
    sink: S,
}

impl<R: DeviceMemoryResource, S: Sink> Logging<R, S> {
    /// Writes to a sink what passes from now on.
    pub fn new(resource: R, sink: S) -> Self {
        Logging {
            upstream: Upstream::new(resource),
            sink,
        }
    }

    fn write(&self, action: Action, address: u64, bytes: u64, stream: &Stream, tag: Tag) {
        self.sink.write(LogRecord {
            time: SystemTime::now(),
            thread: thread_number(),
            action,
            address,
            bytes,
            stream: stream.key(),
            tag,
        });
    }
}

/// The calling thread's number.
fn thread_number() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static OWN: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    OWN.with(|own| *own)
}

impl<R: DeviceMemoryResource, S: Sink> DeviceMemoryResource for Logging<R, S> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        let result = self.upstream.allocate(layout, stream, tag);
        let (action, address) = match &result {
            Ok(block) => (Action::Allocate, block.address()),
            Err(_) => (Action::AllocateFailure, 0),
        };
        self.write(action, address, layout.size() as u64, stream, tag);
        result
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_origin(self.upstream.origin, block)?;
        self.write(
            Action::Free,
            block.address(),
            block.bytes(),
            stream,
            Tag::default(),
        );
        self.upstream.deallocate(block, stream)
    }

    fn kind(&self) -> &'static str {
        "logging"
    }

    forward!(
        identity,
        bytes_outstanding,
        budget_snapshot,
        reap_pending,
        is_retired,
        uses
    );
}
