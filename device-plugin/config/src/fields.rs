//! Deserializes fields of the configuration and checks their values.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bursar_crds::context_policy::ContextAction;
use bursar_crds::quantity;
use bursar_ledger::units::{Bytes, Quantum};
use jiff::SignedDuration;
use serde::de::{Deserialize, Deserializer, Error};

use super::HostMount;

/// The longest wait. The kubelet gives up on PreStartContainer after 30 s
/// (`KubeletPreStartContainerRPCTimeoutInSecs`) and would discard a later answer with its reason.
const MAX_BIND_WAIT: Duration = Duration::from_secs(27);

/// A shorter round is mostly changes from one pod to the next, and a longer one is a wait that
/// programs notice.
const MIN_ROUND: Duration = Duration::from_millis(1);
const MAX_ROUND: Duration = Duration::from_millis(100);

/// A mount as it is written.
#[derive(serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Mount {
    #[serde(deserialize_with = "absolute_path")]
    host_path: PathBuf,
    /// The path on the host where the field is left out.
    #[serde(default, deserialize_with = "optional_absolute_path")]
    container_path: Option<PathBuf>,
    #[serde(default = "yes")]
    read_only: bool,
}

fn yes() -> bool {
    true
}

impl From<Mount> for HostMount {
    fn from(mount: Mount) -> HostMount {
        let Mount {
            host_path,
            container_path,
            read_only,
        } = mount;
        HostMount {
            container_path: container_path.unwrap_or_else(|| host_path.clone()),
            host_path,
            read_only,
        }
    }
}

/// Parses a text; the error names it.
fn parse<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse(&text).map_err(|problem| D::Error::custom(format_args!("{text:?}: {problem}")))
}

pub(super) fn quantum<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Quantum, D::Error> {
    let problem = |_| "is not one of 256Mi, 512Mi, 1Gi".to_owned();
    parse(deserializer, |text| text.parse().map_err(problem))
}

pub(super) fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    let bytes = |text: &str| quantity::parse_bytes(text).map(Bytes);
    parse(deserializer, |text| {
        bytes(text).map_err(|problem| problem.to_string())
    })
}

pub(super) fn optional_bytes<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Bytes>, D::Error> {
    bytes(deserializer).map(Some)
}

pub(super) fn absolute_path<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<PathBuf, D::Error> {
    parse(deserializer, |text| {
        let path = PathBuf::from(text);
        let problem = "is not an absolute path: start it with a slash";
        path.is_absolute().then_some(path).ok_or(problem.to_owned())
    })
}

pub(super) fn optional_absolute_path<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<PathBuf>, D::Error> {
    absolute_path(deserializer).map(Some)
}

pub(super) fn bind_wait<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    parse(deserializer, |text| {
        let wait = text.parse::<SignedDuration>().ok();
        match wait.and_then(|wait| Duration::try_from(wait).ok()) {
            Some(wait) if wait <= MAX_BIND_WAIT => Ok(wait),
            Some(_) => Err("must be at most 27s: the kubelet itself waits for 30s".to_owned()),
            None => Err("is not a time of zero or more: write for example 25s".to_owned()),
        }
    })
}

pub(super) fn optional_round<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    parse(deserializer, |text| {
        let round = text.parse::<SignedDuration>().ok();
        round
            .and_then(|round| Duration::try_from(round).ok())
            .filter(|round| (MIN_ROUND..=MAX_ROUND).contains(round))
            .map(Some)
            .ok_or_else(|| "is no time from 1ms to 100ms: write for example 4ms".to_owned())
    })
}

pub(super) fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        0 => Err(D::Error::custom("0: must be 1 or more")),
        number => Ok(number),
    }
}

/// Reads names of programs, and refuses an empty name and a path.
pub(super) fn programs<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeSet<String>, D::Error> {
    let names = BTreeSet::<String>::deserialize(deserializer)?;
    let is_wrong = |name: &&String| name.is_empty() || name.len() > 255 || name.contains('/');
    match names.iter().find(is_wrong) {
        Some(name) => Err(D::Error::custom(format_args!(
            "{name:?}: is no name of a program; write Xorg, not /usr/bin/Xorg"
        ))),
        None => Ok(names),
    }
}

pub(super) fn context_action<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<ContextAction, D::Error> {
    parse(deserializer, str::parse)
}

pub(super) fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let problem = |_| "is not an address and a port: write for example [::]:9445".to_owned();
    parse(deserializer, |text| text.parse().map_err(problem))
}
