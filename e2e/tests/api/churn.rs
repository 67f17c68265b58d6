//! Many clients that create and delete pods against one quota, which then counts too late.
//!
//! On a control plane without nodes it may be in time for as long as one looks. Then its count is set back by hand
//! in the middle of the storm, which is what a late count does.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use libtest_mimic::Failed;
use serde_json::json;
use tokio::time::{Instant, interval, sleep};

use crate::case::{Case, END, Plan};
use crate::faults::Telling;
use crate::place::{HARD as HARD_NAME, Place, condition};
use crate::server::Server;

const CLIENTS: usize = 8;
/// How often all clients together try to create a pod; a second. About half of them come to something, and to a delete.
const A_SECOND: u64 = 120;
/// How many pods a client keeps, if it gets them. All want more than there is.
const MOST: usize = 4;
/// What the namespace may have.
const HARD: usize = 17;
/// The quota is left to count late by itself for so long, and then helped.
const UNAIDED: Duration = Duration::from_secs(10);
/// More than fits was admitted by then, or never is.
const STORM: Duration = Duration::from_secs(40);

/// What all clients together have done.
#[derive(Default)]
struct Counts {
    created: usize,
    refused: usize,
    deleted: usize,
}

impl Counts {
    /// More pods live than fit. Those whose deletion was asked for are not counted.
    fn is_over(&self) -> bool {
        self.created - self.deleted > HARD
    }
}

pub(crate) async fn churn(server: &Server) -> Result<String, Failed> {
    let name = "churn";
    let mut case = Case::start(server, name, Plan::told(name, Telling::Plain)).await?;
    let hard = format!("{HARD}Gi");
    case.through(
        "a budget is made",
        async |at| at.declare(&hard, &hard).await,
        async |at| Ok(condition(&at.budget().await?, "Ready") == "True"),
    )
    .await?;
    // Pods of the first seconds may be from before the budget, and are left alone.
    sleep(Duration::from_secs(6)).await;
    let at = case.place.clone();
    let (counts, begin) = (Mutex::new(Counts::default()), Instant::now());
    let storm = join_all((0..CLIENTS).map(|client| churns(&at, client, &counts)));
    let aid = async {
        sleep(UNAIDED).await;
        loop {
            for which in ["guaranteed", "limit"] {
                let quota = format!("{}/status", at.quota_path(which));
                let unused = json!({ "status": { "used": { HARD_NAME: "0" } } });
                at.merge(&quota, unused).await?;
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        ends = storm => ends.into_iter().collect::<Result<(), Failed>>()?,
        failed = aid => return failed,
    }
    let stormed = begin.elapsed();
    let Counts {
        created,
        refused,
        deleted,
    } = *locked(&counts);
    let aided = if stormed > UNAIDED {
        "aided"
    } else {
        "by itself"
    };
    let told = format!(
        "{aided}: {created} created, {refused} refused, {deleted} deleted in {stormed:.1?}"
    );
    let before = alive(&at).await?;
    if before <= HARD {
        return Err(format!("never more than fit: {told}, {before} are left").into());
    }
    let mut repaired = Duration::ZERO;
    for (exceeded, since) in [("True", Instant::now()), ("False", Instant::now())] {
        while condition(&at.budget().await?, "Exceeded") != exceeded {
            if since.elapsed() > END {
                return Err(format!("Exceeded is not {exceeded}: {told}, {before} lived").into());
            }
            sleep(Duration::from_millis(100)).await;
        }
        repaired = since.elapsed();
    }
    let after = alive(&at).await?;
    if after != HARD {
        return Err(format!("{after} pods live: {told}").into());
    }
    case.end().await?;
    Ok(format!(
        "{told}; {before} lived, and {after} after {repaired:.1?}"
    ))
}

async fn alive(at: &Place) -> Result<usize, Failed> {
    let pods = at.get(&at.pods_path()).await?;
    Ok(pods["items"].as_array().map_or(0, Vec::len))
}

/// Creates pods, and deletes its own oldest when it is refused or has enough, until more live than fit.
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
                    true
                }
                // The quota is written by many at once, and gives up now and then.
                Err(kube::Error::Api(status)) if matches!(status.code, 409 | 500) => false,
                Err(error) => return Err(error.into()),
            };
            if counts.is_over() || begin.elapsed() > STORM {
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
