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

pub use bump::Arena;
pub use bursar_protocol::wire::kept::{Key, LeaseName};
pub use lease::{Kept, Writing};

use crate::agent_client::{Agent, Unheard};
use crate::checksum::{Checksum, ChecksumError};
use crate::driver::{Access, Context, DriverError};
use crate::error::{CudaError, ErrorClass};
use lease::{Granted, Mapped};
use write_lock::{Claim, Title};

/// `CUDA_ERROR_INVALID_VALUE`
const INVALID_VALUE: i32 = 1;

/// `CUDA_ERROR_INVALID_HANDLE`
const INVALID_HANDLE: i32 = 400;

/// How often a lease that another process writes, or an agent that is away, is asked for again.
const ASK_EVERY: Duration = Duration::from_millis(20);

/// Why there is no lease.
#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    /// A lease cannot be called that.
    #[error("{name:?} is no name of a lease: {source}")]
    Name {
        /// What was asked for.
        name: String,
        /// Why.
        source: WireError,
    },
    /// Nobody listens where the agent should, or it took too long.
    #[error("asking the agent at {path}: {source}; is this a container with Bursar's GPU memory?")]
    Agent {
        /// The socket.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The agent does not talk to this process.
    #[error("the agent refused to talk: {0:?}")]
    Goodbye(Reason),
    /// The agent answered something that is no answer to what it was asked.
    #[error("the agent's answer does not fit the question")]
    Unexpected,
    /// The agent said no.
    #[error("lease {name:?}: {why}")]
    Refused {
        /// The lease's name.
        name: String,
        /// Why.
        why: KeptRefusal,
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
    #[error("{bytes} bytes at {at} of a lease of {whole} bytes")]
    OutOfRange {
        /// Where it starts.
        at: u64,
        /// How long it is.
        bytes: u64,
        /// How large the lease is.
        whole: u64,
    },
    /// The driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// There is no driver, or not this GPU.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl From<Unheard> for KeptError {
    fn from(unheard: Unheard) -> KeptError {
        match unheard {
            Unheard::Away { path, source } => KeptError::Agent { path, source },
            Unheard::Goodbye(reason) => KeptError::Goodbye(reason),
        }
    }
}

impl From<ChecksumError> for KeptError {
    fn from(error: ChecksumError) -> KeptError {
        match error {
            ChecksumError::Cuda(error) => KeptError::Cuda(error),
            // Mappings begin at multiples of the granularity.
            ChecksumError::Unaligned(_) => KeptError::Unexpected,
        }
    }
}

impl KeptError {
    /// Whether the same question may be answered otherwise later.
    pub fn retryable(&self) -> bool {
        match self {
            KeptError::Refused { why, .. } => matches!(
                why,
                KeptRefusal::Writing | KeptRefusal::Unavailable | KeptRefusal::Quota { .. }
            ),
            KeptError::Agent { .. } | KeptError::Corrupt { .. } | KeptError::Lost { .. } => true,
            KeptError::Goodbye(reason) => *reason == Reason::Busy,
            KeptError::Cuda(error) | KeptError::Driver(DriverError::Cuda(error)) => {
                error.retryable()
            }
            KeptError::Name { .. }
            | KeptError::Unexpected
            | KeptError::OutOfRange { .. }
            | KeptError::Driver(_) => false,
        }
    }

    /// What follows from it for this process image.
    pub fn class(&self) -> ErrorClass {
        match self {
            KeptError::Cuda(error) | KeptError::Driver(DriverError::Cuda(error)) => error.class(),
            KeptError::Refused {
                why: KeptRefusal::Quota { .. },
                ..
            } => ErrorClass::OutOfMemory,
            other if other.retryable() => ErrorClass::NotReady,
            _ => ErrorClass::Caller,
        }
    }

    /// Whether waiting for another process or for the agent is what would help.
    fn passes(&self) -> bool {
        match self {
            KeptError::Refused { why, .. } => {
                matches!(why, KeptRefusal::Writing | KeptRefusal::Unavailable)
            }
            KeptError::Agent { .. } => true,
            _ => false,
        }
    }
}

/// A lease that was asked for.
#[derive(Debug)]
pub enum Opened {
    /// It is there, and is what was committed.
    Ready(Kept),
    /// It is new, and this process's to write.
    Writing(Writing),
}

/// Where a process opens leases of one GPU: the agent, and a context to map them in.
#[derive(Clone, Debug)]
pub struct Shelf(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Context,
    agent: Agent,
    /// Loaded when something is verified first.
    checksum: Mutex<Option<Checksum>>,
}

impl Shelf {
    /// Leases of a context's GPU, of the agent that serves this container.
    pub fn new(context: &Context) -> Shelf {
        Shelf::of(context, Agent::of_this_container())
    }

    /// The same, of an agent that listens elsewhere.
    pub fn at(context: &Context, socket: &Path) -> Shelf {
        Shelf::of(context, Agent::at(socket))
    }

    fn of(context: &Context, agent: Agent) -> Shelf {
        Shelf(Arc::new(Inner {
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
    pub fn find(&self, name: &str, key: &Key, patience: Duration) -> Result<Kept, KeptError> {
        match self.ask(name, key, 0, patience)?.0 {
            Granted::Ready { memory, checksum } => self.verified(memory, checksum),
            Granted::Writing { .. } => Err(KeptError::Unexpected),
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
        patience: Duration,
    ) -> Result<Opened, KeptError> {
        let since = Instant::now();
        loop {
            let left = patience.saturating_sub(since.elapsed());
            let ready = match self.ask(name, key, bytes.max(1), left) {
                Ok((Granted::Writing { memory, token }, claim)) => {
                    let writing = Writing::new(self.clone(), memory, token, claim);
                    // One that is too small is discarded.
                    return (writing.bytes() >= bytes)
                        .then_some(Opened::Writing(writing))
                        .ok_or(KeptError::Unexpected);
                }
                Ok((Granted::Ready { memory, checksum }, _)) => self.verified(memory, checksum),
                Err(error) => Err(error),
            };
            match ready {
                // It is discarded: the next question begins it anew.
                Err(KeptError::Corrupt { .. } | KeptError::Lost { .. })
                    if since.elapsed() < patience => {}
                done => return done.map(Opened::Ready),
            }
        }
    }

    fn ask(
        &self,
        name: &str,
        key: &Key,
        bytes: u64,
        patience: Duration,
    ) -> Result<(Granted, Option<Claim>), KeptError> {
        let since = Instant::now();
        let lease_name =
            LeaseName::try_from(name.to_owned()).map_err(|source| KeptError::Name {
                name: name.to_owned(),
                source,
            })?;
        loop {
            match self.ask_once(&lease_name, key, bytes) {
                Err(error) if error.passes() && since.elapsed() + ASK_EVERY < patience => {
                    std::thread::sleep(ASK_EVERY);
                }
                done => return done,
            }
        }
    }

    /// Who may have to write what is asked for has claimed it.
    fn ask_once(
        &self,
        name: &LeaseName,
        key: &Key,
        bytes: u64,
    ) -> Result<(Granted, Option<Claim>), KeptError> {
        let context = &self.0.context;
        let refused = |why| KeptError::Refused {
            name: name.as_str().to_owned(),
            why,
        };
        let claim = match bytes {
            0 => None,
            _ => {
                let title = Title {
                    agent: self.0.agent.socket().to_owned(),
                    gpu: context.uuid(),
                    name: name.clone(),
                    key: *key,
                };
                Some(Claim::of(title).ok_or_else(|| refused(KeptRefusal::Writing))?)
            }
        };
        let map = |fd, bytes| Mapped::of(context, &fd, bytes, Access::ReadWrite);
        let opened = request::open(&self.0.agent, context.uuid(), name, key, bytes, map);
        let (answer, fd, made) = opened?;
        match answer {
            KeptAnswer::Refused(why) => Err(refused(why)),
            granted => {
                let made = made.transpose();
                let given = made.and_then(|made| Granted::of(context, granted, fd, made));
                match (&given, granted) {
                    // It is this process's to write, and cannot be.
                    (Err(_), KeptAnswer::Write { lease, .. }) => drop(self.discard(lease)),
                    (Err(KeptError::Cuda(source)), KeptAnswer::Ready { lease, .. })
                        if is_no_memory(source) =>
                    {
                        self.discard(lease)?;
                        let source = *source;
                        return Err(KeptError::Lost { lease, source });
                    }
                    _ => {}
                }
                Ok((given?, claim))
            }
        }
    }

    /// A lease whose content is what was committed; discards one that is not.
    fn verified(&self, memory: lease::Memory, committed: u64) -> Result<Kept, KeptError> {
        let found = self.checksum_of(&memory)?;
        let lease = memory.lease;
        if found != committed {
            drop(memory);
            self.discard(lease)?;
            return Err(KeptError::Corrupt {
                lease,
                committed,
                found,
            });
        }
        Ok(Kept::new(self.clone(), memory))
    }

    fn checksum_of(&self, memory: &lease::Memory) -> Result<u64, KeptError> {
        let mut loaded = self
            .0
            .checksum
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let checksum = match &mut *loaded {
            Some(checksum) => checksum,
            empty => empty.insert(Checksum::new(&self.0.context)?),
        };
        let stream = self.0.context.default_stream();
        Ok(checksum.of(memory.address(), memory.bytes(), &stream)?)
    }

    fn discard(&self, lease: u64) -> Result<(), KeptError> {
        let version = bursar_protocol::VERSION;
        match request::ask(&self.0.agent, KeptQuestion::Discard { version, lease })? {
            // A lease that somebody else discarded is as gone.
            KeptAnswer::Discarded | KeptAnswer::Refused(KeptRefusal::Missing) => Ok(()),
            KeptAnswer::Refused(why) => Err(refused(lease, why)),
            _ => Err(KeptError::Unexpected),
        }
    }
}

/// Whether the driver says of a descriptor that it is no memory.
fn is_no_memory(error: &CudaError) -> bool {
    error.call == "cuMemImportFromShareableHandle"
        && matches!(error.code, INVALID_VALUE | INVALID_HANDLE)
}

fn refused(lease: u64, why: KeptRefusal) -> KeptError {
    KeptError::Refused {
        name: lease.to_string(),
        why,
    }
}
