//! Chooses the demo's workloads by the sizes of the cluster's GPUs.

use bursar_crds::resources::BORROWED_PRIORITY_CLASS;

use super::{DemoError, NAMESPACES};
use crate::environment::Environment;
use crate::pods::PodBuilder;

/// One pod of the demo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) namespace: &'static str,
    pub(super) name: String,
    pub(super) gib: u32,
    pub(super) program: Program,
}

/// The work of the probe in a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Program {
    /// Allocates a quarter of the request, beside the context.
    TakesAQuarter,
    /// Allocates until the shim refuses.
    FillsQuota,
    /// Allocates a quarter of the request in a pod that borrows.
    Borrows,
    /// Faults once, and finds its retained memory afterwards.
    Faults,
}

/// The amount of memory that [`Program::Faults`] retains.
pub(super) const RETAINED: &str = "64Mi";

impl Workload {
    pub(super) fn pod(&self, image: &str) -> PodBuilder {
        let plan = PodBuilder::new(&self.name, image).gib(self.gib);
        let quarter = format!("{}Mi", self.gib * 256);
        let holding = ["hold", "--bytes", &quarter];
        match self.program {
            Program::TakesAQuarter => plan.arguments(&holding),
            Program::FillsQuota => plan.arguments(&["greedy"]),
            Program::Borrows => plan
                .arguments(&holding)
                .priority_class(BORROWED_PRIORITY_CLASS),
            Program::Faults => plan
                .arguments(&[
                    "fault",
                    "--times=1",
                    "--file=/count/faults",
                    "--bytes",
                    &quarter,
                    "--retain",
                    RETAINED,
                ])
                .with_empty_dir("/count"),
        }
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
    /// The pods that borrow every GPU, after the others have ended.
    pub(super) borrowers: Vec<Workload>,
    /// The pod within its team's guarantee that needs memory of a borrower.
    pub(super) owner: Workload,
    /// The pod whose program faults.
    pub(super) faulting: Workload,
    /// The memory of all GPUs in GiB.
    pub(super) total: u32,
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
        let workload = |namespace, name: &str, gib: u32, program| Workload {
            namespace,
            name: name.to_owned(),
            gib: gib.max(1),
            program,
        };
        let fills_quota = |yes| match yes {
            true => Program::FillsQuota,
            false => Program::TakesAQuarter,
        };
        let team = |number: usize| NAMESPACES[number % NAMESPACES.len()];
        let big = |(number, gpu): (usize, &u32)| {
            workload(
                team(number),
                &format!("train-{}", number + 1),
                gpu * 5 / 8,
                fills_quota(number == 1),
            )
        };
        let mut running: Vec<Workload> = gpus.iter().enumerate().map(big).collect();
        let quarter = Program::TakesAQuarter;
        running.push(workload(team(0), "infer-1", gib * 3 / 16, quarter));
        let last = fills_quota(gpus.len() == 1);
        running.push(workload(team(1), "infer-2", gib / 16, last));
        let borrower = |(number, gpu): (usize, &u32)| {
            let name = format!("batch-{}", number + 1);
            workload(team(1), &name, *gpu, Program::Borrows)
        };
        Some(Self {
            initial: running,
            deleted: 0,
            pending: workload(team(1), "late", gib.div_ceil(2), quarter),
            borrowers: gpus.iter().enumerate().map(borrower).collect(),
            owner: workload(team(0), "owner", gib * 5 / 8, quarter),
            faulting: workload(team(0), "serve", gib / 8, Program::Faults),
            total: gpus.iter().sum(),
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
            let requested: u32 = workloads.initial.iter().map(|workload| workload.gib).sum();
            assert!(
                2 * gib - requested >= workloads.pending.gib,
                "the node has room of {gib}"
            );
            assert!(
                gib - big < workloads.pending.gib,
                "no GPU of {gib} has room"
            );
            let small = requested - 2 * big;
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
                .filter(|workload| workload.program == Program::FillsQuota)
                .count(),
            1
        );
        assert_eq!(Workloads::for_gpus(&[4]), None);
    }

    #[test]
    fn owner_needs_a_borrower_and_fits_its_guarantee() {
        for gpus in [&[16][..], &[8, 8], &[79; 8], &[80, 24]] {
            let workloads = Workloads::for_gpus(gpus).unwrap();
            let lent: u32 = workloads
                .borrowers
                .iter()
                .map(|borrower| borrower.gib)
                .sum();
            assert_eq!(lent, workloads.total, "every GPU is lent: {gpus:?}");
            let (owner, faulting) = (&workloads.owner, &workloads.faulting);
            let budgets = workloads.budgets();
            let of_team = budgets.iter().find(|(team, _)| *team == owner.namespace);
            let own = owner.gib + faulting.gib;
            assert!(of_team.is_some_and(|(_, gib)| own <= *gib), "{gpus:?}");
            assert!(
                gpus.iter().all(|gpu| own <= *gpu || gpu < &gpus[0]),
                "{gpus:?}"
            );
        }
    }
}
