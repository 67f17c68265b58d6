//! Creates and deletes pods by many clients against one quota, which counts them late.
//!
//! On a control plane without nodes the quota may always count in time. The test therefore resets
//! the quota's count during the churn, which has the effect of a late count. The churn continues
//! until the operator has reported the overage and has evicted pods.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bursar_sim_api::faults::WatchFault;
use futures::future::join_all;
use libtest_mimic::Failed;
use serde_json::json;
use tokio::time::{Instant, interval, sleep};

use crate::isolated_scope::{IsolatedScope, QUOTA_RESOURCE as HARD_NAME, condition};
use crate::server::{Permit, Server};
use crate::test_case::{FaultPlan, TestCase, until};

const CLIENTS: usize = 8;
/// The attempts of all clients to create a pod, per second. About half of them succeed and lead to
/// a delete.
const CREATES_PER_SECOND: u64 = 160;
/// The minimum of successful creates and deletes. The target is 60 per second. Two cores reach 77
/// to 143 beside the cluster's trials, but 44 beside compilers, because the API server is the
/// bottleneck.
const MIN_CHANGES: usize = 400;
/// The maximum number of pods of one client. All clients together want more than the quota.
const MAX_PODS_PER_CLIENT: usize = 4;
/// The pods that each client keeps while the quota is reset. Together these exceed the quota, so
/// that the overage lasts.
const PODS_KEPT_PER_CLIENT: usize = 3;
/// The namespace's quota in GiB.
const QUOTA_GIB: usize = 17;
/// The minimum number of pods created after the churn.
const MIN_LATE_PODS: usize = 5;
/// The time before the test begins to reset the quota's count.
const UNAIDED_TIME: Duration = Duration::from_secs(5);
/// The timeout for the operator to report the overage and evict pods, and for the changes of a
/// storm.
const CHURN_TIMEOUT: Duration = Duration::from_secs(90);
const RESET_INTERVAL: Duration = Duration::from_millis(50);
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// The totals of all clients.
#[derive(Default)]
struct Counts {
    created: usize,
    refused: usize,
    deleted: usize,
    /// Whether the test resets the quota's count.
    aided: bool,
    /// Whether the operator has evicted pods, so that clients may stop.
    repaired: bool,
}

pub(crate) async fn churn(server: &Server, permit: Permit) -> Result<String, Failed> {
    let name = "churn";
    let mut case = TestCase::with_permit(
        server,
        permit,
        name,
        FaultPlan::with_watch_fault(name, WatchFault::NoFault),
    )
    .await?;
    let hard = format!("{QUOTA_GIB}Gi");
    let ready = async |at: &IsolatedScope| Ok(condition(&at.budget().await?, "Ready") == "True");
    case.transition(
        "a budget is made",
        async |at| at.create_budget(&hard, &hard).await,
        ready,
    )
    .await?;
    // Pods of the first seconds may be older than the budget, and the operator does not evict
    // these.
    sleep(Duration::from_secs(6)).await;
    let at = case.scope.clone();
    let (counts, begin) = (Mutex::new(Counts::default()), Instant::now());
    let storm = join_all((0..CLIENTS).map(|client| run_client(&at, client, &counts)));
    let aid = async {
        sleep(UNAIDED_TIME).await;
        locked(&counts).aided = true;
        loop {
            reset_quota_count(&at).await?;
            sleep(RESET_INTERVAL).await;
        }
    };
    let mut exceeded_after = None;
    let looks = async {
        loop {
            sleep(POLL_INTERVAL).await;
            if exceeded_after.is_none() && condition(&at.budget().await?, "Exceeded") == "True" {
                exceeded_after = Some(begin.elapsed());
            }
            if exceeded_after.is_some() && evicted(&at).await? > 0 {
                locked(&counts).repaired = true;
            }
        }
    };
    tokio::select! {
        ends = storm => ends.into_iter().collect::<Result<(), Failed>>()?,
        failed = aid => return failed,
        failed = looks => return failed,
    }
    let stormed = begin.elapsed();
    let Counts {
        created,
        refused,
        deleted,
        repaired,
        aided: _,
    } = *locked(&counts);
    let gone = evicted(&at).await?;
    let rate = (created + deleted) as f64 / stormed.as_secs_f64();
    let summary = format!(
        "{created} created, {refused} refused, {deleted} deleted in {stormed:.1?}: {rate:.0} a second; Exceeded after \
         {exceeded_after:.1?}, {gone} evicted in the storm"
    );
    if !repaired {
        return Err(format!("not repaired in the storm: {summary}").into());
    }
    if created + deleted < MIN_CHANGES {
        return Err(format!("no storm: {summary}").into());
    }
    let fits = async || Ok::<_, Failed>(ready(&at).await? && alive(&at).await? <= QUOTA_GIB);
    until(RESET_INTERVAL, "all to fit after the storm", fits).await?;
    // No client deletes pods any more, so every eviction below is the operator's.
    let mut number = 0;
    let over = async || {
        reset_quota_count(&at).await?;
        number += 1;
        drop(
            at.create_pod(&format!("late-{number}"), 1, false, false)
                .await,
        );
        // On a slow machine the operator evicts pods before all late pods exist.
        Ok(number >= MIN_LATE_PODS && alive(&at).await? > QUOTA_GIB)
    };
    until(RESET_INTERVAL, "more than fit", over).await?;
    let exceeded = async || Ok(condition(&at.budget().await?, "Exceeded") == "True");
    until(RESET_INTERVAL, "that to be said", exceeded).await?;
    until(RESET_INTERVAL, "it to be repaired", async || {
        ready(&at).await
    })
    .await?;
    let exact = async |at: &IsolatedScope| Ok(ready(at).await? && alive(at).await? == QUOTA_GIB);
    if !exact(&at).await? {
        let after = alive(&at).await?;
        return Err(format!("{after} pods live: {summary}").into());
    }
    case.finish(exact).await?;
    Ok(summary)
}

/// Resets the quotas' count to 0.
pub(crate) async fn reset_quota_count(at: &IsolatedScope) -> Result<(), Failed> {
    for which in ["guaranteed", "limit"] {
        let quota = format!("{}/status", at.quota_path(which));
        let unused = json!({ "status": { "used": { HARD_NAME: "0" } } });
        at.merge(&quota, unused).await?;
    }
    Ok(())
}

/// Counts the operator's evictions by their Events.
async fn evicted(at: &IsolatedScope) -> Result<usize, Failed> {
    let events = at
        .get(&format!("/api/v1/namespaces/{}/events", at.name))
        .await?;
    let events = events["items"].as_array().into_iter().flatten();
    let of_pods = events.filter(|event| {
        event["reason"] == "GpuMemoryBudgetExceeded" && event["involvedObject"]["kind"] == "Pod"
    });
    Ok(of_pods.count())
}

async fn alive(at: &IsolatedScope) -> Result<usize, Failed> {
    let pods = at.get(&at.pods_path()).await?;
    Ok(pods["items"].as_array().map_or(0, Vec::len))
}

/// Creates pods until the operator has evicted some. The client deletes its oldest pod when a
/// create is refused, or at its maximum.
async fn run_client(
    at: &IsolatedScope,
    client: usize,
    counts: &Mutex<Counts>,
) -> Result<(), Failed> {
    let mut every = interval(Duration::from_millis(
        1000 * CLIENTS as u64 / CREATES_PER_SECOND,
    ));
    let mut own = VecDeque::new();
    let begin = Instant::now();
    for number in 0.. {
        every.tick().await;
        let name = format!("p-{client}-{number}");
        let created = at.create_pod(&name, 1, false, false).await;
        let oldest = {
            let mut counts = locked(counts);
            let full = match created {
                Ok(_) => {
                    counts.created += 1;
                    own.push_back(name);
                    own.len() > MAX_PODS_PER_CLIENT
                }
                Err(kube::Error::Api(status)) if status.code == 403 => {
                    counts.refused += 1;
                    !counts.aided || own.len() > PODS_KEPT_PER_CLIENT
                }
                // The API server sometimes fails a create with a conflict when many requests update
                // the quota.
                Err(kube::Error::Api(status)) if matches!(status.code, 409 | 500) => false,
                Err(error) => return Err(error.into()),
            };
            let enough = counts.repaired && counts.created + counts.deleted >= MIN_CHANGES;
            if enough || begin.elapsed() > CHURN_TIMEOUT {
                return Ok(());
            }
            let oldest = if full { own.pop_front() } else { None };
            counts.deleted += usize::from(oldest.is_some());
            oldest
        };
        if let Some(oldest) = oldest {
            at.delete(&at.pod_path(&oldest)).await?;
        }
    }
    Ok(())
}

fn locked(counts: &Mutex<Counts>) -> MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}
