//! Runs version 0.1.0 beside today's: installations one over the other, and each part with parts of
//! the other version, as a roll-out of hours or a rollback has them.
//!
//! The fd store and the relay stay those of 0.1.0 throughout, because an upgrade replaces neither.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bursar_e2e::artifacts::Artifacts;
use bursar_e2e::chart::{NAMESPACE, RELEASE};
use bursar_e2e::environment::Environment;
use bursar_e2e::pods::{PodBuilder, Pods};
use bursar_e2e::progress::Progress;
use bursar_e2e::versions;
use bursar_e2e::workspace::Profile;
use futures::future::try_join_all;
use libtest_mimic::Failed;
use serde_json::Value;

use crate::cluster_state::call;
use crate::shared_cluster::NAMESPACE as TRIALS;
use crate::upgrade::{Fixture, HOLDER, KEEPER, TIMEOUT, create_budget};

/// The changes of one part to the other version.
const SWAPS: usize = 20;
/// The pods that come and go at once.
const AT_ONCE: usize = 3;
/// A pod that retains memory by the runtime of 0.1.0. [`KEEPER`] has today's.
const EARLIER_KEEPER: &str = "earlier-keeper";

/// The cluster, the commands of both versions, and the leases that must stay.
struct Versions<'a> {
    fixture: Fixture<'a>,
    commands: [&'a Path; 2],
    leases: Vec<(&'static str, Value)>,
}

pub(crate) async fn run_beside_today(progress: &Progress) -> Result<(), Failed> {
    let today = Artifacts::from_workspace(Profile::Dev, crate::harness(), progress)?;
    let first = versions::first(&today, progress)?;
    let environment = Environment::without_bursar(&today, "versions", progress).await?;
    let pods = Pods::in_namespace(&environment.cluster.client(), TRIALS).await?;
    let fixture = Fixture::of(&environment, &today, &pods, progress)?;
    for image in first.artifacts.images.values() {
        fixture.local.import_image(&image.path).await?;
    }
    environment
        .install_bursar(&first.artifacts, progress)
        .await?;
    create_budget(&environment.cluster.client(), "24Gi").await?;
    let earlier_probe = first.artifacts.image_template.reference("probe");
    fixture.start(&pods, HOLDER, &earlier_probe).await?;
    fixture.start(&pods, EARLIER_KEEPER, &earlier_probe).await?;
    fixture
        .start(&pods, KEEPER, &environment.probe_image)
        .await?;
    let mut leases = Vec::new();
    for keeper in [EARLIER_KEEPER, KEEPER] {
        let lease = fixture.retained_lease(keeper).await?;
        assert_eq!(lease["found"], true, "{lease}");
        leases.push((keeper, lease));
    }
    let command = crate::harness().with_file_name("kubectl-bursar");
    let versions = Versions {
        fixture,
        commands: [&command, &first.command],
        leases,
    };
    versions.check("installation").await?;
    environment.install_bursar(&today, progress).await?;
    versions.check("upgrade").await?;
    versions.fixture.helm(&["rollback", RELEASE]).await?;
    versions.check("rollback").await?;
    environment.install_bursar(&today, progress).await?;
    versions.check("second upgrade").await?;

    let is_over = AtomicBool::new(false);
    let swap = async {
        let swapped = versions.swap(&today, &first.artifacts).await;
        is_over.store(true, Ordering::Relaxed);
        swapped
    };
    let probes = [&environment.probe_image, &earlier_probe];
    let load = (0..AT_ONCE).map(|at| come_and_go(at, &pods, probes[at % 2], &is_over));
    let (cycles, ()) = tokio::try_join!(try_join_all(load), swap)?;
    let cycles = cycles.iter().sum::<usize>();
    progress.report(format_args!(
        "{cycles} pods came and went beside {SWAPS} changes"
    ));
    assert!(cycles >= SWAPS, "too little load: {cycles} pods");
    versions.check("changes").await?;

    versions.fixture.helm(&["uninstall", RELEASE]).await?;
    let history = &versions.fixture.history;
    history.check_none_failed_or_restarted().await
}

impl Versions<'_> {
    /// Changes agent and operator by turns: each version of one runs with each of the other.
    async fn swap(&self, today: &Artifacts, first: &Artifacts) -> Result<(), Failed> {
        let parts = [
            ("daemonset/bursar-agent", "agent"),
            ("deployment/bursar-operator", "operator"),
        ];
        for swap in 0..SWAPS {
            let (workload, part) = parts[swap % 2];
            let version = [first, today][swap / 2 % 2];
            let image = format!("{part}={}", version.image_template.reference(part));
            let begin = Instant::now();
            let set = ["set", "image", workload, &image, "--namespace", NAMESPACE];
            let fixture = &self.fixture;
            call(&fixture.kubectl, &set, &fixture.kubeconfig).await?;
            self.check(&format!("change to {image}")).await?;
            let took = begin.elapsed();
            fixture
                .progress
                .report(format_args!("{took:.1?} for change {swap}, to {image}"));
        }
        Ok(())
    }

    /// Checks that all parts run, that no pod failed, that quotas hold, that no lease is lost, and
    /// that both versions of the command show the holder.
    async fn check(&self, step: &str) -> Result<(), Failed> {
        self.fixture.wait_for_rollouts(step).await?;
        self.fixture.check_pods().await?;
        for (keeper, lease) in &self.leases {
            let now = self.fixture.retained_lease(keeper).await?;
            assert_eq!(now, *lease, "{keeper} after the {step}");
        }
        for command in self.commands {
            for (subcommand, part) in [("top", HOLDER), ("gpus", "node-1"), ("budgets", "24")] {
                let arguments = [subcommand, "--namespace", TRIALS];
                let shown = call(command, &arguments, &self.fixture.kubeconfig).await?;
                assert!(
                    shown.contains(part),
                    "{subcommand} after the {step}: {shown}"
                );
            }
        }
        Ok(())
    }
}

/// Starts pods and deletes them once they hold memory, until it is over. Returns their number.
async fn come_and_go(
    at: usize,
    pods: &Pods,
    probe: &str,
    is_over: &AtomicBool,
) -> Result<usize, Failed> {
    let mut cycles = 0;
    while !is_over.load(Ordering::Relaxed) {
        let name = format!("load-{at}-{cycles}");
        let plan = PodBuilder::new(&name, probe)
            .arguments(&["hold", "--bytes=256Mi"])
            .gib(2);
        pods.create(&plan).await?;
        pods.wait_until_running(&name, TIMEOUT).await?;
        tokio::time::sleep(Duration::from_millis(500)).await;
        pods.delete(&name).await?;
        pods.wait_until_deleted(&name, TIMEOUT).await?;
        cycles += 1;
    }
    Ok(cycles)
}
