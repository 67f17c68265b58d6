//! The heaps of a pool: one that has all memory, and shards that threads and streams allocate from side by side.
//!
//! A shard takes chunks from the central heap and cuts its blocks from them under a lock of its own, so that eight
//! threads meet rarely. A chunk is as large as what the shard has live, an 8th of what is free at most: many shards
//! find one. What is free in a shard is never lost to others: where no chunk is to be had, empty ones go back; before a
//! request is refused, other shards are asked, and the free ends of chunks go back too, so that free neighbours become
//! one across chunks. A request is refused only where no free range is large enough.
//!
//! The limit is kept in the same way: a part draws credit from an account ahead, and keeps that of the blocks that are
//! freed in it, so that a block costs no atomic operation on what all threads share. Before a request is refused it gets
//! what is idle in the account and in all parts, so the limit is exact. From then on credit is scarce: parts draw what
//! they need and give back what is freed, for who takes from one another by turns takes again and again. That ends where
//! much is left, or by and by.
//!
//! Locks are taken in one order: the credit's, a shard's, the central heap's. Two shards' has only who takes from anywhere, and
//! it has all of them, one after the other; the pool lets one do so at a time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::epoch::After;
use super::shard_affinity;
use super::tlsf::{BlockId, End, Heap, Open, Refusal, Taken, Whole};
use crate::adaptor::budget::Account;
use crate::resource::BudgetSnapshot;
use crate::sync::biased_lock::{self, Guard, Lock};

/// Shards of a pool; the central heap beside them.
const SHARDS: usize = 32;
/// The part that is the central heap.
const CENTRAL: usize = 0;
/// Chunks have whole multiples of this.
const CHUNK_LEAST: u64 = 2 << 20;
/// A chunk is such a part of what is free at most.
const CHUNKS: u64 = 8;
/// A chunk has room for this many of the blocks that are cut from it where there is as much, and for two at least.
const CHUNK_HOLDS: u64 = 4;
/// Credit is drawn ahead by such a part of what is left.
const CREDITS: u64 = 64;
/// Credit is scarce no more where such a part of the limit is left.
const PLENTY: u64 = 4;
/// Nor where a part has drawn this often: it may be the only one that needs any.
const SCARCE_DRAWS: u32 = 1024;

/// A block's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The heap that it is of.
    pub(super) part: u32,
    /// Its name there.
    pub(super) id: BlockId,
}

/// What a request got.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    /// To free it by.
    pub(super) place: Place,
    /// Where it begins.
    pub(super) address: u64,
    /// What may still use it.
    pub(super) after: After,
}

/// A request: bytes, and a power of two that the address is a multiple of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) bytes: u64,
    pub(super) align: u64,
}

/// Bytes and blocks at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// Bytes that were asked for, of live blocks.
    pub(super) asked: u64,
    /// Bytes that live blocks have.
    pub(super) live: u64,
    /// Live blocks.
    pub(super) blocks: u64,
    /// Free bytes.
    pub(super) free: u64,
    /// The largest free range of one heap.
    pub(super) largest_free: u64,
}

/// A chunk of a shard.
#[derive(Debug)]
struct Chunk {
    /// Its name in the central heap.
    id: BlockId,
    /// Its name in the shard's.
    whole: Whole,
}

/// One heap and what is counted with it.
#[derive(Debug, Default)]
struct Share {
    heap: Heap,
    /// By the region's number; the central heap's regions are slabs, and not here.
    chunks: Vec<Option<Chunk>>,
    /// How often credit was drawn while it was scarce.
    draws: u32,
}

impl Share {
    #[inline]
    fn take(&mut self, part: usize, request: Request) -> Option<Placed> {
        let taken = self.heap.allocate(request.bytes, request.align)?;
        Some(Placed {
            place: Place {
                part: part as u32,
                id: taken.id,
            },
            address: taken.address,
            after: taken.after,
        })
    }

    /// Adds a chunk to a shard.
    fn adopt(&mut self, chunk: Taken) -> Option<()> {
        let vacant = self.chunks.iter().position(Option::is_none);
        let region = vacant.unwrap_or(self.chunks.len());
        let number = u32::try_from(region).ok()?;
        let whole = self
            .heap
            .add(number, chunk.address, chunk.bytes, chunk.after)?;
        if vacant.is_none() {
            self.chunks.push(None);
        }
        self.chunks[region] = Some(Chunk {
            id: chunk.id,
            whole,
        });
        Some(())
    }
}

/// A part on cache lines of its own: neighbours are other threads'.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part {
    share: Lock<Share>,
    /// Bytes that may be allocated here before the account is asked. It is changed under the share's lock only, and looked
    /// at without it.
    credit: AtomicU64,
}

impl Part {
    #[inline]
    fn credit(&self) -> u64 {
        self.credit.load(Ordering::Relaxed)
    }

    #[inline]
    fn set_credit(&self, _: &mut Share, bytes: u64) {
        self.credit.store(bytes, Ordering::Relaxed);
    }

    /// Takes the credit that is idle here; how much it was.
    fn take_idle(&self, share: &mut Share) -> u64 {
        let idle = self.credit();
        self.set_credit(share, 0);
        idle
    }
}

/// What all threads write, apart from what they only read.
#[derive(Debug)]
#[repr(align(128))]
struct Apart<T>(T);

/// The shard of a lane and a thread's seat.
#[inline]
fn shard_of(lane: usize, seat: usize) -> usize {
    1 + lane.wrapping_add(seat) % SHARDS
}

/// The heaps.
#[derive(Debug)]
pub(super) struct Arena {
    parts: Box<[Part]>,
    /// Live bytes as asked for, and credit.
    account: Apart<Account>,
    /// Held by whoever takes credit from parts, so that nobody who looks through them misses any.
    moving: Apart<Mutex<()>>,
    /// What is freed is the account's, not for the next in its part: a request found none left, or more is live than a limit
    /// that was lowered.
    scarce: AtomicBool,
}

impl Arena {
    /// Without memory, and with a limit for live bytes.
    pub(super) fn new(limit: u64) -> Arena {
        biased_lock::prepare();
        Arena {
            account: Apart(Account::new(limit)),
            parts: std::iter::repeat_with(Part::default)
                .take(1 + SHARDS)
                .collect(),
            moving: Apart(Mutex::default()),
            scarce: AtomicBool::new(false),
        }
    }

    /// Adds memory; `None` where it is more than a heap can name.
    pub(super) fn add(&self, slab: u32, address: u64, bytes: u64, after: After) -> Option<Whole> {
        self.central().heap.add(slab, address, bytes, after)
    }

    /// Takes a slab away that is free from end to end; what may still use it.
    pub(super) fn remove(&self, slab: Whole) -> Option<After> {
        self.central().heap.remove(slab)
    }

    /// A block for a stream's lane, of the shard that the calling thread uses for it, if that is all it takes. `None` where
    /// credit, a chunk or the shard's lock have to be got first: the others do.
    #[inline]
    pub(super) fn take(&self, lane: usize, request: Request) -> Option<Placed> {
        let number = shard_of(lane, shard_affinity::of_thread());
        let part = &self.parts[number];
        let Some(mut share) = part.share.try_lock() else {
            // Who comes here again and again gets another shard, and waits for that one from now on.
            shard_affinity::meet();
            return None;
        };
        let credit = part.credit().checked_sub(request.bytes)?;
        let placed = share.take(number, request)?;
        part.set_credit(&mut share, credit);
        Some(placed)
    }

    /// The same with a chunk and with credit that are got for it. `None` where the account has too little, or no free range of
    /// the shard or the central heap is large enough.
    pub(super) fn take_drawing(&self, lane: usize, request: Request) -> Option<Placed> {
        let (number, mut share) = self.shard(lane);
        let part = &self.parts[number];
        if part.credit() < request.bytes {
            self.draw(part, &mut share, request.bytes)?;
        }
        let Some(placed) = self.place(number, &mut share, request) else {
            // Somebody may be short of what was drawn for this.
            if self.scarce.load(Ordering::Relaxed) {
                self.account.0.give_back(part.take_idle(&mut share));
            }
            return None;
        };
        part.set_credit(&mut share, part.credit() - request.bytes);
        Some(placed)
    }

    /// The same for bytes that were charged.
    pub(super) fn take_charged(&self, lane: usize, request: Request) -> Option<Placed> {
        let (number, mut share) = self.shard(lane);
        self.place(number, &mut share, request)
    }

    fn place(&self, part: usize, share: &mut Share, request: Request) -> Option<Placed> {
        let placed = share.take(part, request);
        placed.or_else(|| self.refill(part, share, request))
    }

    /// A block from wherever there is one, for bytes that were charged. No shard takes or gives any memory meanwhile, so that
    /// none is missed.
    pub(super) fn take_anywhere(&self, request: Request) -> Option<Placed> {
        let parts = self.parts.iter().enumerate().skip(1);
        let mut shares: Vec<_> = parts
            .map(|(number, part)| (number, part.share.lock()))
            .collect();
        for (_, share) in &mut shares {
            self.return_chunks_of(share);
        }
        if let Some(placed) = self.central().take(CENTRAL, request) {
            return Some(placed);
        }
        let placed = shares
            .iter_mut()
            .find_map(|(number, share)| share.take(*number, request));
        placed.or_else(|| {
            for (_, share) in &mut shares {
                self.return_ends_of(share);
            }
            self.central().take(CENTRAL, request)
        })
    }

    /// Charges bytes for the other ways to take a block. It fails only where not enough credit is idle, wherever it is.
    pub(super) fn charge(&self, bytes: u64) -> Result<(), BudgetSnapshot> {
        // Room may be all that was missing.
        if self.account.0.take(bytes).is_ok() {
            return Ok(());
        }
        let _one = self.moving();
        self.gather();
        self.account.0.take(bytes)
    }

    /// Gives back what was charged and got no block.
    pub(super) fn discharge(&self, bytes: u64) {
        self.account.0.give_back(bytes);
    }

    /// Changes the limit: what is taken after the return is within it.
    pub(super) fn set_limit(&self, limit: u64) {
        let _one = self.moving();
        self.account.0.resize(limit);
        self.gather();
        self.end_scarcity();
    }

    /// Gives the idle credit of all parts back to the account. `moving` is held.
    fn gather(&self) {
        // Who frees in a part after its credit was taken sees this.
        self.scarce.store(true, Ordering::Relaxed);
        // Under each part's lock, so that what is being drawn ahead is found too. No part keeps any from here on: what
        // comes back meanwhile is in the account.
        let parts = self.parts.iter();
        let idle = parts
            .map(|part| part.take_idle(&mut part.share.lock()))
            .sum();
        self.account.0.give_back(idle);
    }

    /// Lets parts keep the credit of what is freed, if all that is drawn is within the limit. `moving` is held.
    fn end_scarcity(&self) {
        let BudgetSnapshot { limit, used } = self.account.0.snapshot();
        self.scarce.store(used > limit, Ordering::Relaxed);
    }

    /// The limit, and live bytes as asked for.
    pub(super) fn limit(&self) -> BudgetSnapshot {
        BudgetSnapshot {
            used: self.totals().asked,
            ..self.account.0.snapshot()
        }
    }

    fn moving(&self) -> MutexGuard<'_, ()> {
        self.moving.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Draws credit for a request of `bytes`, and some ahead.
    fn draw(&self, part: &Part, share: &mut Share, bytes: u64) -> Option<()> {
        let BudgetSnapshot { limit, used } = self.account.0.snapshot();
        let left = limit.saturating_sub(used);
        let mut ahead = left / CREDITS;
        if self.scarce.load(Ordering::Relaxed) {
            ahead = 0;
            share.draws = share.draws.wrapping_add(1);
            if (left >= limit / PLENTY || share.draws.is_multiple_of(SCARCE_DRAWS))
                && let Ok(_one) = self.moving.0.try_lock()
            {
                self.end_scarcity();
            }
        }
        let least = bytes - part.credit();
        let drawn = [least.saturating_add(ahead), least]
            .into_iter()
            .find(|&wanted| self.account.0.take(wanted).is_ok())?;
        part.set_credit(share, part.credit() + drawn);
        Some(())
    }

    /// Frees a block that `after` may still use; `left` as in [`Heap::free`].
    #[inline]
    pub(super) fn free(
        &self,
        place: Place,
        after: After,
        left: impl Fn(After) -> After,
    ) -> Result<(), Refusal> {
        let part = self.part(place)?;
        let mut share = part.share.lock();
        let asked = share.heap.free(place.id, after, left)?;
        // What is of the central heap was paid for by shards.
        if place.part as usize == CENTRAL || self.scarce.load(Ordering::Relaxed) {
            self.account.0.give_back(asked);
        } else {
            part.set_credit(&mut share, part.credit() + asked);
        }
        Ok(())
    }

    /// Remembers what more may use a live block.
    pub(super) fn used(&self, place: Place, after: After, open: Open) -> Result<(), Refusal> {
        self.part(place)?
            .share
            .lock()
            .heap
            .used(place.id, after, open)
    }

    /// Gives the empty chunks of all shards back to the central heap.
    pub(super) fn return_chunks(&self) {
        for part in &self.parts[1..] {
            self.return_chunks_of(&mut part.share.lock());
        }
    }

    /// The same without waiting for shards that are in use, or are a thread's by right; whether there was a chunk.
    fn return_idle_chunks(&self) -> bool {
        let shares = self.parts[1..]
            .iter()
            .filter_map(|part| part.share.try_lock());
        let returned = shares.map(|mut share| self.return_chunks_of(&mut share));
        returned.sum::<usize>() > 0
    }

    fn return_chunks_of(&self, share: &mut Share) -> usize {
        let chunks = 0..share.chunks.len();
        let returned = chunks.filter(|&region| self.return_chunk(share, region));
        returned.count()
    }

    /// What there is. Heaps are looked at one after the other: sums over a moment in which others go on.
    pub(super) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        let (mut lent, mut chunks) = (0, 0);
        for (number, part) in self.parts.iter().enumerate() {
            let mut share = part.share.lock();
            totals.asked += share.heap.asked_bytes();
            totals.live += share.heap.live_bytes();
            totals.blocks += share.heap.live_blocks();
            totals.free += share.heap.free_bytes();
            totals.largest_free = totals.largest_free.max(share.heap.largest_free());
            if number != CENTRAL {
                lent += share.heap.live_bytes() + share.heap.free_bytes();
                chunks += share.chunks.iter().flatten().count() as u64;
            }
        }
        totals.live = totals.live.saturating_sub(lent);
        totals.blocks = totals.blocks.saturating_sub(chunks);
        totals
    }

    fn central(&self) -> Guard<'_, Share> {
        self.parts[CENTRAL].share.lock()
    }

    fn part(&self, place: Place) -> Result<&Part, Refusal> {
        self.parts.get(place.part as usize).ok_or(Refusal::NotLive)
    }

    /// The shard of a lane and the calling thread.
    fn shard(&self, lane: usize) -> (usize, Guard<'_, Share>) {
        let number = shard_of(lane, shard_affinity::of_thread());
        (number, self.parts[number].share.lock())
    }

    /// Gives a shard a chunk and allocates from it, or from the central heap where there is none.
    fn refill(&self, part: usize, share: &mut Share, request: Request) -> Option<Placed> {
        if self.add_chunk(share, request).is_some()
            || self.return_idle_chunks() && self.add_chunk(share, request).is_some()
        {
            let placed = share.take(part, request);
            if placed.is_some() {
                return placed;
            }
        }
        self.central().take(CENTRAL, request)
    }

    /// Gives a shard a chunk, if there is one that is worth it for a request.
    fn add_chunk(&self, share: &mut Share, request: Request) -> Option<()> {
        let mut central = self.central();
        let most = central.heap.free_bytes() / CHUNKS;
        let one = request.bytes.saturating_add(request.align);
        let wanted = one.saturating_mul(CHUNK_HOLDS).max(share.heap.live_bytes());
        let chunk = wanted.min(most).next_multiple_of(CHUNK_LEAST);
        if one.saturating_mul(2) > chunk {
            return None;
        }
        share.adopt(central.heap.lend(chunk)?)
    }

    /// Gives a chunk back, if it is empty.
    fn return_chunk(&self, share: &mut Share, region: usize) -> bool {
        let Some(chunk) = &share.chunks[region] else {
            return false;
        };
        let (id, whole) = (chunk.id, chunk.whole);
        let Some(after) = share.heap.remove(whole) else {
            return false;
        };
        share.chunks[region] = None;
        // A chunk stays allocated for as long as its shard has it.
        let _ = self.central().heap.free(id, after, |all| all);
        true
    }

    /// Gives back the free ends of a shard's chunks.
    fn return_ends_of(&self, share: &mut Share) {
        for end in share.heap.ends() {
            self.return_end(share, &end);
        }
    }

    fn return_end(&self, share: &mut Share, end: &End) -> Option<()> {
        let chunk = share.chunks.get(end.region as usize)?.as_ref()?;
        let mut central = self.central();
        let (kept, given) = central.heap.divide(chunk.id, end)?;
        let whole = share.heap.remove_end(end, chunk.whole);
        share.chunks[end.region as usize] = Some(Chunk { id: kept, whole });
        // It was allocated a moment ago, and the lock is held.
        let _ = central.heap.free(given, end.after, |all| all);
        Some(())
    }
}

#[cfg(test)]
mod tests;
