//! Checks pods of several containers. They get all of their memory or none, and memory left by a
//! container is charged to the next.

use std::time::Instant;

use bursar_e2e::pods::PodBuilder;
use libtest_mimic::{Failed, Trial};

use crate::quota::event_line;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, trial};

const MIB: u64 = 1 << 20;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial(
            "security/cluster/together",
            containers_of_a_pod_start_together,
        ),
        trial(
            "security/cluster/inherited",
            memory_left_by_init_container_is_charged,
        ),
    ]
}

/// Makes a pod of containers that hold 256 MiB each of their requests.
fn pod_of_containers(context: &TrialContext, name: &str, gib: &[u32]) -> PodBuilder {
    let plan = PodBuilder::new(name, &context.environment.probe_image)
        .arguments(&["hold", "--bytes=256Mi"]);
    match gib {
        [first, rest @ ..] => plan.gib(*first).additional_containers(rest),
        [] => plan,
    }
}

async fn containers_of_a_pod_start_together(context: &mut TrialContext) -> Result<(), Failed> {
    let complete = async |context: &TrialContext, name: &str| {
        let created = Instant::now();
        let wanted = "to run all of its containers";
        let pods = &context.pods;
        let state = pods.wait_until(name, wanted, START_TIMEOUT, |state| state.all_running);
        state.await?;
        context.progress.report(format_args!(
            "{name} is complete after {:.1?}",
            created.elapsed()
        ));
        Ok::<_, Failed>(())
    };
    let four = pod_of_containers(context, "four", &[4, 4, 12, 12]);
    context.pods.create(&four).await?;
    complete(context, "four").await?;
    context.clear().await?;
    let pairs = ["pair-a", "pair-b"];
    for name in pairs {
        let pair = pod_of_containers(context, name, &[7, 9]);
        context.pods.create(&pair).await?;
    }
    for name in pairs {
        complete(context, name).await?;
    }
    context.history.check_none_failed_or_restarted().await
}

/// The memory that the init container leaves, in bytes.
const LEFT: u64 = 512 * MIB;

/// Gives a pod an init container that leaves memory.
type Leaving = fn(PodBuilder) -> PodBuilder;

/// The memory is retained on the node, or a sidecar without a GPU holds its descriptor.
const WAYS: [(&str, Leaving); 2] = [
    ("retained", |plan| {
        plan.init_arguments(&["retain", "--bytes=512Mi"])
    }),
    ("exported", |plan| {
        plan.with_empty_dir("/parked")
            .sidecar_arguments(&["park", "--socket=/parked/socket"])
            .init_arguments(&["export", "--bytes=512Mi", "--to=/parked/socket"])
    }),
];

async fn memory_left_by_init_container_is_charged(
    context: &mut TrialContext,
) -> Result<(), Failed> {
    let (pods, probe) = (
        context.pods.clone(),
        context.environment.probe_image.clone(),
    );
    let greedy = |name: &str, gib: u32| {
        let plan = PodBuilder::new(name, &probe);
        plan.arguments(&["greedy", "--chunk=64Mi"]).gib(gib)
    };
    let got = async |plan: PodBuilder| {
        pods.create(&plan).await?;
        let refused = pods
            .wait_for_log_line(plan.name(), START_TIMEOUT, event_line("refused"))
            .await?;
        Ok::<_, Failed>(refused["got"].as_u64().unwrap_or_default())
    };
    for (name, init, main) in [("equal", 4, 4), ("more", 4, 6), ("less", 6, 4)] {
        let alone = got(greedy(&format!("{name}-alone"), main)).await?;
        context.clear().await?;
        for (way, leaves) in WAYS {
            let after = greedy(&format!("{name}-{way}"), main).init_gib(init);
            let after = got(leaves(after)).await?;
            // Each process on the GPU takes a little from what the agent can prove to be held.
            context.clear().await?;
            context.progress.report(format_args!(
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
    context.history.check_none_failed_or_restarted().await
}
