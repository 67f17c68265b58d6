//! Changes a third quota of the namespace while many clients create pods that another one refuses.
//!
//! The API server decides on pods of a namespace in batches. Pods without GPU memory change the
//! third quota, and where that conflicts, the batch is decided again by that quota alone
//! (kubernetes#141904): pods that the full budget refused are admitted. How many is a matter of the
//! server, and mostly none. So the test then lets pods in itself, by resetting what the quotas
//! count, and the operator has to repair that.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bursar_sim_api::faults::WatchFault;
use futures::future::join_all;
use libtest_mimic::Failed;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::churn::reset_quota_count;
use crate::isolated_scope::{IsolatedScope, condition};
use crate::server::{Permit, Server};
use crate::test_case::{FaultPlan, GIVE_UP_AFTER, TestCase, until};

const CLIENTS: usize = 16;
const QUOTA_GIB: usize = 8;
const RACE: Duration = Duration::from_secs(15);
/// The pods that the test lets in beyond the budget.
const INJECTED: usize = 4;
/// The fewest refusals that make a race.
const MIN_REFUSALS: usize = 300;
/// The pause between two pods without GPU memory of one client.
const PLAIN_INTERVAL: Duration = Duration::from_millis(20);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub(crate) async fn quota_race(server: &Server, permit: Permit) -> Result<String, Failed> {
    let name = "quota-race";
    let plan = FaultPlan::with_watch_fault(name, WatchFault::NoFault);
    let mut case = TestCase::with_permit(server, permit, name, plan).await?;
    let hard = format!("{QUOTA_GIB}Gi");
    let ready = async |at: &IsolatedScope| Ok(condition(&at.budget().await?, "Ready") == "True");
    case.transition(
        "a budget is made",
        async |at| at.create_budget(&hard, &hard).await,
        ready,
    )
    .await?;
    let at = case.scope.clone();
    let third = format!("/api/v1/namespaces/{}/resourcequotas", at.name);
    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": { "name": "third" },
        "spec": { "hard": { "pods": "100000" } },
    });
    at.create(&third, quota).await?;
    // The operator does not evict pods that are as old as the budget's quotas.
    sleep(Duration::from_secs(6)).await;
    for number in 0..QUOTA_GIB {
        at.create_pod(&format!("fits-{number}"), 1, false, false)
            .await?;
    }
    let begin = Instant::now();
    let (admitted, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let client = async |client: usize| {
        for number in 0.. {
            if begin.elapsed() > RACE {
                break;
            }
            let pod = format!("beyond-{client}-{number}");
            match at.create_pod(&pod, 1, false, false).await {
                Ok(_) => admitted.fetch_add(1, Ordering::Relaxed),
                Err(kube::Error::Api(status)) if status.code == 403 => {
                    refused.fetch_add(1, Ordering::Relaxed)
                }
                // Many requests of one quota conflict, or are not answered in time.
                Err(kube::Error::Api(status)) if matches!(status.code, 409 | 500) => 0,
                Err(error) => return Err(Failed::from(error)),
            };
        }
        Ok(())
    };
    let clients = join_all((0..CLIENTS).map(client));
    let plain = async |client: usize| {
        for number in 0.. {
            let pod = json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": { "name": format!("plain-{client}-{number}") },
                "spec": { "terminationGracePeriodSeconds": 0,
                    "containers": [{ "name": "c", "image": "i" }] },
            });
            match at.create(&at.pods_path(), pod).await {
                Err(kube::Error::Api(status)) if !matches!(status.code, 409 | 500) => {
                    return Err(Failed::from(kube::Error::Api(status)));
                }
                _ => sleep(PLAIN_INTERVAL).await,
            }
        }
        Ok(())
    };
    let plains = join_all((0..CLIENTS / 4).map(plain));
    let change = async {
        for number in 0.. {
            let patch = json!({ "metadata": { "annotations": { "changed": number.to_string() } } });
            at.merge(&format!("{third}/third"), patch).await?;
        }
        Ok(())
    };
    let mut most = 0;
    let look = async {
        loop {
            most = most.max(alive(&at).await?);
            sleep(POLL_INTERVAL).await;
        }
    };
    tokio::select! {
        ends = clients => ends.into_iter().collect::<Result<(), Failed>>()?,
        failed = change => return failed.map(|()| String::new()),
        failed = plains => return failed.into_iter().collect::<Result<(), Failed>>().map(|()| String::new()),
        failed = look => return failed,
    }
    let (admitted, refused) = (admitted.into_inner(), refused.into_inner());
    let ended = Instant::now();
    while alive(&at).await? > QUOTA_GIB || !ready(&at).await? {
        if ended.elapsed() > GIVE_UP_AFTER {
            return Err(format!("{admitted} admitted beyond, {most} at once, not repaired").into());
        }
        sleep(POLL_INTERVAL).await;
    }
    if refused < MIN_REFUSALS {
        return Err(format!("no race: {refused} refused in {RACE:?}").into());
    }
    for number in 0..INJECTED {
        admit_beyond(&at, &format!("injected-{number}")).await?;
    }
    let injected = Instant::now();
    until(POLL_INTERVAL, "the repair", async || {
        Ok(alive(&at).await? <= QUOTA_GIB && ready(&at).await?)
    })
    .await?;
    let took = injected.elapsed();
    case.finish(async |at| Ok(ready(at).await? && alive(at).await? <= QUOTA_GIB))
        .await?;
    Ok(format!(
        "{refused} refused, {admitted} admitted beyond {QUOTA_GIB}, at most {most} at once; \
         {INJECTED} let in, repaired after {took:.1?}"
    ))
}

/// Creates a pod beyond the full budget, whose quotas count nothing for a moment.
async fn admit_beyond(at: &IsolatedScope, pod: &str) -> Result<(), Failed> {
    until(POLL_INTERVAL, "a pod beyond the budget", async || {
        reset_quota_count(at).await?;
        match at.create_pod(pod, 1, false, false).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if matches!(status.code, 403 | 409 | 500) => Ok(false),
            Err(error) => Err(error.into()),
        }
    })
    .await
}

/// The number of pods with GPU memory that are not terminating.
async fn alive(at: &IsolatedScope) -> Result<usize, Failed> {
    let pods = at.get(&at.pods_path()).await?;
    let pods = pods["items"].as_array().into_iter().flatten();
    let is_there = |pod: &&serde_json::Value| {
        let name = pod["metadata"]["name"].as_str().unwrap_or_default();
        pod["metadata"]["deletionTimestamp"].is_null() && !name.starts_with("plain")
    };
    Ok(pods.filter(is_there).count())
}
