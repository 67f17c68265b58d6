//! A pod whose main process faults again and again: executed again in its place, or restarted by the kubelet, and finds the
//! memory that its first image had kept.

use std::time::Duration;

use bursar_crds::gpu_node::ContextOrder;
use bursar_crds::{GpuMemoryBudget, GpuNode};
use bursar_e2e::pods::PodPlan;
use bursar_e2e::wait::{self, Look};
use jiff::Timestamp;
use kube::api::{Api, DeleteParams, PostParams};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::quota::event;
use crate::stage::{NAMESPACE, SOON, Stage, trial};
use crate::told;

/// The metric with P of the container's last image.
const GENERATION: &str = "bursar_container_generation";
const POISONED: &str = "GpuContextPoisoned";
/// How often the main process faults in a row.
const IN_PLACE: u32 = 5;
/// The kubelet waits 10, 20, 40 s ... between restarts.
const RESTARTS: u32 = 4;
/// How long those take together, on a loaded machine.
const BACK_OFF: Duration = Duration::from_secs(180);
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("runtime/cluster/poison", poison)]
}

async fn poison(stage: &mut Stage) -> Result<(), Failed> {
    let budgets: Api<GpuMemoryBudget> = Api::namespaced(stage.scene.cluster.client(), NAMESPACE);
    let budget = |action: &str| -> Result<GpuMemoryBudget, Failed> {
        Ok(serde_json::from_value(json!({
            "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
            "metadata": { "name": "default" },
            "spec": {
                "deviceMemory": { "guaranteed": "24Gi" },
                "contextPolicy": { "action": action, "maxRestarts": 10 },
            },
        }))?)
    };
    budgets
        .create(&PostParams::default(), &budget("InPlace")?)
        .await?;
    let outcome = async {
        until_ordered(stage, |orders| !orders.is_empty()).await?;
        in_place(stage).await
    }
    .await;
    budgets.delete("default", &DeleteParams::default()).await?;
    outcome?;
    // Without a budget the container is restarted.
    until_ordered(stage, <[_]>::is_empty).await?;
    restarted(stage).await
}

/// Waits until every node has such orders about poisoned contexts.
async fn until_ordered(
    stage: &Stage,
    wanted: impl Fn(&[ContextOrder]) -> bool,
) -> Result<(), Failed> {
    let nodes: Api<GpuNode> = Api::all(stage.scene.cluster.client());
    let look = async || match nodes.list(&Default::default()).await {
        Ok(list) if list.iter().all(|node| wanted(&node.spec.context_policies)) => Look::Found(()),
        Ok(list) => Look::NotYet(format!("{:?}", list.items)),
        Err(error) => Look::NotYet(error.to_string()),
    };
    Ok(wait::until("the orders on the nodes", SOON, PAUSE, look).await?)
}

fn plan(stage: &Stage, name: &str, times: u32) -> PodPlan {
    let times = format!("--times={times}");
    PodPlan::new(name, &stage.scene.probe)
        .arguments(&["fault", &times, "--file=/count/faults", "--keep=64Mi"])
        .empty_volume("/count")
        .restarts()
        .gib(4)
}

/// What a program says of the memory that its first image kept, if that is right: every other found it, as it was.
fn found_what_was_kept(starts: &[Value]) -> Result<(), Failed> {
    let same = |start: &Value| {
        ["lease", "generation", "checksum"].map(|field| start["kept"][field].clone())
    };
    let right = starts.iter().enumerate().all(|(image, start)| {
        start["kept"]["found"] == (image > 0) && same(start) == same(&starts[0])
    });
    right
        .then_some(())
        .ok_or_else(|| format!("kept memory: {starts:?}").into())
}

async fn in_place(stage: &Stage) -> Result<(), Failed> {
    const POD: &str = "in-place";
    let pods = &stage.pods;
    pods.create(&plan(stage, POD, IN_PLACE)).await?;
    let steady = pods.until_logged(POD, SOON, event("steady")).await?;
    assert_eq!(steady["faults"], IN_PLACE);
    let node = pods.node(POD).await?;
    assert_eq!(pods.state(POD).await?.restarts, 0);
    let log = pods.log(POD).await?;
    let starts: Vec<Value> = log.lines().filter_map(event("started")).collect();
    assert_eq!(starts.len(), IN_PLACE as usize + 1, "{log}");
    found_what_was_kept(&starts)?;
    let wanted = f64::from(IN_PLACE + 1);
    let labels = [("pod", POD)];
    told::until_metric(stage, &node, GENERATION, &labels, |value| value == wanted).await?;
    told::until_status(stage, &node, "no open fault", |status| {
        status.faults.is_empty()
    })
    .await?;
    let last = format!("(generation {IN_PLACE}): it is executed again");
    told::until_event(stage, POD, POISONED, &last).await?;
    stage.witness.nobody_failed_or_restarted()?;
    stage.progress.say(format_args!(
        "in place: {IN_PLACE} faults in a row, 0 restarts of the container, P {}, kept memory found each time",
        IN_PLACE + 1
    ));
    Ok(pods.delete(POD).await?)
}

async fn restarted(stage: &Stage) -> Result<(), Failed> {
    const POD: &str = "restarted";
    let pods = &stage.pods;
    pods.create(&plan(stage, POD, RESTARTS)).await?;
    let (mut known, mut starts) = (0, Vec::new());
    let look = async || match pods.get(POD).await {
        Ok(pod) => {
            let containers = pod.status.unwrap_or_default().container_statuses;
            let container = containers.unwrap_or_default().into_iter().next();
            let restarts = container.map_or(0, |container| container.restart_count);
            Look::<i32>::Found(restarts)
        }
        Err(error) => Look::NotYet(error.to_string()),
    };
    let begun = Timestamp::now();
    while known < RESTARTS {
        let left = Timestamp::now().duration_since(begun).unsigned_abs();
        if left > BACK_OFF {
            return Err(format!("{known} restarts after {left:?}").into());
        }
        let now = wait::until("the pod", SOON, PAUSE, &look).await?;
        if now.unsigned_abs() > known {
            known = now.unsigned_abs();
            starts.push(left.as_secs_f64());
        }
        tokio::time::sleep(PAUSE).await;
    }
    let steady = pods.until_logged(POD, SOON, event("steady")).await?;
    assert_eq!(steady["faults"], RESTARTS);
    assert_eq!(known, RESTARTS, "one restart each");
    let node = pods.node(POD).await?;
    let wanted = f64::from(RESTARTS + 1);
    let labels = [("pod", POD)];
    told::until_metric(stage, &node, GENERATION, &labels, |value| value == wanted).await?;
    let waits: Vec<String> = starts
        .iter()
        .scan(0.0, |last, start| {
            Some(format!("{:.1}", start - std::mem::replace(last, *start)))
        })
        .collect();
    stage.progress.say(format_args!(
        "restarted by the kubelet: {RESTARTS} faults, {RESTARTS} restarts, {} s from one to the next",
        waits.join(", ")
    ));
    Ok(())
}
