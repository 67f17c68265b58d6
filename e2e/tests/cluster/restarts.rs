//! Everything that pods do not depend on ends and comes back, and they notice nothing.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use bursar_e2e::chart;
use bursar_e2e::pods::GPU_MEMORY;
use bursar_e2e::wait::{self, Look};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, ListParams, LogParams};
use libtest_mimic::{Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::placement::{holder, run_each};
use crate::stage::{SOON, Stage, node_trial};

const ROUNDS: usize = 10;
/// The agent is registered again this soon after it can be.
const REGISTERED: f64 = 2.0;
/// As in [`crate::placement`].
const STARTED: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(50);

pub(crate) fn trials() -> Vec<Trial> {
    vec![node_trial("main/cluster/restarts", restarts)]
}

/// What is done to the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Blow {
    KubeletRestarted,
    PluginFolderWiped,
    AgentKilled,
    CheckpointLost,
    CheckpointSpoilt,
}

/// The agent's registrations by what came before.
type Delays = BTreeMap<Blow, Delay>;

#[derive(Default)]
struct Delay {
    /// In seconds after they became possible.
    possible: Vec<f64>,
    /// In seconds after the blow: with the time that the kubelet takes to start again, or to start
    /// the agent again.
    blow: Vec<f64>,
}

async fn restarts(stage: &mut Stage) -> Result<(), Failed> {
    run_each(stage, &[("ten-a", 10), ("ten-b", 10)]).await?;
    let pods = stage.pods.clone();
    pods.create(&holder(stage, "eight", 8)).await?;
    let scheduled = |state: &bursar_e2e::pods::State| state.scheduled;
    pods.until("eight", "to be scheduled", SOON, scheduled)
        .await?;
    let before = stage.on_node()?.cdi()?;
    assert_eq!(before.len(), 2, "{before:?}");

    let blows = [
        Blow::KubeletRestarted,
        Blow::PluginFolderWiped,
        Blow::AgentKilled,
        Blow::CheckpointLost,
        Blow::CheckpointSpoilt,
    ];
    let mut delays = Delays::new();
    for round in 0..ROUNDS {
        for blow in blows {
            let (possible, since) = strike(stage, blow).await?;
            let delay = delays.entry(blow).or_default();
            delay.possible.push(possible);
            delay.blow.push(since);
            let after = stage.on_node()?.cdi()?;
            assert_eq!(before, after, "bindings after {blow:?}, round {round}");
            stage.witness.nobody_failed_or_restarted()?;
        }
    }
    let mut late = Vec::new();
    for (blow, delay) in delays {
        let (mut seconds, mut since) = (delay.possible, delay.blow);
        seconds.sort_by(f64::total_cmp);
        since.sort_by(f64::total_cmp);
        let (median, p99) = (percentile(&seconds, 50), percentile(&seconds, 99));
        let (all, longest) = (percentile(&since, 50), percentile(&since, 99));
        stage.progress.say(format_args!(
            "{blow:?}, {ROUNDS} times: registered in {median:.3} s (median), {p99:.3} s (p99), \
             {all:.1} s and {longest:.1} s after the blow"
        ));
        if p99 >= REGISTERED {
            late.push((blow, seconds));
        }
    }
    assert!(late.is_empty(), "too late: {late:?}");

    assert!(!pods.state("eight").await?.running);
    pods.delete("ten-a").await?;
    pods.until_gone("ten-a", SOON).await?;
    pods.until_running("eight", STARTED).await?;
    stage.witness.nobody_failed_or_restarted()
}

/// The value that `percent` of the sorted values do not exceed.
pub(crate) fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted
        .get(rank.saturating_sub(1))
        .copied()
        .unwrap_or(f64::NAN)
}

/// Does it, waits until the agent is registered again, and answers the seconds from when it could, and
/// from the blow.
async fn strike(stage: &mut Stage, blow: Blow) -> Result<(f64, f64), Failed> {
    let node = stage.on_node()?;
    let now = Timestamp::now();
    let line = match blow {
        Blow::KubeletRestarted => {
            stage.local()?.restart_kubelet(false).await?;
            let lines = registered(stage, now).await?;
            // Until then the kubelet would fail it for good if it found no agent.
            let waits = |lines: &Lines| lines.waiting > Some(now);
            until_logged(stage, "eight to wait again", waits).await?;
            lines
        }
        Blow::PluginFolderWiped => {
            node.wipe_plugins()?;
            registered(stage, now).await?
        }
        Blow::AgentKilled => {
            kill_agent(stage)?;
            registered(stage, now).await?
        }
        Blow::CheckpointLost => {
            // A running agent writes it again at the next change; a dead one does not.
            node.remove_checkpoint()?;
            kill_agent(stage)?;
            registered(stage, now).await?
        }
        Blow::CheckpointSpoilt => {
            node.spoil_checkpoint()?;
            kill_agent(stage)?;
            registered(stage, now).await?
        }
    };
    let possible = match blow {
        Blow::KubeletRestarted => timestamp(node.kubelet_socket_made()?)?,
        Blow::PluginFolderWiped => now,
        Blow::AgentKilled | Blow::CheckpointLost | Blow::CheckpointSpoilt => line.first,
    };
    let since = |then| line.registered.duration_since(then).as_secs_f64();
    Ok((since(possible), since(now)))
}

fn timestamp(time: SystemTime) -> Result<Timestamp, Failed> {
    Ok(Timestamp::try_from(time)?)
}

fn kill_agent(stage: &mut Stage) -> Result<(), Failed> {
    let agents = stage.local()?.processes_named("bursar-agent");
    let [agent] = agents[..] else {
        return Err(format!("processes of the agent: {agents:?}").into());
    };
    let pid = Pid::from_raw(agent).ok_or("no pid")?;
    Ok(kill_process(pid, Signal::KILL)?)
}

/// Moments in the log of the agent that runs.
struct Lines {
    /// Its first line.
    first: Timestamp,
    /// Its last registration.
    registered: Timestamp,
    /// When a pod last began to wait.
    waiting: Option<Timestamp>,
}

/// Waits until the agent's log has a registration after `since`.
async fn registered(stage: &Stage, since: Timestamp) -> Result<Lines, Failed> {
    let again = |lines: &Lines| lines.registered > since;
    until_logged(stage, "the agent to register again", again).await
}

/// Waits until the agent's log has such lines.
async fn until_logged(
    stage: &Stage,
    what: &str,
    wanted: impl Fn(&Lines) -> bool,
) -> Result<Lines, Failed> {
    let client = stage.scene.cluster.client();
    let api: Api<Pod> = Api::namespaced(client, chart::NAMESPACE);
    let agents = ListParams::default().labels("app.kubernetes.io/component=agent");
    let look = async || {
        let list = match api.list(&agents).await {
            Ok(list) => list,
            Err(error) => return Look::NotYet(error.to_string()),
        };
        let Some(agent) = list.items.first() else {
            return Look::NotYet("there is no agent".to_owned());
        };
        match api.logs(&agent.name_any(), &LogParams::default()).await {
            Ok(log) => match lines(&log) {
                Some(lines) if wanted(&lines) => Look::Found(lines),
                _ => Look::NotYet(format!("its log ends with {:?}", log.lines().last())),
            },
            Err(error) => Look::NotYet(error.to_string()),
        }
    };
    Ok(wait::until(what, SOON, PAUSE, look).await?)
}

fn lines(log: &str) -> Option<Lines> {
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
    Some(Lines {
        first: first?,
        registered: registered?,
        waiting,
    })
}
