//! A lease in this process: mapped to be written, committed, or mapped to be read.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_protocol::VERSION;
use bursar_protocol::wire::kept::{KeptAnswer, KeptQuestion, KeptRefusal};

use super::write_lock::WriteLock;
use super::{LeaseClient, LeaseError, POLL_INTERVAL, refused, request};
use crate::driver::{Access, Context, Handle, Mapping};

/// For how long a commit is said again that the agent has not heard, or cannot have done.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(30);

/// A lease's memory, mapped. The mapping keeps it, whatever becomes of the lease.
#[derive(Debug)]
pub(super) struct LeaseMemory {
    pub(super) lease: u64,
    generation: u64,
    mapped: MappedHandle,
}

/// A descriptor's memory, mapped: that alone keeps it. The handle is given up with the mapping, for to do so takes
/// time, and nobody is to wait for a lease longer than they must.
#[derive(Debug)]
pub(super) struct MappedHandle {
    mapping: Mapping,
    _handle: Handle,
}

/// What the agent gave.
#[derive(Debug)]
pub(super) enum GrantedLease {
    Ready { memory: LeaseMemory, checksum: u64 },
    Writing { memory: LeaseMemory, token: u64 },
}

impl GrantedLease {
    /// What an answer gives: its descriptor is in it, or was `made` before.
    pub(super) fn from_response(
        context: &Context,
        answer: KeptAnswer,
        fd: Option<OwnedFd>,
        premapped: Option<MappedHandle>,
    ) -> Result<GrantedLease, LeaseError> {
        let mapped = |bytes, access| match (premapped, fd) {
            (Some(premapped), _)
                if access == Access::ReadWrite && premapped.mapping.bytes() == bytes =>
            {
                Ok(premapped)
            }
            (None, Some(fd)) => MappedHandle::map(context, &fd, bytes, access),
            _ => Err(LeaseError::UnexpectedResponse),
        };
        match answer {
            KeptAnswer::Ready {
                lease,
                generation,
                bytes,
                checksum,
            } => {
                let memory = LeaseMemory {
                    lease,
                    generation,
                    mapped: mapped(bytes, Access::Read)?,
                };
                Ok(GrantedLease::Ready { memory, checksum })
            }
            KeptAnswer::Write {
                lease,
                generation,
                bytes,
                token,
                expires_ms: _,
            } => {
                let memory = LeaseMemory {
                    lease,
                    generation,
                    mapped: mapped(bytes, Access::ReadWrite)?,
                };
                Ok(GrantedLease::Writing { memory, token })
            }
            _ => Err(LeaseError::UnexpectedResponse),
        }
    }
}

impl MappedHandle {
    pub(super) fn map(
        context: &Context,
        fd: &OwnedFd,
        bytes: u64,
        access: Access,
    ) -> Result<MappedHandle, LeaseError> {
        let driver = context.driver();
        let handle = driver.import(fd.as_fd(), bytes)?;
        let addresses = Arc::new(driver.reserve(bytes)?);
        Ok(MappedHandle {
            mapping: addresses.map(0, &handle, access, context)?,
            _handle: handle,
        })
    }
}

impl LeaseMemory {
    pub(super) fn address(&self) -> u64 {
        self.mapped.mapping.address()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.mapped.mapping.bytes()
    }
}

/// The address of a range that is inside the lease.
fn checked_address(
    address: u64,
    lease_bytes: u64,
    at: u64,
    bytes: usize,
) -> Result<u64, LeaseError> {
    let bytes = bytes as u64;
    match at.checked_add(bytes) {
        Some(end) if end <= lease_bytes => Ok(address + at),
        _ => Err(LeaseError::OutOfRange {
            at,
            bytes,
            lease_bytes,
        }),
    }
}

/// A lease that holds what was committed. Dropping it unmaps it; the lease stays.
#[derive(Debug)]
pub struct RetainedLease {
    client: LeaseClient,
    memory: LeaseMemory,
}

impl RetainedLease {
    pub(super) fn new(client: LeaseClient, memory: LeaseMemory) -> RetainedLease {
        RetainedLease { client, memory }
    }

    /// The first address. A kernel that writes there faults.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// How many bytes: what the writer asked for, rounded up to the driver's granularity.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Names the lease; never another one on this node.
    pub fn lease(&self) -> u64 {
        self.memory.lease
    }

    /// The lease's generation, L: higher than that of any lease of this name and key before.
    pub fn generation(&self) -> u64 {
        self.memory.generation
    }

    /// The context that it is mapped in.
    pub fn context(&self) -> &Context {
        self.client.context()
    }

    /// Copies a part of it to the host.
    ///
    /// # Errors
    /// [`KeptError::OutOfRange`], or what the driver answered.
    pub fn read(&self, at: u64, to: &mut [u8]) -> Result<(), LeaseError> {
        let from = checked_address(self.address(), self.bytes(), at, to.len())?;
        Ok(self.context().copy_from_device(to, from)?)
    }

    /// The checksum of what it holds now.
    ///
    /// # Errors
    /// What the driver answered.
    pub fn checksum(&self) -> Result<u64, LeaseError> {
        self.client.checksum_of(&self.memory)
    }

    /// Gives the lease up, for all of the namespace. Who has it mapped keeps its memory until then.
    ///
    /// # Errors
    /// What the agent refused.
    pub fn discard(self) -> Result<(), LeaseError> {
        let RetainedLease { client, memory } = self;
        let lease = memory.lease;
        drop(memory);
        client.discard(lease)
    }
}

/// A new lease, zeroed, that this process alone has. Dropped without a commit it is discarded.
#[derive(Debug)]
pub struct LeaseWriter {
    client: LeaseClient,
    /// `None` once it is committed.
    memory: Option<LeaseMemory>,
    lease: u64,
    generation: u64,
    address: u64,
    bytes: u64,
    token: u64,
    /// Until its lease is committed or discarded.
    _write_lock: Option<WriteLock>,
}

impl LeaseWriter {
    pub(super) fn new(
        client: LeaseClient,
        memory: LeaseMemory,
        token: u64,
        write_lock: Option<WriteLock>,
    ) -> LeaseWriter {
        LeaseWriter {
            client,
            _write_lock: write_lock,
            lease: memory.lease,
            generation: memory.generation,
            address: memory.address(),
            bytes: memory.bytes(),
            token,
            memory: Some(memory),
        }
    }

    /// The first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes: what was asked for, rounded up to the driver's granularity.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Names the lease; never another one on this node.
    pub fn lease(&self) -> u64 {
        self.lease
    }

    /// The lease's generation, L: higher than that of any lease of this name and key before.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The context that it is mapped in.
    pub fn context(&self) -> &Context {
        self.client.context()
    }

    /// Copies from the host to a part of it.
    ///
    /// # Errors
    /// [`KeptError::OutOfRange`], or what the driver answered.
    pub fn write(&self, at: u64, from: &[u8]) -> Result<(), LeaseError> {
        let to = checked_address(self.address(), self.bytes(), at, from.len())?;
        Ok(self.context().copy_to_device(to, from)?)
    }

    /// Makes the lease what it will be: waits for all work of the context, takes the right to write away from this
    /// process, and states the checksum. The address stays.
    ///
    /// # Errors
    /// What the driver answered; [`KeptRefusal::Fenced`] where the right to commit has ended. Either way the lease is
    /// this writer's no more: it is discarded, but for one that is another's to write by now.
    pub fn commit(mut self) -> Result<RetainedLease, LeaseError> {
        // Taken only when nothing can fail any more: until then the end of `self` discards the lease.
        let memory = self.memory.as_ref().ok_or(LeaseError::UnexpectedResponse)?;
        self.client.context().synchronize()?;
        memory
            .mapped
            .mapping
            .set_access(Access::Read, self.client.context())?;
        let question = KeptQuestion::Commit {
            version: VERSION,
            lease: self.lease,
            token: self.token,
            checksum: self.client.checksum_of(memory)?,
        };
        if let Err(error) = self.report_commit(&question) {
            if matches!(&error, LeaseError::Refused { reason, .. } if *reason == KeptRefusal::Fenced)
            {
                // It ended with the right to write it, or who asked for it later has that: theirs is not discarded.
                self.memory = None;
            }
            return Err(error);
        }
        let memory = self.memory.take().ok_or(LeaseError::UnexpectedResponse)?;
        Ok(RetainedLease::new(self.client.clone(), memory))
    }

    /// States what is in the lease. To say the same again is no error, so it is said until it is heard: while the agent is
    /// replaced, or has lost the vault.
    fn report_commit(&self, question: &KeptQuestion) -> Result<(), LeaseError> {
        let start = Instant::now();
        loop {
            let stated = match request::request(&self.client.0.agent, question.clone()) {
                Ok(KeptAnswer::Committed) => Ok(()),
                Ok(KeptAnswer::Refused(reason)) => Err(refused(self.lease, reason)),
                Ok(_) => Err(LeaseError::UnexpectedResponse),
                Err(error) => Err(error),
            };
            match stated {
                Err(error) if error.is_transient() && start.elapsed() < COMMIT_TIMEOUT => {
                    std::thread::sleep(POLL_INTERVAL);
                }
                done => return done,
            }
        }
    }

    /// Gives the lease up.
    ///
    /// # Errors
    /// What the agent refused.
    pub fn discard(mut self) -> Result<(), LeaseError> {
        drop(self.memory.take());
        self.client.discard(self.lease)
    }
}

impl Drop for LeaseWriter {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            drop(memory);
            // Where it fails, the end of this process ends the lease.
            let _ = self.client.discard(self.lease);
        }
    }
}
