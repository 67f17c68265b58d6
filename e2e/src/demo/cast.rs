//! Who is in the demo: sizes that fit the cluster's GPUs.

use super::{DemoError, NAMESPACES};
use crate::pods::PodPlan;
use crate::scene::Scene;

/// One pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Role {
    pub(super) namespace: &'static str,
    pub(super) name: String,
    pub(super) gib: u32,
    /// It takes until it is refused; others take a quarter of what they asked for, beside their context.
    pub(super) greedy: bool,
}

impl Role {
    pub(super) fn plan(&self, image: &str) -> PodPlan {
        let plan = PodPlan::new(&self.name, image).gib(self.gib);
        if self.greedy {
            return plan.arguments(&["greedy"]);
        }
        let quarter = format!("{}Mi", self.gib * 256);
        plan.arguments(&["hold", "--bytes", &quarter])
    }
}

/// All pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cast {
    /// Those that find room, in order.
    pub(super) running: Vec<Role>,
    /// The one of them that is deleted.
    pub(super) leaves: usize,
    /// The one that finds no GPU with room.
    pub(super) late: Role,
}

impl Cast {
    /// Sizes for the GPUs of `scene`.
    ///
    /// # Errors
    /// When they are too small.
    pub(super) async fn of(scene: &Scene) -> Result<Self, DemoError> {
        let gpus = scene.gpu_sizes().await?;
        Self::for_gpus(&gpus).ok_or_else(|| DemoError::TooSmall(format!("{gpus:?} GiB")))
    }

    /// On each GPU a pod of 5/8 of it, then one of 3/16 and one of 1/16: no GPU has half of the
    /// largest free then, but all together have.
    fn for_gpus(gpus: &[u32]) -> Option<Self> {
        let gib = *gpus.first()?;
        if gib < 8 {
            return None;
        }
        let role = |namespace, name: &str, gib: u32, greedy| Role {
            namespace,
            name: name.to_owned(),
            gib: gib.max(1),
            greedy,
        };
        let team = |number: usize| NAMESPACES[number % NAMESPACES.len()];
        let big = |(number, gpu): (usize, &u32)| {
            role(
                team(number),
                &format!("train-{}", number + 1),
                gpu * 5 / 8,
                number == 1,
            )
        };
        let mut running: Vec<Role> = gpus.iter().enumerate().map(big).collect();
        running.push(role(team(0), "infer-1", gib * 3 / 16, false));
        running.push(role(team(1), "infer-2", gib / 16, gpus.len() == 1));
        Some(Self {
            running,
            leaves: 0,
            late: role(team(1), "late", gib.div_ceil(2), false),
        })
    }

    /// What each namespace may use: what its pods ask for.
    pub(super) fn budgets(&self) -> Vec<(&'static str, u32)> {
        let all = || self.running.iter().chain([&self.late]);
        let sum = |namespace| {
            all()
                .filter(|role| role.namespace == namespace)
                .map(|role| role.gib)
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
    fn the_late_one_fits_the_node_but_no_gpu_until_a_big_one_leaves() {
        for gib in 8..200 {
            let cast = Cast::for_gpus(&[gib, gib]).unwrap();
            let big = cast.running[cast.leaves].gib;
            let asked: u32 = cast.running.iter().map(|role| role.gib).sum();
            assert!(
                2 * gib - asked >= cast.late.gib,
                "the node has room of {gib}"
            );
            assert!(gib - big < cast.late.gib, "no GPU of {gib} has room");
            let small = asked - 2 * big;
            assert!(
                gib - small >= cast.late.gib,
                "the freed GPU of {gib} has room, with both small ones on it"
            );
        }
    }

    #[test]
    fn one_gpu_is_enough() {
        let cast = Cast::for_gpus(&[16]).unwrap();
        let used: u32 = cast.running.iter().map(|role| role.gib).sum();
        assert!(used <= 16 && 16 - used < cast.late.gib);
        assert_eq!(cast.running.iter().filter(|role| role.greedy).count(), 1);
        assert_eq!(Cast::for_gpus(&[4]), None);
    }
}
