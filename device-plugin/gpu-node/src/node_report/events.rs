//! Computes the events of a change from one report to the next: pure.

use bursar_apiserver::Reason;
use bursar_crds::conditions::{ConditionUpdate, gpu_node as names};
use bursar_ledger::units::Bytes;

use crate::{GpuHealth, NodeReport};

/// The events for the changes from `before` to `after`.
pub fn transition_events(before: Option<&NodeReport>, after: &NodeReport) -> Vec<(Reason, String)> {
    let was_present = |condition: &ConditionUpdate| {
        before.is_some_and(|before| {
            let same = |old: &ConditionUpdate| {
                old.type_ == condition.type_ && old.reason == condition.reason
            };
            before.conditions.iter().any(same)
        })
    };
    let new_conditions = after
        .conditions
        .iter()
        .filter(|condition| !was_present(condition));
    let mut events: Vec<_> = new_conditions
        .filter_map(|condition| Some((event_reason(condition)?, condition.message.clone())))
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
            let message = match report.has_managed_memory {
                false => format!("{given} are held by others, and not given to pods"),
                true => format!(
                    "{given} are not given to pods: the agent cannot prove them free while managed memory is on the GPU; \
                     end the pods with managed memory there, or drain the GPU"
                ),
            };
            events.push((Reason::MemoryLeaked, message));
        }
    }
    events
}

/// The event reason of a condition. A restarted kubelet is no event, but a refused registration is.
fn event_reason(condition: &ConditionUpdate) -> Option<Reason> {
    match (condition.type_, condition.reason) {
        (_, names::CHECKPOINT_REBUILT) => Some(Reason::CheckpointRebuilt),
        (_, names::CHECKPOINT_UNWRITABLE) => Some(Reason::CheckpointUnwritable),
        (_, names::TOO_MANY_DEVICE_IDS) => Some(Reason::TooManyDeviceIds),
        (_, names::REGISTRATION_REFUSED | names::KUBELET_FOLDER) => {
            Some(Reason::RegistrationFailed)
        }
        (names::CDI_READY, _) if condition.holds == Some(false) => Some(Reason::CdiUnusable),
        (names::GPUS_FOUND, _) if condition.holds == Some(false) => Some(Reason::GpusMissing),
        _ => None,
    }
}
