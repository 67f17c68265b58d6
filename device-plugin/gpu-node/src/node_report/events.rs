//! Computes the events of a change from one report to the next: pure.

use bursar_apiserver::Reason;
use bursar_crds::conditions::{ConditionUpdate, gpu_node as names};
use bursar_crds::gpu_node::HealthStatus;

use crate::NodeReport;

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
    for gpu in &after.status.gpus {
        let mut old = before.iter().flat_map(|before| &before.status.gpus);
        let old = old.find(|old| old.uuid == gpu.uuid);
        let was_healthy = old.is_none_or(|old| old.health.status == HealthStatus::Healthy);
        let is_healthy = gpu.health.status == HealthStatus::Healthy;
        let (gpu, why) = (&gpu.uuid, &gpu.health.reason);
        if was_healthy && !is_healthy {
            let message = format!("{gpu} gets no new pods: {why}");
            events.push((Reason::GpuUnhealthy, message));
        } else if is_healthy && !was_healthy {
            events.push((Reason::GpuHealthy, format!("{gpu} gets new pods again")));
        }
    }
    for (gpu, exported) in &after.exported {
        if before.is_some_and(|before| before.exported.contains_key(gpu)) {
            continue;
        }
        let given = format!("of {gpu} {} that ended pods had exported", exported.bytes);
        let message = match exported.is_beside_managed {
            false => format!("{given} are held by others, and not given to pods"),
            true => format!(
                "{given} are not given to pods: the agent cannot prove them free while managed memory is on the GPU; \
                 end the pods with managed memory there, or drain the GPU"
            ),
        };
        events.push((Reason::MemoryLeaked, message));
    }
    events
}

/// The event reason of a condition. A restarted kubelet is no event, but a refused registration and
/// a silent relay are.
fn event_reason(condition: &ConditionUpdate) -> Option<Reason> {
    match (condition.type_, condition.reason) {
        (_, names::CHECKPOINT_REBUILT) => Some(Reason::CheckpointRebuilt),
        (_, names::CHECKPOINT_UNWRITABLE) => Some(Reason::CheckpointUnwritable),
        (_, names::TOO_MANY_DEVICE_IDS) => Some(Reason::TooManyDeviceIds),
        (_, names::REGISTRATION_REFUSED | names::KUBELET_FOLDER | names::RELAY_SILENT) => {
            Some(Reason::RegistrationFailed)
        }
        (names::CDI_READY, _) if condition.holds == Some(false) => Some(Reason::CdiUnusable),
        (names::GPUS_FOUND, _) if condition.holds == Some(false) => Some(Reason::GpusMissing),
        _ => None,
    }
}
