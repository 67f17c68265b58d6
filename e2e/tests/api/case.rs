//! One case: its place on the API server, the operators that look after it, and what happens to them.

use std::time::Duration;

use bursar_crds::Quantum;
use bursar_operator::observe::patient;
use bursar_operator::operator::{self, OperatorError};
use bursar_operator::placement::Rules;
use kube::Config;
use kube::client::ClientBuilder;
use libtest_mimic::Failed;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::faults::{Doomed, Fate, Faults, Telling};
use crate::place::Place;
use crate::server::Server;

/// The state that is declared is reached within this time, whatever happens to one write or watch.
pub(crate) const END: Duration = Duration::from_secs(30);
/// Then nothing is written any more. No timer of the operator's is longer: a label's small change waits 10 s.
const QUIET: Duration = Duration::from_secs(12);
/// What is gathered is written by then.
const SETTLED: Duration = Duration::from_millis(900);
/// A client waits so long for a watch to say something, as in production.
const SILENCE: Duration = Duration::from_secs(205);
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
        let client = ClientBuilder::try_from(patient(config, silence))?.with_layer(faults);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let rules = Rules {
            quantum: Quantum::Gib1,
            move_waiters: true,
            disruption_grace: Duration::from_secs(60),
        };
        let shutdown = CancellationToken::new();
        let operator = operator::run(client.build(), listener, rules, shutdown.clone());
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
    operators: Vec<Operator>,
    /// How many writes met their fate.
    met: usize,
    /// The longest time that a transition took.
    longest: Duration,
    /// The writes of each transition.
    writes: Vec<Vec<String>>,
}

/// How a case went.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// How many writes met their fate.
    pub(crate) met: usize,
    /// The longest time from a change to the state that it asks for.
    pub(crate) longest: Duration,
    /// The writes of each transition.
    pub(crate) writes: Vec<Vec<String>>,
}

impl Outcome {
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.writes.extend(other.writes);
        Self {
            met: self.met + other.met,
            longest: self.longest.max(other.longest),
            writes: self.writes,
        }
    }
}

impl Case {
    pub(crate) async fn start(server: &Server, name: &str, plan: Plan) -> Result<Self, Failed> {
        Self::over(server, server.plane.operators(), SILENCE, name, plan).await
    }

    /// With another way to the API server, and less patience with its silence.
    pub(crate) async fn over(
        server: &Server,
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
            operators: Vec::new(),
            met: 0,
            longest: Duration::ZERO,
            writes: Vec::new(),
            plan,
        };
        for _ in 0..=usize::from(case.plan.two) {
            case.operate().await?;
        }
        Ok(case)
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
        let (begin, mut killed) = (Instant::now(), false);
        loop {
            if self.plan.killed && !killed && faults.met() > 0 {
                killed = true;
                for operator in std::mem::take(&mut self.operators) {
                    operator.kill().await;
                }
                self.operate().await?;
            }
            self.operators_run().await?;
            let is_done = done(&self.place).await?;
            let took = begin.elapsed();
            if is_done && took > SETTLED && faults.quiet() > SETTLED {
                self.longest = self.longest.max(took);
                self.met += faults.met();
                self.writes.push(faults.writes());
                return Ok(());
            }
            if took > END {
                return Err(self.failed(what).await);
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
            "{name}: {what}: not reached within {END:?}; {} writes, the last first: {last:?}\n{}\n{}\n{gpus}",
            writes.len(),
            budget["spec"],
            budget["status"]
        )
        .into()
    }

    /// Waits until nothing is written any more, and ends the operators.
    pub(crate) async fn end(self) -> Result<Outcome, Failed> {
        let faults = &self.plan.faults;
        faults.doom(Doomed::Nothing);
        let begin = Instant::now();
        while faults.quiet() < QUIET {
            if begin.elapsed() > END {
                let (name, writes) = (&self.place.name, faults.writes());
                return Err(format!("{name}: it writes and writes: {writes:?}").into());
            }
            sleep(LOOK).await;
        }
        for operator in self.operators {
            operator.stop().await?;
        }
        Ok(Outcome {
            met: self.met,
            longest: self.longest,
            writes: self.writes,
        })
    }
}
