//! Maps a lease in this process, to write and commit it or to read it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bursar_protocol::VERSION;
use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};

use super::write_lock::WriteLock;
use super::{LeaseClient, LeaseError, POLL_INTERVAL, refused, request};
use crate::driver::{Access, Context, Handle, Mapping, Reservation};
use crate::vouched;

/// Time for which a commit is repeated while the agent is busy, does not respond or cannot store
/// it.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Mapped memory of a lease. The mapping keeps the memory even if the lease is discarded.
#[derive(Debug)]
pub(super) struct LeaseMemory {
    pub(super) lease: u64,
    generation: u64,
    mapped: MappedHandle,
}

/// Mapped handle, unmapped behind the work of the context. The handle is released with the mapping,
/// because an earlier release would delay the open.
#[derive(Debug)]
struct MappedHandle {
    mapping: Mapping,
    _handle: Handle,
    /// Dropped last, because the mapping is the context's.
    context: Context,
}

impl Drop for MappedHandle {
    fn drop(&mut self) {
        // A kernel that still uses the memory would fault. The driver does not wait for a context
        // while a stream of it is captured.
        if self.context.synchronize().is_err() {
            self.mapping.leave_mapped();
        }
    }
}

/// Lease that the agent granted.
#[derive(Debug)]
pub(super) enum GrantedLease {
    Ready { memory: LeaseMemory, checksum: u64 },
    Writing { memory: LeaseMemory, token: u64 },
}

impl GrantedLease {
    /// Maps the granted lease, whose file descriptor came with the answer, at `reserved` addresses
    /// of its size, or else at new ones.
    pub(super) fn from_response(
        context: &Context,
        answer: RetainedResponse,
        fd: Option<OwnedFd>,
        reserved: Option<Reservation>,
    ) -> Result<GrantedLease, LeaseError> {
        let mapped = |bytes, access| {
            let fd = fd.ok_or(LeaseError::UnexpectedResponse)?;
            MappedHandle::map(context, &fd, bytes, access, reserved)
        };
        match answer {
            RetainedResponse::Ready {
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
            RetainedResponse::Write {
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
    fn map(
        context: &Context,
        fd: &OwnedFd,
        bytes: u64,
        access: Access,
        reserved: Option<Reservation>,
    ) -> Result<MappedHandle, LeaseError> {
        let driver = context.driver();
        let handle = driver.import(fd.as_fd(), bytes)?;
        let reserved = reserved.filter(|addresses| addresses.bytes() == bytes);
        let addresses = Arc::new(reserved.map_or_else(|| driver.reserve(bytes), Ok)?);
        Ok(MappedHandle {
            mapping: addresses.map(0, &handle, access, context)?,
            _handle: handle,
            context: context.clone(),
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

/// Returns the address of a range that is inside the lease.
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

/// Committed lease, mapped read-only. A drop waits for all work of the context and unmaps the
/// memory, and the lease stays. During the capture of a stream the driver refuses the wait, and
/// ends the capture; the memory then stays mapped until the process ends.
#[derive(Debug)]
pub struct RetainedLease {
    client: LeaseClient,
    memory: LeaseMemory,
}

impl RetainedLease {
    pub(super) fn new(client: LeaseClient, memory: LeaseMemory) -> RetainedLease {
        RetainedLease { client, memory }
    }

    /// Returns the first address. A kernel that writes there faults.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Returns the size: the requested bytes, rounded up to the driver's granularity.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Returns the lease's number, which is unique on the node.
    pub fn lease(&self) -> u64 {
        self.memory.lease
    }

    /// Returns the lease's generation, which is higher than that of any earlier lease of this name
    /// and key.
    pub fn generation(&self) -> u64 {
        self.memory.generation
    }

    /// Returns the context in which the lease is mapped.
    pub fn context(&self) -> &Context {
        self.client.context()
    }

    /// Copies a part of the lease, from byte `at` on, to the host.
    ///
    /// # Errors
    /// [`LeaseError::OutOfRange`], or the driver's error.
    pub fn read(&self, at: u64, to: &mut [u8]) -> Result<(), LeaseError> {
        let from = checked_address(self.address(), self.bytes(), at, to.len())?;
        Ok(vouched::copy_from_device(self.context(), to, from)?)
    }

    /// Computes the checksum of the present content.
    ///
    /// # Errors
    /// The error that the driver returned.
    pub fn checksum(&self) -> Result<u64, LeaseError> {
        self.client.checksum_of(&self.memory)
    }

    /// Discards the lease for the whole namespace. Each process that has the lease mapped keeps its
    /// memory until it unmaps it.
    ///
    /// # Errors
    /// The refusal of the agent.
    pub fn discard(self) -> Result<(), LeaseError> {
        let RetainedLease { client, memory } = self;
        let lease = memory.lease;
        drop(memory);
        client.discard(lease)
    }
}

/// New, zeroed lease of which this process is the only writer. A drop without a commit waits for
/// all work of the context and discards the lease.
#[derive(Debug)]
pub struct LeaseWriter {
    client: LeaseClient,
    /// `None` once the lease is committed.
    memory: Option<LeaseMemory>,
    lease: u64,
    generation: u64,
    address: u64,
    bytes: u64,
    token: u64,
    /// Held until the lease is committed or discarded.
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

    /// Returns the first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the size: the requested bytes, rounded up to the driver's granularity.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the lease's number, which is unique on the node.
    pub fn lease(&self) -> u64 {
        self.lease
    }

    /// Returns the lease's generation, which is higher than that of any earlier lease of this name
    /// and key.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the context in which the lease is mapped.
    pub fn context(&self) -> &Context {
        self.client.context()
    }

    /// Copies bytes of the host to a part of the lease, from byte `at` on.
    ///
    /// # Errors
    /// [`LeaseError::OutOfRange`], or the driver's error.
    pub fn write(&self, at: u64, from: &[u8]) -> Result<(), LeaseError> {
        let to = checked_address(self.address(), self.bytes(), at, from.len())?;
        Ok(vouched::copy_to_device(self.context(), to, from)?)
    }

    /// Commits the content: waits for all work of the context, makes the mapping read-only in
    /// place, and reports the checksum.
    ///
    /// # Errors
    /// The driver's error, or [`RetainedRefusal::Fenced`] if the right to commit has ended. The
    /// lease is discarded, except when another writer has it by now.
    pub fn commit(mut self) -> Result<RetainedLease, LeaseError> {
        // Taken only when no step can fail any more: until then the drop of `self` discards the
        // lease.
        let memory = self.memory.as_ref().ok_or(LeaseError::UnexpectedResponse)?;
        self.client.context().synchronize()?;
        memory
            .mapped
            .mapping
            .set_access(Access::Read, self.client.context())?;
        let question = RetainedRequest::Commit {
            version: VERSION,
            lease: self.lease,
            token: self.token,
            checksum: self.client.checksum_of(memory)?,
        };
        if let Err(error) = self.report_commit(&question) {
            if matches!(&error, LeaseError::Refused { reason, .. } if *reason == RetainedRefusal::Fenced)
            {
                // The right to write has ended, or a later request of this process has it. That
                // writer's lease must not be discarded.
                self.memory = None;
            }
            return Err(error);
        }
        let memory = self.memory.take().ok_or(LeaseError::UnexpectedResponse)?;
        Ok(RetainedLease::new(self.client.clone(), memory))
    }

    /// Reports the commit until the agent confirms it. A commit may be repeated, while the agent
    /// restarts or has lost the fd store.
    fn report_commit(&self, question: &RetainedRequest) -> Result<(), LeaseError> {
        let start = Instant::now();
        loop {
            let stated = match request::request(&self.client.0.agent, question.clone()) {
                Ok((RetainedResponse::Committed, _)) => Ok(()),
                Ok((RetainedResponse::Refused(reason), _)) => Err(refused(self.lease, reason)),
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

    /// Discards the lease.
    ///
    /// # Errors
    /// The refusal of the agent.
    pub fn discard(mut self) -> Result<(), LeaseError> {
        drop(self.memory.take());
        self.client.discard(self.lease)
    }
}

impl Drop for LeaseWriter {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            drop(memory);
            // If the request fails, the agent discards the lease when this process exits.
            let _ = self.client.discard(self.lease);
        }
    }
}
