//! Completes the status of a report with what depends on the status before it: pure.

use bursar_crds::conditions::update_conditions;
use bursar_crds::context_policy::FaultAction;
use bursar_crds::gpu_node::{
    Fault, FaultKind, GpuNodeStatus, MAX_CONTAINERS, MAX_FAULTS, MAX_GPUS, MAX_NAMESPACES,
    MAX_NOT_ENFORCED, MAX_QUOTAS, MAX_RETAINED, MAX_WAITING,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::report::{NodeReport, ready_condition};

/// Completes the status of a report with the times and outcomes that only the last published status
/// knows, and bounds its lists. Entries that did not change keep their times.
///
/// * Before this agent has read a spec, the outcomes of the earlier agent's spec stay, because its
///   overrides stay too.
/// * A GPU's health keeps its time while it does not change.
/// * A GPU's fault has the time of its first write. The fault of a context has its own time.
///
/// `generation` is the object's `metadata.generation`, if known.
pub fn carry_over(
    before: &GpuNodeStatus,
    report: &NodeReport,
    generation: Option<i64>,
    now: &Time,
) -> GpuNodeStatus {
    let mut after = report.status.clone();
    if after.observed_generation.is_none() {
        after.observed_generation = before.observed_generation;
        after.quotas.clone_from(&before.quotas);
    }
    for gpu in &mut after.gpus {
        let old = before.gpus.iter().find(|old| old.uuid == gpu.uuid);
        let same = old.filter(|old| old.health.status == gpu.health.status);
        let since = same.and_then(|old| old.health.since.clone());
        gpu.health.since = since.or_else(|| Some(now.clone()));
    }
    for fault in &mut after.faults {
        if fault.kind == FaultKind::Gpu {
            let old = before.faults.iter().find(|old| old.id == fault.id);
            old.map_or(now, |old| &old.time).clone_into(&mut fault.time);
        }
    }
    select_faults(&mut after.faults);
    after.gpus.truncate(MAX_GPUS);
    after.waiting.truncate(MAX_WAITING);
    after.not_enforced.truncate(MAX_NOT_ENFORCED);
    after.quotas.truncate(MAX_QUOTAS);
    after.containers.truncate(MAX_CONTAINERS);
    after.retained.truncate(MAX_RETAINED);
    after.namespaces.truncate(MAX_NAMESPACES);
    let mut updates = vec![ready_condition(&report.conditions)];
    updates.extend_from_slice(&report.conditions);
    after.conditions = update_conditions(&before.conditions, &updates, generation, now);
    after
}

/// Selects the faults to publish. GPU faults come first, because each concerns many pods, and then
/// faults that wait for the operator. Among equals the oldest come first.
fn select_faults(faults: &mut Vec<Fault>) {
    let rank = |fault: &Fault| {
        let is_gpus = fault.kind == FaultKind::Gpu;
        let awaits_eviction = fault.action.is_some_and(FaultAction::awaits_eviction);
        (!is_gpus, !awaits_eviction)
    };
    faults.sort_by(|a, b| (rank(a), a.time.0, &a.id).cmp(&(rank(b), b.time.0, &b.id)));
    faults.truncate(MAX_FAULTS);
}

#[cfg(test)]
mod tests {
    use bursar_crds::gpu_node::{
        HealthStatus, MemoryResource, PendingContainer, QuotaState, QuotaStatus,
    };

    use super::*;
    use crate::fixtures::{at, container, fault, lease, report};

    fn carried(before: &GpuNodeStatus, status: &GpuNodeStatus, now: i64) -> GpuNodeStatus {
        let report = NodeReport {
            status: status.clone(),
            ..report()
        };
        carry_over(before, &report, Some(1), &at(now))
    }

    #[test]
    fn status_read_back_equals_what_was_written() {
        let mut status = report().status;
        status.waiting.push(PendingContainer {
            pod_uid: "0f".into(),
            namespace: "team".into(),
            pod: "p".into(),
            container: "c".into(),
            resource: MemoryResource::ManagedMemory,
            quanta: 8,
            since: at(10),
        });
        let written = carried(&GpuNodeStatus::default(), &status, 10);
        let json = serde_json::to_value(&written).unwrap();
        let read: GpuNodeStatus = serde_json::from_value(json).unwrap();
        assert_eq!(read, written);
        assert_eq!(carried(&read, &status, 500), written);
    }

    #[test]
    fn lists_of_the_status_are_bounded() {
        let mut status = report().status;
        status.containers = vec![container("a"); 1_000];
        status.retained = vec![lease(1); 1_000];
        status.retained_count = 5_000;
        let status = carried(&GpuNodeStatus::default(), &status, 10);
        assert_eq!(status.containers.len(), MAX_CONTAINERS);
        assert_eq!(status.retained.len(), MAX_RETAINED);
        assert_eq!(status.retained_count, 5_000);
    }

    #[test]
    fn health_keeps_its_time_until_the_status_changes() {
        let mut after = report().status;
        let before = carried(&GpuNodeStatus::default(), &after, 10);
        after.gpus[0].health.status = HealthStatus::Unhealthy;
        after.gpus[1].health.reason = "Other".into();
        let after = carried(&before, &after, 60);
        let since = after.gpus.iter().map(|gpu| gpu.health.since.clone());
        assert_eq!(Vec::from_iter(since), [Some(at(60)), Some(at(10))]);
        assert_eq!(carried(&after, &after, 500), after);
    }

    #[test]
    fn quota_outcomes_stay_until_the_spec_is_read_again() {
        let of = |generation: Option<i64>, quotas: &[QuotaStatus]| GpuNodeStatus {
            observed_generation: generation,
            quotas: quotas.to_vec(),
            ..GpuNodeStatus::default()
        };
        let outcome = QuotaStatus {
            pod_uid: "0f".into(),
            container: "main".into(),
            account: "device".into(),
            state: QuotaState::NotFound,
            quota: None,
            used: None,
        };
        let before = of(Some(7), &[outcome]);
        let outcomes = |status| {
            let after = carried(&before, &status, 20);
            (after.observed_generation, after.quotas)
        };
        assert_eq!(outcomes(of(None, &[])), (Some(7), before.quotas.clone()));
        assert_eq!(outcomes(of(Some(8), &[])), (Some(8), vec![]));
    }

    #[test]
    fn gpu_fault_keeps_its_time_and_comes_first() {
        let faults = vec![
            fault("a-1", FaultKind::Context, 1),
            fault("GPU-00000000-3", FaultKind::Gpu, 0),
        ];
        let faulty = GpuNodeStatus {
            faults,
            ..GpuNodeStatus::default()
        };
        let first = carried(&GpuNodeStatus::default(), &faulty, 10);
        let times = first
            .faults
            .iter()
            .map(|fault| (fault.kind, fault.time.clone()));
        let expected = [(FaultKind::Gpu, at(10)), (FaultKind::Context, at(1))];
        assert_eq!(Vec::from_iter(times), expected);
        assert_eq!(carried(&first, &faulty, 500), first);
    }

    #[test]
    fn faults_that_wait_for_the_operator_come_before_older_ones() {
        let fault = |seconds: i64, action| Fault {
            action: Some(action),
            ..fault(&format!("a-{seconds}"), FaultKind::Context, seconds)
        };
        let older = (1..=64).rev();
        let older = older.map(|number| fault(number, FaultAction::Report));
        let waiting = [
            fault(71, FaultAction::BeyondMaximum),
            fault(70, FaultAction::Evict),
        ];
        let mut faults = older.chain(waiting).collect();
        select_faults(&mut faults);
        let ids: Vec<&str> = faults.iter().map(|fault| fault.id.as_str()).collect();
        assert_eq!(ids.len(), MAX_FAULTS);
        assert_eq!(ids[..3], ["a-70", "a-71", "a-1"]);
    }
}
