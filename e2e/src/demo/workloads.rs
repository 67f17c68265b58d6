//! Chooses the demo's workloads by the sizes of the cluster's GPUs.

use super::{DemoError, NAMESPACES};
use crate::environment::Environment;
use crate::pods::PodBuilder;

/// One pod of the demo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) namespace: &'static str,
    pub(super) name: String,
    pub(super) gib: u32,
    /// Whether the pod allocates until the shim refuses. Others allocate a quarter of their
    /// request, beside their context.
    pub(super) fills_quota: bool,
}

impl Workload {
    pub(super) fn pod(&self, image: &str) -> PodBuilder {
        let plan = PodBuilder::new(&self.name, image).gib(self.gib);
        if self.fills_quota {
            return plan.arguments(&["greedy"]);
        }
        let quarter = format!("{}Mi", self.gib * 256);
        plan.arguments(&["hold", "--bytes", &quarter])
    }
}

/// All pods of the demo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Workloads {
    /// The pods that find room, in order of creation.
    pub(super) initial: Vec<Workload>,
    /// The index of the pod that the demo deletes.
    pub(super) deleted: usize,
    /// The pod that waits, because no GPU has room for it.
    pub(super) pending: Workload,
}

impl Workloads {
    /// Chooses workloads for the GPUs of the environment.
    ///
    /// # Errors
    /// When the GPUs are too small.
    pub(super) async fn for_environment(environment: &Environment) -> Result<Self, DemoError> {
        let gpus = environment.gpu_sizes_in_quanta().await?;
        Self::for_gpus(&gpus).ok_or_else(|| DemoError::TooSmall(format!("{gpus:?} GiB")))
    }

    /// Sizes the pods: 5/8 on each GPU, then 3/16 and 1/16. No GPU then has half of the largest one
    /// free, although the node has as much in total.
    fn for_gpus(gpus: &[u32]) -> Option<Self> {
        let gib = *gpus.first()?;
        if gib < 8 {
            return None;
        }
        let workload = |namespace, name: &str, gib: u32, greedy| Workload {
            namespace,
            name: name.to_owned(),
            gib: gib.max(1),
            fills_quota: greedy,
        };
        let team = |number: usize| NAMESPACES[number % NAMESPACES.len()];
        let big = |(number, gpu): (usize, &u32)| {
            workload(
                team(number),
                &format!("train-{}", number + 1),
                gpu * 5 / 8,
                number == 1,
            )
        };
        let mut running: Vec<Workload> = gpus.iter().enumerate().map(big).collect();
        running.push(workload(team(0), "infer-1", gib * 3 / 16, false));
        running.push(workload(team(1), "infer-2", gib / 16, gpus.len() == 1));
        Some(Self {
            initial: running,
            deleted: 0,
            pending: workload(team(1), "late", gib.div_ceil(2), false),
        })
    }

    /// Returns each namespace's budget, the sum of its pods' requests.
    pub(super) fn budgets(&self) -> Vec<(&'static str, u32)> {
        let all = || self.initial.iter().chain([&self.pending]);
        let sum = |namespace| {
            all()
                .filter(|workload| workload.namespace == namespace)
                .map(|workload| workload.gib)
                .sum()
        };
        NAMESPACES
            .map(|namespace| (namespace, sum(namespace)))
            .to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pending_pod_fits_no_gpu_until_a_large_pod_is_deleted() {
        for gib in 8..200 {
            let workloads = Workloads::for_gpus(&[gib, gib]).unwrap();
            let big = workloads.initial[workloads.deleted].gib;
            let asked: u32 = workloads.initial.iter().map(|workload| workload.gib).sum();
            assert!(
                2 * gib - asked >= workloads.pending.gib,
                "the node has room of {gib}"
            );
            assert!(
                gib - big < workloads.pending.gib,
                "no GPU of {gib} has room"
            );
            let small = asked - 2 * big;
            assert!(
                gib - small >= workloads.pending.gib,
                "the freed GPU of {gib} has room, with both small ones on it"
            );
        }
    }

    #[test]
    fn workloads_fit_a_single_gpu() {
        let workloads = Workloads::for_gpus(&[16]).unwrap();
        let used: u32 = workloads.initial.iter().map(|workload| workload.gib).sum();
        assert!(used <= 16 && 16 - used < workloads.pending.gib);
        assert_eq!(
            workloads
                .initial
                .iter()
                .filter(|workload| workload.fills_quota)
                .count(),
            1
        );
        assert_eq!(Workloads::for_gpus(&[4]), None);
    }
}
