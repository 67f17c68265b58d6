//! Many clients that create and delete pods against one quota, which then counts too late.
//!
//! On a control plane without nodes it may be in time for as long as one looks. Then its count is set back by hand
//! in the middle of the storm, which is what a late count does. The storm goes on until the operator has said so, and
//! has ended pods.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use libtest_mimic::Failed;
use serde_json::json;
use tokio::time::{Instant, interval, sleep};

use crate::case::{Case, END, Plan};
use crate::place::{HARD as HARD_NAME, Place, condition};
use crate::server::{Server, Turn};
use bursar_sim_api::faults::Telling;

const CLIENTS: usize = 8;
/// How often all clients together try to create a pod; a second. About half of them come to something, and to a delete.
const A_SECOND: u64 = 160;
/// Creates and deletes that have to come to something. 60 a second are meant, and two cores do 77 to 143 beside the
/// cluster's trials, but 44 beside compilers: how many there are a second is the API server's affair.
const AT_LEAST: usize = 400;
/// How many pods a client keeps, if it gets them. All want more than there is.
const MOST: usize = 4;
/// So many it does not give up while the quota is helped to count late: together more than fit, so that it does not
/// end by itself.
const KEPT: usize = 3;
/// What the namespace may have.
const HARD: usize = 17;
/// So many more are asked for after the storm, at least.
const LATE: usize = 5;
/// The quota is left to count late by itself for so long, and then helped.
const UNAIDED: Duration = Duration::from_secs(5);
/// It is seen that there are too many pods, and some of them go, by then, or never.
const STORM: Duration = Duration::from_secs(40);
const AID: Duration = Duration::from_millis(50);
const LOOK: Duration = Duration::from_millis(300);

/// What all clients together have done.
#[derive(Default)]
struct Counts {
    created: usize,
    refused: usize,
    deleted: usize,
    /// The quota is helped to count late.
    aided: bool,
    /// They may end: the operator has done its part.
    repaired: bool,
}

pub(crate) async fn churn(server: &Server, turn: Turn) -> Result<String, Failed> {
    let name = "churn";
    let mut case = Case::alone(server, turn, name, Plan::told(name, Telling::Plain)).await?;
    let hard = format!("{HARD}Gi");
    let ready = async |at: &Place| Ok(condition(&at.budget().await?, "Ready") == "True");
    case.through(
        "a budget is made",
        async |at| at.declare(&hard, &hard).await,
        ready,
    )
    .await?;
    // Pods of the first seconds may be from before the budget, and are left alone.
    sleep(Duration::from_secs(6)).await;
    let at = case.place.clone();
    let (counts, begin) = (Mutex::new(Counts::default()), Instant::now());
    let storm = join_all((0..CLIENTS).map(|client| churns(&at, client, &counts)));
    let aid = async {
        sleep(UNAIDED).await;
        locked(&counts).aided = true;
        loop {
            count_nothing(&at).await?;
            sleep(AID).await;
        }
    };
    let mut exceeded_after = None;
    let looks = async {
        loop {
            sleep(LOOK).await;
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
    let told = format!(
        "{created} created, {refused} refused, {deleted} deleted in {stormed:.1?}: {rate:.0} a second; Exceeded after \
         {exceeded_after:.1?}, {gone} evicted in the storm"
    );
    if !repaired {
        return Err(format!("not repaired in the storm: {told}").into());
    }
    if created + deleted < AT_LEAST {
        return Err(format!("no storm: {told}").into());
    }
    let fits = async || Ok::<_, Failed>(ready(&at).await? && alive(&at).await? <= HARD);
    until("all to fit after the storm", fits).await?;
    // Now that nobody else deletes any, nobody goes that need not.
    let mut number = 0;
    let over = async || {
        count_nothing(&at).await?;
        number += 1;
        drop(at.pod(&format!("late-{number}"), 1, false, false).await);
        // Where this is slow the operator is there before all have come.
        Ok(number >= LATE && alive(&at).await? > HARD)
    };
    until("more than fit", over).await?;
    let exceeded = async || Ok(condition(&at.budget().await?, "Exceeded") == "True");
    until("that to be said", exceeded).await?;
    until("it to be repaired", async || ready(&at).await).await?;
    let exact = async |at: &Place| Ok(ready(at).await? && alive(at).await? == HARD);
    if !exact(&at).await? {
        let after = alive(&at).await?;
        return Err(format!("{after} pods live: {told}").into());
    }
    case.end(exact).await?;
    Ok(told)
}

async fn until(
    what: &str,
    mut is: impl AsyncFnMut() -> Result<bool, Failed>,
) -> Result<(), Failed> {
    let begin = Instant::now();
    while !is().await? {
        if begin.elapsed() > END {
            return Err(format!("waited in vain for {what}").into());
        }
        sleep(AID).await;
    }
    Ok(())
}

/// Sets back what the quotas count.
async fn count_nothing(at: &Place) -> Result<(), Failed> {
    for which in ["guaranteed", "limit"] {
        let quota = format!("{}/status", at.quota_path(which));
        let unused = json!({ "status": { "used": { HARD_NAME: "0" } } });
        at.merge(&quota, unused).await?;
    }
    Ok(())
}

/// How many pods the operator ended, by what it tells.
async fn evicted(at: &Place) -> Result<usize, Failed> {
    let events = at
        .get(&format!("/api/v1/namespaces/{}/events", at.name))
        .await?;
    let events = events["items"].as_array().into_iter().flatten();
    let of_pods = events.filter(|event| {
        event["reason"] == "GpuMemoryBudgetExceeded" && event["involvedObject"]["kind"] == "Pod"
    });
    Ok(of_pods.count())
}

async fn alive(at: &Place) -> Result<usize, Failed> {
    let pods = at.get(&at.pods_path()).await?;
    Ok(pods["items"].as_array().map_or(0, Vec::len))
}

/// Creates pods, and deletes its own oldest when it is refused or has enough, until the operator has done its part.
async fn churns(at: &Place, client: usize, counts: &Mutex<Counts>) -> Result<(), Failed> {
    let mut every = interval(Duration::from_millis(1000 * CLIENTS as u64 / A_SECOND));
    let mut own = VecDeque::new();
    let begin = Instant::now();
    for number in 0.. {
        every.tick().await;
        let name = format!("p-{client}-{number}");
        let made = at.pod(&name, 1, false, false).await;
        let oldest = {
            let mut counts = locked(counts);
            let full = match made {
                Ok(_) => {
                    counts.created += 1;
                    own.push_back(name);
                    own.len() > MOST
                }
                Err(kube::Error::Api(status)) if status.code == 403 => {
                    counts.refused += 1;
                    !counts.aided || own.len() > KEPT
                }
                // The quota is written by many at once, and gives up now and then.
                Err(kube::Error::Api(status)) if matches!(status.code, 409 | 500) => false,
                Err(error) => return Err(error.into()),
            };
            let enough = counts.repaired && counts.created + counts.deleted >= AT_LEAST;
            if enough || begin.elapsed() > STORM {
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
