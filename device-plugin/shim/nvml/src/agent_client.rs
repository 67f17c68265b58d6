//! Asks the agent what the container uses of a device, at most ten times a second.

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use bursar_protocol::VERSION;
use bursar_protocol::connect::{connect, read_message};
use bursar_protocol::messages::{Account, Message, ProcessUsage, RejectReason, Request, Response};

use crate::nvml_return::{self, NvmlReturn};

/// How long an answer is reused, because tools that poll make several calls in a row.
const MAX_AGE: Duration = Duration::from_millis(100);

/// How long one step of a query may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the shim leaves the agent alone after a failure, because each call would wait anew.
const BACKOFF: Duration = Duration::from_secs(1);

/// The container's quota and usage of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    /// In bytes.
    pub(crate) quota: u64,
    /// In bytes; more than the quota after the quota was lowered.
    pub(crate) used: u64,
    /// The container's processes that use the device.
    pub(crate) processes: Vec<ProcessUsage>,
}

/// The agent's answer about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
enum AgentAnswer {
    Usage(Usage),
    /// The device is not the container's, like the parent GPU of its MIG instance.
    NotAssigned,
}

impl AgentAnswer {
    fn usage(&self) -> Result<Usage, NvmlReturn> {
        match self {
            AgentAnswer::Usage(usage) => Ok(usage.clone()),
            AgentAnswer::NotAssigned => Err(nvml_return::NO_PERMISSION),
        }
    }
}

/// The agent's last answer about each device.
struct Cache {
    devices: Vec<CachedAnswer>,
    /// The agent is not asked before this time.
    backoff_until: Option<Instant>,
}

struct CachedAnswer {
    uuid: String,
    answer: AgentAnswer,
    at: Instant,
}

static CACHE: Mutex<Cache> = Mutex::new(Cache {
    devices: Vec::new(),
    backoff_until: None,
});

/// Returns the container's usage of the device with this UUID, as NVML prints it.
///
/// # Errors
/// NO_PERMISSION where the device is not the container's, UNKNOWN where the agent never answered.
pub(crate) fn usage(uuid: &str) -> Result<Usage, NvmlReturn> {
    let now = Instant::now();
    let (last, quiet) = cache().map_or((None, false), |known| {
        let device = known.devices.iter().find(|device| device.uuid == uuid);
        let last = device.map(|device| (device.answer.clone(), device.at));
        (last, known.backoff_until.is_some_and(|until| now < until))
    });
    let answer = match last {
        Some((answer, at)) if now.saturating_duration_since(at) < MAX_AGE => answer,
        last if quiet => last.ok_or(nvml_return::UNKNOWN)?.0,
        last => match query(uuid) {
            Ok(answer) => {
                store(uuid, &answer);
                answer
            }
            Err(_) => {
                if let Some(mut known) = cache() {
                    known.backoff_until = Some(Instant::now() + BACKOFF);
                }
                last.ok_or(nvml_return::UNKNOWN)?.0
            }
        },
    };
    answer.usage()
}

/// Locks the cache. Returns `None` while another thread holds the lock, or held it when this
/// process was forked; the agent is then asked each time.
fn cache() -> Option<MutexGuard<'static, Cache>> {
    match CACHE.try_lock() {
        Ok(known) => Some(known),
        Err(TryLockError::Poisoned(known)) => Some(PoisonError::into_inner(known)),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn store(uuid: &str, answer: &AgentAnswer) {
    let Some(mut known) = cache() else {
        return;
    };
    let (answer, at) = (answer.clone(), Instant::now());
    known.backoff_until = None;
    match known.devices.iter_mut().find(|device| device.uuid == uuid) {
        Some(device) => (device.answer, device.at) = (answer, at),
        None => known.devices.push(CachedAnswer {
            uuid: uuid.to_owned(),
            answer,
            at,
        }),
    }
}

/// Asks the agent, on a connection of its own.
fn query(uuid: &str) -> io::Result<AgentAnswer> {
    let mut agent = connect(ANSWER_TIMEOUT)?;
    let query = Request::Query {
        version: VERSION,
        account: Account::Device(uuid.to_owned()),
    };
    agent.write_all(&query.frame())?;
    match read_message(&mut agent)? {
        Response::Usage {
            quota,
            used,
            processes,
        } => Ok(AgentAnswer::Usage(Usage {
            quota,
            used,
            processes,
        })),
        Response::Rejected {
            reason: RejectReason::Account,
        } => Ok(AgentAnswer::NotAssigned),
        _ => Err(io::ErrorKind::ConnectionRefused.into()),
    }
}
