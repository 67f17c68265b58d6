//! Checks every shape of pod on a kubelet: init containers, sidecars, several containers and
//! several GPUs. Each container gets its request, and no pod waits for memory that the node has.

use std::time::Duration;

use bursar_e2e::pods::{PodBuilder, Pods, Role};
use bursar_e2e::wait::{self, Poll};
use k8s_openapi::api::core::v1::ResourceQuota;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams};
use libtest_mimic::{Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::budget_enforcement::{TEAMS, cleared, create_team};
use crate::quota::event_line;
use crate::restarts::kill_agent;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial, trial};
use crate::status;

const GIB: u64 = 1 << 30;
const PAUSE: Duration = Duration::from_millis(200);
/// The annotation for the least number of GPUs.
const GPUS: &str = "bursar.dev/gpus";
/// The arguments of a container that runs as long as its pod.
const HOLD: &[&str] = &["hold", "--bytes=256Mi"];
/// The arguments of a container that ends at once.
const ONCE: &[&str] = &["hold", "--bytes=256Mi", "--then=exit"];
/// The arguments of a sidecar that ends, but not before the kubelet sees it run. Only then the
/// kubelet starts the next container.
const BRIEFLY: &[&str] = &["hold", "--bytes=256Mi", "--then=linger"];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("pods/cluster/init", init_containers_lend_their_memory),
        trial("pods/cluster/sidecars", sidecars_keep_their_memory),
        trial("pods/cluster/gpus", containers_are_spread_over_gpus),
        trial("pods/cluster/budget", async |context| {
            cleared(context, budget_counts_a_pod_as_the_scheduler_does).await
        }),
        node_trial("pods/cluster/restarts", async |context| {
            containers_restart_apart(context, [1, 1, 2, 1]).await
        }),
        node_trial("pods/cluster/restarts-long", async |context| {
            containers_restart_apart(context, [2, 2, 3, 2]).await
        }),
    ]
}

/// A pod, and the GPU memory of its containers by their names.
struct Shape {
    plan: PodBuilder,
    gib: Vec<(&'static str, u32)>,
}

/// Starts a shape with a main container that holds memory.
fn shape(context: &TrialContext, name: &str, main: impl Into<Option<u32>>) -> Shape {
    let plan = PodBuilder::new(name, &context.environment.probe_image).arguments(HOLD);
    match main.into() {
        Some(gib) => Shape {
            plan: plan.gib(gib),
            gib: vec![("main", gib)],
        },
        None => Shape {
            plan: plan
                .with_empty_dir("/parked")
                .arguments(&["park", "--socket=/parked/socket"]),
            gib: Vec::new(),
        },
    }
}

impl Shape {
    fn container(mut self, role: Role, name: &'static str, gib: u32) -> Self {
        let arguments = if role == Role::Init { ONCE } else { HOLD };
        self.plan = self.plan.container(role, name, gib, arguments);
        self.gib.push((name, gib));
        self
    }

    fn init(self, name: &'static str, gib: u32) -> Self {
        self.container(Role::Init, name, gib)
    }

    fn sidecar(self, name: &'static str, gib: u32) -> Self {
        self.container(Role::Sidecar, name, gib)
    }

    fn beside(self, name: &'static str, gib: u32) -> Self {
        self.container(Role::Beside, name, gib)
    }
}

/// Creates the pods at once, which together have room on one GPU, so that the order of their starts
/// does not matter. Checks that none waits, and that each container sees its request.
async fn run_together(context: &TrialContext, pods: &Pods, shapes: &[Shape]) -> Result<(), Failed> {
    for shape in shapes {
        pods.create(&shape.plan).await?;
    }
    for Shape { plan, gib } in shapes {
        let name = plan.name();
        let all = "to run all of its containers";
        let complete = pods.wait_until(name, all, START_TIMEOUT, |state| state.all_running);
        complete.await?;
        for (container, gib) in gib {
            let holding = event_line("holding");
            let holding = pods.wait_for_container_log_line(name, container, START_TIMEOUT, holding);
            let holding = holding.await?;
            let total = holding["device"]["total"].as_u64();
            assert_eq!(
                total,
                Some(u64::from(*gib) * GIB),
                "{name}/{container}: {holding}"
            );
        }
    }
    let waited = status::events(context, "WaitingForGpuMemory").await?;
    let is_ours = |name: Option<&str>| shapes.iter().any(|shape| Some(shape.plan.name()) == name);
    let waited: Vec<_> = waited
        .iter()
        .filter(|event| is_ours(status::pod_of(event)))
        .map(|event| (status::pod_of(event), &event.note))
        .collect();
    assert!(waited.is_empty(), "pods waited: {waited:?}");
    Ok(())
}

async fn init_containers_lend_their_memory(context: &mut TrialContext) -> Result<(), Failed> {
    let shapes = [
        shape(context, "init-equal", 3).init("init", 3),
        shape(context, "init-larger", 2).init("init", 5),
        shape(context, "init-smaller", 3).init("init", 1),
        shape(context, "init-several", 2)
            .init("first", 1)
            .init("second", 3)
            .beside("beside", 2),
    ];
    run_together(context, &context.pods.clone(), &shapes).await?;
    context.clear().await?;
    let shapes = [
        shape(context, "init-alone", None).init("init", 6),
        shape(context, "init-without", 5),
        shape(context, "init-two", 2)
            .init("first", 3)
            .init("second", 3),
    ];
    run_together(context, &context.pods.clone(), &shapes).await?;
    context.history.check_none_failed_or_restarted().await
}

async fn sidecars_keep_their_memory(context: &mut TrialContext) -> Result<(), Failed> {
    let shapes = [
        shape(context, "sidecar-plain", 2).sidecar("sidecar", 1),
        shape(context, "sidecar-first", 2)
            .sidecar("sidecar", 1)
            .init("init", 3),
        shape(context, "sidecar-last", 2)
            .init("init", 3)
            .sidecar("sidecar", 1),
        shape(context, "sidecar-two", 1)
            .sidecar("one", 1)
            .init("init", 2)
            .sidecar("two", 1)
            .beside("beside", 1),
    ];
    run_together(context, &context.pods.clone(), &shapes).await?;
    context.history.check_none_failed_or_restarted().await
}

/// Returns the sizes of the devices that a pod's container sees, in GiB.
fn sizes(report: &Value) -> Vec<u64> {
    let devices = report["devices"].as_array().into_iter().flatten();
    let totals = devices.filter_map(|device| device["total"].as_u64());
    totals.map(|total| total / GIB).collect()
}

async fn containers_are_spread_over_gpus(context: &mut TrialContext) -> Result<(), Failed> {
    let pods = context.pods.clone();
    let probe = context.environment.probe_image.clone();
    let spread = |name: &str, gib: u32| {
        let plan = PodBuilder::new(name, &probe);
        plan.arguments(HOLD).gib(gib)
    };
    let reports: &[&str] = &["report"];
    let shapes = [
        (spread("two-by-size", 20), vec![10, 10]),
        (spread("two-by-name", 4).annotation(GPUS, "2"), vec![2, 2]),
        (
            spread("two-and-init", 4)
                .annotation(GPUS, "2")
                .container(Role::Init, "init", 4, reports)
                .container(Role::Beside, "beside", 4, HOLD),
            vec![2, 2],
        ),
    ];
    for (plan, sees) in &shapes {
        let name = plan.name();
        pods.create(plan).await?;
        let all = "to run all of its containers";
        pods.wait_until(name, all, START_TIMEOUT, |state| state.all_running)
            .await?;
        let report = context.exec(name, &["report"]).await?;
        let report = report.lines().find_map(event_line("report"));
        let report = report.ok_or("the probe reports nothing")?;
        assert_eq!(&sizes(&report), sees, "{name}: {report}");
        // Both devices work, each up to its part of the quota.
        let second = ["hold", "--bytes=128Mi", "--device=1", "--then=exit"];
        let held = context.exec(name, &second).await?;
        assert!(held.contains("\"holding\""), "{name}: {held}");
    }
    let init = pods.wait_for_container_log_line(
        "two-and-init",
        "init",
        START_TIMEOUT,
        event_line("report"),
    );
    assert_eq!(sizes(&init.await?), [2, 2]);
    let waited = status::events(context, "WaitingForGpuMemory").await?;
    let waited = waited.iter().filter_map(status::pod_of);
    let waited: Vec<_> = waited.filter(|name| name.starts_with("two-")).collect();
    assert!(waited.is_empty(), "pods waited: {waited:?}");
    context.clear().await?;

    // 20 GiB are free, and 10 of them on one GPU only.
    pods.create(&spread("in-the-way", 10)).await?;
    pods.wait_until_running("in-the-way", START_TIMEOUT).await?;
    pods.create(&spread("two-later", 20)).await?;
    let waits = status::wait_for_event(context, "two-later", "WaitingForGpuMemory", "20 GiB");
    let (_, note) = waits.await?;
    context
        .progress
        .report(format_args!("the 20 waits: {note}"));
    pods.delete("in-the-way").await?;
    pods.wait_until_running("two-later", START_TIMEOUT).await?;
    context.history.check_none_failed_or_restarted().await
}

async fn budget_counts_a_pod_as_the_scheduler_does(
    context: &mut TrialContext,
) -> Result<(), Failed> {
    let client = context.environment.cluster.client();
    let spec = json!({ "deviceMemory": { "guaranteed": "16Gi" } });
    let pods = create_team(&client, TEAMS[0], spec).await?;
    let shapes = [
        shape(context, "budget-init", 4)
            .init("init", 8)
            .beside("beside", 4),
        shape(context, "budget-sidecar", 4)
            .sidecar("sidecar", 2)
            .init("init", 6),
    ];
    run_together(context, &pods, &shapes).await?;
    let quotas: Api<ResourceQuota> = Api::namespaced(client, TEAMS[0]);
    let used = async || match quotas.list(&ListParams::default()).await {
        Ok(list) => {
            let used = list.items.iter().filter_map(|quota| {
                let used = quota.status.as_ref()?.used.as_ref()?;
                let amounts = used.iter().filter(|(name, _)| name.contains("gpu-memory"));
                Some((
                    quota.name_any(),
                    amounts.map(|(_, amount)| amount.0.clone()).collect(),
                ))
            });
            let used: Vec<(String, Vec<String>)> = used.collect();
            match used
                .iter()
                .any(|(_, amounts)| amounts.iter().any(|amount| amount == "16"))
            {
                true => Poll::Ready(()),
                false => Poll::Pending(format!("{used:?}")),
            }
        }
        Err(error) => Poll::Pending(error.to_string()),
    };
    wait::poll_until("the quota to count 16 GiB", START_TIMEOUT, PAUSE, used).await?;
    let beyond = shape(context, "budget-beyond", 1);
    let refused = pods.create(&beyond.plan).await;
    let refused = refused.err().ok_or("a pod beyond the budget is admitted")?;
    assert!(refused.to_string().contains("exceeded quota"), "{refused}");
    Ok(())
}

/// Waits until each of these containers has started so many more times.
async fn wait_for_starts(
    context: &TrialContext,
    pod: &str,
    containers: &[&str],
    more: usize,
) -> Result<(), Failed> {
    let starts = |container: &str| {
        let records = context.history.records();
        let record = records.iter().find(|record| record.name == pod);
        record.and_then(|record| Some(record.containers.get(container)?.len()))
    };
    let all = || -> Vec<usize> {
        let starts = containers.iter().map(|name| starts(name));
        starts.map(Option::unwrap_or_default).collect()
    };
    let before = all();
    let poll = async || {
        let now = all();
        let mut each = now.iter().zip(&before);
        match each.all(|(now, before)| *now >= before + more) {
            true => Poll::Ready(()),
            false => Poll::Pending(format!("{now:?} after {before:?}")),
        }
    };
    let what = format!("{containers:?} of {pod} to start {more} more times");
    Ok(wait::poll_until(&what, START_TIMEOUT, PAUSE, poll).await?)
}

/// Kills the process that holds the namespaces of the pod. The kubelet then starts all containers
/// in a new sandbox, init containers too.
fn kill_sandbox(context: &mut TrialContext, uid: &str) -> Result<(), Failed> {
    let pauses = context.local()?.processes_named("pause").into_iter();
    let is_of_pod = |pid: &i32| {
        std::fs::read_to_string(format!("/proc/{pid}/cgroup"))
            .is_ok_and(|cgroups| cgroups.contains(uid))
    };
    let pauses: Vec<i32> = pauses.filter(is_of_pod).collect();
    let [pause] = pauses[..] else {
        return Err(format!("pause processes of the pod: {pauses:?}").into());
    };
    let pid = Pid::from_raw(pause).ok_or("no pid")?;
    Ok(kill_process(pid, Signal::KILL)?)
}

/// Checks that bindings stay while containers restart so many times. They restart before the
/// bindings are read, by themselves, after a kill of the agent and after one of the sandbox.
async fn containers_restart_apart(
    context: &mut TrialContext,
    [before, alone, after_agent, after_sandbox]: [usize; 4],
) -> Result<(), Failed> {
    let plan = PodBuilder::new("apart", &context.environment.probe_image)
        .restart_always()
        .arguments(HOLD)
        .gib(4)
        .container(Role::Sidecar, "sidecar", 2, BRIEFLY)
        .container(Role::Init, "init", 6, ONCE)
        .container(Role::Beside, "often", 3, ONCE)
        .container(Role::Beside, "steady", 2, HOLD);
    let pods = context.pods.clone();
    pods.create(&plan).await?;
    wait_for_starts(context, "apart", &["main", "steady"], 1).await?;
    let restarting = ["sidecar", "often"];
    wait_for_starts(context, "apart", &restarting, before).await?;
    let bindings = context.node_files()?.cdi_files()?;
    wait_for_starts(context, "apart", &restarting, alone).await?;
    kill_agent(context)?;
    wait_for_starts(context, "apart", &restarting, after_agent).await?;
    let once = |record: &crate::pod_history::PodRecord| {
        ["main", "steady", "init"].map(|name| record.containers.get(name).map(|ids| ids.len()))
    };
    let starts: Vec<_> = context.history.records().iter().map(once).collect();
    assert_eq!(starts, [[Some(1); 3]], "steady containers restarted");
    assert_eq!(bindings, context.node_files()?.cdi_files()?, "bindings");

    let uid = pods.get("apart").await?.uid().unwrap_or_default();
    kill_sandbox(context, &uid)?;
    wait_for_starts(context, "apart", &["main", "init", "steady"], 1).await?;
    wait_for_starts(context, "apart", &restarting, after_sandbox).await?;
    let after = context.node_files()?.cdi_files()?;
    assert_eq!(bindings, after, "bindings after");
    let failed: Vec<_> = context
        .history
        .records()
        .into_iter()
        .filter_map(|record| record.failed)
        .collect();
    assert!(failed.is_empty(), "{failed:?}");
    Ok(())
}
