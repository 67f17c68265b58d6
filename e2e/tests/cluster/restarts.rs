//! Restarts the kubelet and the agent repeatedly, and checks that pods keep their bindings and
//! notice nothing.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::{Duration, SystemTime};

use bursar_e2e::chart;
use bursar_e2e::pods::{GPU_MEMORY, PodState};
use bursar_e2e::wait::{self, Poll};
use futures::future::{Either, select};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, ListParams, LogParams};
use libtest_mimic::{Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::placement::{holder, run_each};
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};

/// The component that registers with the kubelet.
const RELAY: &str = "relay";
/// The component that registers with the relay.
const AGENT: &str = "agent";
/// Half of the registrations are this soon after registration becomes possible.
const MEDIAN_REGISTRATION_SECONDS: f64 = 10.0;
/// All registrations are this soon, on a busy machine too.
const MAX_REGISTRATION_SECONDS: f64 = 60.0;
/// The pod that the kubelet admits, and that then waits for memory.
const WAITING_POD: &str = "eight";
const PAUSE: Duration = Duration::from_millis(50);

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        node_trial("main/cluster/restarts", async |context| {
            agent_registers_again_after_disruptions(context, 2).await
        }),
        node_trial("main/cluster/restarts-long", async |context| {
            agent_registers_again_after_disruptions(context, 10).await
        }),
    ]
}

/// A disruption of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Disruption {
    KubeletRestarted,
    PluginFolderWiped,
    AgentKilled,
    CheckpointLost,
    CheckpointTruncated,
}

/// The delays of the agent's registrations by the disruption before them.
type Delays = BTreeMap<Disruption, Delay>;

#[derive(Default)]
struct Delay {
    /// Seconds since registration became possible.
    since_possible: Vec<f64>,
    /// Seconds since the disruption, which include the restart of the kubelet or of the agent by
    /// the kubelet.
    since_disruption: Vec<f64>,
}

async fn agent_registers_again_after_disruptions(
    context: &mut TrialContext,
    rounds: usize,
) -> Result<(), Failed> {
    run_each(context, &[("ten-a", 10), ("ten-b", 10)]).await?;
    create_waiting_pod(context).await?;
    let pods = context.pods.clone();
    let before = context.node_files()?.cdi_files()?;
    assert_eq!(before.len(), 2, "{before:?}");

    let disruptions = [
        Disruption::KubeletRestarted,
        Disruption::PluginFolderWiped,
        Disruption::AgentKilled,
        Disruption::CheckpointLost,
        Disruption::CheckpointTruncated,
    ];
    let mut delays = Delays::new();
    let mut rejections = 0;
    for round in 0..rounds {
        for disruption in disruptions {
            let begin = Timestamp::now();
            let (possible, since) = disrupt(context, disruption).await?;
            let is_restart = disruption == Disruption::KubeletRestarted;
            if is_restart && is_rejected_after(context, begin).await? {
                rejections += 1;
                pods.delete(WAITING_POD).await?;
                pods.wait_until_deleted(WAITING_POD, START_TIMEOUT).await?;
                context.history.forgive(WAITING_POD).await?;
                create_waiting_pod(context).await?;
            }
            let delay = delays.entry(disruption).or_default();
            delay.since_possible.push(possible);
            delay.since_disruption.push(since);
            let after = context.node_files()?.cdi_files()?;
            assert_eq!(
                before, after,
                "bindings after {disruption:?}, round {round}"
            );
            context.history.check_none_failed_or_restarted().await?;
        }
    }
    let mut late = Vec::new();
    for (disruption, delay) in delays {
        let (mut seconds, mut since) = (delay.since_possible, delay.since_disruption);
        seconds.sort_by(f64::total_cmp);
        since.sort_by(f64::total_cmp);
        let (median, p99) = (percentile(&seconds, 50), percentile(&seconds, 99));
        let (all, longest) = (percentile(&since, 50), percentile(&since, 99));
        context.progress.report(format_args!(
            "{disruption:?}, {rounds} times: registered in {median:.3} s (median), {p99:.3} s (p99), \
             {all:.1} s and {longest:.1} s after the disruption"
        ));
        if median >= MEDIAN_REGISTRATION_SECONDS || p99 >= MAX_REGISTRATION_SECONDS {
            late.push((disruption, seconds));
        }
    }
    assert!(late.is_empty(), "too late: {late:?}");
    context.progress.report(format_args!(
        "{rejections} of {rounds} restarted kubelets rejected the waiting pod before the relay had \
         registered"
    ));
    assert!(rejections < rounds, "no waiting pod survived a restart");

    assert!(!pods.state(WAITING_POD).await?.running);
    pods.delete("ten-a").await?;
    pods.wait_until_deleted("ten-a", START_TIMEOUT).await?;
    pods.wait_until_running(WAITING_POD, START_TIMEOUT).await?;

    context.local()?.restart_containerd(true).await?;
    run_each(context, &[("after", 4)]).await?;
    context.history.check_none_failed_or_restarted().await
}

/// Creates the waiting pod, and waits until the kubelet has admitted it.
async fn create_waiting_pod(context: &TrialContext) -> Result<(), Failed> {
    let since = Timestamp::now();
    context
        .pods
        .create(&holder(context, WAITING_POD, 8))
        .await?;
    let waits = |lines: &LogTimes| lines.waiting > Some(since);
    wait_for_log(context, AGENT, "the pod to wait", waits).await?;
    Ok(())
}

/// Waits until the pod waits again after the kubelet's restart at `since`, or is rejected for good.
/// Returns whether it was rejected.
///
/// A kubelet admits its pods within 1 s of its plugin socket, whether or not its plugins have
/// registered by then, and rejects a waiting pod without them. Bursar can only register soon.
async fn is_rejected_after(context: &TrialContext, since: Timestamp) -> Result<bool, Failed> {
    let waits = |lines: &LogTimes| lines.waiting > Some(since);
    let waits = wait_for_log(context, AGENT, "the pod to wait again", waits);
    let rejected =
        |state: &PodState| state.phase == "Failed" && state.reason == "UnexpectedAdmissionError";
    let rejected = context
        .pods
        .wait_until(WAITING_POD, "to be rejected", START_TIMEOUT, rejected);
    match select(pin!(waits), pin!(rejected)).await {
        Either::Left((waits, _)) => waits.map(|_| false),
        Either::Right((rejected, _)) => Ok(rejected.map(|_| true)?),
    }
}

/// Returns the value that `percent` of the sorted values do not exceed.
pub(crate) fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted
        .get(rank.saturating_sub(1))
        .copied()
        .unwrap_or(f64::NAN)
}

/// Disrupts the node and waits for the agent's registration. Returns the seconds since registration
/// became possible, and since the disruption.
async fn disrupt(context: &mut TrialContext, disruption: Disruption) -> Result<(f64, f64), Failed> {
    let node = context.node_files()?;
    let now = Timestamp::now();
    let line = match disruption {
        Disruption::KubeletRestarted => {
            context.local()?.restart_kubelet(false).await?;
            wait_for_registration(context, RELAY, now).await?
        }
        Disruption::PluginFolderWiped => {
            node.wipe_plugins()?;
            wait_for_registration(context, RELAY, now).await?
        }
        Disruption::AgentKilled => {
            kill_agent(context)?;
            wait_for_registration(context, AGENT, now).await?
        }
        Disruption::CheckpointLost => {
            // A running agent would write its checkpoint again at the next change.
            node.remove_checkpoint()?;
            kill_agent(context)?;
            wait_for_registration(context, AGENT, now).await?
        }
        Disruption::CheckpointTruncated => {
            node.truncate_checkpoint()?;
            kill_agent(context)?;
            wait_for_registration(context, AGENT, now).await?
        }
    };
    let possible = match disruption {
        Disruption::KubeletRestarted => timestamp(node.kubelet_socket_time()?)?,
        Disruption::PluginFolderWiped => now,
        Disruption::AgentKilled | Disruption::CheckpointLost | Disruption::CheckpointTruncated => {
            line.first
        }
    };
    let since = |then| line.registered.duration_since(then).as_secs_f64();
    Ok((since(possible), since(now)))
}

fn timestamp(time: SystemTime) -> Result<Timestamp, Failed> {
    Ok(Timestamp::try_from(time)?)
}

pub(crate) fn kill_agent(context: &TrialContext) -> Result<(), Failed> {
    Ok(kill_process(agent_pid(context)?, Signal::KILL)?)
}

/// Returns the process of the node's only agent.
pub(crate) fn agent_pid(context: &TrialContext) -> Result<Pid, Failed> {
    only_process(context, "bursar-agent")
}

/// Returns the node's only process of this program.
pub(crate) fn only_process(context: &TrialContext, program: &str) -> Result<Pid, Failed> {
    let local = context.environment.cluster.local();
    let found = local
        .ok_or("this needs a cluster of our own")?
        .processes_named(program);
    match found[..] {
        [pid] => Ok(Pid::from_raw(pid).ok_or("no pid")?),
        _ => Err(format!("processes of {program}: {found:?}").into()),
    }
}

/// Times in the log of a running agent or relay.
struct LogTimes {
    /// The time of the first line.
    first: Timestamp,
    /// The time of the last registration.
    registered: Timestamp,
    /// The time at which a pod last began to wait.
    waiting: Option<Timestamp>,
}

/// Waits until the log of the component's pod has a registration after `since`.
async fn wait_for_registration(
    context: &TrialContext,
    component: &str,
    since: Timestamp,
) -> Result<LogTimes, Failed> {
    let again = |lines: &LogTimes| lines.registered > since;
    let what = format!("the {component} to register again");
    wait_for_log(context, component, &what, again).await
}

/// Waits until the times in the log of the component's pod satisfy `wanted`.
async fn wait_for_log(
    context: &TrialContext,
    component: &str,
    what: &str,
    wanted: impl Fn(&LogTimes) -> bool,
) -> Result<LogTimes, Failed> {
    let client = context.environment.cluster.client();
    let api: Api<Pod> = Api::namespaced(client, chart::NAMESPACE);
    let pods = format!("app.kubernetes.io/component={component}");
    let pods = ListParams::default().labels(&pods);
    let poll = async || {
        let list = match api.list(&pods).await {
            Ok(list) => list,
            Err(error) => return Poll::Pending(error.to_string()),
        };
        let Some(pod) = list.items.first() else {
            return Poll::Pending(format!("there is no {component}"));
        };
        match api.logs(&pod.name_any(), &LogParams::default()).await {
            Ok(log) => match lines(&log) {
                Some(lines) if wanted(&lines) => Poll::Ready(lines),
                _ => Poll::Pending(format!("its log ends with {:?}", log.lines().last())),
            },
            Err(error) => Poll::Pending(error.to_string()),
        }
    };
    Ok(wait::poll_until(what, START_TIMEOUT, PAUSE, poll).await?)
}

fn lines(log: &str) -> Option<LogTimes> {
    let lines = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let (mut first, mut registered, mut waiting) = (None, None, None);
    for line in lines {
        let time: Option<Timestamp> = line["timestamp"]
            .as_str()
            .and_then(|text| text.parse().ok());
        first = first.or(time);
        let fields = &line["fields"];
        if fields["message"] == "registered" && fields["resource"] == GPU_MEMORY {
            registered = time;
        }
        if fields["message"] == "waiting" {
            waiting = time;
        }
    }
    Some(LogTimes {
        first: first?,
        registered: registered?,
        waiting,
    })
}
