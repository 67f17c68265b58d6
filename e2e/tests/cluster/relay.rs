//! Stops the plugin relay, for which the kubelet waits with every pod of the node.

use std::time::{Duration, Instant};

use bursar_crds::GpuNode;
use bursar_crds::conditions::gpu_node::{REGISTERED, RELAY_SILENT};
use bursar_e2e::pods::PodBuilder;
use bursar_e2e::wait::{self, Poll};
use kube::api::{Api, ListParams};
use libtest_mimic::{Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};

use crate::placement::holder;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};

/// Pods run within this time of the stop, and it is told within this time.
const BOUND: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) fn trials() -> Vec<Trial> {
    vec![node_trial(
        "fleet/cluster/relay-stopped",
        stopped_relay_is_told_and_runs_on,
    )]
}

fn relay_pid(context: &TrialContext) -> Result<Pid, Failed> {
    let local = context.environment.cluster.local();
    let relays = local
        .ok_or("this needs a cluster of our own")?
        .processes_named("bursar-relay");
    match relays[..] {
        [relay] => Ok(Pid::from_raw(relay).ok_or("no pid")?),
        _ => Err(format!("processes of the relay: {relays:?}").into()),
    }
}

async fn stopped_relay_is_told_and_runs_on(context: &mut TrialContext) -> Result<(), Failed> {
    let relay = relay_pid(context)?;
    kill_process(relay, Signal::STOP)?;
    let stopped = Instant::now();
    let pods = context.pods.clone();
    // The kubelet admits no other pod while it waits for the first one's Allocate.
    pods.create(&holder(context, "with-gpu", 2)).await?;
    let without = PodBuilder::new("without-gpu", &context.environment.probe_image);
    pods.create(&without.arguments(&["park", "--socket=/park"]))
        .await?;
    wait_for_condition(context, REGISTERED, RELAY_SILENT).await?;
    let told = stopped.elapsed();
    for name in ["with-gpu", "without-gpu"] {
        pods.wait_until_running(name, START_TIMEOUT).await?;
    }
    let ran = stopped.elapsed();
    context.progress.report(format_args!(
        "a stopped relay was told after {told:.1?}, and pods ran after {ran:.1?}"
    ));
    assert!(told < BOUND && ran < BOUND, "told {told:?}, ran {ran:?}");
    assert_eq!(relay_pid(context)?, relay, "the agent did not end it");
    context.history.check_none_failed_or_restarted().await
}

/// Waits until a condition of the node's GpuNode has this reason.
pub(crate) async fn wait_for_condition(
    context: &TrialContext,
    type_: &str,
    reason: &str,
) -> Result<(), Failed> {
    let nodes: Api<GpuNode> = Api::all(context.environment.cluster.client());
    let poll = async || {
        let nodes = match nodes.list(&ListParams::default()).await {
            Ok(nodes) => nodes,
            Err(error) => return Poll::Pending(error.to_string()),
        };
        let statuses = nodes.into_iter().filter_map(|node| node.status);
        let mut conditions = statuses.flat_map(|status| status.conditions);
        match conditions.find(|condition| condition.type_ == type_) {
            Some(condition) if condition.reason == reason => Poll::Ready(()),
            other => Poll::Pending(format!("{other:?}")),
        }
    };
    let what = format!("{type_} to be {reason}");
    Ok(wait::poll_until(&what, START_TIMEOUT, PAUSE, poll).await?)
}
