//! Injects faults: crashes, failing writes and watches, a second operator, and no controller
//! manager.

use std::collections::{BTreeMap, BTreeSet};

use bursar_sim_api::faults::{FaultyWrites, LAGGING_KINDS, WatchFault, WriteFault};
use futures::future::join_all;
use futures::try_join;
use http::StatusCode;
use kube::Client;
use libtest_mimic::Failed;
use serde_json::json;

use crate::isolated_scope::{IsolatedScope, condition};
use crate::scenarios;
use crate::server::{Permit, Server, is_long};
use crate::test_case::{FaultPlan, Outcome, TestCase, WATCHED_KINDS};

/// The most writes of a transition.
const MAX_WRITES: usize = 8;
/// The kinds of disturbed watches.
const WATCH_FAULTS: [WatchFault; 6] = [
    // The first case takes longest.
    WatchFault::Lagging,
    WatchFault::Delayed,
    WatchFault::Duplicated,
    WatchFault::Replayed,
    WatchFault::Disconnected,
    WatchFault::Expired,
];

/// The scenarios delete objects of the first four watched kinds.
const DELETED_KINDS: usize = 4;
/// The minimum number of disturbed events of each resource. GpuNamespaces change least.
const MIN_EVENTS: usize = 3;

/// Returns the numbers of the writes in a transition that fail, one per case: every second from
/// `first`, and each in the long tier.
fn failing_numbers(first: usize) -> Vec<usize> {
    if is_long() {
        (1..=MAX_WRITES).collect()
    } else {
        (first..=MAX_WRITES).step_by(2).collect()
    }
}

/// Counts the writes of a transition that fail.
fn count_failing(numbers: &[usize], writes: &[String]) -> usize {
    numbers
        .iter()
        .filter(|number| **number <= writes.len())
        .count()
}

/// Runs all scenarios concurrently.
async fn run_scenarios(
    server: &Server,
    name: &str,
    plan: impl Fn(&str) -> FaultPlan,
) -> Result<Outcome, Failed> {
    let [budget, node, faults] =
        ["budget", "node", "faults"].map(|about| format!("{name}-{about}"));
    let by_budget = async {
        let case = TestCase::start(server, &budget, plan(&budget)).await?;
        let operator = Client::try_from(server.control_plane.operator_config())?;
        scenarios::budget_scenario(case, operator).await
    };
    let by_node = async {
        let case = TestCase::start(server, &node, plan(&node)).await?;
        scenarios::node_scenario(case).await
    };
    let by_faults = async {
        let case = TestCase::start(server, &faults, plan(&faults)).await?;
        scenarios::fault_scenario(case).await
    };
    let (budget, node, faults) =
        try_join!(Box::pin(by_budget), Box::pin(by_node), Box::pin(by_faults))?;
    Ok(budget.merge(node).merge(faults))
}

async fn merge_outcomes(
    runs: impl IntoIterator<Item = impl Future<Output = Result<Outcome, Failed>>>,
) -> Result<Outcome, Failed> {
    let mut sum = Outcome::default();
    let mut failures = Vec::new();
    for outcome in join_all(runs).await {
        match outcome {
            Ok(outcome) => sum = sum.merge(outcome),
            Err(failed) => failures.extend(failed.message().map(str::to_owned)),
        }
    }
    if failures.is_empty() {
        return Ok(sum);
    }
    Err(failures.join("\n\n").into())
}

/// Returns the outcome of the scenarios without faults, which run once for all comparisons.
async fn undisturbed_outcome(server: &Server) -> Result<&Outcome, Failed> {
    let plan = |case: &str| FaultPlan::with_watch_fault(case, WatchFault::NoFault);
    let run = server
        .undisturbed
        .get_or_init(async || run_scenarios(server, "plain", plan).await);
    run.await.as_ref().map_err(Clone::clone)
}

/// Checks that three in four of the expected faults were injected. `count_expected` counts those of
/// a transition by its writes in the undisturbed run, whose number differs a little from run to
/// run.
fn check_faults_met(
    outcome: &Outcome,
    plain: &Outcome,
    count_expected: impl Fn(&[String]) -> usize,
) -> Result<String, Failed> {
    let transitions = &outcome.transitions;
    let changes: BTreeSet<_> = transitions
        .iter()
        .map(|transition| &transition.change)
        .collect();
    let plain = plain.transitions.iter();
    let expected: usize = plain
        .filter(|transition| changes.contains(&transition.change))
        .map(|transition| count_expected(&transition.writes))
        .sum();
    let met: usize = transitions
        .iter()
        .map(|transition| transition.faults_met)
        .sum();
    let summary = format!(
        "{met} writes of {expected} met; {}",
        outcome.check_durations()?
    );
    if 4 * met < 3 * expected {
        return Err(summary.into());
    }
    Ok(summary)
}

/// Runs the scenarios without faults. Their writes are those that must fail in other trials.
pub(crate) async fn undisturbed(server: &Server) -> Result<String, Failed> {
    let outcome = undisturbed_outcome(server).await?;
    let counts = || outcome.transitions.iter().map(|one| one.writes.len());
    Ok(format!(
        "{} writes in {} transitions, at most {} in one; {}",
        counts().sum::<usize>(),
        outcome.transitions.len(),
        counts().max().unwrap_or_default(),
        outcome.check_durations()?,
    ))
}

/// Kills the operator before odd writes of a transition and after even ones, and before and after
/// each in the long tier.
pub(crate) async fn crashes(server: &Server) -> Result<String, Failed> {
    let faults = [
        ("before", WriteFault::RequestDropped, failing_numbers(1)),
        ("after", WriteFault::ResponseDropped, failing_numbers(2)),
    ];
    let cases = faults.iter().flat_map(|(when, fault, numbers)| {
        numbers.iter().map(move |number| (*when, *fault, *number))
    });
    let runs = cases.map(async |(when, fault, number)| {
        let plan = |case: &str| FaultPlan {
            kill_operator: true,
            ..FaultPlan::with_write_fault(case, fault, FaultyWrites::Nth(number))
        };
        run_scenarios(server, &format!("crash-{when}-{number}"), plan).await
    });
    let (plain, outcome) = try_join!(undisturbed_outcome(server), merge_outcomes(runs))?;
    check_faults_met(&outcome, plain, |writes| {
        let numbers = faults.iter().map(|(.., numbers)| numbers);
        numbers.map(|numbers| count_failing(numbers, writes)).sum()
    })
}

pub(crate) async fn failing_writes(server: &Server) -> Result<String, Failed> {
    let faults = [
        ("conflict", WriteFault::Refused(StatusCode::CONFLICT)),
        (
            "error",
            WriteFault::Refused(StatusCode::INTERNAL_SERVER_ERROR),
        ),
        ("garbled", WriteFault::ErrorAfterWrite),
    ];
    let runs = faults.map(async |(name, fault)| {
        let plan =
            |case: &str| FaultPlan::with_write_fault(case, fault, FaultyWrites::FirstAttempts);
        run_scenarios(server, name, plan).await
    });
    let (plain, outcome) = try_join!(undisturbed_outcome(server), merge_outcomes(runs))?;
    // Each distinct write fails at its first attempt.
    check_faults_met(&outcome, plain, |writes| {
        faults.len() * writes.iter().collect::<BTreeSet<_>>().len()
    })
}

/// Drops the response to odd writes of a transition, and to each in the long tier. `crashes` drops
/// responses too, and kills the operator.
pub(crate) async fn unanswered_writes(server: &Server) -> Result<String, Failed> {
    let numbers = failing_numbers(1);
    let runs = numbers.iter().map(async |&number| {
        let plan = |case: &str| {
            FaultPlan::with_write_fault(
                case,
                WriteFault::ResponseDropped,
                FaultyWrites::Nth(number),
            )
        };
        run_scenarios(server, &format!("unanswered-{number}"), plan).await
    });
    let (plain, outcome) = try_join!(undisturbed_outcome(server), merge_outcomes(runs))?;
    check_faults_met(&outcome, plain, |writes| count_failing(&numbers, writes))
}

pub(crate) async fn watches(server: &Server) -> Result<String, Failed> {
    let runs = WATCH_FAULTS.map(async |fault| {
        let name = format!("{fault:?}").to_lowercase();
        let outcome = run_scenarios(server, &name, |case| {
            FaultPlan::with_watch_fault(case, fault)
        })
        .await?;
        check_every_kind_disturbed(fault, &outcome.disturbed_events)?;
        Ok(outcome)
    });
    let outcome = merge_outcomes(runs).await?;
    let events: usize = outcome.disturbed_events.values().sum();
    let durations = outcome.check_durations()?;
    Ok(format!("{events} events were disturbed; {durations}"))
}

/// Checks that events of every resource were disturbed, deletions included.
fn check_every_kind_disturbed(
    fault: WatchFault,
    disturbed: &BTreeMap<String, usize>,
) -> Result<(), Failed> {
    let lags = fault == WatchFault::Lagging;
    let (changed, gone) = if lags {
        (&LAGGING_KINDS[..], &[][..])
    } else {
        (&WATCHED_KINDS[..], &WATCHED_KINDS[..DELETED_KINDS])
    };
    for kind in changed {
        let of_kind = disturbed
            .iter()
            .filter(|(event, _)| event.ends_with(&format!(" {kind}")));
        let of_kind: usize = of_kind.map(|(_, count)| count).sum();
        if of_kind < MIN_EVENTS {
            return Err(format!("{fault:?}: {of_kind} events of {kind}: {disturbed:?}").into());
        }
    }
    for kind in gone {
        if !disturbed.contains_key(&format!("DELETED {kind}")) {
            return Err(format!("{fault:?}: none of {kind} went: {disturbed:?}").into());
        }
    }
    Ok(())
}

pub(crate) async fn two_operators(server: &Server) -> Result<String, Failed> {
    let plan = |case: &str| FaultPlan {
        two_operators: true,
        ..FaultPlan::with_watch_fault(case, WatchFault::NoFault)
    };
    run_scenarios(server, "two", plan).await?.check_durations()
}

/// Checks the operator without a controller manager, which neither enforces a quota nor collects
/// that of a deleted budget.
pub(crate) async fn no_controller_manager(
    server: &Server,
    permit: Permit,
) -> Result<String, Failed> {
    let name = "unmanaged";
    let ready = async |at: &IsolatedScope| Ok(condition(&at.budget().await?, "Ready") == "True");
    let mut case = TestCase::with_permit(
        server,
        permit,
        name,
        FaultPlan::with_watch_fault(name, WatchFault::NoFault),
    )
    .await?;
    server
        .control_plane
        .set_controller_manager_running(false)
        .await?;
    case.transition(
        "a budget is made",
        async |at| at.create_budget("16Gi", "24Gi").await,
        async |at| {
            let budget = at.budget().await?;
            let labels = at.get(&at.namespace_path()).await?["metadata"]["labels"].clone();
            let labelled = !labels["bursar.dev/budget"].is_null();
            Ok(condition(&budget, "Enforced") == "False" && !labelled)
        },
    )
    .await?;
    case.transition(
        "the controller manager is back",
        async |_| {
            Ok(server
                .control_plane
                .set_controller_manager_running(true)
                .await?)
        },
        ready,
    )
    .await?;
    server
        .control_plane
        .set_controller_manager_running(false)
        .await?;
    case.transition(
        "it is amended",
        async |at| {
            at.patch_budget(json!({ "deviceMemory": { "guaranteed": "8Gi" } }))
                .await
        },
        async |at| Ok(condition(&at.budget().await?, "Enforced") == "False"),
    )
    .await?;
    case.transition(
        "the controller manager is back again",
        async |_| {
            Ok(server
                .control_plane
                .set_controller_manager_running(true)
                .await?)
        },
        ready,
    )
    .await?;
    case.finish(ready).await?.check_durations()
}
