//! Decides what follows a poisoned context in which container: pure.

use bursar_apiserver::ContextPolicies;
use bursar_crds::context_policy::ContextAction;
use bursar_crds::gpu_node::RestartRequest;

use bursar_node::allocator::BoundContainer;
use bursar_sessions::RecoveryPolicy;

/// The policy of a container: that of its namespace, or the cluster's `default`. None where
/// the container's namespace is unknown, so that its present policy stays.
pub fn context_policy(
    policies: &ContextPolicies,
    default: ContextAction,
    container: &BoundContainer,
) -> Option<RecoveryPolicy> {
    let namespace = &container.name.as_ref()?.pod.as_ref()?.namespace;
    let policy = policies.get(namespace).cloned().unwrap_or_default();
    Some(RecoveryPolicy::new(
        policy.action.unwrap_or(default),
        policy.max_restarts,
        policy.window_seconds,
        policy.grace_seconds,
    ))
}

/// The process generation that a container is ordered to reach; none without an order.
pub(crate) fn required_generation(
    orders: &[RestartRequest],
    container: &BoundContainer,
) -> Option<u64> {
    let holder = container.name.as_ref()?;
    let matching = orders.iter().filter(|order| {
        order.pod_uid == container.pod.as_str() && order.container == holder.container
    });
    let most = matching.map(|order| order.process_generation).max()?;
    u64::try_from(most).ok()
}

#[cfg(test)]
mod tests {
    use bursar_crds::context_policy::ContextPolicy;
    use bursar_node::checkpoint_state::{ContainerName, PodName};

    use super::*;

    fn container_in(namespace: Option<&str>) -> BoundContainer {
        let pod = namespace.map(|namespace| PodName {
            namespace: namespace.to_owned(),
            name: "p".to_owned(),
        });
        BoundContainer {
            name: Some(ContainerName {
                container: "c".to_owned(),
                pod,
            }),
            ..BoundContainer::with_ids(1, 1)
        }
    }

    #[test]
    fn policy_is_that_of_the_namespace_or_the_default() {
        let policy = ContextPolicy {
            action: Some(ContextAction::InPlace),
            max_restarts: 9,
            window_seconds: 60,
            grace_seconds: 3,
        };
        let policies = [("here".to_owned(), policy)].into();
        let ordered = RecoveryPolicy::new(ContextAction::InPlace, 9, 60, 3);
        let policy =
            |default, namespace| context_policy(&policies, default, &container_in(namespace));
        for default in ContextAction::DEFAULTS {
            assert_eq!(policy(default, Some("here")), Some(ordered));
            let default_policy = RecoveryPolicy::new(default, 5, 600, 10);
            assert_eq!(policy(default, Some("there")), Some(default_policy));
            assert_eq!(policy(default, None), None);
        }
    }

    #[test]
    fn required_generation_is_the_highest_of_its_orders() {
        let order = |pod: &str, container: &str, process_generation| RestartRequest {
            fault: "f".into(),
            pod_uid: pod.into(),
            container: container.into(),
            process_generation,
        };
        let container = container_in(Some("here"));
        let uid = container.pod.as_str();
        let orders = [
            order(uid, "c", 3),
            order(uid, "c", 5),
            order(uid, "d", 8),
            order("q", "c", 9),
        ];
        assert_eq!(required_generation(&orders, &container), Some(5));
        assert_eq!(required_generation(&orders[2..], &container), None);
    }
}
