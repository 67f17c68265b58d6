//! Shares managed memory between several owners, which take turns by locks and write tokens.
//!
//! ```text
//! SharedManagedRef --lock-------------> &ManagedRef      many: host and kernels read
//!                  --lock_mut(token)--> &mut ManagedRef  one: host and kernels write
//!                  --begin_write------> WriteToken       --commit--> number of the commit
//! ```
//!
//! The token coordinates writers over longer times than a lock: a writer may submit several kernels
//! and commit them as one. A lock is held while slices or arguments of the memory live.
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use crate::memory::gpu_ref::WriteError;
use crate::memory::managed_ref::ManagedRef;
use crate::memory::write_token::{WriteGate, WriteToken};
use crate::state::{DeviceGeneration, StaleReason};

/// Managed memory for `len` items of `T` with several owners, freed with the last clone.
pub struct SharedManagedRef<T>(Arc<Inner<T>>);

struct Inner<T> {
    memory: RwLock<ManagedRef<T>>,
    gate: WriteGate,
}

impl<T> Clone for SharedManagedRef<T> {
    fn clone(&self) -> Self {
        SharedManagedRef(Arc::clone(&self.0))
    }
}

impl<T> fmt::Debug for SharedManagedRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owners = Arc::strong_count(&self.0);
        let mut out = f.debug_struct("SharedManagedRef");
        out.field("owners", &owners).field("gate", &self.0.gate);
        out.finish_non_exhaustive()
    }
}

impl<T> From<ManagedRef<T>> for SharedManagedRef<T> {
    fn from(memory: ManagedRef<T>) -> Self {
        SharedManagedRef(Arc::new(Inner {
            memory: RwLock::new(memory),
            gate: WriteGate::default(),
        }))
    }
}

/// Right to read the memory on the host and in kernels; gives a [`ManagedRef`].
#[derive(Debug)]
pub struct ManagedReadGuard<'a, T>(RwLockReadGuard<'a, ManagedRef<T>>);

impl<T> Deref for ManagedReadGuard<'_, T> {
    type Target = ManagedRef<T>;

    fn deref(&self) -> &ManagedRef<T> {
        &self.0
    }
}

/// Right to write the memory on the host and in kernels; gives a [`ManagedRef`].
#[derive(Debug)]
pub struct ManagedWriteGuard<'a, T>(RwLockWriteGuard<'a, ManagedRef<T>>);

impl<T> Deref for ManagedWriteGuard<'_, T> {
    type Target = ManagedRef<T>;

    fn deref(&self) -> &ManagedRef<T> {
        &self.0
    }
}

impl<T> DerefMut for ManagedWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut ManagedRef<T> {
        &mut self.0
    }
}

impl<T> SharedManagedRef<T> {
    /// Returns the generation under which the memory was allocated.
    pub fn generation(&self) -> DeviceGeneration {
        self.lock_unchecked().generation()
    }

    /// Locks the memory for readers. Waits while a writer has the memory locked, so a task calls
    /// this where it may block.
    ///
    /// # Errors
    /// The reason for which the memory is stale.
    pub fn lock(&self) -> Result<ManagedReadGuard<'_, T>, StaleReason> {
        let memory = self.lock_unchecked();
        memory.check()?;
        Ok(ManagedReadGuard(memory))
    }

    /// Locks the memory for one writer. Waits while others have the memory locked.
    ///
    /// # Errors
    /// [`WriteError::Stale`], or [`WriteError::Refused`] if the gate refuses the token.
    pub fn lock_mut(&self, token: &WriteToken) -> Result<ManagedWriteGuard<'_, T>, WriteError> {
        let memory = self.0.memory.write();
        let memory = memory.unwrap_or_else(PoisonError::into_inner);
        memory.check()?;
        // Checked under the lock, so that the next writer follows this one.
        self.0.gate.admit(token)?;
        Ok(ManagedWriteGuard(memory))
    }

    /// Issues the write token from `now` on.
    ///
    /// # Errors
    /// [`WriteError::Stale`], or [`Busy`](crate::memory::write_token::WriteRefused::Busy) while
    /// another writer has the token.
    pub fn begin_write(&self, now: Instant, lifetime: Duration) -> Result<WriteToken, WriteError> {
        self.lock_unchecked().check()?;
        Ok(self.0.gate.issue(now, lifetime)?)
    }

    /// Commits a write and returns the number of the commit. The work may still run: a reader waits
    /// for it.
    ///
    /// # Errors
    /// The memory or the token became invalid, and the write does not count.
    pub fn commit(&self, token: WriteToken, now: Instant) -> Result<u64, WriteError> {
        self.lock_unchecked().check()?;
        Ok(self.0.gate.commit(token, now)?)
    }

    /// Returns the number of committed writes.
    pub fn commits(&self) -> u64 {
        self.0.gate.commits()
    }

    /// Revokes the current write token. A writer that has locked the memory keeps the lock, and its
    /// commit is refused.
    pub fn fence_writer(&self) {
        self.0.gate.fence();
    }

    /// Returns the memory to one owner, if this is the last clone.
    ///
    /// # Errors
    /// This handle, while others exist.
    pub fn try_into_owner(self) -> Result<ManagedRef<T>, SharedManagedRef<T>> {
        let inner = Arc::try_unwrap(self.0).map_err(SharedManagedRef)?;
        let memory = inner.memory.into_inner();
        Ok(memory.unwrap_or_else(PoisonError::into_inner))
    }

    fn lock_unchecked(&self) -> RwLockReadGuard<'_, ManagedRef<T>> {
        let memory = self.0.memory.read();
        memory.unwrap_or_else(PoisonError::into_inner)
    }
}
