//! Decides what follows a finding: pure.

use bursar_config::{AuditConfig, AuditPolicy};
use bursar_host::procfs::ProcessOwner;
use bursar_ledger::units::PodUid;
use bursar_sessions::Process;

use super::compare::Finding;

/// The agent reports unaccounted memory after this many audits, because a process that ends leaves
/// some for a moment.
const UNACCOUNTED_AFTER: u32 = 10;

/// The agent reports a holder after this many audits. A program may be within `cuInit` at one
/// audit, but not at two, because `cuInit` takes 0.2 s.
const HOLDER_AFTER: u32 = 2;

/// The agent's reaction to a finding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Action {
    /// Whether to publish an Event: once as long as the finding is present.
    pub publish_event: bool,
    /// The processes to kill.
    pub kill: Vec<Process>,
}

/// The pod of a finding that names no allocation, if the policy may kill the pod's process. Memory
/// within the tolerance may be that of a program that monitors GPUs.
fn outsider<'a>(finding: &'a Finding, config: &AuditConfig) -> Option<&'a PodUid> {
    let (pod, bytes) = match finding {
        Finding::UntrackedProcess {
            owner: ProcessOwner::Container { pod, .. },
            bytes,
            ..
        } => (pod, bytes.unwrap_or_default()),
        Finding::Holder { pod, bytes, .. } => (pod, *bytes),
        _ => return None,
    };
    let may_kill = config.policy == AuditPolicy::Kill && config.kill_outsiders;
    (may_kill && bytes > config.tolerance).then_some(pod)
}

/// Decides about a finding that was present in `strikes` audits, for most kinds in a row. The agent
/// kills a process of a pod that it gave memory of the GPU. It kills a process of an [`outsider`]
/// if that pod `may_end`. It kills no process of the host, because those are the administrator's.
pub fn action(
    finding: &Finding,
    strikes: u32,
    config: &AuditConfig,
    may_end: impl FnOnce(&PodUid) -> bool,
) -> Action {
    let (publish_at, at_fault) = match finding {
        Finding::UntrackedProcess {
            owner: ProcessOwner::AllowedHost,
            ..
        } => return Action::default(),
        Finding::OverQuota { processes, .. } => (1, processes.clone()),
        Finding::UntrackedProcess { process, .. } | Finding::TamperedPage { process, .. } => {
            (1, vec![*process])
        }
        Finding::Holder {
            process,
            is_only_suspect: true,
            ..
        } => (HOLDER_AFTER, vec![*process]),
        Finding::Holder { .. } => (HOLDER_AFTER, Vec::new()),
        Finding::OverManaged { .. } | Finding::Unaccounted { .. } => {
            (UNACCOUNTED_AFTER, Vec::new())
        }
    };
    let kills = match config.policy {
        AuditPolicy::Report => false,
        // A kill may fail, so the agent repeats it after as many audits.
        AuditPolicy::Kill => strikes > 0 && strikes.is_multiple_of(config.kill_after),
    };
    let may_kill =
        || finding.allocation().is_some() || outsider(finding, config).is_some_and(may_end);
    let kills = kills && may_kill();
    Action {
        publish_event: strikes == publish_at,
        kill: if kills { at_fault } else { Vec::new() },
    }
}

#[cfg(test)]
mod tests {
    use bursar_ledger::units::{AllocationId, Bytes};

    use super::*;

    fn action(finding: &Finding, strikes: u32, config: &AuditConfig) -> Action {
        super::action(finding, strikes, config, |_| true)
    }

    const PROCESS: Process = Process { pid: 7, start: 70 };

    fn config(policy: AuditPolicy) -> AuditConfig {
        AuditConfig {
            policy,
            process_allowance: Bytes::gib(1),
            ..AuditConfig::default()
        }
    }

    fn over_quota() -> Finding {
        Finding::OverQuota {
            allocation: AllocationId::from_bits(1),
            gpu: "GPU-a".parse().unwrap(),
            quota: Bytes::gib(1),
            charged: Bytes::gib(4),
            processes: vec![PROCESS],
        }
    }

    fn untracked(allocation: Option<AllocationId>) -> Finding {
        Finding::UntrackedProcess {
            gpu: "GPU-a".parse().unwrap(),
            process: PROCESS,
            bytes: None,
            owner: ProcessOwner::Host,
            allocation,
        }
    }

    #[test]
    fn finding_kills_after_as_many_audits_as_configured() {
        let config = config(AuditPolicy::Kill);
        let steps: Vec<(bool, usize)> = (1..=7)
            .map(|strikes| action(&over_quota(), strikes, &config))
            .map(|action| (action.publish_event, action.kill.len()))
            .collect();
        let expected = [
            (true, 0),
            (false, 0),
            (false, 1),
            (false, 0),
            (false, 0),
            (false, 1),
            (false, 0),
        ];
        assert_eq!(steps, expected);
    }

    #[test]
    fn policy_report_kills_nothing() {
        let config = config(AuditPolicy::Report);
        let kills = (1..=100).map(|strikes| action(&over_quota(), strikes, &config).kill.len());
        assert_eq!(kills.sum::<usize>(), 0);
    }

    #[test]
    fn process_outside_our_containers_is_reported_and_not_killed() {
        let config = config(AuditPolicy::Kill);
        assert!(action(&untracked(None), 1, &config).publish_event);
        assert_eq!(action(&untracked(None), 3, &config).kill, []);
        let mut allowed = untracked(None);
        if let Finding::UntrackedProcess { owner, .. } = &mut allowed {
            *owner = ProcessOwner::AllowedHost;
        }
        assert_eq!(action(&allowed, 1, &config), Action::default());
        let bound = untracked(Some(AllocationId::from_bits(1)));
        assert_eq!(action(&bound, 3, &config).kill, [PROCESS]);
    }

    #[test]
    fn process_of_a_pod_without_gpu_memory_is_killed_unless_exempt() {
        let pod: PodUid = "p".parse().unwrap();
        let mut finding = untracked(None);
        let Finding::UntrackedProcess { owner, bytes, .. } = &mut finding else {
            unreachable!("an untracked process");
        };
        *owner = ProcessOwner::Container {
            pod: pod.clone(),
            cgroup: "c".into(),
        };
        *bytes = Some(Bytes::gib(1));
        let kill = config(AuditPolicy::Kill);
        let kills = |finding: &Finding, config: &AuditConfig, exempt: &[&PodUid]| {
            let may_end = |pod: &PodUid| !exempt.contains(&pod);
            super::action(finding, 3, config, may_end).kill
        };
        assert_eq!(kills(&finding, &kill, &[]), [PROCESS]);
        assert_eq!(kills(&finding, &kill, &[&pod]), []);
        let off = AuditConfig {
            kill_outsiders: false,
            ..kill.clone()
        };
        assert_eq!(kills(&finding, &off, &[]), []);
        assert_eq!(kills(&finding, &config(AuditPolicy::Report), &[]), []);
        // A program that monitors GPUs may have some memory of the driver's.
        let Finding::UntrackedProcess { bytes, .. } = &mut finding else {
            unreachable!("an untracked process");
        };
        *bytes = Some(Bytes::mib(64));
        assert_eq!(kills(&finding, &kill, &[]), []);
    }

    #[test]
    fn holder_is_killed_only_when_it_is_the_only_suspect() {
        let config = config(AuditPolicy::Kill);
        let holder = |is_only_suspect| Finding::Holder {
            gpu: "GPU-a".parse().unwrap(),
            process: PROCESS,
            bytes: Bytes::gib(1),
            pod: "p".parse().unwrap(),
            allocation: Some(AllocationId::from_bits(1)),
            imported: None,
            is_only_suspect,
        };
        let published: Vec<bool> = (1..=4)
            .map(|strikes| action(&holder(true), strikes, &config).publish_event)
            .collect();
        assert_eq!(published, [false, true, false, false]);
        assert_eq!(action(&holder(true), 3, &config).kill, [PROCESS]);
        assert_eq!(action(&holder(false), 3, &config).kill, []);
    }
}
