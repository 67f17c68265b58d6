//! Crashes, writes and watches that fail, two operators, and no controller manager.

use std::collections::BTreeSet;

use futures::future::join_all;
use http::StatusCode;
use kube::Client;
use libtest_mimic::Failed;
use serde_json::json;

use crate::case::{Case, Outcome, Plan};
use crate::faults::{Doomed, Fate, Telling};
use crate::place::condition;
use crate::server::Server;
use crate::tours;

/// The writes of a transition that are met by number. What comes later is of a kind that is met in other transitions.
const NUMBERS: std::ops::RangeInclusive<usize> = 1..=8;

/// All tours, at the same time.
async fn tour(server: &Server, name: &str, plan: impl Fn(&str) -> Plan) -> Result<Outcome, Failed> {
    let [budget, node, faults] =
        ["budget", "node", "faults"].map(|about| format!("{name}-{about}"));
    let by_budget = async {
        let case = Case::start(server, &budget, plan(&budget)).await?;
        let operator = Client::try_from(server.plane.operators())?;
        tours::of_a_budget(case, operator).await
    };
    let by_node = async {
        let case = Case::start(server, &node, plan(&node)).await?;
        tours::of_a_node(case).await
    };
    let by_faults = async {
        let case = Case::start(server, &faults, plan(&faults)).await?;
        tours::of_faults(case).await
    };
    let (budget, node, faults) = futures::try_join!(by_budget, by_node, by_faults)?;
    Ok(budget.and(node).and(faults))
}

async fn all(
    tours: impl IntoIterator<Item = impl Future<Output = Result<Outcome, Failed>>>,
) -> Result<Outcome, Failed> {
    let mut sum = Outcome::default();
    let mut failures = Vec::new();
    for outcome in join_all(tours).await {
        match outcome {
            Ok(outcome) => sum = sum.and(outcome),
            Err(failed) => failures.extend(failed.message().map(str::to_owned)),
        }
    }
    if failures.is_empty() {
        return Ok(sum);
    }
    Err(failures.join("\n\n").into())
}

fn told(outcome: Outcome, least: usize) -> Result<String, Failed> {
    let Outcome { met, longest, .. } = outcome;
    if met < least {
        return Err(format!("only {met} writes were met").into());
    }
    Ok(format!(
        "{met} writes met, at most {longest:.1?} to the end of a transition"
    ))
}

/// Nothing happens but the tours. What is written in them is what is met by number elsewhere.
pub(crate) async fn undisturbed(server: &Server) -> Result<String, Failed> {
    let plan = |case: &str| Plan::told(case, Telling::Plain);
    let outcome = tour(server, "plain", plan).await?;
    let numbered = outcome
        .writes
        .iter()
        .flat_map(|writes| writes.iter().take(*NUMBERS.end()));
    let met: BTreeSet<&String> = numbered.collect();
    let all = outcome.writes.iter().flatten();
    let unmet: Vec<_> = all.filter(|write| !met.contains(write)).collect();
    if !unmet.is_empty() {
        return Err(format!("beyond {} in every transition: {unmet:?}", NUMBERS.end()).into());
    }
    let counts = || outcome.writes.iter().map(Vec::len);
    Ok(format!(
        "{} writes in {} transitions, at most {} in one",
        counts().sum::<usize>(),
        outcome.writes.len(),
        counts().max().unwrap_or_default(),
    ))
}

pub(crate) async fn crashes(server: &Server) -> Result<String, Failed> {
    let fates = [("before", Fate::Lost), ("after", Fate::Unanswered)];
    let tours = NUMBERS.flat_map(|number| fates.map(|(when, fate)| (number, when, fate)));
    let tours = tours.map(async |(number, when, fate)| {
        let plan = |case: &str| Plan {
            killed: true,
            ..Plan::of(case, fate, Doomed::Number(number))
        };
        tour(server, &format!("crash-{when}-{number}"), plan).await
    });
    told(all(tours).await?, 100)
}

pub(crate) async fn failing_writes(server: &Server) -> Result<String, Failed> {
    let fates = [
        ("conflict", Fate::Refused(StatusCode::CONFLICT)),
        ("error", Fate::Refused(StatusCode::INTERNAL_SERVER_ERROR)),
        ("garbled", Fate::Garbled),
    ];
    let tours = fates.map(async |(name, fate)| {
        let plan = |case: &str| Plan::of(case, fate, Doomed::FirstTries);
        tour(server, name, plan).await
    });
    told(all(tours).await?, 120)
}

pub(crate) async fn unanswered_writes(server: &Server) -> Result<String, Failed> {
    let tours = NUMBERS.map(async |number| {
        let plan = |case: &str| Plan::of(case, Fate::Unanswered, Doomed::Number(number));
        tour(server, &format!("unanswered-{number}"), plan).await
    });
    told(all(tours).await?, 50)
}

pub(crate) async fn watches(server: &Server) -> Result<String, Failed> {
    let tellings = [
        Telling::Late,
        Telling::Twice,
        Telling::Again,
        Telling::Cut,
        Telling::Expired,
    ];
    let tours = tellings.map(async |telling| {
        let name = format!("{telling:?}").to_lowercase();
        tour(server, &name, |case| Plan::told(case, telling)).await
    });
    told(all(tours).await?, 0)
}

pub(crate) async fn two_operators(server: &Server) -> Result<String, Failed> {
    let plan = |case: &str| Plan {
        two: true,
        ..Plan::told(case, Telling::Plain)
    };
    told(tour(server, "two", plan).await?, 0)
}

/// Without it no quota comes into force, and none goes with its budget.
pub(crate) async fn no_controller_manager(server: &Server) -> Result<String, Failed> {
    let name = "unmanaged";
    let mut case = Case::start(server, name, Plan::told(name, Telling::Plain)).await?;
    server.plane.controller_manager(false).await?;
    case.through(
        "a budget is made",
        async |at| at.declare("16Gi", "24Gi").await,
        async |at| {
            let budget = at.budget().await?;
            let labels = at.get(&at.namespace_path()).await?["metadata"]["labels"].clone();
            let labelled = !labels["bursar.dev/budget"].is_null();
            Ok(condition(&budget, "Enforced") == "False" && !labelled)
        },
    )
    .await?;
    case.through(
        "the controller manager is back",
        async |_| Ok(server.plane.controller_manager(true).await?),
        async |at| Ok(condition(&at.budget().await?, "Ready") == "True"),
    )
    .await?;
    server.plane.controller_manager(false).await?;
    case.through(
        "it is amended",
        async |at| {
            at.amend(json!({ "deviceMemory": { "guaranteed": "8Gi" } }))
                .await
        },
        async |at| Ok(condition(&at.budget().await?, "Enforced") == "False"),
    )
    .await?;
    case.through(
        "the controller manager is back again",
        async |_| Ok(server.plane.controller_manager(true).await?),
        async |at| Ok(condition(&at.budget().await?, "Ready") == "True"),
    )
    .await?;
    told(case.end().await?, 0)
}
