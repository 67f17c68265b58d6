//! Runs one test case: its objects, the operators that reconcile them, and the injected faults.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use bursar_crds::Quantum;
use bursar_crds::context_policy::ContextAction;
use bursar_http::Listeners;
use bursar_operator::api::client::client_config;
use bursar_operator::placement::PlacementOptions;
use bursar_operator::run::{self, OperatorError, Options};
use bursar_sim_api::faults::{Faults, FaultyWrites, WatchFault, WriteFault};
use k8s_openapi::jiff::Timestamp;
use kube::Config;
use kube::client::ClientBuilder;
use libtest_mimic::Failed;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::isolated_scope::IsolatedScope;
use crate::server::{Permit, Server, acquire_permit};

/// The operator reaches the declared state within this time, even if a write or a watch fails.
pub(crate) const PROMISED_TIME: Duration = Duration::from_secs(30);
/// The time after which a case fails. A busy machine exceeds the promised time now and then, which
/// is counted.
pub(crate) const GIVE_UP_AFTER: Duration = Duration::from_secs(120);
/// The time without writes at the end of a case, longer than the longest back-off.
const QUIET_PERIOD: Duration = Duration::from_secs(60);
/// The time after which the operator has written its debounced changes.
const SETTLE_TIME: Duration = Duration::from_millis(900);
/// The operator's client reconnects after this time without data, as in production.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_secs(50);
/// The resources that the operator watches.
pub(crate) const WATCHED_KINDS: [&str; 7] = [
    "gpumemorybudgets",
    "namespaces",
    "pods",
    "resourcequotas",
    "gpunodes",
    "gpunamespaces",
    "nodes",
];
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Waits for a state, and looks for it after each `pause`.
pub(crate) async fn until(
    pause: Duration,
    what: &str,
    mut is: impl AsyncFnMut() -> Result<bool, Failed>,
) -> Result<(), Failed> {
    let begin = Instant::now();
    while !is().await? {
        if begin.elapsed() > GIVE_UP_AFTER {
            return Err(format!("waited in vain for {what}").into());
        }
        sleep(pause).await;
    }
    Ok(())
}

/// A running operator.
pub(crate) struct Operator {
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), OperatorError>>,
}

impl Operator {
    /// Starts an operator with the chart's rights. It misses agents in the namespace `agents`.
    pub(crate) async fn start(
        config: Config,
        silence: Duration,
        faults: &Faults,
        agents: Option<&str>,
    ) -> Result<Self, Failed> {
        let client = ClientBuilder::try_from(client_config(config, silence))?.with_layer(faults);
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listeners = Listeners::bind(any, any).await?;
        let options = Options {
            placement: PlacementOptions {
                quantum: Quantum::Gib1,
                relocate_pending_pods: true,
                disruption_grace: Duration::from_secs(60),
                drain_for_nvidia: true,
            },
            default_action: ContextAction::default(),
            agents: agents.map(str::to_owned),
            election: None,
        };
        let shutdown = CancellationToken::new();
        let operator = run::run(
            client.build(),
            listeners,
            options,
            Timestamp::now,
            shutdown.clone(),
        );
        Ok(Self {
            task: tokio::spawn(operator),
            shutdown,
        })
    }

    /// Aborts the operator at once.
    async fn kill(self) {
        self.task.abort();
        drop(self.task.await);
    }

    /// Stops the operator by its shutdown token.
    pub(crate) async fn stop(self) -> Result<(), Failed> {
        self.shutdown.cancel();
        Ok(tokio::time::timeout(GIVE_UP_AFTER, self.task).await???)
    }
}

/// The faults of a case.
pub(crate) struct FaultPlan {
    /// The faults of the operator's writes and watches.
    pub(crate) faults: Faults,
    /// The writes of each transition that fail.
    pub(crate) faulty_writes: FaultyWrites,
    /// Whether the operator is killed together with the failing write, and another one starts.
    pub(crate) kill_operator: bool,
    /// Whether a second operator runs beside the first.
    pub(crate) two_operators: bool,
}

impl FaultPlan {
    /// Makes a plan whose faulty writes have this fault.
    pub(crate) fn with_write_fault(
        case: &str,
        fault: WriteFault,
        faulty_writes: FaultyWrites,
    ) -> Self {
        Self {
            faults: Faults::new(case, fault, WatchFault::NoFault),
            faulty_writes,
            kill_operator: false,
            two_operators: false,
        }
    }

    /// Makes a plan without failing writes, with watches of this kind.
    pub(crate) fn with_watch_fault(case: &str, watch_fault: WatchFault) -> Self {
        Self {
            faults: Faults::new(case, WriteFault::RequestDropped, watch_fault),
            faulty_writes: FaultyWrites::NoWrite,
            kill_operator: false,
            two_operators: false,
        }
    }
}

/// Isolated objects with the operators that reconcile them.
pub(crate) struct TestCase {
    pub(crate) scope: IsolatedScope,
    plan: FaultPlan,
    config: Config,
    silence: Duration,
    /// Additional time that the faults may add to a transition.
    extra_delay: Duration,
    operators: Vec<Operator>,
    /// The permit that the case holds while it makes changes, if it needs one.
    permit: Option<Permit>,
    outcome: Outcome,
}

/// The results of one case or more.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// The longest time from a change to the declared state.
    pub(crate) longest: Duration,
    pub(crate) transitions: Vec<Transition>,
    /// The number of disturbed watch events by kind.
    pub(crate) disturbed_events: BTreeMap<String, usize>,
}

/// A change, and the writes until the declared state was reached.
#[derive(Clone, Debug)]
pub(crate) struct Transition {
    /// The description of the change.
    pub(crate) change: String,
    pub(crate) writes: Vec<String>,
    /// The number of writes that failed as planned.
    pub(crate) faults_met: usize,
    /// Whether the transition exceeded the promised time.
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

    /// Summarizes the durations. At most one transition in twenty may exceed the promised time, and
    /// none of a few.
    pub(crate) fn check_durations(&self) -> Result<String, Failed> {
        let late = self
            .transitions
            .iter()
            .filter(|transition| transition.is_late);
        let late: Vec<_> = late.map(|transition| transition.change.as_str()).collect();
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

    /// Starts a case that already has its permit.
    pub(crate) async fn with_permit(
        server: &Server,
        permit: Permit,
        name: &str,
        plan: FaultPlan,
    ) -> Result<Self, Failed> {
        Self::with_config(
            server,
            Some(permit),
            server.control_plane.operator_config(),
            READ_TIMEOUT,
            name,
            plan,
        )
        .await
    }

    /// Starts a case with another configuration of the operator's client and another read timeout.
    pub(crate) async fn with_config(
        server: &Server,
        permit: Option<Permit>,
        config: Config,
        silence: Duration,
        name: &str,
        plan: FaultPlan,
    ) -> Result<Self, Failed> {
        let scope = IsolatedScope::set_up(server, name).await?;
        let mut case = Self {
            scope,
            config,
            silence,
            extra_delay: plan.faults.max_watch_delay(),
            operators: Vec::new(),
            permit,
            outcome: Outcome::default(),
            plan,
        };
        for _ in 0..=usize::from(case.plan.two_operators) {
            case.start_operator().await?;
        }
        Ok(case)
    }

    /// Allows each transition this additional time.
    pub(crate) fn allow_delay(mut self, late: Duration) -> Self {
        self.extra_delay = late;
        self
    }

    /// Returns whether no write fails by plan.
    pub(crate) fn is_undisturbed(&self) -> bool {
        self.plan.faulty_writes == FaultyWrites::NoWrite
    }

    async fn start_operator(&mut self) -> Result<(), Failed> {
        let (config, faults) = (self.config.clone(), &self.plan.faults);
        let operator = Operator::start(config, self.silence, faults, None);
        self.operators.push(operator.await?);
        Ok(())
    }

    /// Makes a change, and waits for its declared state while the planned faults are injected.
    pub(crate) async fn transition(
        &mut self,
        what: &str,
        change: impl AsyncFnOnce(&IsolatedScope) -> Result<(), Failed>,
        done: impl AsyncFn(&IsolatedScope) -> Result<bool, Failed>,
    ) -> Result<(), Failed> {
        let faults = self.plan.faults.clone();
        if faults.causes_lists() {
            self.wait_until_all_watched().await?;
        }
        faults.set_faulty_writes(self.plan.faulty_writes);
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
            // The state lasts, and the operator has stopped writing.
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

    /// Waits until the operator watches every kind, so that the faults meet the next change.
    async fn wait_until_all_watched(&mut self) -> Result<(), Failed> {
        let begin = Instant::now();
        while !self.plan.faults.watches_all(&WATCHED_KINDS) {
            self.check_operators_run().await?;
            if begin.elapsed() > GIVE_UP_AFTER {
                return Err(self.failure("the operator does not watch every kind").await);
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Fails if an operator has exited.
    async fn check_operators_run(&mut self) -> Result<(), Failed> {
        match self
            .operators
            .iter()
            .position(|operator| operator.task.is_finished())
        {
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

    /// Waits until the operator stops writing, checks that the last declared state lasts, and stops
    /// the operators.
    pub(crate) async fn finish(
        mut self,
        done: impl AsyncFn(&IsolatedScope) -> Result<bool, Failed>,
    ) -> Result<Outcome, Failed> {
        let faults = self.plan.faults.clone();
        faults.set_faulty_writes(FaultyWrites::NoWrite);
        // The case makes no further changes, so other cases may start.
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
