//! Shows memory that a team borrows, and that its owner gets back.

use std::time::Instant;

use bursar_crds::GpuMemoryBudget;
use kube::api::Api;

use super::table::Row;
use super::workloads::{Workload, Workloads};
use super::{DemoError, POLL_INTERVAL, TIMEOUT, kubectl_bursar, report, run_pod};
use crate::environment::Environment;
use crate::pods::{PodError, PodState, Pods};
use crate::progress::Progress;
use crate::wait::{self, Poll};

/// Lends every GPU to one team, and lets a pod of the other team claim its guarantee.
///
/// # Errors
/// When a pod does not reach its expected state in time.
pub(super) async fn run(
    environment: &Environment,
    workloads: &Workloads,
    progress: &Progress,
) -> Result<Vec<Row>, DemoError> {
    let client = environment.cluster.client();
    let mut rows = Vec::new();
    for borrower in &workloads.borrowers {
        rows.push(run_pod(environment, borrower, progress).await?);
    }
    wait_until_published(environment, &workloads.borrowers).await?;
    println!("\n{}", kubectl_bursar(&client, "budgets").await?);

    let start = Instant::now();
    rows.push(run_pod(environment, &workloads.owner, progress).await?);
    let took = start.elapsed().as_secs_f64();
    let victim = preempted(environment, &workloads.borrowers).await?;
    let owner = &workloads.owner;
    report(
        progress,
        &workloads.borrowers[victim],
        format_args!(
            "borrowed, and is preempted: {} ran after {took:.1} s",
            owner.name
        ),
    );
    for row in &mut rows[..workloads.borrowers.len()] {
        row.note = "borrows".to_owned();
    }
    rows[victim].note = format!("borrowed; was preempted for {}", owner.name);
    if let Some(row) = rows.last_mut() {
        row.note = format!("got its guarantee back in {took:.1} s");
    }
    Ok(rows)
}

/// Waits until the budget's status has the amount that the borrowers request.
async fn wait_until_published(
    environment: &Environment,
    borrowers: &[Workload],
) -> Result<(), DemoError> {
    let total: u32 = borrowers.iter().map(|borrower| borrower.gib).sum();
    let namespace = borrowers[0].namespace;
    let budgets: Api<GpuMemoryBudget> = Api::namespaced(environment.cluster.client(), namespace);
    let poll = async || match budgets.get_status("default").await {
        Ok(budget) => {
            let status = budget.status.unwrap_or_default();
            match status.device_memory.borrowed.quanta {
                quanta if quanta >= i64::from(total) => Poll::Ready(()),
                quanta => Poll::Pending(format!("it says {quanta}")),
            }
        }
        Err(error) => Poll::Pending(error.to_string()),
    };
    let what = format!("the budget of {namespace} to say that {total} GiB are borrowed");
    Ok(wait::poll_until(&what, TIMEOUT, POLL_INTERVAL, poll).await?)
}

/// Returns the index of the borrower that has ended.
async fn preempted(environment: &Environment, borrowers: &[Workload]) -> Result<usize, PodError> {
    let pods = Pods::in_namespace(&environment.cluster.client(), borrowers[0].namespace).await?;
    let poll = async || match pods.list().await {
        Ok(list) => {
            let runs = |borrower: &&Workload| {
                list.iter().any(|pod| {
                    pod.metadata.name.as_deref() == Some(&borrower.name)
                        && pod.metadata.deletion_timestamp.is_none()
                        && PodState::of(pod).running
                })
            };
            match borrowers.iter().position(|borrower| !runs(&borrower)) {
                Some(victim) => Poll::Ready(victim),
                None => Poll::Pending("all run".to_owned()),
            }
        }
        Err(error) => Poll::Pending(error.to_string()),
    };
    Ok(wait::poll_until("a borrower to end", TIMEOUT, POLL_INTERVAL, poll).await?)
}
