//! Measures which pod gets the devices that evictions free: with and without a nominated node on
//! the waiting pod, and what evictions do to a Job (F19).

use bursar_e2e::images::PAUSE;
use bursar_e2e::pods::PodBuilder;
use bursar_e2e::raw_api::RawApi;
use bursar_e2e::wait::{self, Poll};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{EvictParams, ListParams};
use libtest_mimic::Failed;
use serde_json::{Value, json};

use super::{BareCluster, POLL_INTERVAL};
use crate::shared_cluster::START_TIMEOUT;

const RESOURCE: &str = "facts.bursar.dev/device";
/// The devices of the node, which the waiting pod requests whole.
const DEVICES: usize = 4;
/// The class of the waiting pod, for which the scheduler itself does not preempt.
const CLASS: &str = "facts-owner";
const WAITING: &str = "waiting";
const VICTIMS: [&str; 2] = ["victim-0", "victim-1"];
/// Pods of lower priority that are pending beside the waiting pod.
const RIVALS: [&str; 2] = ["rival-0", "rival-1"];
const ROUNDS: usize = 8;
/// The most failures of the Job that the Job controller forgives.
const BACKOFF_LIMIT: usize = 2;

pub(super) async fn freed_devices_go_to_the_nominated_pod(
    cluster: &mut BareCluster,
) -> Result<(), Failed> {
    let objects = RawApi::new(cluster.local.client());
    let class =
        json!({ "metadata": { "name": CLASS }, "value": 1000, "preemptionPolicy": "Never" });
    let classes = "/apis/scheduling.k8s.io/v1/priorityclasses";
    objects.create(classes, &class).await?;
    let capacity = json!({ "status": { "capacity": { RESOURCE: DEVICES.to_string() } } });
    let node = format!("/api/v1/nodes/{}/status", cluster.local.node_name());
    objects.merge_patch(&node, &capacity).await?;
    cluster.wait_for_allocatable(RESOURCE, DEVICES).await?;
    for nominated in [false, true] {
        for _ in 0..ROUNDS {
            evict_for_a_waiting_pod(cluster, &objects, nominated).await?;
            cluster.pods.delete_all().await?;
        }
        let (name, winners) = match nominated {
            false => ("without", "pending pods of lower priority"),
            true => ("with", "the waiting pod"),
        };
        cluster.progress.report(format_args!(
            "{name} a nominated node {winners} got the freed devices in {ROUNDS} of {ROUNDS} rounds"
        ));
    }
    evictions_end_a_job(cluster, &objects).await
}

/// A pod waits for the devices of two victims, which are evicted one after the other. Each eviction
/// frees enough for a rival, and too little for the waiting pod.
async fn evict_for_a_waiting_pod(
    cluster: &BareCluster,
    objects: &RawApi,
    nominated: bool,
) -> Result<(), Failed> {
    let pods = &cluster.pods;
    let half = (DEVICES / 2).to_string();
    for victim in VICTIMS {
        let victim = PodBuilder::new(victim, PAUSE).limit(RESOURCE, &half);
        pods.create(&victim).await?;
    }
    for victim in VICTIMS {
        pods.wait_until_running(victim, START_TIMEOUT).await?;
    }
    let waiting = PodBuilder::new(WAITING, PAUSE)
        .limit(RESOURCE, &DEVICES.to_string())
        .priority_class(CLASS);
    pods.create(&waiting).await?;
    wait_until_unschedulable(cluster, WAITING).await?;
    for rival in RIVALS {
        let plan = PodBuilder::new(rival, PAUSE).limit(RESOURCE, &half);
        pods.create(&plan).await?;
        wait_until_unschedulable(cluster, rival).await?;
    }
    if nominated {
        let path = format!("/api/v1/namespaces/default/pods/{WAITING}/status");
        let node = json!({ "status": { "nominatedNodeName": cluster.local.node_name() } });
        objects.merge_patch(&path, &node).await?;
    }
    for victim in VICTIMS {
        pods.api().evict(victim, &EvictParams::default()).await?;
        pods.wait_until_deleted(victim, START_TIMEOUT).await?;
    }
    // The winners hold all devices, so the others can have none.
    let (winners, losers) = match nominated {
        false => (&RIVALS[..], &[WAITING][..]),
        true => (&[WAITING][..], &RIVALS[..]),
    };
    for winner in winners {
        pods.wait_until_running(winner, START_TIMEOUT).await?;
    }
    for loser in losers {
        assert!(!pods.state(loser).await?.scheduled, "{loser}");
    }
    Ok(())
}

/// Waits until the scheduler has found no node for the pod.
async fn wait_until_unschedulable(cluster: &BareCluster, pod: &str) -> Result<(), Failed> {
    let poll = async || match cluster.pods.get(pod).await {
        Ok(pod) => {
            let conditions = pod.status.unwrap_or_default().conditions;
            let mut conditions = conditions.iter().flatten();
            match conditions.any(|condition| condition.reason.as_deref() == Some("Unschedulable")) {
                true => Poll::Ready(()),
                false => Poll::Pending("the scheduler has not tried it".to_owned()),
            }
        }
        Err(error) => Poll::Pending(error.to_string()),
    };
    let what = format!("{pod} to be unschedulable");
    Ok(wait::poll_until(&what, START_TIMEOUT, POLL_INTERVAL, poll).await?)
}

/// Evicts the pods of a Job until the Job has failed.
async fn evictions_end_a_job(cluster: &BareCluster, objects: &RawApi) -> Result<(), Failed> {
    let container = json!({ "name": "main", "image": PAUSE });
    let template = json!({ "spec": {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container] } });
    let job = json!({ "metadata": { "name": "job" },
        "spec": { "backoffLimit": BACKOFF_LIMIT, "template": template } });
    let jobs = "/apis/batch/v1/namespaces/default/jobs";
    objects.create(jobs, &job).await?;
    for evicted in 1..=BACKOFF_LIMIT + 1 {
        let name = wait_for_pod_of_job(cluster).await?;
        let pods = cluster.pods.api();
        pods.evict(&name, &EvictParams::default()).await?;
        wait_for_job(objects, &format!("{jobs}/job"), evicted).await?;
    }
    let job = objects.get(&format!("{jobs}/job")).await?;
    cluster.progress.report(format_args!(
        "{} evictions end a Job with backoffLimit {BACKOFF_LIMIT}",
        BACKOFF_LIMIT + 1
    ));
    assert!(has_failed(&job), "{}", job["status"]);
    Ok(())
}

/// Waits until a pod of the Job runs that is not being deleted, and returns its name.
async fn wait_for_pod_of_job(cluster: &BareCluster) -> Result<String, Failed> {
    let pods = cluster.pods.api();
    let of_job = ListParams::default().labels("batch.kubernetes.io/job-name=job");
    let runs = |pod: &Pod| {
        let status = pod.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref());
        phase == Some("Running") && pod.metadata.deletion_timestamp.is_none()
    };
    let poll = async || match pods.list(&of_job).await {
        Ok(list) => match list.items.into_iter().find(runs) {
            Some(pod) => Poll::Ready(pod.metadata.name.unwrap_or_default()),
            None => Poll::Pending("no pod of the Job runs".to_owned()),
        },
        Err(error) => Poll::Pending(error.to_string()),
    };
    Ok(wait::poll_until("a pod of the Job", START_TIMEOUT, POLL_INTERVAL, poll).await?)
}

/// Waits until the Job counts this number of failed pods. The Job has failed only after the last.
async fn wait_for_job(objects: &RawApi, path: &str, failed: usize) -> Result<(), Failed> {
    let poll = async || match objects.get(path).await {
        Ok(job) if job["status"]["failed"] == failed => match has_failed(&job) {
            over if over == (failed > BACKOFF_LIMIT) => Poll::Ready(()),
            _ => Poll::Pending(job["status"].to_string()),
        },
        Ok(job) => Poll::Pending(job["status"].to_string()),
        Err(error) => Poll::Pending(error.to_string()),
    };
    let what = format!("{failed} failures of the Job");
    Ok(wait::poll_until(&what, START_TIMEOUT, POLL_INTERVAL, poll).await?)
}

fn has_failed(job: &Value) -> bool {
    let conditions = job["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|one| one["type"] == "Failed" && one["reason"] == "BackoffLimitExceeded")
}
