//! Computes the events of a change from one report to the next: pure.

use bursar_apiserver::Reason;
use bursar_crds::conditions::{ConditionUpdate, gpu_node as names};
use bursar_ledger::units::Bytes;

use crate::{GpuHealth, NodeReport};

/// The events for the changes from `before` to `after`.
pub fn transition_events(before: Option<&NodeReport>, after: &NodeReport) -> Vec<(Reason, String)> {
    let said_before = |statement: &ConditionUpdate| {
        before.is_some_and(|before| {
            let same = |old: &ConditionUpdate| {
                old.type_ == statement.type_ && old.reason == statement.reason
            };
            before.conditions.iter().any(same)
        })
    };
    let news = after
        .conditions
        .iter()
        .filter(|statement| !said_before(statement));
    let mut events: Vec<_> = news
        .filter_map(|statement| Some((event_reason(statement)?, statement.message.clone())))
        .collect();
    for report in &after.gpus {
        let gpu = &report.gpu.uuid;
        let old = before.and_then(|before| before.gpus.iter().find(|old| old.gpu.uuid == *gpu));
        match (old.map(|old| &old.health), &report.health) {
            (Some(GpuHealth::Healthy) | None, GpuHealth::Unhealthy { reason }) => {
                events.push((
                    Reason::GpuUnhealthy,
                    format!("{gpu} gets no new pods: {reason}"),
                ));
            }
            (Some(GpuHealth::Unhealthy { .. }), GpuHealth::Healthy) => {
                events.push((Reason::GpuHealthy, format!("{gpu} gets new pods again")));
            }
            _ => {}
        }
        let leaked = report.memory.leaked;
        if leaked > Bytes::ZERO && old.is_none_or(|old| old.memory.leaked == Bytes::ZERO) {
            let given = format!("of {gpu} {leaked} that ended pods had exported");
            let message = match &report.eviction_risk {
                None => format!("{given} are held by others, and not given to pods"),
                Some(why) => format!(
                    "{given} are not given to pods: the agent cannot prove them free beside managed memory: {why}"
                ),
            };
            events.push((Reason::MemoryLeaked, message));
        }
    }
    events
}

/// The event reason of a condition. A restarted kubelet is no event, but a refused registration is.
fn event_reason(statement: &ConditionUpdate) -> Option<Reason> {
    match (statement.type_, statement.reason) {
        (_, names::CHECKPOINT_REBUILT) => Some(Reason::CheckpointRebuilt),
        (_, names::CHECKPOINT_UNWRITABLE) => Some(Reason::CheckpointUnwritable),
        (_, names::TOO_MANY_DEVICE_IDS) => Some(Reason::TooManyDeviceIds),
        (_, names::REGISTRATION_REFUSED | names::KUBELET_FOLDER) => {
            Some(Reason::RegistrationFailed)
        }
        (names::CDI_READY, _) if statement.holds == Some(false) => Some(Reason::CdiUnusable),
        (names::GPUS_FOUND, _) if statement.holds == Some(false) => Some(Reason::GpusMissing),
        _ => None,
    }
}
