//! One case: its place on the API server, the operators that look after it, and what happens to them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use bursar_crds::Quantum;
use bursar_http::Listeners;
use bursar_operator::api::client::client_config;
use bursar_operator::placement::PlacementOptions;
use bursar_operator::run::{self, OperatorError};
use k8s_openapi::jiff::Timestamp;
use kube::Config;
use kube::client::ClientBuilder;
use libtest_mimic::Failed;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::place::Place;
use crate::server::{Server, Turn, turn};
use bursar_sim_api::faults::{Doomed, Fate, Faults, Telling};

/// The state that is declared is reached within this time, whatever happens to one write or watch.
pub(crate) const PROMISED: Duration = Duration::from_secs(30);
/// What takes longer hangs: a machine that has much else to do breaks a promise now and then, which is counted.
pub(crate) const END: Duration = Duration::from_secs(120);
/// Then nothing is written any more, for longer than the longest wait between two tries.
const QUIET: Duration = Duration::from_secs(60);
/// What is gathered is written by then.
const SETTLED: Duration = Duration::from_millis(900);
/// A client waits so long for a watch to say something, as in production.
pub(crate) const SILENCE: Duration = Duration::from_secs(205);
const LOOK: Duration = Duration::from_millis(300);

/// A running operator.
pub(crate) struct Operator {
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), OperatorError>>,
}

impl Operator {
    /// Starts one with the chart's rights.
    pub(crate) async fn start(
        config: Config,
        silence: Duration,
        faults: &Faults,
    ) -> Result<Self, Failed> {
        let client = ClientBuilder::try_from(client_config(config, silence))?.with_layer(faults);
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listeners = Listeners::bind(any, any).await?;
        let rules = PlacementOptions {
            quantum: Quantum::Gib1,
            move_waiters: true,
            disruption_grace: Duration::from_secs(60),
        };
        let shutdown = CancellationToken::new();
        let operator = run::run(
            client.build(),
            listeners,
            rules,
            Timestamp::now,
            shutdown.clone(),
        );
        Ok(Self {
            task: tokio::spawn(operator),
            shutdown,
        })
    }

    /// Ends it where it stands.
    async fn kill(self) {
        self.task.abort();
        drop(self.task.await);
    }

    /// Asks it to end.
    pub(crate) async fn stop(self) -> Result<(), Failed> {
        self.shutdown.cancel();
        Ok(tokio::time::timeout(END, self.task).await???)
    }
}

/// What happens while a tour is made.
pub(crate) struct Plan {
    /// What the operator's writes and watches suffer.
    pub(crate) faults: Faults,
    /// Which writes, of each transition.
    pub(crate) doomed: Doomed,
    /// The operator is killed with a write that met its fate, and another one is started.
    pub(crate) killed: bool,
    /// A second operator runs beside it.
    pub(crate) two: bool,
}

impl Plan {
    /// Nothing; for others to be made from.
    pub(crate) fn of(case: &str, fate: Fate, doomed: Doomed) -> Self {
        Self {
            faults: Faults::new(case, fate, Telling::Plain),
            doomed,
            killed: false,
            two: false,
        }
    }

    /// Watches that tell so.
    pub(crate) fn told(case: &str, telling: Telling) -> Self {
        Self {
            faults: Faults::new(case, Fate::Lost, telling),
            doomed: Doomed::Nothing,
            killed: false,
            two: false,
        }
    }
}

/// A place with its operators.
pub(crate) struct Case {
    pub(crate) place: Place,
    plan: Plan,
    config: Config,
    silence: Duration,
    /// What a change comes to may be told so much later.
    late: Duration,
    operators: Vec<Operator>,
    /// While it is at work.
    turn: Option<Turn>,
    outcome: Outcome,
}

/// How cases went.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// The longest time from a change to the state that it asks for.
    pub(crate) longest: Duration,
    pub(crate) transitions: Vec<Transition>,
    /// How many events of each kind watches did not tell plainly.
    pub(crate) dealt: BTreeMap<String, usize>,
}

/// A change, and what was written until all was as it asks for.
#[derive(Clone, Debug)]
pub(crate) struct Transition {
    /// The change.
    pub(crate) what: String,
    pub(crate) writes: Vec<String>,
    /// How many writes met their fate.
    pub(crate) met: usize,
    /// It took longer than was promised.
    late: bool,
}

impl Outcome {
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.longest = self.longest.max(other.longest);
        self.transitions.extend(other.transitions);
        for (event, count) in other.dealt {
            *self.dealt.entry(event).or_default() += count;
        }
        self
    }

    /// How long transitions took, if no more than one in twenty of them took longer than was promised: none of a few.
    pub(crate) fn lasted(&self) -> Result<String, Failed> {
        let late = self.transitions.iter().filter(|one| one.late);
        let late: Vec<_> = late.map(|one| one.what.as_str()).collect();
        let longest = self.longest;
        if late.len() > (self.transitions.len() + 10) / 20 {
            return Err(
                format!("not within {PROMISED:?}, but up to {longest:.1?}: {late:?}").into(),
            );
        }
        Ok(format!("at most {longest:.1?} to the end of a transition"))
    }
}

impl Case {
    pub(crate) async fn start(server: &Server, name: &str, plan: Plan) -> Result<Self, Failed> {
        Self::alone(server, turn().await, name, plan).await
    }

    /// By a turn that is there.
    pub(crate) async fn alone(
        server: &Server,
        turn: Turn,
        name: &str,
        plan: Plan,
    ) -> Result<Self, Failed> {
        Self::over(server, turn, server.plane.operators(), SILENCE, name, plan).await
    }

    /// With another way to the API server, and less patience with its silence.
    pub(crate) async fn over(
        server: &Server,
        turn: Turn,
        config: Config,
        silence: Duration,
        name: &str,
        plan: Plan,
    ) -> Result<Self, Failed> {
        let place = Place::make(server, name).await?;
        let mut case = Self {
            place,
            config,
            silence,
            late: plan.faults.latest(),
            operators: Vec::new(),
            turn: Some(turn),
            outcome: Outcome::default(),
            plan,
        };
        for _ in 0..=usize::from(case.plan.two) {
            case.operate().await?;
        }
        Ok(case)
    }

    /// The same, and a change may be told of so much later.
    pub(crate) fn late_by(mut self, late: Duration) -> Self {
        self.late = late;
        self
    }

    /// Whether no write ends badly.
    pub(crate) fn is_undisturbed(&self) -> bool {
        self.plan.doomed == Doomed::Nothing
    }

    async fn operate(&mut self) -> Result<(), Failed> {
        let operator = Operator::start(self.config.clone(), self.silence, &self.plan.faults);
        self.operators.push(operator.await?);
        Ok(())
    }

    /// Makes a change, and waits for what it should come to while things go wrong by plan.
    pub(crate) async fn through(
        &mut self,
        what: &str,
        change: impl AsyncFnOnce(&Place) -> Result<(), Failed>,
        done: impl AsyncFn(&Place) -> Result<bool, Failed>,
    ) -> Result<(), Failed> {
        let faults = self.plan.faults.clone();
        faults.doom(self.plan.doomed);
        change(&self.place).await?;
        let (begin, mut killed, mut reached) = (Instant::now(), false, None);
        loop {
            if self.plan.killed && !killed && faults.met() > 0 {
                killed = true;
                for operator in std::mem::take(&mut self.operators) {
                    operator.kill().await;
                }
                self.operate().await?;
            }
            self.operators_run().await?;
            let elapsed = begin.elapsed();
            reached = match done(&self.place).await? {
                true => reached.or(Some(elapsed)),
                false => None,
            };
            // It stays so, and nobody writes any more.
            let settled = elapsed > SETTLED && faults.quiet() > SETTLED;
            if let Some(took) = reached.filter(|_| settled) {
                self.outcome.longest = self.outcome.longest.max(took);
                self.outcome.transitions.push(Transition {
                    what: what.to_owned(),
                    writes: faults.writes(),
                    met: faults.met(),
                    late: took > PROMISED + self.late,
                });
                return Ok(());
            }
            if elapsed > END + self.late {
                return Err(self.failed(&format!("{what}: not reached in time")).await);
            }
            sleep(LOOK).await;
        }
    }

    /// An operator ends when it is told to, and not before.
    async fn operators_run(&mut self) -> Result<(), Failed> {
        match self.operators.iter().position(|one| one.task.is_finished()) {
            None => Ok(()),
            Some(ended) => {
                let ended = self.operators.swap_remove(ended).task.await;
                Err(format!("{}: the operator ended: {ended:?}", self.place.name).into())
            }
        }
    }

    async fn failed(&self, what: &str) -> Failed {
        let (name, writes) = (&self.place.name, self.plan.faults.writes());
        let budget = self.place.budget().await.unwrap_or_default();
        let gpus = self.place.gpus().await.unwrap_or_default();
        let last: Vec<_> = writes.iter().rev().take(8).collect();
        format!(
            "{name}: {what}; {} writes, the last first: {last:?}\n{}\n{}\n{gpus}",
            writes.len(),
            budget["spec"],
            budget["status"]
        )
        .into()
    }

    /// Waits until nothing is written any more, sees that what the last change asks for is so still, and ends the
    /// operators.
    pub(crate) async fn end(
        mut self,
        done: impl AsyncFn(&Place) -> Result<bool, Failed>,
    ) -> Result<Outcome, Failed> {
        let faults = self.plan.faults.clone();
        faults.doom(Doomed::Nothing);
        // There is nothing to do any more: others may begin.
        self.turn = None;
        let begin = Instant::now();
        while faults.quiet() < QUIET {
            if begin.elapsed() > END + self.late + faults.quiet() {
                return Err(self
                    .failed(&format!("it writes and writes, {} now", faults.last()))
                    .await);
            }
            sleep(LOOK).await;
        }
        self.operators_run().await?;
        if !done(&self.place).await? {
            return Err(self.failed("a minute later").await);
        }
        for operator in self.operators {
            operator.stop().await?;
        }
        self.outcome.dealt = faults.dealt();
        Ok(self.outcome)
    }
}
