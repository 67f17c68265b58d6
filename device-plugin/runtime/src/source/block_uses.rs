//! Tracks uses of blocks by streams, and releases a freed block after the last use.
//!
//! ```text
//!   insert        finish, record            retire             reap
//! -------> live ---- used in a stream ----> retired --------> released
//!                                               ^---- work before the free is not done,
//!                                                     or the free failed
//! ```
//!
//! Driver calls in this module order streams and query events; none waits.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{Access, Context, Event, Stream, StreamKey};
use crate::error::{CudaError, ResourceError};
use crate::resource::{Block, BlockRef, BlockUse, FreeError, Outstanding, Reaped};
use crate::source::live_blocks::LiveBlocks;

/// Last use of a block in one stream.
#[derive(Debug)]
struct StreamUse {
    stream: StreamKey,
    /// Number of the last use.
    sequence: u64,
    /// Event after the last use. A thread that orders a stream behind the event holds a clone.
    event: Arc<Event>,
    /// Whether any use in the stream writes. The event then covers that write.
    writes: bool,
}

#[derive(Debug)]
struct LiveBlock<P> {
    block: BlockRef,
    /// Stream in which the block was allocated.
    alloc_stream: Stream,
    /// Last uses, one for each stream.
    uses: Vec<StreamUse>,
    /// Number of prepared uses that are not finished.
    open_uses: u32,
    payload: P,
}

impl<P> LiveBlock<P> {
    /// Keeps the later of two uses in a stream, and returns the events that are not needed any
    /// more.
    fn record_use(&mut self, new: StreamUse) -> Vec<Arc<Event>> {
        let existing = self.uses.iter_mut().find(|used| used.stream == new.stream);
        match existing {
            Some(used) => {
                used.writes |= new.writes;
                if new.sequence < used.sequence {
                    return vec![new.event];
                }
                used.sequence = new.sequence;
                vec![std::mem::replace(&mut used.event, new.event)]
            }
            None => {
                let done = self.prune_uses();
                self.uses.push(new);
                done
            }
        }
    }

    /// Removes completed uses above the threshold, and returns their events. A block that ever new
    /// streams use would fill the list otherwise.
    fn prune_uses(&mut self) -> Vec<Arc<Event>> {
        if self.uses.len() < PRUNE_THRESHOLD {
            return Vec::new();
        }
        let is_done = |used: &mut StreamUse| used.event.is_done() == Ok(true);
        let done = self.uses.extract_if(.., is_done);
        done.map(|used| used.event).collect()
    }

    /// Returns the events behind which an access in a stream is ordered.
    fn events_before(&self, stream: &Stream, access: Access) -> Vec<Arc<Event>> {
        let others = self
            .uses
            .iter()
            .filter(|used| used.stream != stream.key() && (used.writes || access.writes()));
        others.map(|used| Arc::clone(&used.event)).collect()
    }
}

/// Freed block whose memory is not released yet.
#[derive(Debug)]
pub(crate) struct RetiredBlock<P> {
    pub(crate) block: BlockRef,
    /// Stream of the free.
    pub(crate) stream: Stream,
    /// Uses that the free must still wait for. `alloc_stream` is set if the block was allocated in
    /// another stream.
    uses: Vec<StreamUse>,
    alloc_stream: Option<Stream>,
    /// Frees of one stream complete in the order of these numbers.
    sequence: u64,
    /// Whether the free is in the stream.
    free_submitted: bool,
    /// Event after the free.
    done_event: Option<Event>,
    pub(crate) payload: P,
}

#[derive(Debug)]
struct State<P> {
    live: HashMap<u64, LiveBlock<P>>,
    /// Live blocks by their addresses.
    live_addresses: LiveBlocks,
    retired: HashMap<u64, RetiredBlock<P>>,
    /// Retired blocks that a thread is freeing or reaping now.
    in_progress: HashSet<u64>,
    live_bytes: u64,
    retired_bytes: u64,
    /// Events for reuse.
    spare_events: Vec<Event>,
}

/// Blocks of a resource that tracks uses, each with a payload of that resource.
#[derive(Debug)]
pub(crate) struct BlockUses<P> {
    context: Context,
    /// Numbers uses and frees. An operation comes after all work that was submitted before a lower
    /// number was taken.
    next_sequence: AtomicU64,
    blocks: Mutex<State<P>>,
}

const MAX_SPARE_EVENTS: usize = 256;

/// Number of a block's uses above which completed ones are pruned.
const PRUNE_THRESHOLD: usize = 32;

impl<P> BlockUses<P> {
    pub(crate) fn new(context: &Context) -> Self {
        BlockUses {
            context: context.clone(),
            next_sequence: AtomicU64::new(0),
            blocks: Mutex::new(State {
                live: HashMap::new(),
                live_addresses: LiveBlocks::default(),
                retired: HashMap::new(),
                in_progress: HashSet::new(),
                live_bytes: 0,
                retired_bytes: 0,
                spare_events: Vec::new(),
            }),
        }
    }

    fn blocks(&self) -> MutexGuard<'_, State<P>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_sequence(&self) -> u64 {
        self.next_sequence.fetch_add(1, Ordering::AcqRel)
    }

    /// Records an event after the present work of a stream.
    fn record_event(&self, stream: &Stream) -> Result<Event, CudaError> {
        let spare = self.blocks().spare_events.pop();
        let event = spare.map_or_else(|| self.context.event(), Ok)?;
        event.record(stream)?;
        Ok(event)
    }

    fn recycle_events(&self, events: impl IntoIterator<Item = Event>) {
        let spare = &mut self.blocks().spare_events;
        spare.extend(
            events
                .into_iter()
                .take(MAX_SPARE_EVENTS.saturating_sub(spare.len())),
        );
    }

    /// Adds an allocated block.
    ///
    /// # Errors
    /// [`ResourceError::PointerCollision`] if a live block has some of its bytes. The payload is
    /// then never dropped, because its memory is the live block's too.
    pub(crate) fn insert(
        &self,
        block: BlockRef,
        alloc_stream: &Stream,
        payload: P,
    ) -> Result<(), ResourceError> {
        let mut blocks = self.blocks();
        let inserted = blocks.live_addresses.insert(block, self.context.ordinal());
        if let Err(collision) = inserted {
            std::mem::forget(payload);
            return Err(collision);
        }
        blocks.live_bytes += block.bytes();
        let live = LiveBlock {
            block,
            alloc_stream: alloc_stream.clone(),
            uses: Vec::new(),
            open_uses: 0,
            payload,
        };
        blocks.live.insert(block.generation, live);
        Ok(())
    }

    /// Reads the payload of a live block.
    pub(crate) fn with_payload<T>(
        &self,
        block: BlockRef,
        read: impl FnOnce(&P) -> T,
    ) -> Result<T, ResourceError> {
        self.with_live(block, |live| read(&live.payload))
    }

    /// Orders a stream behind the block's allocation and conflicting uses, and opens a use.
    pub(crate) fn prepare(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<BlockUse, ResourceError> {
        let (alloc_stream, events) = self.with_live(block, |live| {
            live.open_uses += 1;
            let other = live.alloc_stream.key() != stream.key();
            (
                other.then(|| live.alloc_stream.clone()),
                live.events_before(stream, access),
            )
        })?;
        let ordered = events
            .iter()
            .try_for_each(|event| stream.wait(event))
            .and_then(|()| match &alloc_stream {
                Some(alloc_stream) => self.order_after(stream, alloc_stream),
                None => Ok(()),
            });
        if let Err(error) = ordered {
            self.with_live(block, |live| {
                live.open_uses = live.open_uses.saturating_sub(1)
            })?;
            return Err(error.into());
        }
        Ok(BlockUse {
            block,
            stream: stream.key(),
            access,
        })
    }

    /// Finishes a prepared use.
    pub(crate) fn finish(&self, used: BlockUse, stream: &Stream) -> Result<(), ResourceError> {
        if used.stream != stream.key() {
            let generation = used.block.generation;
            return Err(ResourceError::WrongStream { generation });
        }
        match self.record(used.block, stream, used.access) {
            // Without an event the host waits for the work; otherwise the block could never be
            // freed.
            Err(ResourceError::Cuda(_)) => stream.synchronize()?,
            other => other?,
        }
        self.with_live(used.block, |live| {
            live.open_uses = live.open_uses.saturating_sub(1)
        })
    }

    /// Records a use by the present work of a stream.
    pub(crate) fn record(
        &self,
        block: BlockRef,
        stream: &Stream,
        access: Access,
    ) -> Result<(), ResourceError> {
        let sequence = self.take_sequence();
        let used = StreamUse {
            stream: stream.key(),
            sequence,
            event: Arc::new(self.record_event(stream)?),
            writes: access.writes(),
        };
        let old = self.with_live(block, |live| live.record_use(used))?;
        // An event that another thread still waits for is not reused.
        self.recycle_events(old.into_iter().filter_map(Arc::into_inner));
        Ok(())
    }

    fn with_live<T>(
        &self,
        block: BlockRef,
        change: impl FnOnce(&mut LiveBlock<P>) -> T,
    ) -> Result<T, ResourceError> {
        let mut blocks = self.blocks();
        let live = blocks
            .live
            .get_mut(&block.generation)
            .filter(|live| live.block == block);
        live.map(change).ok_or(stale(block))
    }

    fn order_after(&self, stream: &Stream, behind: &Stream) -> Result<(), CudaError> {
        let recorded = self.record_event(behind)?;
        stream.wait(&recorded)?;
        // A stream waits for the event's state at the time of the call, so the event can be reused.
        self.recycle_events([recorded]);
        Ok(())
    }

    /// Retires a block and orders `stream` behind all of its uses, then calls `free` to submit the
    /// free.
    ///
    /// If a step fails, the block stays retired and `reap` retries.
    pub(crate) fn retire(
        &self,
        block: Block,
        stream: &Stream,
        free: impl FnOnce(&RetiredBlock<P>) -> Result<(), CudaError>,
    ) -> Result<(), FreeError> {
        let bytes = block.bytes();
        match self.try_retire(block.as_ref(), stream, free) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => Err(FreeError::Retired { bytes, source }),
            Err(reason) => Err(FreeError::Refused { block, reason }),
        }
    }

    fn try_retire(
        &self,
        block: BlockRef,
        stream: &Stream,
        free: impl FnOnce(&RetiredBlock<P>) -> Result<(), CudaError>,
    ) -> Result<Result<(), CudaError>, ResourceError> {
        let live = {
            let mut blocks = self.blocks();
            let generation = block.generation;
            match blocks.live.get(&generation) {
                Some(live) if live.block != block => return Err(stale(block)),
                Some(LiveBlock { open_uses: 0, .. }) => {}
                Some(live) => {
                    let uses = live.open_uses;
                    return Err(ResourceError::InUse { generation, uses });
                }
                None => return Err(stale(block)),
            }
            let live = blocks.live.remove(&generation).ok_or(stale(block))?;
            blocks.live_addresses.remove(&block);
            blocks.live_bytes -= block.bytes();
            blocks.retired_bytes += block.bytes();
            blocks.in_progress.insert(generation);
            live
        };
        let mut retired = RetiredBlock {
            block,
            stream: stream.clone(),
            uses: live.uses,
            alloc_stream: (live.alloc_stream.key() != stream.key()).then_some(live.alloc_stream),
            sequence: self.take_sequence(),
            free_submitted: false,
            done_event: None,
            payload: live.payload,
        };
        let result = self.submit_free(&mut retired, free);
        let mut blocks = self.blocks();
        blocks.in_progress.remove(&block.generation);
        blocks.retired.insert(block.generation, retired);
        Ok(result)
    }

    /// Releases retired blocks whose work is done.
    ///
    /// `free` submits a free that failed in [`BlockUses::retire`]; `release` gives the payload
    /// back. A block for which either fails stays retired.
    pub(crate) fn reap(
        &self,
        free: impl Fn(&RetiredBlock<P>) -> Result<(), CudaError>,
        release: impl Fn(&mut RetiredBlock<P>) -> Result<(), ResourceError>,
    ) -> Result<Reaped, ResourceError> {
        let entries = {
            let mut blocks = self.blocks();
            let all = std::mem::take(&mut blocks.retired);
            blocks.in_progress.extend(all.keys());
            let mut all: Vec<_> = all.into_values().collect();
            all.sort_unstable_by_key(|entry| entry.sequence);
            all
        };
        let (mut busy, mut remaining, mut events, mut result, mut freed) =
            (HashSet::new(), Vec::new(), Vec::new(), Ok(()), 0);
        for mut entry in entries {
            let done = match self.poll_done(&mut entry, &mut busy, &free) {
                Ok(true) => release(&mut entry).map(|()| true),
                other => other.map_err(ResourceError::from),
            };
            match done {
                Ok(true) => {
                    freed += entry.block.bytes();
                    let mut blocks = self.blocks();
                    blocks.in_progress.remove(&entry.block.generation);
                    blocks.retired_bytes -= entry.block.bytes();
                    drop(blocks);
                    events.extend(entry.done_event);
                }
                Ok(false) => remaining.push(entry),
                Err(error) => {
                    result = Err(error);
                    remaining.push(entry);
                }
            }
        }
        self.recycle_events(events);
        let mut blocks = self.blocks();
        for entry in remaining {
            blocks.in_progress.remove(&entry.block.generation);
            blocks.retired.insert(entry.block.generation, entry);
        }
        let pending = blocks.retired_bytes;
        drop(blocks);
        result?;
        Ok(Reaped { freed, pending })
    }

    /// Forgets a retired block of which nothing is left to release. If another thread is reaping
    /// the block, that thread or a later reap forgets it.
    #[cfg(feature = "cudarc-interop")]
    pub(crate) fn forget_retired(&self, block: BlockRef) {
        let mut blocks = self.blocks();
        let entry = blocks.retired.remove(&block.generation);
        if let Some(entry) = entry {
            blocks.retired_bytes -= entry.block.bytes();
            drop(blocks);
            self.recycle_events(entry.done_event);
        }
    }

    /// Orders the stream behind the remaining uses and submits the free, unless that is done.
    fn submit_free(
        &self,
        entry: &mut RetiredBlock<P>,
        free: impl FnOnce(&RetiredBlock<P>) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        while let Some(used) = entry.uses.last() {
            if used.stream != entry.stream.key() {
                entry.stream.wait(&used.event)?;
            }
            let done = entry.uses.pop();
            self.recycle_events(done.and_then(|used| Arc::into_inner(used.event)));
        }
        if let Some(alloc_stream) = &entry.alloc_stream {
            self.order_after(&entry.stream, alloc_stream)?;
            entry.alloc_stream = None;
        }
        if !entry.free_submitted {
            free(entry)?;
            entry.free_submitted = true;
        }
        if entry.done_event.is_none() {
            entry.done_event = Some(self.record_event(&entry.stream)?);
        }
        Ok(())
    }

    /// Returns whether a retired block's work is done. Work of a stream completes in order, so a
    /// busy stream is queried once.
    fn poll_done(
        &self,
        entry: &mut RetiredBlock<P>,
        busy: &mut HashSet<StreamKey>,
        free: impl FnOnce(&RetiredBlock<P>) -> Result<(), CudaError>,
    ) -> Result<bool, CudaError> {
        if busy.contains(&entry.stream.key()) {
            return Ok(false);
        }
        self.submit_free(entry, free)?;
        let done = entry
            .done_event
            .as_ref()
            .map_or(Ok(false), Event::is_done)?;
        if !done {
            busy.insert(entry.stream.key());
        }
        Ok(done)
    }

    /// Takes all payloads when the resource is dropped, those of live blocks first.
    pub(crate) fn take_payloads(&mut self) -> (Vec<P>, Vec<P>) {
        let blocks = self
            .blocks
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let live = std::mem::take(&mut blocks.live).into_values();
        let retired = std::mem::take(&mut blocks.retired).into_values();
        let retired = retired.map(|entry| entry.payload).collect();
        (live.map(|entry| entry.payload).collect(), retired)
    }

    pub(crate) fn is_retired(&self, block: BlockRef) -> bool {
        let blocks = self.blocks();
        blocks.retired.contains_key(&block.generation)
            || blocks.in_progress.contains(&block.generation)
    }

    pub(crate) fn outstanding(&self) -> Outstanding {
        let blocks = self.blocks();
        Outstanding {
            live: blocks.live_bytes,
            retired: blocks.retired_bytes,
        }
    }

    /// Returns the number of retired blocks.
    pub(crate) fn retired_count(&self) -> usize {
        self.blocks().retired.len()
    }
}

fn stale(block: BlockRef) -> ResourceError {
    ResourceError::Stale {
        generation: block.generation,
    }
}

/// Implements the methods that a source forwards to its field `blocks`, a [`BlockUses`].
macro_rules! forward_block_uses {
    () => {
        fn ordinal(&self) -> u32 {
            self.context.ordinal()
        }
        fn origin(&self) -> $crate::resource::Origin {
            self.origin
        }
        fn bytes_outstanding(&self) -> $crate::resource::Outstanding {
            self.blocks.outstanding()
        }
        fn is_retired(&self, block: $crate::resource::BlockRef) -> bool {
            self.blocks.is_retired(block)
        }
        fn supports_block_use_tracking(&self) -> bool {
            true
        }
        fn prepare_block_use(
            &self,
            block: $crate::resource::BlockRef,
            stream: &$crate::driver::Stream,
            access: $crate::driver::Access,
        ) -> Result<$crate::resource::BlockUse, $crate::error::ResourceError> {
            $crate::resource::check_stream(self.ordinal(), stream)?;
            self.blocks.prepare(block, stream, access)
        }
        fn finish_block_use(
            &self,
            used: $crate::resource::BlockUse,
            stream: &$crate::driver::Stream,
        ) -> Result<(), $crate::error::ResourceError> {
            self.blocks.finish(used, stream)
        }
        fn record_block_use(
            &self,
            block: $crate::resource::BlockRef,
            stream: &$crate::driver::Stream,
            access: $crate::driver::Access,
        ) -> Result<(), $crate::error::ResourceError> {
            $crate::resource::check_stream(self.ordinal(), stream)?;
            self.blocks.record(block, stream, access)
        }
    };
}
pub(crate) use forward_block_uses;

#[cfg(test)]
mod tests {
    use std::alloc::Layout;

    use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

    use super::*;
    use crate::driver::Driver;
    use crate::resource::Origin;

    #[test]
    fn colliding_pointer_is_an_error_while_its_block_is_live() {
        run_in_subprocess(ONE_GPU, |_| {
            let context = Driver::get().unwrap().device(0).unwrap();
            let context = context.primary_context().unwrap();
            let (stream, origin) = (context.default_stream(), Origin::unique());
            let blocks = BlockUses::new(&context);
            let layout = Layout::new::<[u8; 1024]>();
            let block = |address, generation| BlockRef {
                address,
                layout,
                origin,
                generation,
                cookie: 0,
            };
            let insert = |address, generation, payload| {
                blocks.insert(block(address, generation), &stream, payload)
            };
            let live = Arc::new(());
            insert(4096, 0, Arc::clone(&live)).unwrap();
            for address in [4096, 4096 - 1023, 4096 + 1023] {
                let collision = ResourceError::PointerCollision {
                    ordinal: 0,
                    address,
                    generation: 0,
                };
                assert_eq!(insert(address, 1, Arc::clone(&live)), Err(collision));
            }
            // No payload was dropped, so no memory of the live block was freed.
            assert_eq!(Arc::strong_count(&live), 5);
            assert_eq!(blocks.outstanding().live, 1024);
            insert(4096 + 1024, 2, Arc::clone(&live)).unwrap();
            // The driver may return the address of a freed block before its work is done.
            let freed = Block::new(block(4096, 0));
            blocks.retire(freed, &stream, |_| Ok(())).unwrap();
            assert!(blocks.is_retired(block(4096, 0)));
            insert(4096, 3, live).unwrap();
        });
    }
}
