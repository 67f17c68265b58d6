//! Crashes, writes and watches that fail, two operators, and no controller manager.

use std::collections::{BTreeMap, BTreeSet};

use futures::future::join_all;
use futures::try_join;
use http::StatusCode;
use kube::Client;
use libtest_mimic::Failed;
use serde_json::json;

use crate::case::{Case, Outcome, Plan};
use crate::place::{Place, condition};
use crate::server::{Server, Turn};
use crate::tours;
use bursar_sim_api::faults::{Doomed, Fate, LAGGING, Telling};

/// The writes of a transition that are met by number.
const NUMBERS: std::ops::RangeInclusive<usize> = 1..=8;
/// Watches tell so.
const TELLINGS: [Telling; 6] = [
    // It takes longest.
    Telling::Lagging,
    Telling::Late,
    Telling::Twice,
    Telling::Again,
    Telling::Cut,
    Telling::Expired,
];

/// What the operator watches: first what comes and goes in the tours.
const KINDS: [&str; 6] = [
    "gpumemorybudgets",
    "namespaces",
    "pods",
    "resourcequotas",
    "gpunodes",
    "nodes",
];
/// At least so many events of a kind are not told plainly.
const EVENTS: usize = 5;

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
    let (budget, node, faults) =
        try_join!(Box::pin(by_budget), Box::pin(by_node), Box::pin(by_faults))?;
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

/// The tours when nothing goes wrong; they are made once for all that compare with them.
async fn plain(server: &Server) -> Result<&Outcome, Failed> {
    let plan = |case: &str| Plan::told(case, Telling::Plain);
    let tour = server
        .undisturbed
        .get_or_init(async || tour(server, "plain", plan).await);
    tour.await.as_ref().map_err(Clone::clone)
}

/// Of the transitions that were made with faults, three writes in four have to have met theirs, each `times`: of what is
/// written in the same transition when nothing goes wrong, `of` it. How much that is differs a little from run to run.
fn met(
    outcome: &Outcome,
    plain: &Outcome,
    times: usize,
    of: impl Fn(&[String]) -> usize,
) -> Result<String, Failed> {
    let made: BTreeSet<_> = outcome.transitions.iter().map(|one| &one.what).collect();
    let plain = plain.transitions.iter();
    let meant = plain.filter(|one| made.contains(&one.what));
    let meant = times * meant.map(|one| of(&one.writes)).sum::<usize>();
    let met: usize = outcome.transitions.iter().map(|one| one.met).sum();
    let told = format!("{met} writes of {meant} met; {}", outcome.lasted()?);
    if 4 * met < 3 * meant {
        return Err(told.into());
    }
    Ok(told)
}

/// Nothing happens but the tours. What is written in them is what has to be met elsewhere.
pub(crate) async fn undisturbed(server: &Server) -> Result<String, Failed> {
    let outcome = plain(server).await?;
    let counts = || outcome.transitions.iter().map(|one| one.writes.len());
    Ok(format!(
        "{} writes in {} transitions, at most {} in one; {}",
        counts().sum::<usize>(),
        outcome.transitions.len(),
        counts().max().unwrap_or_default(),
        outcome.lasted()?,
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
    let (plain, outcome) = try_join!(plain(server), all(tours))?;
    met(&outcome, plain, fates.len(), <[_]>::len)
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
    let (plain, outcome) = try_join!(plain(server), all(tours))?;
    // Each is met when it is tried for the first time.
    let once = |writes: &[String]| writes.iter().collect::<BTreeSet<_>>().len();
    met(&outcome, plain, fates.len(), once)
}

pub(crate) async fn unanswered_writes(server: &Server) -> Result<String, Failed> {
    let tours = NUMBERS.map(async |number| {
        let plan = |case: &str| Plan::of(case, Fate::Unanswered, Doomed::Number(number));
        tour(server, &format!("unanswered-{number}"), plan).await
    });
    let (plain, outcome) = try_join!(plain(server), all(tours))?;
    met(&outcome, plain, 1, <[_]>::len)
}

pub(crate) async fn watches(server: &Server) -> Result<String, Failed> {
    let tours = TELLINGS.map(async |telling| {
        let name = format!("{telling:?}").to_lowercase();
        let outcome = tour(server, &name, |case| Plan::told(case, telling)).await?;
        is_of_every_kind(telling, &outcome.dealt)?;
        Ok(outcome)
    });
    let outcome = all(tours).await?;
    let events: usize = outcome.dealt.values().sum();
    let lasted = outcome.lasted()?;
    Ok(format!("{events} events not told plainly; {lasted}"))
}

/// Whether each kind's events were told so, and that an object is gone too, where the tours do that to one.
fn is_of_every_kind(telling: Telling, dealt: &BTreeMap<String, usize>) -> Result<(), Failed> {
    let lags = telling == Telling::Lagging;
    let (changed, gone) = if lags {
        (&LAGGING[..], &[][..])
    } else {
        (&KINDS[..], &KINDS[..4])
    };
    for kind in changed {
        let of_it = dealt
            .iter()
            .filter(|(event, _)| event.ends_with(&format!(" {kind}")));
        let of_it: usize = of_it.map(|(_, count)| count).sum();
        if of_it < EVENTS {
            return Err(format!("{telling:?}: {of_it} events of {kind}: {dealt:?}").into());
        }
    }
    for kind in gone {
        if !dealt.contains_key(&format!("DELETED {kind}")) {
            return Err(format!("{telling:?}: none of {kind} went: {dealt:?}").into());
        }
    }
    Ok(())
}

pub(crate) async fn two_operators(server: &Server) -> Result<String, Failed> {
    let plan = |case: &str| Plan {
        two: true,
        ..Plan::told(case, Telling::Plain)
    };
    tour(server, "two", plan).await?.lasted()
}

/// Without it no quota comes into force, and none goes with its budget.
pub(crate) async fn no_controller_manager(server: &Server, turn: Turn) -> Result<String, Failed> {
    let name = "unmanaged";
    let ready = async |at: &Place| Ok(condition(&at.budget().await?, "Ready") == "True");
    let mut case = Case::alone(server, turn, name, Plan::told(name, Telling::Plain)).await?;
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
        ready,
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
        ready,
    )
    .await?;
    case.end(ready).await?.lasted()
}
