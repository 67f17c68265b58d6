//! Adds up the amounts of a pod's containers.

/// Returns a pod's amount as the scheduler and quotas count it: that of its containers and sidecars
/// together, or of the largest init container with the sidecars before it. Each init container
/// comes with whether it is a sidecar, in the pod's order.
///
/// Source: `k8s.io/component-helpers/resource/helpers.go`, `AggregateContainerRequests`.
pub fn pod_total<T: Copy + Default + Ord>(
    init_containers: impl IntoIterator<Item = (bool, T)>,
    containers: impl IntoIterator<Item = T>,
    plus: impl Fn(T, T) -> T,
) -> T {
    let (mut sidecars, mut starting) = (T::default(), T::default());
    for (is_sidecar, amount) in init_containers {
        if is_sidecar {
            sidecars = plus(sidecars, amount);
        } else {
            starting = starting.max(plus(sidecars, amount));
        }
    }
    let running = containers.into_iter().fold(sidecars, plus);
    starting.max(running)
}
