//! Kept memory: device memory that outlives the process that filled it.
//!
//! ```text
//!                 open                         commit
//!   (not there) --------> Writing, zeroed ------------> Kept, read-only
//!                            |  its process ends,          |  open, by any process of the namespace: the content
//!                            |  or discards it             |  is verified, and a lease that is not what was
//!                            v                             v  committed is discarded
//!                          (gone)                        discard
//! ```
//!
//! A lease is found by a name and a key: a digest of all that decides its content (model, revision, quantisation, rank,
//! versions). The node owns the memory, so it survives a fault, an exec and a kill of whoever has it open.
//!
//! * [`ask`] asks the agent, [`image`] says which image of the process asks
//! * [`claim`] keeps threads of this process from writing the same
//! * [`lease`] maps, commits, verifies
//! * [`arena`] is a lease that is being written as a resource to allocate from
#![forbid(unsafe_code)]

mod bump;
mod lease;
mod process_image;
mod request;
mod write_lock;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bursar_protocol::wire::kept::{KeptAnswer, KeptQuestion, KeptRefusal};
use bursar_protocol::wire::{Reason, WireError};

pub use bump::LeaseArena;
pub use bursar_protocol::wire::kept::{Key, LeaseName};
pub use lease::{LeaseWriter, RetainedLease};

use crate::agent_client::{AgentClient, ClientError};
use crate::checksum::{ChecksumError, DeviceChecksum};
use crate::driver::{Access, Context, DriverError};
use crate::error::{CudaError, ErrorClass};
use lease::{GrantedLease, MappedHandle};
use write_lock::{WriteLock, WriteLockKey};

/// `CUDA_ERROR_INVALID_VALUE`
const INVALID_VALUE: i32 = 1;

/// `CUDA_ERROR_INVALID_HANDLE`
const INVALID_HANDLE: i32 = 400;

/// How often a lease that another process writes, or an agent that is away, is asked for again.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Why there is no lease.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// A lease cannot be called that.
    #[error("{name:?} is no name of a lease: {source}")]
    InvalidName {
        /// What was asked for.
        name: String,
        /// Why.
        source: WireError,
    },
    /// Nobody listens where the agent should, or it took too long.
    #[error("asking the agent at {path}: {source}; is this a container with Bursar's GPU memory?")]
    AgentUnreachable {
        /// The socket.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The agent does not talk to this process.
    #[error("the agent refused to talk: {0:?}")]
    Rejected(Reason),
    /// The agent answered something that is no answer to what it was asked.
    #[error("the agent's answer does not fit the question")]
    UnexpectedResponse,
    /// The agent said no.
    #[error("lease {name:?}: {reason}")]
    Refused {
        /// The lease's name.
        name: String,
        /// Why.
        reason: KeptRefusal,
    },
    /// The content is not what was committed. The lease is discarded: the next open begins it anew.
    #[error("lease {lease}: the content is not what was committed; it is discarded, load it again")]
    Corrupt {
        /// The lease.
        lease: u64,
        /// The checksum that it was committed with.
        committed: u64,
        /// What it has now.
        found: u64,
    },
    /// The node says that it keeps the lease, and the driver that there is no such memory. The lease is discarded:
    /// the next open begins it anew.
    #[error("lease {lease}: its memory is lost ({source}); it is discarded, load it again")]
    Lost {
        /// The lease.
        lease: u64,
        /// What the driver answered.
        source: CudaError,
    },
    /// A range that is not inside the lease.
    #[error("{bytes} bytes at {at} of a lease of {lease_bytes} bytes")]
    OutOfRange {
        /// Where it starts.
        at: u64,
        /// How long it is.
        bytes: u64,
        /// How large the lease is.
        lease_bytes: u64,
    },
    /// The driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// There is no driver, or not this GPU.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl From<ClientError> for LeaseError {
    fn from(unheard: ClientError) -> LeaseError {
        match unheard {
            ClientError::Unreachable { path, source } => {
                LeaseError::AgentUnreachable { path, source }
            }
            ClientError::Rejected(reason) => LeaseError::Rejected(reason),
        }
    }
}

impl From<ChecksumError> for LeaseError {
    fn from(error: ChecksumError) -> LeaseError {
        match error {
            ChecksumError::Cuda(error) => LeaseError::Cuda(error),
            // Mappings begin at multiples of the granularity.
            ChecksumError::Unaligned(_) => LeaseError::UnexpectedResponse,
        }
    }
}

impl LeaseError {
    /// Whether the same question may be answered otherwise later.
    pub fn retryable(&self) -> bool {
        match self {
            LeaseError::Refused { reason, .. } => matches!(
                reason,
                KeptRefusal::Writing | KeptRefusal::Unavailable | KeptRefusal::Quota { .. }
            ),
            LeaseError::AgentUnreachable { .. }
            | LeaseError::Corrupt { .. }
            | LeaseError::Lost { .. } => true,
            LeaseError::Rejected(reason) => *reason == Reason::Busy,
            LeaseError::Cuda(error) | LeaseError::Driver(DriverError::Cuda(error)) => {
                error.retryable()
            }
            LeaseError::InvalidName { .. }
            | LeaseError::UnexpectedResponse
            | LeaseError::OutOfRange { .. }
            | LeaseError::Driver(_) => false,
        }
    }

    /// What follows from it for this process image.
    pub fn class(&self) -> ErrorClass {
        match self {
            LeaseError::Cuda(error) | LeaseError::Driver(DriverError::Cuda(error)) => error.class(),
            LeaseError::Refused {
                reason: KeptRefusal::Quota { .. },
                ..
            } => ErrorClass::OutOfMemory,
            other if other.retryable() => ErrorClass::NotReady,
            _ => ErrorClass::Caller,
        }
    }

    /// Whether waiting for another process or for the agent is what would help.
    fn is_transient(&self) -> bool {
        match self {
            LeaseError::Refused { reason, .. } => {
                matches!(reason, KeptRefusal::Writing | KeptRefusal::Unavailable)
            }
            LeaseError::AgentUnreachable { .. } => true,
            _ => false,
        }
    }
}

/// A lease that was asked for.
#[derive(Debug)]
pub enum LeaseState {
    /// It is there, and is what was committed.
    Ready(RetainedLease),
    /// It is new, and this process's to write.
    Writing(LeaseWriter),
}

/// Where a process opens leases of one GPU: the agent, and a context to map them in.
#[derive(Clone, Debug)]
pub struct LeaseClient(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Context,
    agent: AgentClient,
    /// Loaded when something is verified first.
    checksum: Mutex<Option<DeviceChecksum>>,
}

impl LeaseClient {
    /// Leases of a context's GPU, of the agent that serves this container.
    pub fn new(context: &Context) -> LeaseClient {
        LeaseClient::with_agent(context, AgentClient::in_container())
    }

    /// The same, of an agent that listens elsewhere.
    pub fn with_socket(context: &Context, socket: &Path) -> LeaseClient {
        LeaseClient::with_agent(context, AgentClient::with_socket(socket))
    }

    fn with_agent(context: &Context, agent: AgentClient) -> LeaseClient {
        LeaseClient(Arc::new(Inner {
            context: context.clone(),
            agent,
            checksum: Mutex::new(None),
        }))
    }

    /// The context that leases are mapped in.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Opens a lease that is there, verified. While another process writes it or the agent is away, it asks again
    /// for as long as `patience` lasts.
    ///
    /// # Errors
    /// [`KeptRefusal::Missing`] where there is none, [`KeptError::Corrupt`] where it is not what was committed,
    /// [`KeptError::Lost`] where its memory is no more, and others.
    pub fn find(
        &self,
        name: &str,
        key: &Key,
        timeout: Duration,
    ) -> Result<RetainedLease, LeaseError> {
        match self.request(name, key, 0, timeout)?.0 {
            GrantedLease::Ready { memory, checksum } => self.verify(memory, checksum),
            GrantedLease::Writing { .. } => Err(LeaseError::UnexpectedResponse),
        }
    }

    /// Opens a lease, or begins it with at least so many bytes where it is not there, is lost or is not what was
    /// committed. Waits as [`find`](Self::find) does.
    ///
    /// # Errors
    /// What the agent refused, or the driver answered.
    pub fn open(
        &self,
        name: &str,
        key: &Key,
        bytes: u64,
        timeout: Duration,
    ) -> Result<LeaseState, LeaseError> {
        let start = Instant::now();
        loop {
            let remaining = timeout.saturating_sub(start.elapsed());
            let ready = match self.request(name, key, bytes.max(1), remaining) {
                Ok((GrantedLease::Writing { memory, token }, write_lock)) => {
                    let writing = LeaseWriter::new(self.clone(), memory, token, write_lock);
                    // One that is too small is discarded.
                    return (writing.bytes() >= bytes)
                        .then_some(LeaseState::Writing(writing))
                        .ok_or(LeaseError::UnexpectedResponse);
                }
                Ok((GrantedLease::Ready { memory, checksum }, _)) => self.verify(memory, checksum),
                Err(error) => Err(error),
            };
            match ready {
                // It is discarded: the next question begins it anew.
                Err(LeaseError::Corrupt { .. } | LeaseError::Lost { .. })
                    if start.elapsed() < timeout => {}
                done => return done.map(LeaseState::Ready),
            }
        }
    }

    fn request(
        &self,
        name: &str,
        key: &Key,
        bytes: u64,
        timeout: Duration,
    ) -> Result<(GrantedLease, Option<WriteLock>), LeaseError> {
        let start = Instant::now();
        let lease_name =
            LeaseName::try_from(name.to_owned()).map_err(|source| LeaseError::InvalidName {
                name: name.to_owned(),
                source,
            })?;
        loop {
            match self.request_once(&lease_name, key, bytes) {
                Err(error) if error.is_transient() && start.elapsed() + POLL_INTERVAL < timeout => {
                    std::thread::sleep(POLL_INTERVAL);
                }
                done => return done,
            }
        }
    }

    /// Who may have to write what is asked for has claimed it.
    fn request_once(
        &self,
        name: &LeaseName,
        key: &Key,
        bytes: u64,
    ) -> Result<(GrantedLease, Option<WriteLock>), LeaseError> {
        let context = &self.0.context;
        let refused = |reason| LeaseError::Refused {
            name: name.as_str().to_owned(),
            reason,
        };
        let write_lock = match bytes {
            0 => None,
            _ => {
                let lock_key = WriteLockKey {
                    agent: self.0.agent.socket().to_owned(),
                    gpu: context.uuid(),
                    name: name.clone(),
                    key: *key,
                };
                Some(
                    WriteLock::try_acquire(lock_key)
                        .ok_or_else(|| refused(KeptRefusal::Writing))?,
                )
            }
        };
        let map = |fd, bytes| MappedHandle::map(context, &fd, bytes, Access::ReadWrite);
        let opened = request::open(&self.0.agent, context.uuid(), name, key, bytes, map);
        let (answer, fd, premapped) = opened?;
        match answer {
            KeptAnswer::Refused(reason) => Err(refused(reason)),
            granted => {
                let premapped = premapped.transpose();
                let result = premapped.and_then(|premapped| {
                    GrantedLease::from_response(context, granted, fd, premapped)
                });
                match (&result, granted) {
                    // It is this process's to write, and cannot be.
                    (Err(_), KeptAnswer::Write { lease, .. }) => drop(self.discard(lease)),
                    (Err(LeaseError::Cuda(source)), KeptAnswer::Ready { lease, .. })
                        if is_not_device_memory(source) =>
                    {
                        self.discard(lease)?;
                        let source = *source;
                        return Err(LeaseError::Lost { lease, source });
                    }
                    _ => {}
                }
                Ok((result?, write_lock))
            }
        }
    }

    /// A lease whose content is what was committed; discards one that is not.
    fn verify(
        &self,
        memory: lease::LeaseMemory,
        committed: u64,
    ) -> Result<RetainedLease, LeaseError> {
        let found = self.checksum_of(&memory)?;
        let lease = memory.lease;
        if found != committed {
            drop(memory);
            self.discard(lease)?;
            return Err(LeaseError::Corrupt {
                lease,
                committed,
                found,
            });
        }
        Ok(RetainedLease::new(self.clone(), memory))
    }

    fn checksum_of(&self, memory: &lease::LeaseMemory) -> Result<u64, LeaseError> {
        let mut loaded = self
            .0
            .checksum
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let checksum = match &mut *loaded {
            Some(checksum) => checksum,
            empty => empty.insert(DeviceChecksum::new(&self.0.context)?),
        };
        let stream = self.0.context.default_stream();
        Ok(checksum.of(memory.address(), memory.bytes(), &stream)?)
    }

    fn discard(&self, lease: u64) -> Result<(), LeaseError> {
        let version = bursar_protocol::VERSION;
        match request::request(&self.0.agent, KeptQuestion::Discard { version, lease })? {
            // A lease that somebody else discarded is as gone.
            KeptAnswer::Discarded | KeptAnswer::Refused(KeptRefusal::Missing) => Ok(()),
            KeptAnswer::Refused(reason) => Err(refused(lease, reason)),
            _ => Err(LeaseError::UnexpectedResponse),
        }
    }
}

/// Whether the driver says of a descriptor that it is no memory.
fn is_not_device_memory(error: &CudaError) -> bool {
    error.call == "cuMemImportFromShareableHandle"
        && matches!(error.code, INVALID_VALUE | INVALID_HANDLE)
}

fn refused(lease: u64, reason: KeptRefusal) -> LeaseError {
    LeaseError::Refused {
        name: lease.to_string(),
        reason,
    }
}
