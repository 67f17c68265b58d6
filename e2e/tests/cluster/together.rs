//! Pods of several containers: all of them have their memory or none has, and what one leaves counts against the next.

use std::time::Instant;

use bursar_e2e::pods::PodPlan;
use libtest_mimic::{Failed, Trial};

use crate::quota::event;
use crate::stage::{SOON, Stage, trial};

const MIB: u64 = 1 << 20;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("security/cluster/together", pods_start_whole),
        trial("security/cluster/inherited", what_init_left_counts),
    ]
}

/// A pod of containers that hold 256 MiB each, of what they ask for.
fn several(stage: &Stage, name: &str, gib: &[u32]) -> PodPlan {
    let plan = PodPlan::new(name, &stage.scene.probe).arguments(&["hold", "--bytes=256Mi"]);
    match gib {
        [first, rest @ ..] => plan.gib(*first).beside(rest),
        [] => plan,
    }
}

async fn pods_start_whole(stage: &mut Stage) -> Result<(), Failed> {
    let complete = async |stage: &Stage, name: &str| {
        let created = Instant::now();
        let wanted = "to run all of its containers";
        let pods = &stage.pods;
        let state = pods.until(name, wanted, SOON, |state| state.complete);
        state.await?;
        stage.progress.say(format_args!(
            "{name} is complete after {:.1?}",
            created.elapsed()
        ));
        Ok::<_, Failed>(())
    };
    let four = several(stage, "four", &[4, 4, 12, 12]);
    stage.pods.create(&four).await?;
    complete(stage, "four").await?;
    stage.clear().await?;
    let pairs = ["pair-a", "pair-b"];
    for name in pairs {
        let pair = several(stage, name, &[7, 9]);
        stage.pods.create(&pair).await?;
    }
    for name in pairs {
        complete(stage, name).await?;
    }
    stage.witness.nobody_failed_or_restarted()
}

/// The memory that the init container leaves.
const LEFT: u64 = 512 * MIB;

/// Gives a pod an init container that leaves memory.
type Leaving = fn(PodPlan) -> PodPlan;

/// The node keeps the memory, or a sidecar that asks for no GPU has its descriptor.
const WAYS: [(&str, Leaving); 2] = [
    ("kept", |plan| {
        plan.init_arguments(&["keep", "--bytes=512Mi"])
    }),
    ("exported", |plan| {
        plan.empty_volume("/parked")
            .sidecar_arguments(&["park", "--socket=/parked/socket"])
            .init_arguments(&["export", "--bytes=512Mi", "--to=/parked/socket"])
    }),
];

async fn what_init_left_counts(stage: &mut Stage) -> Result<(), Failed> {
    let (pods, probe) = (stage.pods.clone(), stage.scene.probe.clone());
    let greedy = |name: &str, gib: u32| {
        let plan = PodPlan::new(name, &probe);
        plan.arguments(&["greedy", "--chunk=64Mi"]).gib(gib)
    };
    let got = async |plan: PodPlan| {
        pods.create(&plan).await?;
        let refused = pods
            .until_logged(plan.name(), SOON, event("refused"))
            .await?;
        Ok::<_, Failed>(refused["got"].as_u64().unwrap_or_default())
    };
    for (name, init, main) in [("equal", 4, 4), ("more", 4, 6), ("less", 6, 4)] {
        let alone = got(greedy(&format!("{name}-alone"), main)).await?;
        stage.clear().await?;
        for (way, leaves) in WAYS {
            let after = greedy(&format!("{name}-{way}"), main).init_gib(init);
            let after = got(leaves(after)).await?;
            stage.clear().await?;
            stage.progress.say(format_args!(
                "{init} then {main} GiB: {} MiB alone, {} MiB after {} MiB were {way}",
                alone / MIB,
                after / MIB,
                LEFT / MIB
            ));
            let less = alone.saturating_sub(after);
            assert!(less >= LEFT, "{name}, {way}: it is not charged");
            assert!(less < 2 * LEFT, "{name}, {way}: it is charged twice");
            let both = after + LEFT;
            assert!(both <= u64::from(main) << 30, "{name}, {way}: {both}");
        }
    }
    stage.witness.nobody_failed_or_restarted()
}
