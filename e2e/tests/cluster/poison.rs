//! Checks pods whose main process or worker faults. The shim executes the process again, the
//! kubelet restarts the container, or the worker ends alone.

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::time::{Duration, Instant};

use bursar_crds::context_policy::FaultAction;
use bursar_crds::{GpuMemoryBudget, GpuNamespace};
use bursar_e2e::pods::{PodBuilder, PodState};
use bursar_e2e::wait::{self, Poll};
use futures::FutureExt as _;
use jiff::Timestamp;
use kube::api::{Api, DeleteParams, PostParams};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::quota::event_line;
use crate::shared_cluster::{NAMESPACE, START_TIMEOUT, TrialContext, node_trial, trial};
use crate::{operator, status};

/// The metric with the process generation of a container.
const GENERATION: &str = "bursar_container_generation";
const POISONED: &str = "GpuContextPoisoned";
/// After half of the faults the process computes again within this time, with its retained memory.
const MEDIAN_RECOVERY: Duration = Duration::from_secs(5);
/// After each fault the process does so within this time, on a busy machine too.
const MAX_RECOVERY: Duration = Duration::from_secs(60);
/// The timeout of all faults of a pod, on a loaded machine.
const TOGETHER: Duration = Duration::from_secs(400);
/// The program of the pods.
const PROGRAM: &str = "bursar-probe";
/// The agent waits 30 s for the API server before it acts, and the program 5 s before it faults.
const OFFLINE_TIMEOUT: Duration = Duration::from_secs(300);
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("runtime/cluster/poison", async |context| {
            poison(context, 25, 3).await
        }),
        trial("runtime/cluster/poison-long", async |context| {
            poison(context, 50, 5).await
        }),
        trial(
            "operator/cluster/contexts",
            pod_beyond_the_policys_maximum_is_evicted,
        ),
    ]
}

/// Returns trials for the end of the run, because Kubernetes' own controllers need up to a minute
/// to reconnect to an API server.
pub(crate) fn last_trials() -> Vec<Trial> {
    vec![node_trial(
        "operator/cluster/alone",
        agent_restarts_pods_while_the_api_server_is_down,
    )]
}

/// The main process faults `faults` times in a row and is executed again in place. Then it faults
/// `restarts` times in a container that the kubelet restarts.
async fn poison(context: &mut TrialContext, faults: u32, restarts: u32) -> Result<(), Failed> {
    with_context_policy(context, "InPlace", 2 * faults, async |context| {
        in_place(context, faults).await
    })
    .await?;
    // The namespace is charged for the pod's retained memory until the pod is removed.
    context.clear().await?;
    // Without a budget the agent ends the process: the container's main one, then a worker of it.
    restarted(context, restarts).await?;
    context.clear().await?;
    worker_is_replaced(context).await
}

/// Runs `act` under a budget with this context policy and at most `most` restarts.
pub(crate) async fn with_context_policy(
    context: &mut TrialContext,
    action: &str,
    most: u32,
    act: impl AsyncFnOnce(&mut TrialContext) -> Result<(), Failed>,
) -> Result<(), Failed> {
    let budgets = budgets(context);
    let budget: GpuMemoryBudget = serde_json::from_value(json!({
        "apiVersion": "bursar.dev/v1alpha1", "kind": "GpuMemoryBudget",
        "metadata": { "name": "default" },
        "spec": {
            "deviceMemory": { "guaranteed": "32Gi" },
            "contextPolicy": { "action": action, "maxRestarts": most },
        },
    }))?;
    budgets.create(&PostParams::default(), &budget).await?;
    let outcome = async {
        wait_for_context_policy(context, true).await?;
        act(context).await
    };
    // The budget is deleted also after a failed assertion.
    let outcome = AssertUnwindSafe(outcome).catch_unwind().await;
    let scaled = operator::scale(&context.environment.cluster.client(), 1).await;
    budgets.delete("default", &DeleteParams::default()).await?;
    outcome.unwrap_or_else(|panic| resume_unwind(panic))?;
    scaled?;
    wait_for_context_policy(context, false).await
}

fn budgets(context: &TrialContext) -> Api<GpuMemoryBudget> {
    Api::namespaced(context.environment.cluster.client(), NAMESPACE)
}

/// A pod faults once more than its policy allows. The operator evicts the pod and records the
/// reason in the budget's status, also when the operator starts only later.
async fn pod_beyond_the_policys_maximum_is_evicted(
    context: &mut TrialContext,
) -> Result<(), Failed> {
    with_context_policy(context, "InPlace", 1, async |context| {
        let client = context.environment.cluster.client();
        context
            .pods
            .create(&faulting_pod(context, "beyond", 9))
            .await?;
        let faulting = event_line("faulting");
        context
            .pods
            .wait_for_log_line("beyond", START_TIMEOUT, faulting)
            .await?;
        operator::kill(&client).await?;
        evicted(context, "beyond").await?;
        let why = "after 1 restarts within";
        status::wait_for_event(context, "beyond", POISONED, why).await?;
        operator::scale(&client, 0).await?;
        context
            .pods
            .create(&faulting_pod(context, "unseen", 9))
            .await?;
        context
            .pods
            .wait_until_running("unseen", START_TIMEOUT)
            .await?;
        let node = context.pods.node("unseen").await?;
        status::wait_for_status(context, &node, "a fault that is left open", |status| {
            let mut actions = status.faults.iter().map(|fault| fault.action);
            actions.any(|action| action == Some(FaultAction::BeyondMaximum))
        })
        .await?;
        operator::scale(&client, 1).await?;
        evicted(context, "unseen").await
    })
    .await
}

/// The agent restarts a pod instead of its eviction while the API server is down. After the API
/// server's return the operator finds nothing left to do.
async fn agent_restarts_pods_while_the_api_server_is_down(
    context: &mut TrialContext,
) -> Result<(), Failed> {
    const POD: &str = "alone";
    with_context_policy(context, "Evict", 3, async |context| {
        let plan = probe_pod(context, POD, &["--times=1", "--after=5", "--blind"]);
        context.pods.create(&plan).await?;
        context
            .pods
            .wait_for_log_line(POD, START_TIMEOUT, event_line("started"))
            .await?;
        let first = context.local()?.processes_named(PROGRAM);
        context.local()?.kill_api_server().await?;
        let away = Instant::now();
        let restarted = {
            let local = &*context.local()?;
            let another = async || match local.processes_named(PROGRAM) {
                now if !now.is_empty() && now != first => Poll::Ready(()),
                now => Poll::Pending(format!("{now:?}, at first {first:?}")),
            };
            let what = "the agent to restart the container";
            wait::poll_until(what, OFFLINE_TIMEOUT, PAUSE, another).await
        };
        context.local()?.start_api_server().await?;
        restarted?;
        let client = context.environment.cluster.client();
        let answers = async || match client.apiserver_version().await {
            Ok(_) => Poll::Ready(()),
            Err(error) => Poll::Pending(error.to_string()),
        };
        wait::poll_until("the API server to answer", START_TIMEOUT, PAUSE, answers).await?;
        // By its own back-off the kubelet would need up to a minute to reconnect to the API server.
        context.local()?.restart_kubelet(false).await?;
        context.progress.report(format_args!(
            "restarted {:.1?} after the API server was killed",
            away.elapsed()
        ));
        let steady = context
            .pods
            .wait_for_log_line(POD, START_TIMEOUT, event_line("steady"))
            .await?;
        assert_eq!(steady["faults"], 1);
        recovered_leases(&steady)?;
        let once = |state: &PodState| state.running && state.restarts == 1;
        let what = "to have been restarted once";
        context
            .pods
            .wait_until(POD, what, START_TIMEOUT, once)
            .await?;
        let node = context.pods.node(POD).await?;
        let labels = [("pod", POD)];
        status::wait_for_metric(context, &node, GENERATION, &labels, |value| value == 2.0).await?;
        status::wait_for_status(context, &node, "a fault that is done with", |status| {
            let mut namespaces = status.namespaces.iter();
            status.faults.is_empty() && namespaces.any(|namespace| namespace.poisoned > 0)
        })
        .await
        .map(drop)
    })
    .await?;
    // The operator is up to date, because it has removed the context policies.
    let state = context.pods.state(POD).await?;
    assert!(state.running && state.restarts == 1, "{state:?}");
    Ok(())
}

/// Waits until the pod is evicted and the budget's status has the reason.
async fn evicted(context: &TrialContext, pod: &str) -> Result<(), Failed> {
    context.pods.wait_until_deleted(pod, START_TIMEOUT).await?;
    let status = budgets(context).get("default").await?.status;
    let evictions = status.unwrap_or_default().evictions;
    let Some(eviction) = evictions.iter().find(|eviction| eviction.pod == pod) else {
        return Err(format!("{pod} is not on record: {evictions:?}").into());
    };
    if eviction.reason != "TooManyRestarts" {
        return Err(format!("{pod}: {eviction:?}").into());
    }
    context
        .progress
        .report(format_args!("{pod}: {}", eviction.message));
    Ok(())
}

/// Waits until the operator has written the namespace's GpuNamespace, or has deleted it.
async fn wait_for_context_policy(context: &TrialContext, wanted: bool) -> Result<(), Failed> {
    let namespaces: Api<GpuNamespace> = Api::all(context.environment.cluster.client());
    let poll = async || match namespaces.get_opt(NAMESPACE).await {
        Ok(found) if found.is_some() == wanted => Poll::Ready(()),
        Ok(found) => Poll::Pending(format!("{found:?}")),
        Err(error) => Poll::Pending(error.to_string()),
    };
    // The operator may have to reconnect to the API server.
    Ok(wait::poll_until("the context policy", 2 * START_TIMEOUT, PAUSE, poll).await?)
}

fn faulting_pod(context: &TrialContext, name: &str, times: u32) -> PodBuilder {
    probe_pod(context, name, &[&format!("--times={times}")])
}

fn probe_pod(context: &TrialContext, name: &str, how: &[&str]) -> PodBuilder {
    let fault = ["fault", "--file=/count/faults", "--retain=64Mi"];
    PodBuilder::new(name, &context.environment.probe_image)
        .arguments(&[&fault, how].concat())
        .with_empty_dir("/count")
        .restart_always()
        .gib(4)
}

/// Checks that every later image found the retained memory of the first one unchanged. Returns the
/// reports of all images as the last one printed them, because the kubelet need not keep the logs
/// of restarted containers.
fn recovered_leases(steady: &Value) -> Result<&[Value], Failed> {
    let starts = steady["starts"].as_array().map_or(&[][..], Vec::as_slice);
    let same = |start: &Value| {
        ["lease", "generation", "checksum"].map(|field| start["retained"][field].clone())
    };
    let right = starts.iter().enumerate().all(|(image, start)| {
        start["retained"]["found"] == (image > 0) && same(start) == same(&starts[0])
    });
    let all = steady["faults"] == json!(starts.len().saturating_sub(1));
    (right && all)
        .then_some(starts)
        .ok_or_else(|| format!("retained memory: {steady}").into())
}

/// Returns the median and the 99th percentile of the time from a fault until the next image has its
/// retained memory.
fn times(log: &str, starts: &[Value]) -> (Duration, Duration) {
    let at = |event: &Value| event["at"].as_u64().unwrap_or(u64::MAX);
    let faults = log.lines().filter_map(event_line("faulting"));
    let pairs = faults.zip(starts.iter().skip(1));
    let mut times: Vec<u64> = pairs
        .map(|(fault, start)| at(start).saturating_sub(at(&fault)))
        .collect();
    times.sort_unstable();
    let rank =
        |percent: usize| Duration::from_millis(times[(times.len() * percent).div_ceil(100) - 1]);
    (rank(50), rank(99))
}

async fn in_place(context: &mut TrialContext, faults: u32) -> Result<(), Failed> {
    const POD: &str = "in-place";
    let pods = &context.pods;
    pods.create(&faulting_pod(context, POD, faults)).await?;
    pods.wait_for_log_line(POD, START_TIMEOUT, event_line("faulting"))
        .await?;
    operator::kill(&context.environment.cluster.client()).await?;
    let steady = pods
        .wait_for_log_line(POD, TOGETHER, event_line("steady"))
        .await?;
    assert_eq!(steady["faults"], faults);
    let node = pods.node(POD).await?;
    let restarts = pods.state(POD).await?.restarts;
    assert_eq!(restarts, 0, "by the kubelet: {steady}");
    let starts = recovered_leases(&steady)?;
    let (median, p99) = times(&pods.log(POD).await?, starts);
    assert!(
        median < MEDIAN_RECOVERY && p99 < MAX_RECOVERY,
        "from a fault to the retained memory: {median:?} (median), {p99:?} (p99)"
    );
    let wanted = f64::from(faults + 1);
    let labels = [("pod", POD)];
    status::wait_for_metric(context, &node, GENERATION, &labels, |value| value == wanted).await?;
    status::wait_for_status(context, &node, "no open fault", |status| {
        status.faults.is_empty()
    })
    .await?;
    // The agent sends Events for some of many faults only.
    status::wait_for_event(
        context,
        POD,
        POISONED,
        "(generation 1): its program is executed again",
    )
    .await?;
    context.history.check_none_failed_or_restarted().await?;
    context.progress.report(format_args!(
        "in place: {faults} faults in a row, 0 restarts of the container, P {}, retained memory found each time, after \
         {median:?} (p50) and {p99:?} (p99)",
        faults + 1
    ));
    Ok(pods.delete(POD).await?)
}

/// The worker of a server faults and ignores its error. The agent ends the worker alone, the server
/// starts another one, and that one gets the memory of the former.
async fn worker_is_replaced(context: &TrialContext) -> Result<(), Failed> {
    const POD: &str = "server";
    let pods = &context.pods;
    let worker = [
        "fault",
        "--times=1",
        "--file=/count/faults",
        "--bytes=3Gi",
        "--blind",
    ];
    let plan = PodBuilder::new(POD, &context.environment.probe_image)
        .arguments(&[&["serve", "--"], &worker[..]].concat())
        .with_empty_dir("/count")
        .restart_always()
        .gib(4);
    pods.create(&plan).await?;
    let steady = pods
        .wait_for_log_line(POD, TOGETHER, event_line("steady"))
        .await?;
    let refused = [0, 1].map(|start: usize| steady["starts"][start]["refused"].clone());
    assert_eq!(refused, [Value::Null, Value::Null], "3 GiB each time");
    let log = pods.log(POD).await?;
    let events = |name: &str| log.lines().filter_map(event_line(name)).collect::<Vec<_>>();
    assert_eq!(events("serving").len(), 1, "{log}");
    assert_eq!(events("faulted")[0]["answer"]["code"], 700, "{log}");
    let [ended] = &events("ended")[..] else {
        return Err(log.into());
    };
    assert_eq!(ended["signal"], 9, "{log}");
    assert!(
        log.contains("bursar: CUDA error 700: this process ends within 10 s"),
        "{log}"
    );
    let state = pods.state(POD).await?;
    assert!(state.running && state.restarts == 0, "{state:?}");
    let node = pods.node(POD).await?;
    let labels = [("pod", POD)];
    status::wait_for_metric(context, &node, GENERATION, &labels, |value| value == 2.0).await?;
    status::wait_for_status(context, &node, "no open fault", |status| {
        status.faults.is_empty()
    })
    .await?;
    let goes_on = "it ends, and its container goes on";
    status::wait_for_event(context, POD, POISONED, goes_on).await?;
    context.progress.report(format_args!(
        "a server's worker: killed alone after its grace, replaced with 3 of 4 GiB, 0 restarts of the container"
    ));
    Ok(())
}

/// Each fault ends the container, and the kubelet starts it again. By default it waits 10, 20, 40 s
/// ... before, and in this cluster 1 s.
async fn restarted(context: &TrialContext, faults: u32) -> Result<(), Failed> {
    const POD: &str = "restarted";
    let pods = &context.pods;
    pods.create(&faulting_pod(context, POD, faults)).await?;
    let (mut known, mut starts) = (0, Vec::new());
    let poll = async || match pods.get(POD).await {
        Ok(pod) => {
            let containers = pod.status.unwrap_or_default().container_statuses;
            let container = containers.unwrap_or_default().into_iter().next();
            let restarts = container.map_or(0, |container| container.restart_count);
            Poll::<i32>::Ready(restarts)
        }
        Err(error) => Poll::Pending(error.to_string()),
    };
    let begin = Timestamp::now();
    while known < faults {
        let left = Timestamp::now().duration_since(begin).unsigned_abs();
        if left > TOGETHER {
            return Err(format!("{known} restarts after {left:?}").into());
        }
        let now = wait::poll_until("the pod", START_TIMEOUT, PAUSE, &poll).await?;
        if now.unsigned_abs() > known {
            if known == 0 {
                operator::kill(&context.environment.cluster.client()).await?;
            }
            known = now.unsigned_abs();
            starts.push(left.as_secs_f64());
        }
        tokio::time::sleep(PAUSE).await;
    }
    let steady = pods
        .wait_for_log_line(POD, START_TIMEOUT, event_line("steady"))
        .await?;
    assert_eq!(steady["faults"], faults);
    assert_eq!(known, faults, "one restart each");
    recovered_leases(&steady)?;
    let node = pods.node(POD).await?;
    let wanted = f64::from(faults + 1);
    let labels = [("pod", POD)];
    status::wait_for_metric(context, &node, GENERATION, &labels, |value| value == wanted).await?;
    let waits: Vec<String> = starts
        .iter()
        .scan(0.0, |last, start| {
            Some(format!("{:.1}", start - std::mem::replace(last, *start)))
        })
        .collect();
    context.progress.report(format_args!(
        "restarted by the kubelet: {faults} faults, {faults} restarts, retained memory found, {} s from one to the next",
        waits.join(", ")
    ));
    Ok(())
}
