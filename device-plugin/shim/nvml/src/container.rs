//! What the container uses of a device, as the agent says: asked at most ten times a second.

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use bursar_protocol::VERSION;
use bursar_protocol::dial::{dial, read};
use bursar_protocol::wire::{Account, Listed, Message, Reason, ToAgent, ToShim};

use crate::codes::{self, Code};

/// How long an answer is good for: tools that poll ask for the same several times in a row.
const FRESH: Duration = Duration::from_millis(100);

/// How long one step of a question may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the agent is left alone after it did not answer: each call would wait for it anew.
const QUIET: Duration = Duration::from_secs(1);

/// What the container may use of a device, and does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    /// In bytes.
    pub(crate) quota: u64,
    /// In bytes; more than the quota after that was lowered.
    pub(crate) used: u64,
    /// The container's processes that use the device.
    pub(crate) processes: Vec<Listed>,
}

/// What the agent says of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    Usage(Usage),
    /// The container was not given it: it is the GPU around its MIG instance, say.
    NotOurs,
}

impl Said {
    fn shown(&self) -> Result<Usage, Code> {
        match self {
            Said::Usage(usage) => Ok(usage.clone()),
            Said::NotOurs => Err(codes::NO_PERMISSION),
        }
    }
}

/// What the agent said last of each device that it was asked about.
struct Known {
    devices: Vec<Device>,
    /// The agent is not asked before.
    quiet_until: Option<Instant>,
}

struct Device {
    uuid: String,
    said: Said,
    at: Instant,
}

static KNOWN: Mutex<Known> = Mutex::new(Known {
    devices: Vec::new(),
    quiet_until: None,
});

/// What the container uses of the device with this UUID, as NVML prints it.
///
/// # Errors
/// NO_PERMISSION where the device is not the container's, UNKNOWN where the agent never said.
pub(crate) fn usage(uuid: &str) -> Result<Usage, Code> {
    let now = Instant::now();
    let (last, quiet) = known().map_or((None, false), |known| {
        let device = known.devices.iter().find(|device| device.uuid == uuid);
        let last = device.map(|device| (device.said.clone(), device.at));
        (last, known.quiet_until.is_some_and(|until| now < until))
    });
    let said = match last {
        Some((said, at)) if now.saturating_duration_since(at) < FRESH => said,
        last if quiet => last.ok_or(codes::UNKNOWN)?.0,
        last => match ask(uuid) {
            Ok(said) => {
                note(uuid, &said);
                said
            }
            Err(_) => {
                if let Some(mut known) = known() {
                    known.quiet_until = Some(Instant::now() + QUIET);
                }
                last.ok_or(codes::UNKNOWN)?.0
            }
        },
    };
    said.shown()
}

/// Nothing while another thread has it, or had it when this process was forked: then the agent is
/// asked each time.
fn known() -> Option<MutexGuard<'static, Known>> {
    match KNOWN.try_lock() {
        Ok(known) => Some(known),
        Err(TryLockError::Poisoned(known)) => Some(PoisonError::into_inner(known)),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn note(uuid: &str, said: &Said) {
    let Some(mut known) = known() else {
        return;
    };
    let (said, at) = (said.clone(), Instant::now());
    known.quiet_until = None;
    match known.devices.iter_mut().find(|device| device.uuid == uuid) {
        Some(device) => (device.said, device.at) = (said, at),
        None => known.devices.push(Device {
            uuid: uuid.to_owned(),
            said,
            at,
        }),
    }
}

/// Asks the agent, on a connection of its own.
fn ask(uuid: &str) -> io::Result<Said> {
    let mut agent = dial(ANSWER_TIMEOUT)?;
    let query = ToAgent::Query {
        version: VERSION,
        account: Account::Device(uuid.to_owned()),
    };
    agent.write_all(&query.frame())?;
    match read(&mut agent)? {
        ToShim::Usage {
            quota,
            used,
            processes,
        } => Ok(Said::Usage(Usage {
            quota,
            used,
            processes,
        })),
        ToShim::Goodbye {
            reason: Reason::Account,
        } => Ok(Said::NotOurs),
        _ => Err(io::ErrorKind::ConnectionRefused.into()),
    }
}
