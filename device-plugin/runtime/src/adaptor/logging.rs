//! Logs every allocation and free.
//!
//! The adaptor logs a free before it happens and an allocation after it, so that the log never
//! shows an address as allocated twice.
#![forbid(unsafe_code)]

mod csv;

use std::alloc::Layout;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::SystemTime;

pub use csv::CsvSink;

use crate::adaptor::upstream::{Upstream, forward};
use crate::driver::{Stream, StreamKey};
use crate::error::ResourceError;
use crate::resource::physical::{
    PhysicalBlock, PhysicalMemoryResource, ReleaseError, check_physical_origin,
};
use crate::resource::{Block, DeviceMemoryResource, FreeError, Tag, check_origin};

/// Kind of a logged call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// An allocation succeeded.
    Allocate,
    /// An allocation failed.
    AllocateFailure,
    /// A block is about to be freed.
    Free,
}

/// One logged call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRecord {
    /// Time of the call.
    pub time: SystemTime,
    /// Calling thread, by a number that is unique in this process.
    pub thread: u64,
    /// Kind of the call.
    pub action: Action,
    /// First device address, or the number of a physical block; 0 for a failed allocation.
    pub address: u64,
    /// Requested bytes.
    pub bytes: u64,
    /// Stream of the call; the default stream for physical memory.
    pub stream: StreamKey,
    /// Purpose of an allocation; empty for a free.
    pub tag: Tag,
}

impl Action {
    /// Returns the action and the first address of an allocation's result.
    pub(crate) fn of_allocation<E>(address: Result<u64, E>) -> (Action, u64) {
        match address {
            Ok(address) => (Action::Allocate, address),
            Err(_) => (Action::AllocateFailure, 0),
        }
    }
}

impl LogRecord {
    /// Creates the record of a call by this thread.
    pub(crate) fn now(
        action: Action,
        address: u64,
        bytes: u64,
        stream: StreamKey,
        tag: Tag,
    ) -> LogRecord {
        LogRecord {
            time: SystemTime::now(),
            thread: thread_number(),
            action,
            address,
            bytes,
            stream,
            tag,
        }
    }
}

/// Destination of the records.
pub trait Sink: Send + Sync + fmt::Debug {
    /// Writes a record. A failure of the log must not fail an allocation, so this returns nothing.
    fn write(&self, event: LogRecord);
}

/// Sink that keeps all records in memory.
#[derive(Debug, Default)]
pub struct MemorySink(Mutex<Vec<LogRecord>>);

impl MemorySink {
    /// Returns all records so far.
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

/// Log that is switched on and off while threads allocate. A log that is off costs one load.
#[derive(Debug, Default)]
pub struct LogSwitch {
    on: AtomicBool,
    sink: RwLock<Option<Arc<dyn Sink>>>,
}

impl LogSwitch {
    /// Writes the records of later calls to a sink; `None` switches the log off.
    pub fn set(&self, sink: Option<Arc<dyn Sink>>) {
        let mut current = self.sink.write().unwrap_or_else(PoisonError::into_inner);
        self.on.store(sink.is_some(), Ordering::Relaxed);
        *current = sink;
    }

    /// Returns whether the log is on.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }
}

impl Sink for LogSwitch {
    fn write(&self, event: LogRecord) {
        let sink = self.sink.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(sink) = &*sink {
            sink.write(event);
        }
    }
}

/// Log over an upstream resource.
#[derive(Debug)]
pub struct Logging<R, S> {
    upstream: Upstream<R>,
    sink: S,
}

impl<R, S: Sink> Logging<R, S> {
    /// Logs the calls of a resource to a sink.
    pub fn new(resource: R, sink: S) -> Self {
        Logging {
            upstream: Upstream::new(resource),
            sink,
        }
    }

    fn write(&self, action: Action, address: u64, bytes: u64, stream: StreamKey, tag: Tag) {
        self.sink
            .write(LogRecord::now(action, address, bytes, stream, tag));
    }
}

/// Returns the number of the calling thread.
fn thread_number() -> u64 {
    use std::sync::atomic::AtomicU64;
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static OWN: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    OWN.with(|own| *own)
}

impl<R: DeviceMemoryResource, S: Sink> DeviceMemoryResource for Logging<R, S> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        let result = self.upstream.allocate(layout, stream, tag);
        let (action, address) = Action::of_allocation(result.as_ref().map(Block::address));
        self.write(action, address, layout.size() as u64, stream.key(), tag);
        result
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_origin(self.upstream.origin, block)?;
        self.write(
            Action::Free,
            block.address(),
            block.bytes(),
            stream.key(),
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

impl<R: PhysicalMemoryResource, S: Sink> PhysicalMemoryResource for Logging<R, S> {
    fn create(&self, bytes: u64, tag: Tag) -> Result<PhysicalBlock, ResourceError> {
        let result = self.upstream.create(bytes, tag);
        let (action, number) = Action::of_allocation(result.as_ref().map(PhysicalBlock::number));
        let stream = StreamKey::default_of(self.ordinal());
        self.write(action, number, bytes, stream, tag);
        result
    }

    fn release(&self, block: PhysicalBlock) -> Result<(), ReleaseError> {
        let block = check_physical_origin(self.upstream.origin, block)?;
        let (number, bytes) = (block.number(), block.bytes());
        let stream = StreamKey::default_of(self.ordinal());
        self.write(Action::Free, number, bytes, stream, Tag::default());
        self.upstream.release(block)
    }

    fn kind(&self) -> &'static str {
        "logging"
    }

    forward!(physical_identity, budget_snapshot);
}
