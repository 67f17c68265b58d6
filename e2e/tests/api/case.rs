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

use crate::place::IsolatedScope;
use crate::server::{Permit, Server, acquire_permit};
use bursar_sim_api::faults::{Faults, FaultyWrites, WatchFault, WriteFault};

/// The state that is declared is reached within this time, whatever happens to one write or watch.
pub(crate) const PROMISED_TIME: Duration = Duration::from_secs(30);
/// What takes longer hangs: a machine that has much else to do breaks a promise now and then, which is counted.
pub(crate) const GIVE_UP_AFTER: Duration = Duration::from_secs(120);
/// Then nothing is written any more, for longer than the longest wait between two tries.
const QUIET_PERIOD: Duration = Duration::from_secs(60);
/// What is gathered is written by then.
const SETTLE_TIME: Duration = Duration::from_millis(900);
/// A client waits so long for a watch to say something, as in production.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_secs(205);
const POLL_INTERVAL: Duration = Duration::from_millis(300);

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
        Ok(tokio::time::timeout(GIVE_UP_AFTER, self.task).await???)
    }
}

/// What happens while a tour is made.
pub(crate) struct FaultPlan {
    /// What the operator's writes and watches suffer.
    pub(crate) faults: Faults,
    /// Which writes, of each transition.
    pub(crate) doomed: FaultyWrites,
    /// The operator is killed with a write that met its fate, and another one is started.
    pub(crate) kill_operator: bool,
    /// A second operator runs beside it.
    pub(crate) two_operators: bool,
}

impl FaultPlan {
    /// Nothing; for others to be made from.
    pub(crate) fn with_fate(case: &str, fate: WriteFault, doomed: FaultyWrites) -> Self {
        Self {
            faults: Faults::new(case, fate, WatchFault::NoFault),
            doomed,
            kill_operator: false,
            two_operators: false,
        }
    }

    /// Watches that tell so.
    pub(crate) fn with_telling(case: &str, telling: WatchFault) -> Self {
        Self {
            faults: Faults::new(case, WriteFault::RequestDropped, telling),
            doomed: FaultyWrites::NoWrite,
            kill_operator: false,
            two_operators: false,
        }
    }
}

/// A place with its operators.
pub(crate) struct TestCase {
    pub(crate) scope: IsolatedScope,
    plan: FaultPlan,
    config: Config,
    silence: Duration,
    /// What a change comes to may be told so much later.
    extra_delay: Duration,
    operators: Vec<Operator>,
    /// While it is at work.
    permit: Option<Permit>,
    outcome: Outcome,
}

/// How cases went.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// The longest time from a change to the state that it asks for.
    pub(crate) longest: Duration,
    pub(crate) transitions: Vec<Transition>,
    /// How many events of each kind watches did not tell plainly.
    pub(crate) disturbed_events: BTreeMap<String, usize>,
}

/// A change, and what was written until all was as it asks for.
#[derive(Clone, Debug)]
pub(crate) struct Transition {
    /// The change.
    pub(crate) change: String,
    pub(crate) writes: Vec<String>,
    /// How many writes met their fate.
    pub(crate) faults_met: usize,
    /// It took longer than was promised.
    is_late: bool,
}

impl Outcome {
    pub(crate) fn merge(mut self, other: Self) -> Self {
        self.longest = self.longest.max(other.longest);
        self.transitions.extend(other.transitions);
        for (event, count) in other.disturbed_events {
            *self.disturbed_events.entry(event).or_default() += count;
        }
        self
    }

    /// How long transitions took, if no more than one in twenty of them took longer than was promised: none of a few.
    pub(crate) fn check_durations(&self) -> Result<String, Failed> {
        let late = self.transitions.iter().filter(|one| one.is_late);
        let late: Vec<_> = late.map(|one| one.change.as_str()).collect();
        let longest = self.longest;
        if late.len() > (self.transitions.len() + 10) / 20 {
            return Err(
                format!("not within {PROMISED_TIME:?}, but up to {longest:.1?}: {late:?}").into(),
            );
        }
        Ok(format!("at most {longest:.1?} to the end of a transition"))
    }
}

impl TestCase {
    pub(crate) async fn start(
        server: &Server,
        name: &str,
        plan: FaultPlan,
    ) -> Result<Self, Failed> {
        Self::with_permit(server, acquire_permit().await, name, plan).await
    }

    /// By a turn that is there.
    pub(crate) async fn with_permit(
        server: &Server,
        turn: Permit,
        name: &str,
        plan: FaultPlan,
    ) -> Result<Self, Failed> {
        Self::with_config(
            server,
            turn,
            server.control_plane.operator_config(),
            READ_TIMEOUT,
            name,
            plan,
        )
        .await
    }

    /// With another way to the API server, and less patience with its silence.
    pub(crate) async fn with_config(
        server: &Server,
        turn: Permit,
        config: Config,
        silence: Duration,
        name: &str,
        plan: FaultPlan,
    ) -> Result<Self, Failed> {
        let place = IsolatedScope::set_up(server, name).await?;
        let mut case = Self {
            scope: place,
            config,
            silence,
            extra_delay: plan.faults.max_watch_delay(),
            operators: Vec::new(),
            permit: Some(turn),
            outcome: Outcome::default(),
            plan,
        };
        for _ in 0..=usize::from(case.plan.two_operators) {
            case.start_operator().await?;
        }
        Ok(case)
    }

    /// The same, and a change may be told of so much later.
    pub(crate) fn allow_delay(mut self, late: Duration) -> Self {
        self.extra_delay = late;
        self
    }

    /// Whether no write ends badly.
    pub(crate) fn is_undisturbed(&self) -> bool {
        self.plan.doomed == FaultyWrites::NoWrite
    }

    async fn start_operator(&mut self) -> Result<(), Failed> {
        let operator = Operator::start(self.config.clone(), self.silence, &self.plan.faults);
        self.operators.push(operator.await?);
        Ok(())
    }

    /// Makes a change, and waits for what it should come to while things go wrong by plan.
    pub(crate) async fn transition(
        &mut self,
        what: &str,
        change: impl AsyncFnOnce(&IsolatedScope) -> Result<(), Failed>,
        done: impl AsyncFn(&IsolatedScope) -> Result<bool, Failed>,
    ) -> Result<(), Failed> {
        let faults = self.plan.faults.clone();
        faults.set_faulty_writes(self.plan.doomed);
        change(&self.scope).await?;
        let (begin, mut killed, mut reached) = (Instant::now(), false, None);
        loop {
            if self.plan.kill_operator && !killed && faults.fault_count() > 0 {
                killed = true;
                for operator in std::mem::take(&mut self.operators) {
                    operator.kill().await;
                }
                self.start_operator().await?;
            }
            self.check_operators_run().await?;
            let elapsed = begin.elapsed();
            reached = match done(&self.scope).await? {
                true => reached.or(Some(elapsed)),
                false => None,
            };
            // It stays so, and nobody writes any more.
            let settled = elapsed > SETTLE_TIME && faults.idle_time() > SETTLE_TIME;
            if let Some(took) = reached.filter(|_| settled) {
                self.outcome.longest = self.outcome.longest.max(took);
                self.outcome.transitions.push(Transition {
                    change: what.to_owned(),
                    writes: faults.writes(),
                    faults_met: faults.fault_count(),
                    is_late: took > PROMISED_TIME + self.extra_delay,
                });
                return Ok(());
            }
            if elapsed > GIVE_UP_AFTER + self.extra_delay {
                return Err(self.failure(&format!("{what}: not reached in time")).await);
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// An operator ends when it is told to, and not before.
    async fn check_operators_run(&mut self) -> Result<(), Failed> {
        match self.operators.iter().position(|one| one.task.is_finished()) {
            None => Ok(()),
            Some(ended) => {
                let ended = self.operators.swap_remove(ended).task.await;
                Err(format!("{}: the operator ended: {ended:?}", self.scope.name).into())
            }
        }
    }

    async fn failure(&self, what: &str) -> Failed {
        let (name, writes) = (&self.scope.name, self.plan.faults.writes());
        let budget = self.scope.budget().await.unwrap_or_default();
        let gpus = self.scope.gpu_node().await.unwrap_or_default();
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
    pub(crate) async fn finish(
        mut self,
        done: impl AsyncFn(&IsolatedScope) -> Result<bool, Failed>,
    ) -> Result<Outcome, Failed> {
        let faults = self.plan.faults.clone();
        faults.set_faulty_writes(FaultyWrites::NoWrite);
        // There is nothing to do any more: others may begin.
        self.permit = None;
        let begin = Instant::now();
        while faults.idle_time() < QUIET_PERIOD {
            if begin.elapsed() > GIVE_UP_AFTER + self.extra_delay + faults.idle_time() {
                return Err(self
                    .failure(&format!(
                        "it writes and writes, {} now",
                        faults.last_write()
                    ))
                    .await);
            }
            sleep(POLL_INTERVAL).await;
        }
        self.check_operators_run().await?;
        if !done(&self.scope).await? {
            return Err(self.failure("a minute later").await);
        }
        for operator in self.operators {
            operator.stop().await?;
        }
        self.outcome.disturbed_events = faults.faulted_events();
        Ok(self.outcome)
    }
}
