//! Moves credit between the account of the limit and the shards.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use super::Shards;
use super::shard::{Shard, ShardState};
use crate::resource::BudgetSnapshot;

/// A shard draws this fraction of the remaining credit ahead.
const DRAW_AHEAD_DIVISOR: u64 = 64;
/// Low credit ends once this fraction of the limit is left.
const PLENTY_DIVISOR: u64 = 4;
/// Low credit also ends after so many draws by one shard, which may be the only one that needs any.
pub(super) const LOW_CREDIT_DRAWS: u32 = 1024;

impl Shards {
    /// Charges bytes for the slower methods. Fails only if the account and all shards together lack
    /// idle credit.
    pub(in super::super) fn charge(&self, bytes: u64) -> Result<(), BudgetSnapshot> {
        // Credit may suffice, and only room was missing.
        if self.account.0.charge(bytes).is_ok() {
            return Ok(());
        }
        let _one = self.lock_collection();
        self.collect_credit();
        self.account.0.charge(bytes)
    }

    /// Returns charged bytes that got no block.
    pub(in super::super) fn uncharge(&self, bytes: u64) {
        self.account.0.uncharge(bytes);
    }

    /// Changes the limit. Every allocation after the return obeys it.
    pub(in super::super) fn set_limit(&self, limit: u64) {
        let _one = self.lock_collection();
        self.account.0.set_limit(limit);
        self.collect_credit();
        self.update_low_credit();
    }

    /// Returns the idle credit of all shards to the account. The caller holds `collection`.
    fn collect_credit(&self) {
        // A thread that frees in a shard after this collection sees the flag.
        self.low_credit.store(true, Ordering::Relaxed);
        // Under each shard's lock, so that concurrent draws are found too. From here on shards keep
        // no credit, and freed credit goes to the account.
        let shards = self.shards.iter();
        let idle = shards
            .map(|shard| shard.take_credit(&mut shard.state.lock()))
            .sum();
        self.account.0.uncharge(idle);
    }

    /// Lets shards keep freed credit again if all drawn credit is within the limit. The caller
    /// holds `collection`.
    fn update_low_credit(&self) {
        let BudgetSnapshot { limit, used } = self.account.0.snapshot();
        self.low_credit.store(used > limit, Ordering::Relaxed);
    }

    /// Returns the limit and the requested bytes of live blocks.
    pub(in super::super) fn budget(&self) -> BudgetSnapshot {
        BudgetSnapshot {
            used: self.totals().requested,
            ..self.account.0.snapshot()
        }
    }

    fn lock_collection(&self) -> MutexGuard<'_, ()> {
        self.collection
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Draws credit for a request, and more ahead if possible.
    pub(super) fn draw_credit(
        &self,
        shard: &Shard,
        state: &mut ShardState,
        bytes: u64,
    ) -> Option<()> {
        let BudgetSnapshot { limit, used } = self.account.0.snapshot();
        let remaining = limit.saturating_sub(used);
        let mut ahead = remaining / DRAW_AHEAD_DIVISOR;
        if self.low_credit.load(Ordering::Relaxed) {
            ahead = 0;
            state.draws = state.draws.wrapping_add(1);
            if (remaining >= limit / PLENTY_DIVISOR || state.draws.is_multiple_of(LOW_CREDIT_DRAWS))
                && let Ok(_one) = self.collection.0.try_lock()
            {
                self.update_low_credit();
            }
        }
        let least = bytes - shard.credit();
        let drawn = [least.saturating_add(ahead), least]
            .into_iter()
            .find(|&wanted| self.account.0.charge(wanted).is_ok())?;
        shard.set_credit(state, shard.credit() + drawn);
        Some(())
    }
}
