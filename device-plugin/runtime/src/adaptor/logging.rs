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

pub use csv::Csv;

use crate::adaptor::upstream::{Under, pass_on};
use crate::driver::{Stream, StreamKey};
use crate::error::{FreeError, ResourceError};
use crate::resource::{Block, DeviceMemoryResource, Tag, check_own};

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
pub struct Event {
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
    fn write(&self, event: Event);
}

/// Keeps every line in memory.
#[derive(Debug, Default)]
pub struct Memory(Mutex<Vec<Event>>);

impl Memory {
    /// The lines so far.
    pub fn events(&self) -> Vec<Event> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Sink for Memory {
    fn write(&self, event: Event) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(event);
    }
}

impl<S: Sink + ?Sized> Sink for Arc<S> {
    fn write(&self, event: Event) {
        (**self).write(event);
    }
}

/// A log over a resource.
#[derive(Debug)]
pub struct Logging<R, S> {
    under: Under<R>,
    sink: S,
}

impl<R: DeviceMemoryResource, S: Sink> Logging<R, S> {
    /// Writes to a sink what passes from now on.
    pub fn new(resource: R, sink: S) -> Self {
        Logging {
            under: Under::new(resource),
            sink,
        }
    }

    fn write(&self, action: Action, address: u64, bytes: u64, stream: &Stream, tag: Tag) {
        self.sink.write(Event {
            time: SystemTime::now(),
            thread: thread(),
            action,
            address,
            bytes,
            stream: stream.key(),
            tag,
        });
    }
}

/// The calling thread's number.
fn thread() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static OWN: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    OWN.with(|own| *own)
}

impl<R: DeviceMemoryResource, S: Sink> DeviceMemoryResource for Logging<R, S> {
    fn allocate(&self, layout: Layout, stream: &Stream, tag: Tag) -> Result<Block, ResourceError> {
        let answer = self.under.allocate(layout, stream, tag);
        let (action, address) = match &answer {
            Ok(block) => (Action::Allocate, block.address()),
            Err(_) => (Action::AllocateFailure, 0),
        };
        self.write(action, address, layout.size() as u64, stream, tag);
        answer
    }

    fn deallocate(&self, block: Block, stream: &Stream) -> Result<(), FreeError> {
        let block = check_own(self.under.origin, block)?;
        self.write(
            Action::Free,
            block.address(),
            block.bytes(),
            stream,
            Tag::default(),
        );
        self.under.deallocate(block, stream)
    }

    fn kind(&self) -> &'static str {
        "logging"
    }

    pass_on!(
        identity,
        bytes_outstanding,
        budget_snapshot,
        reap_pending,
        is_retired,
        uses
    );
}
