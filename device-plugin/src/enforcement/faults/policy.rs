//! What is done about poisoned contexts of which container: pure.

use bursar_crds::gpu_node::{ContextOrder, RestartOrder};

use crate::node::allocator::BoundContainer;
use crate::sessions::Policy;

/// The policy of a container, by the orders for namespaces. None where its namespace is not known: what it had stands.
pub fn policy(orders: &[ContextOrder], container: &BoundContainer) -> Option<Policy> {
    let namespace = &container.holder.as_ref()?.pod.as_ref()?.namespace;
    let order = orders.iter().find(|order| order.namespace == *namespace);
    Some(order.map_or_else(Policy::default, |order| {
        Policy::new(order.action, order.max_restarts, order.window_seconds)
    }))
}

/// The number that the container's images are ordered to reach; none where no order is about it.
pub fn reach(orders: &[RestartOrder], container: &BoundContainer) -> Option<u64> {
    let holder = container.holder.as_ref()?;
    let of_it = orders.iter().filter(|order| {
        order.pod_uid == container.pod.as_str() && order.container == holder.container
    });
    let most = of_it.map(|order| order.process_generation).max()?;
    u64::try_from(most).ok()
}

#[cfg(test)]
mod tests {
    use bursar_crds::budget::ContextAction;

    use super::*;
    use crate::node::checkpoint_state::{Holder, PodName};

    fn of(namespace: Option<&str>) -> BoundContainer {
        let pod = namespace.map(|namespace| PodName {
            namespace: namespace.to_owned(),
            name: "p".to_owned(),
        });
        BoundContainer {
            holder: Some(Holder {
                container: "c".to_owned(),
                pod,
            }),
            ..BoundContainer::numbered(1, 1)
        }
    }

    #[test]
    fn a_container_has_its_namespaces_policy_and_without_one_is_restarted() {
        let orders = [ContextOrder {
            namespace: "here".to_owned(),
            action: ContextAction::InPlace,
            max_restarts: 9,
            window_seconds: 60,
        }];
        let here = Policy::new(ContextAction::InPlace, 9, 60);
        assert_eq!(policy(&orders, &of(Some("here"))), Some(here));
        let elsewhere = policy(&orders, &of(Some("there"))).unwrap();
        assert_eq!(elsewhere, Policy::default());
        assert_eq!(elsewhere.action, ContextAction::Restart);
        assert_eq!(policy(&orders, &of(None)), None);
    }

    #[test]
    fn of_several_orders_for_a_container_the_furthest_counts_and_others_are_not_its() {
        let order = |pod: &str, container: &str, process_generation| RestartOrder {
            fault: "f".into(),
            pod_uid: pod.into(),
            container: container.into(),
            process_generation,
        };
        let container = of(Some("here"));
        let uid = container.pod.as_str();
        let orders = [
            order(uid, "c", 3),
            order(uid, "c", 5),
            order(uid, "d", 8),
            order("q", "c", 9),
        ];
        assert_eq!(reach(&orders, &container), Some(5));
        assert_eq!(reach(&orders[2..], &container), None);
    }
}
