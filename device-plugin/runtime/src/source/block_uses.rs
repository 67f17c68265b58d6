//! What streams do with blocks: who may use one, what a free has to wait for, and what has been freed but not given back.
//!
//! ```text
//!   begin            finish, record            end               reap
//! ---------> live ---- used in a stream ----> retired --------> gone
//!                                                 ^---- the work before the free, or the free itself, is not done
//! ```
//!
//! Driver calls here order streams and ask events; none waits.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::{Context, Event, Stream, StreamKey};
use crate::error::{CudaError, FreeError, ResourceError};
use crate::resource::{Block, BlockRef, BlockUse, Outstanding, Reaped};

/// A live block.
#[derive(Debug)]
struct Live<P> {
    block: BlockRef,
    /// The stream that it was allocated in.
    home: Stream,
    /// Behind the last use in each other stream, and that use's number.
    uses: Vec<(StreamKey, u64, Event)>,
    /// Uses that were prepared and not finished.
    open: u32,
    payload: P,
}

impl<P> Live<P> {
    /// Keeps the later of two uses in a stream; the event that nobody needs any more.
    fn note(&mut self, stream: StreamKey, number: u64, mark: Event) -> Option<Event> {
        let known = self.uses.iter_mut().find(|(of, ..)| *of == stream);
        match known {
            Some((_, later, _)) if number < *later => Some(mark),
            Some((_, last, event)) => {
                *last = number;
                Some(std::mem::replace(event, mark))
            }
            None => {
                self.uses.push((stream, number, mark));
                None
            }
        }
    }
}

/// A block that was freed, and whose memory has not been given back.
#[derive(Debug)]
pub(crate) struct Retired<P> {
    pub(crate) block: BlockRef,
    /// The stream that the free is in the order of.
    pub(crate) stream: Stream,
    /// What the free's stream has yet to be ordered behind: uses, and the allocation where it was in another stream.
    uses: Vec<(StreamKey, u64, Event)>,
    home: Option<Stream>,
    /// Frees of one stream end in the order of their numbers.
    number: u64,
    /// The free is in the stream's order.
    freed: bool,
    /// Behind the free.
    done: Option<Event>,
    pub(crate) payload: P,
}

#[derive(Debug)]
struct Blocks<P> {
    live: HashMap<u64, Live<P>>,
    retired: HashMap<u64, Retired<P>>,
    /// Retired blocks that somebody is freeing or reaping now.
    leaving: HashSet<u64>,
    live_bytes: u64,
    retired_bytes: u64,
    /// Events that nobody needs any more.
    spare: Vec<Event>,
}

/// The blocks of a resource that tracks their uses, each with what the resource keeps beside it.
#[derive(Debug)]
pub(crate) struct Tracking<P> {
    context: Context,
    /// Numbers uses and frees: who has the higher number comes behind whatever was submitted before the lower was taken.
    numbers: AtomicU64,
    blocks: Mutex<Blocks<P>>,
}

/// More events than this are not kept.
const SPARE: usize = 256;

impl<P> Tracking<P> {
    pub(crate) fn new(context: &Context) -> Self {
        Tracking {
            context: context.clone(),
            numbers: AtomicU64::new(0),
            blocks: Mutex::new(Blocks {
                live: HashMap::new(),
                retired: HashMap::new(),
                leaving: HashSet::new(),
                live_bytes: 0,
                retired_bytes: 0,
                spare: Vec::new(),
            }),
        }
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks<P>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::AcqRel)
    }

    /// An event behind what a stream has to do now.
    fn mark(&self, stream: &Stream) -> Result<Event, CudaError> {
        let spare = self.blocks().spare.pop();
        let event = spare.map_or_else(|| self.context.event(), Ok)?;
        event.record(stream)?;
        Ok(event)
    }

    fn keep(&self, events: impl IntoIterator<Item = Event>) {
        let spare = &mut self.blocks().spare;
        spare.extend(events.into_iter().take(SPARE.saturating_sub(spare.len())));
    }

    /// A block was made.
    pub(crate) fn begin(&self, block: BlockRef, home: &Stream, payload: P) {
        let mut blocks = self.blocks();
        blocks.live_bytes += block.bytes();
        let live = Live {
            block,
            home: home.clone(),
            uses: Vec::new(),
            open: 0,
            payload,
        };
        blocks.live.insert(block.generation, live);
    }

    /// Looks at what is kept beside a live block.
    pub(crate) fn with<T>(
        &self,
        block: BlockRef,
        look: impl FnOnce(&P) -> T,
    ) -> Result<T, ResourceError> {
        self.change(block, |live| look(&live.payload))
    }

    /// Orders a stream behind a block's allocation, and opens a use.
    pub(crate) fn prepare(
        &self,
        block: BlockRef,
        stream: &Stream,
    ) -> Result<BlockUse, ResourceError> {
        let home = self.change(block, |live| {
            live.open += 1;
            (live.home.key() != stream.key()).then(|| live.home.clone())
        })?;
        if let Some(home) = home {
            let ordered = self.order(stream, &home);
            if let Err(error) = ordered {
                self.change(block, |live| live.open = live.open.saturating_sub(1))?;
                return Err(error.into());
            }
        }
        Ok(BlockUse {
            block,
            stream: stream.key(),
        })
    }

    /// Notes the end of a use that was prepared.
    pub(crate) fn finish(&self, used: BlockUse, stream: &Stream) -> Result<(), ResourceError> {
        if used.stream != stream.key() {
            let generation = used.block.generation;
            return Err(ResourceError::WrongStream { generation });
        }
        match self.record(used.block, stream) {
            // No event can be had: then the work is waited for, so that the block can be freed at all.
            Err(ResourceError::Cuda(_)) => stream.synchronize()?,
            other => other?,
        }
        self.change(used.block, |live| live.open = live.open.saturating_sub(1))
    }

    /// Notes a use by what is in a stream now.
    pub(crate) fn record(&self, block: BlockRef, stream: &Stream) -> Result<(), ResourceError> {
        let number = self.number();
        let mark = self.mark(stream)?;
        let old = self.change(block, |live| live.note(stream.key(), number, mark))?;
        self.keep(old);
        Ok(())
    }

    fn change<T>(
        &self,
        block: BlockRef,
        change: impl FnOnce(&mut Live<P>) -> T,
    ) -> Result<T, ResourceError> {
        let mut blocks = self.blocks();
        let live = blocks
            .live
            .get_mut(&block.generation)
            .filter(|live| live.block == block);
        live.map(change).ok_or(stale(block))
    }

    fn order(&self, stream: &Stream, behind: &Stream) -> Result<(), CudaError> {
        let mark = self.mark(behind)?;
        stream.wait(&mark)?;
        // A wait keeps to what the event was when it was called.
        self.keep([mark]);
        Ok(())
    }

    /// Ends a block: it is retired, and a stream ordered behind all of its uses; then `free` is called, which puts the
    /// free into the stream's order. Where something fails the block stays retired, and is tried again by `reap`.
    pub(crate) fn end(
        &self,
        block: Block,
        stream: &Stream,
        free: impl FnOnce(&Retired<P>) -> Result<(), CudaError>,
    ) -> Result<(), FreeError> {
        let bytes = block.bytes();
        match self.retire(block.as_ref(), stream, free) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => Err(FreeError::Retired { bytes, source }),
            Err(why) => Err(FreeError::Refused { block, why }),
        }
    }

    fn retire(
        &self,
        block: BlockRef,
        stream: &Stream,
        free: impl FnOnce(&Retired<P>) -> Result<(), CudaError>,
    ) -> Result<Result<(), CudaError>, ResourceError> {
        let live = {
            let mut blocks = self.blocks();
            let generation = block.generation;
            match blocks.live.get(&generation) {
                Some(live) if live.block != block => return Err(stale(block)),
                Some(Live { open: 0, .. }) => {}
                Some(live) => {
                    let uses = live.open;
                    return Err(ResourceError::InUse { generation, uses });
                }
                None => return Err(stale(block)),
            }
            let live = blocks.live.remove(&generation).ok_or(stale(block))?;
            blocks.live_bytes -= block.bytes();
            blocks.retired_bytes += block.bytes();
            blocks.leaving.insert(generation);
            live
        };
        let mut retired = Retired {
            block,
            stream: stream.clone(),
            uses: live.uses,
            home: (live.home.key() != stream.key()).then_some(live.home),
            number: self.number(),
            freed: false,
            done: None,
            payload: live.payload,
        };
        let answer = self.advance(&mut retired, free);
        let mut blocks = self.blocks();
        blocks.leaving.remove(&block.generation);
        blocks.retired.insert(block.generation, retired);
        Ok(answer)
    }

    /// Gives back retired blocks whose work is done: `free` is as for [`Tracking::end`], where that failed; `gone` gives
    /// back what is kept beside a block. A block that fails stays retired.
    pub(crate) fn reap(
        &self,
        free: impl Fn(&Retired<P>) -> Result<(), CudaError>,
        gone: impl Fn(&mut Retired<P>) -> Result<(), CudaError>,
    ) -> Result<Reaped, ResourceError> {
        let tried = {
            let mut blocks = self.blocks();
            let all = std::mem::take(&mut blocks.retired);
            blocks.leaving.extend(all.keys());
            let mut all: Vec<_> = all.into_values().collect();
            all.sort_unstable_by_key(|one| one.number);
            all
        };
        let (mut busy, mut left, mut events, mut answer, mut freed) =
            (HashSet::new(), Vec::new(), Vec::new(), Ok(()), 0);
        for mut one in tried {
            let done = match self.look(&mut one, &mut busy, &free) {
                Ok(true) => gone(&mut one).map(|()| true),
                other => other,
            };
            match done {
                Ok(true) => {
                    freed += one.block.bytes();
                    let mut blocks = self.blocks();
                    blocks.leaving.remove(&one.block.generation);
                    blocks.retired_bytes -= one.block.bytes();
                    drop(blocks);
                    events.extend(one.done);
                }
                Ok(false) => left.push(one),
                Err(error) => {
                    answer = Err(error);
                    left.push(one);
                }
            }
        }
        self.keep(events);
        let mut blocks = self.blocks();
        for one in left {
            blocks.leaving.remove(&one.block.generation);
            blocks.retired.insert(one.block.generation, one);
        }
        let pending = blocks.retired_bytes;
        drop(blocks);
        answer?;
        Ok(Reaped { freed, pending })
    }

    /// Puts a free behind all uses into its stream's order, as far as that was not done before.
    fn advance(
        &self,
        one: &mut Retired<P>,
        free: impl FnOnce(&Retired<P>) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        while let Some((of, _, event)) = one.uses.last() {
            if *of != one.stream.key() {
                one.stream.wait(event)?;
            }
            self.keep(one.uses.pop().map(|(.., event)| event));
        }
        if let Some(home) = &one.home {
            self.order(&one.stream, home)?;
            one.home = None;
        }
        if !one.freed {
            free(one)?;
            one.freed = true;
        }
        if one.done.is_none() {
            one.done = Some(self.mark(&one.stream)?);
        }
        Ok(())
    }

    /// Whether a retired block's work is done. Work in one stream ends in its order, so a stream is asked until it is busy.
    fn look(
        &self,
        one: &mut Retired<P>,
        busy: &mut HashSet<StreamKey>,
        free: impl FnOnce(&Retired<P>) -> Result<(), CudaError>,
    ) -> Result<bool, CudaError> {
        if busy.contains(&one.stream.key()) {
            return Ok(false);
        }
        self.advance(one, free)?;
        let done = one.done.as_ref().map_or(Ok(false), Event::is_done)?;
        if !done {
            busy.insert(one.stream.key());
        }
        Ok(done)
    }

    /// All that is kept beside blocks, those of live ones first: for the end of a resource.
    pub(crate) fn take_payloads(&mut self) -> (Vec<P>, Vec<P>) {
        let blocks = self
            .blocks
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let live = std::mem::take(&mut blocks.live).into_values();
        let retired = std::mem::take(&mut blocks.retired).into_values();
        let retired = retired.map(|one| one.payload).collect();
        (live.map(|one| one.payload).collect(), retired)
    }

    pub(crate) fn is_retired(&self, block: BlockRef) -> bool {
        let blocks = self.blocks();
        blocks.retired.contains_key(&block.generation) || blocks.leaving.contains(&block.generation)
    }

    pub(crate) fn outstanding(&self) -> Outstanding {
        let blocks = self.blocks();
        Outstanding {
            live: blocks.live_bytes,
            retired: blocks.retired_bytes,
        }
    }

    /// How many blocks are retired.
    pub(crate) fn retired(&self) -> usize {
        self.blocks().retired.len()
    }
}

fn stale(block: BlockRef) -> ResourceError {
    ResourceError::Stale {
        generation: block.generation,
    }
}

/// The methods of a source whose field `blocks` is a [`Tracking`], beside `context` and `origin`.
macro_rules! tracked {
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
        fn prepare_block_use(
            &self,
            block: $crate::resource::BlockRef,
            stream: &$crate::driver::Stream,
        ) -> Result<$crate::resource::BlockUse, $crate::error::ResourceError> {
            $crate::resource::check_stream(self.ordinal(), stream)?;
            self.blocks.prepare(block, stream)
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
        ) -> Result<(), $crate::error::ResourceError> {
            $crate::resource::check_stream(self.ordinal(), stream)?;
            self.blocks.record(block, stream)
        }
    };
}
pub(crate) use tracked;
