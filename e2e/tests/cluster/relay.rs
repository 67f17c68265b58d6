//! Stops the plugin relay by a signal. The kubelet waits for the relay's answer, and admits no pod
//! of the node meanwhile.

use std::time::{Duration, Instant};

use bursar_crds::GpuNode;
use bursar_crds::conditions::gpu_node::{REGISTERED, RELAY_SILENT};
use bursar_e2e::pods::PodBuilder;
use bursar_e2e::wait::{self, Poll};
use kube::api::{Api, ListParams};
use libtest_mimic::{Failed, Trial};
use rustix::process::{Signal, kill_process};

use crate::placement::holder;
use crate::restarts::only_process;
use crate::shared_cluster::{START_TIMEOUT, TrialContext, node_trial};

/// Within this time of the relay's stop the GpuNode says so, and the pods run.
const BOUND: Duration = Duration::from_secs(30);
/// The relay's program.
pub(crate) const RELAY: &str = "bursar-relay";
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) fn trials() -> Vec<Trial> {
    vec![node_trial(
        "fleet/cluster/relay-stopped",
        stopped_relay_is_told_and_runs_on,
    )]
}

async fn stopped_relay_is_told_and_runs_on(context: &mut TrialContext) -> Result<(), Failed> {
    let relay = only_process(context, RELAY)?;
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
    assert_eq!(
        only_process(context, RELAY)?,
        relay,
        "the agent did not end the relay"
    );
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
