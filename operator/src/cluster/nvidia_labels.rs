//! Decides from NVIDIA's labels on a Node which GPUs the operator drains. Pure.

use std::collections::{BTreeMap, BTreeSet};

use bursar_crds::gpu_node::MAX_GPUS;

use super::ssa_diff::needs_apply;

/// The GPU operator's state of a driver upgrade (its `k8s-operator-libs`, `pkg/upgrade/consts.go`).
const DRIVER_UPGRADE: &str = "nvidia.com/gpu-driver-upgrade-state";

/// MIG manager's state of a reconfiguration (`mig-parted`, `deployments/container`).
const MIG_CONFIG: &str = "nvidia.com/mig.config.state";

/// The maintenance of a node's GPUs by NVIDIA's operators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Maintenance {
    /// Nothing: pods may use the GPUs.
    #[default]
    None,
    /// No process may use the GPUs.
    Drain,
    /// The labels do not say it: the GPUs stay as they are.
    Unclear,
}

impl Maintenance {
    /// Reads a node's labels.
    pub fn of(labels: &BTreeMap<String, String>) -> Self {
        let value = |label| labels.get(label).map_or("", String::as_str);
        let driver = match value(DRIVER_UPGRADE) {
            ""
            | "upgrade-required"
            | "cordon-required"
            | "wait-for-jobs-required"
            | "uncordon-required"
            | "upgrade-done" => Self::None,
            "pod-deletion-required"
            | "drain-required"
            | "node-maintenance-required"
            | "post-maintenance-required"
            | "pod-restart-required"
            | "validation-required" => Self::Drain,
            // Such as `upgrade-failed`, where the old driver, the new one or none is loaded.
            _ => Self::Unclear,
        };
        let mig = match value(MIG_CONFIG) {
            "pending" | "rebooting" => Self::Drain,
            _ => Self::None,
        };
        if mig == Self::Drain { mig } else { driver }
    }
}

/// The GPUs that the operator drains on a node, where its entries in `spec.drain` have to change.
///
/// `applied` is what the operator applied last; `None` before its first write.
pub(crate) fn due_drain(
    maintenance: Maintenance,
    gpus: &[String],
    current: &[String],
    applied: Option<&Vec<String>>,
) -> Option<Vec<String>> {
    let desired: Vec<String> = match maintenance {
        Maintenance::Unclear => return None,
        Maintenance::None => Vec::new(),
        // An agent without a driver lists no GPU, so that the present entries stay too.
        Maintenance::Drain => {
            let all: BTreeSet<&String> = gpus.iter().chain(current).collect();
            all.into_iter().take(MAX_GPUS).cloned().collect()
        }
    };
    needs_apply(current, &desired, applied).then_some(desired)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        let text = |(label, value): &(&str, &str)| ((*label).to_owned(), (*value).to_owned());
        entries.iter().map(text).collect()
    }

    fn uuids(gpus: &[&str]) -> Vec<String> {
        gpus.iter().map(|gpu| (*gpu).to_owned()).collect()
    }

    #[test]
    fn driver_upgrade_drains_from_pod_deletion_to_validation() {
        let states = [
            ("", Maintenance::None),
            ("upgrade-required", Maintenance::None),
            ("cordon-required", Maintenance::None),
            ("wait-for-jobs-required", Maintenance::None),
            ("pod-deletion-required", Maintenance::Drain),
            ("drain-required", Maintenance::Drain),
            ("node-maintenance-required", Maintenance::Drain),
            ("post-maintenance-required", Maintenance::Drain),
            ("pod-restart-required", Maintenance::Drain),
            ("validation-required", Maintenance::Drain),
            ("uncordon-required", Maintenance::None),
            ("upgrade-done", Maintenance::None),
            ("upgrade-failed", Maintenance::Unclear),
            ("a-state-of-later-versions", Maintenance::Unclear),
        ];
        for (state, expected) in states {
            let found = Maintenance::of(&labels(&[(DRIVER_UPGRADE, state)]));
            assert_eq!(found, expected, "{state}");
        }
        assert_eq!(Maintenance::of(&labels(&[])), Maintenance::None);
    }

    #[test]
    fn mig_manager_drains_while_it_reconfigures() {
        for (state, expected) in [
            ("pending", Maintenance::Drain),
            ("rebooting", Maintenance::Drain),
            ("success", Maintenance::None),
            ("failed", Maintenance::None),
        ] {
            let both = [(MIG_CONFIG, state), (DRIVER_UPGRADE, "upgrade-done")];
            assert_eq!(Maintenance::of(&labels(&both)), expected, "{state}");
        }
    }

    #[test]
    fn drain_names_every_gpu_and_is_returned_once() {
        let (gpus, ours) = (uuids(&["A", "B"]), uuids(&["A", "B"]));
        let drain = due_drain(Maintenance::Drain, &gpus, &[], None);
        assert_eq!(drain, Some(ours.clone()));
        let again = due_drain(Maintenance::Drain, &gpus, &ours, Some(&ours));
        assert_eq!(again, None);
        let back = due_drain(Maintenance::None, &gpus, &ours, Some(&ours));
        assert_eq!(back, Some(Vec::new()));
        let none = Some(&Vec::new());
        assert_eq!(due_drain(Maintenance::None, &gpus, &[], none), None);
    }

    #[test]
    fn admins_drain_stays_when_ours_is_returned() {
        let (admins, none) = (uuids(&["A"]), Vec::new());
        // An operator that has just started cannot know which entries are its own.
        let first = due_drain(Maintenance::None, &admins, &admins, None);
        assert_eq!(first, Some(Vec::new()));
        assert_eq!(
            due_drain(Maintenance::None, &admins, &admins, Some(&none)),
            None
        );
    }

    #[test]
    fn drain_stays_while_the_agent_has_no_driver() {
        let ours = uuids(&["A", "B"]);
        assert_eq!(due_drain(Maintenance::Drain, &[], &ours, None), None);
        let kept = due_drain(Maintenance::Unclear, &[], &ours, Some(&ours));
        assert_eq!(kept, None);
    }
}
