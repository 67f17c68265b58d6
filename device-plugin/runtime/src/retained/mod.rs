//! Opens retained memory: device memory that outlives the process that filled it.
//!
//! ```text
//!               open                       commit
//!   (no lease) --------> Writing, zeroed ----------> Ready, read-only
//!                          |  the writer exits or       |  any process of the namespace opens
//!                          |  discards the lease        |  and verifies it; if it is corrupt,
//!                          v                            v  it is discarded
//!                      (no lease)                   (no lease)
//! ```
//!
//! A lease is found by a name and a key. The key is a digest of everything that decides the
//! content, such as model, revision, quantisation, rank and versions. The node owns the memory, so
//! a lease survives a fault, an exec and a kill of each process that has it open.
//!
//! * `request` sends requests to the agent, and `process_image` identifies the requesting
//!   image.
//! * `write_lock` prevents threads of this process from writing the same lease.
//! * `lease` maps, verifies and commits a lease.
//! * `bump` allocates blocks from a lease that is being written.
#![forbid(unsafe_code)]

mod bump;
mod lease;
mod process_image;
mod request;
mod write_lock;

use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::{DecodeError, RejectReason};

pub use bump::LeaseArena;
pub use bursar_protocol::messages::retained::{Key, LeaseName};
pub use lease::{LeaseWriter, RetainedLease};

use crate::agent_client::{AgentClient, ClientError};
use crate::checksum::{ChecksumError, DeviceChecksum};
use crate::driver::{Context, DriverError, Reservation};
use crate::error::{CudaError, ErrorClass};
use lease::GrantedLease;
use write_lock::{WriteLock, WriteLockKey};

/// `CUDA_ERROR_INVALID_VALUE`
const INVALID_VALUE: i32 = 1;

/// `CUDA_ERROR_INVALID_HANDLE`
const INVALID_HANDLE: i32 = 400;

/// Interval between requests for a lease that another process writes, or to an agent that is busy
/// or does not respond.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Reason for which a lease was not opened or used.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The name is not valid for a lease.
    #[error("failed to open lease {name:?}: {source}; use a valid name")]
    InvalidName {
        /// Requested name.
        name: String,
        /// Reason for which the name is not valid.
        source: DecodeError,
    },
    /// The agent does not listen at the socket or did not respond in time.
    #[error(
        "failed to reach the agent at {path}: {source}; run in a container with Bursar's GPU memory"
    )]
    AgentUnreachable {
        /// Path of the socket.
        path: String,
        /// Cause of the failure.
        source: std::io::Error,
    },
    /// The agent refused the connection.
    #[error(
        "failed to connect to the agent: it rejected this process ({0:?}); see the agent's log"
    )]
    Rejected(RejectReason),
    /// The agent's response does not match the request.
    #[error(
        "failed to read the agent's response: it does not match the request; use one version of library and agent"
    )]
    UnexpectedResponse,
    /// The agent refused the request.
    #[error("failed to use lease {name:?}: {reason}")]
    Refused {
        /// Lease's name.
        name: String,
        /// Reason of the refusal.
        reason: RetainedRefusal,
    },
    /// The content differs from the committed content. The lease was discarded, and the next open
    /// creates it anew.
    #[error(
        "failed to verify lease {lease}: its content differs from the commit, so it was discarded; load it again"
    )]
    Corrupt {
        /// Lease's number.
        lease: u64,
        /// Checksum at the commit.
        committed: u64,
        /// Present checksum.
        found: u64,
    },
    /// The agent has the lease, but the driver does not know its memory. The lease was discarded,
    /// and the next open creates it anew.
    #[error(
        "failed to map lease {lease}: its memory is lost ({source}), so it was discarded; load it again"
    )]
    Lost {
        /// Lease's number.
        lease: u64,
        /// Error that the driver returned.
        source: CudaError,
    },
    /// The range is not inside the lease.
    #[error(
        "failed to access {bytes} bytes at {at}: the lease has {lease_bytes} bytes; pass a range inside it"
    )]
    OutOfRange {
        /// Offset of the range.
        at: u64,
        /// Size of the range in bytes.
        bytes: u64,
        /// Size of the lease in bytes.
        lease_bytes: u64,
    },
    /// The driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// No driver, or no such GPU in this process.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl From<ClientError> for LeaseError {
    fn from(error: ClientError) -> LeaseError {
        match error {
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
            // Mappings start at multiples of the granularity, so this does not happen.
            ChecksumError::Unaligned(_) => LeaseError::UnexpectedResponse,
        }
    }
}

impl LeaseError {
    /// Returns whether the same request may succeed later.
    pub fn retryable(&self) -> bool {
        match self {
            LeaseError::Refused { reason, .. } => matches!(
                reason,
                RetainedRefusal::Writing
                    | RetainedRefusal::Unavailable
                    | RetainedRefusal::Quota { .. }
                    | RetainedRefusal::GpuLimit { .. }
            ),
            LeaseError::AgentUnreachable { .. }
            | LeaseError::Corrupt { .. }
            | LeaseError::Lost { .. } => true,
            LeaseError::Rejected(reason) => *reason == RejectReason::Busy,
            LeaseError::Cuda(error) => error.retryable(),
            LeaseError::Driver(error) => error.retryable(),
            LeaseError::InvalidName { .. }
            | LeaseError::UnexpectedResponse
            | LeaseError::OutOfRange { .. } => false,
        }
    }

    /// Returns the class of the failure for this process image.
    pub fn class(&self) -> ErrorClass {
        match self {
            LeaseError::Cuda(error) => error.class(),
            LeaseError::Driver(error) => error.class(),
            LeaseError::Refused {
                reason: RetainedRefusal::Quota { .. } | RetainedRefusal::GpuLimit { .. },
                ..
            } => ErrorClass::OutOfMemory,
            other if other.retryable() => ErrorClass::NotReady,
            _ => ErrorClass::Caller,
        }
    }

    /// Returns whether waiting for another process or for the agent may help.
    fn is_transient(&self) -> bool {
        match self {
            LeaseError::Refused { reason, .. } => {
                matches!(
                    reason,
                    RetainedRefusal::Writing | RetainedRefusal::Unavailable
                )
            }
            LeaseError::Rejected(reason) => *reason == RejectReason::Busy,
            LeaseError::AgentUnreachable { path, source } => match source.kind() {
                // A container with Bursar's GPU memory has the folder even without an agent.
                ErrorKind::NotFound => Path::new(path).parent().is_some_and(Path::exists),
                // The bytes are no response of this version.
                ErrorKind::Other => false,
                _ => true,
            },
            _ => false,
        }
    }
}

/// State of an opened lease.
#[derive(Debug)]
pub enum LeaseState {
    /// The lease is committed and verified.
    Ready(RetainedLease),
    /// The lease is new, and this process is its writer.
    Writing(LeaseWriter),
}

/// Opens leases of one GPU through the agent, and maps them in a context.
#[derive(Clone, Debug)]
pub struct LeaseClient(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Context,
    agent: AgentClient,
    /// Loaded for the first verification.
    checksum: Mutex<Option<DeviceChecksum>>,
}

impl LeaseClient {
    /// Opens leases of a context's GPU through the agent of this container.
    pub fn new(context: &Context) -> LeaseClient {
        LeaseClient::with_agent(context, AgentClient::in_container())
    }

    /// Opens leases through an agent at another socket.
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

    /// Returns the context in which leases are mapped.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Opens and verifies a committed lease. Retries until `timeout` while another process writes
    /// the lease, or the agent is busy or does not respond.
    ///
    /// # Errors
    /// [`RetainedRefusal::Missing`] if there is no such lease, [`LeaseError::Corrupt`] if its
    /// content changed, [`LeaseError::Lost`] if its memory is lost, and others.
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

    /// Opens a lease, or creates it with at least `bytes` bytes if it is missing, lost or corrupt.
    /// Waits as [`find`](Self::find) does.
    ///
    /// # Errors
    /// The refusal of the agent, or the driver's error.
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
                    // Dropping the writer discards a lease that is too small.
                    return (writing.bytes() >= bytes)
                        .then_some(LeaseState::Writing(writing))
                        .ok_or(LeaseError::UnexpectedResponse);
                }
                Ok((GrantedLease::Ready { memory, checksum }, _)) => self.verify(memory, checksum),
                Err(error) => Err(error),
            };
            match ready {
                // The lease was discarded, so the next request creates it anew.
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

    /// Requests a lease once. A request that may create the lease takes the write lock first.
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
                        .ok_or_else(|| refused(RetainedRefusal::Writing))?,
                )
            }
        };
        // The process would only wait for the agent: it reserves addresses of the lease. A lease
        // of another size, as an existing one may have, gets others.
        let mut reserved = None;
        let reserve = || reserved = self.reserve(bytes);
        let (answer, fd) = request::open(&self.0.agent, context.uuid(), name, key, bytes, reserve)?;
        match answer {
            RetainedResponse::Refused(reason) => Err(refused(reason)),
            granted => {
                let result = GrantedLease::from_response(context, granted, fd, reserved);
                match (&result, granted) {
                    // This process is the lease's writer but cannot map its memory.
                    (Err(_), RetainedResponse::Write { lease, .. }) => drop(self.discard(lease)),
                    (Err(LeaseError::Cuda(source)), RetainedResponse::Ready { lease, .. })
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

    /// Reserves addresses for a lease of `bytes` bytes, which the agent rounds up. `None` for none,
    /// and after an error, which the later mapping meets again.
    fn reserve(&self, bytes: u64) -> Option<Reservation> {
        let granularity = self.context().device().granularity().ok()?;
        let bytes = bytes.checked_next_multiple_of(granularity)?;
        (bytes > 0).then(|| self.context().driver().reserve(bytes).ok())?
    }

    /// Verifies the content of a lease, and discards a corrupt one.
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
        match request::request(&self.0.agent, RetainedRequest::Discard { version, lease })?.0 {
            // Another process discarded the lease first.
            RetainedResponse::Discarded | RetainedResponse::Refused(RetainedRefusal::Missing) => {
                Ok(())
            }
            RetainedResponse::Refused(reason) => Err(refused(lease, reason)),
            _ => Err(LeaseError::UnexpectedResponse),
        }
    }
}

/// Returns whether the driver says that a file descriptor is not device memory.
fn is_not_device_memory(error: &CudaError) -> bool {
    error.call == "cuMemImportFromShareableHandle"
        && matches!(error.code, INVALID_VALUE | INVALID_HANDLE)
}

fn refused(lease: u64, reason: RetainedRefusal) -> LeaseError {
    LeaseError::Refused {
        name: lease.to_string(),
        reason,
    }
}
