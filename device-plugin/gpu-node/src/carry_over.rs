//! Completes a status with what depends on the one before it: pure.

use bursar_crds::context_policy::FaultAction;
use bursar_crds::gpu_node::{Fault, FaultKind, GpuNodeStatus, MAX_FAULTS};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// Completes `after`, the status that the agent's own state gives, with the times and outcomes that
/// only the last published status knows.
///
/// * Before this agent has read a spec, the outcomes of the earlier agent's spec stay, because its
///   overrides stay too.
/// * A GPU's health keeps its time while it does not change.
/// * A GPU's fault has the time of its first write. The fault of a context has its own time.
pub(crate) fn carry_over(before: &GpuNodeStatus, after: &mut GpuNodeStatus, now: &Time) {
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
    use bursar_crds::gpu_node::{HealthStatus, QuotaState, QuotaStatus};

    use super::*;
    use crate::fixtures::{at, fault, report};
    use crate::render::render;

    fn status() -> GpuNodeStatus {
        render(&report(), &GpuNodeStatus::default(), Some(1), &at(10))
    }

    fn carried(before: &GpuNodeStatus, after: &GpuNodeStatus, now: i64) -> GpuNodeStatus {
        let mut after = after.clone();
        carry_over(before, &mut after, &at(now));
        after
    }

    #[test]
    fn health_keeps_its_time_until_the_status_changes() {
        let before = status();
        let mut after = before.clone();
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
        assert_eq!(carried(&before, &of(None, &[]), 20), before);
        assert_eq!(carried(&before, &of(Some(8), &[]), 20), of(Some(8), &[]));
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
