//! Runs the phases of the benchmark one after another, and records their measurements.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bursar_e2e::control_plane::ControlPlane;
use bursar_e2e::progress::Progress;
use bursar_e2e::raw_api::RawApi;
use http::Request;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::index::sample;
use tokio::time::sleep;

use crate::fleet::{Fleet, Size};
use crate::operator::{Operator, Sample, cpu};
use crate::relist;
use crate::table::{Measurement, Projection};

const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The time without writes after which the operator counts as quiet: the update of a label may wait
/// 10 s.
const QUIET_PERIOD: Duration = Duration::from_secs(12);
/// The time for which an idle operator's writes are counted.
const IDLE_PERIOD: Duration = Duration::from_secs(10);
/// The time for which budgets are changed as fast as the API server accepts.
const AMENDMENT_PERIOD: Duration = Duration::from_secs(10);
const CHURN_PERIOD: Duration = Duration::from_secs(20);
/// The number of nodes that change in one step of churn.
const NODES_PER_STEP: usize = 16;
/// The timeout of each wait.
const TIMEOUT: Duration = Duration::from_secs(400);

/// The cluster and its measurements.
pub(crate) struct Bench<'a> {
    control_plane: &'a ControlPlane,
    progress: &'a Progress,
    /// The operator's program.
    program: PathBuf,
    log: PathBuf,
    kubeconfig: PathBuf,
    /// The process ids of the API server and etcd.
    server_pids: Vec<i32>,
    fleet: Fleet,
    rows: Vec<Measurement>,
}

/// A point in time, with the counts and resources used until then.
struct Checkpoint {
    begin: Instant,
    sample: Sample,
    operator: f64,
    servers: f64,
    events: u64,
}

impl<'a> Bench<'a> {
    /// Creates the objects.
    pub(crate) async fn make(
        plane: &'a ControlPlane,
        progress: &'a Progress,
        (program, log): (PathBuf, PathBuf),
        size: Size,
    ) -> anyhow::Result<Self> {
        let (fleet, rate) = Fleet::make(RawApi::new(plane.client()), size).await?;
        progress.report(format_args!("{size:?}: made, {rate:.0} pods a second"));
        let mut servers = plane.processes_named("kube-apiserver").await;
        servers.extend(plane.processes_named("etcd").await);
        Ok(Self {
            kubeconfig: plane.write_operator_kubeconfig()?,
            control_plane: plane,
            progress,
            program,
            log,
            server_pids: servers,
            fleet,
            rows: Vec::new(),
        })
    }

    /// Runs all phases, or only the list of all pods beside a watch.
    pub(crate) async fn run(mut self, relist: bool) -> anyhow::Result<Vec<Measurement>> {
        if relist {
            self.relist().await?;
            return Ok(self.rows);
        }
        let mut operator = self.start()?;
        self.first_start(&mut operator).await?;
        let rows = ["idle: writes in 10 s", "idle: operator's processor, %"];
        self.idle(&mut operator, rows).await?;
        operator.stop().await?;

        let mut operator = self.start()?;
        self.restart(&mut operator).await?;
        operator.stop().await?;

        self.change_everything().await?;
        let mut operator = self.start()?;
        self.resync(&mut operator).await?;
        self.amendments(&mut operator).await?;
        self.policy_edits(&mut operator).await?;
        self.change_one_node_repeatedly(&mut operator).await?;
        self.restarted_contexts(&mut operator).await?;
        self.evicted_pods(&mut operator).await?;
        self.churn(&mut operator).await?;
        let rows = [
            "at the end: writes in 10 s of quiet",
            "at the end: operator's processor, %",
        ];
        self.idle(&mut operator, rows).await?;
        let (memory, peak) = operator.memory()?;
        self.row(
            "at the end: resident memory, MiB",
            memory,
            Projection::Linear,
        );
        self.row("its peak, MiB", peak, Projection::Linear);
        operator.stop().await?;
        self.relist().await?;
        Ok(self.rows)
    }

    /// Lists all pods beside an open watch, and changes pods meanwhile.
    async fn relist(&mut self) -> anyhow::Result<()> {
        let relist = relist::measure(&self.fleet, self.kubeconfig.clone()).await?;
        let longest = relist.lateness.iter().max().copied().unwrap_or_default();
        let rows = [
            (
                "all pods listed beside the watch, s",
                relist.took.as_secs_f64(),
            ),
            ("the same: events meanwhile", relist.lateness.len() as f64),
            (
                "the same: applied after a bare watcher's, s (the longest)",
                longest.as_secs_f64(),
            ),
        ];
        for (name, value) in rows {
            self.row(name, value, Projection::NotProjected);
        }
        Ok(())
    }

    fn row(&mut self, what: &'static str, value: f64, projected: Projection) {
        self.progress.report(format_args!("  {what}: {value:.2}"));
        self.rows.push(Measurement {
            name: what,
            value,
            projected,
        });
    }

    fn start(&self) -> anyhow::Result<Operator> {
        Operator::start(&self.program, &self.kubeconfig, &self.log)
    }

    fn budgets(&self) -> u64 {
        self.fleet.size.budgets as u64
    }

    async fn mark(&self, operator: &mut Operator) -> anyhow::Result<Checkpoint> {
        Ok(Checkpoint {
            begin: Instant::now(),
            sample: operator.sample().await?,
            operator: operator.cpu()?,
            servers: self
                .server_pids
                .iter()
                .filter_map(|pid| cpu(*pid).ok())
                .sum(),
            events: self.events().await?,
        })
    }

    /// Returns the API server's count of Event writes. Only the operator writes Events of this API
    /// group.
    async fn events(&self) -> anyhow::Result<u64> {
        let request = Request::get("/metrics").body(Vec::new())?;
        let text = self.control_plane.client().request_text(request).await?;
        let of_events = text.lines().filter(|line| {
            line.starts_with("apiserver_request_total{")
                && line.contains("group=\"events.k8s.io\"")
                && ["POST", "PATCH"].iter().any(|verb| line.contains(verb))
        });
        let counts = of_events.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        Ok(counts.sum::<f64>() as u64)
    }

    /// Waits until the operator's metrics satisfy `done`.
    async fn wait_until(
        &self,
        what: &str,
        operator: &mut Operator,
        done: impl Fn(&Sample) -> bool,
    ) -> anyhow::Result<()> {
        let begin = Instant::now();
        loop {
            let sample = operator.sample().await?;
            if done(&sample) {
                return Ok(());
            }
            anyhow::ensure!(begin.elapsed() < TIMEOUT, "{what}: {sample:?}");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits for a quiet period, and returns when it began.
    async fn wait_until_quiet(&self, operator: &mut Operator) -> anyhow::Result<Instant> {
        let begin = Instant::now();
        let (mut last, mut since) = (operator.sample().await?, begin);
        while since.elapsed() < QUIET_PERIOD {
            anyhow::ensure!(begin.elapsed() < TIMEOUT, "it writes and writes: {last:?}");
            sleep(POLL_INTERVAL).await;
            let now = operator.sample().await?;
            if now.writes != last.writes {
                (last, since) = (now, Instant::now());
            }
        }
        Ok(since)
    }

    /// Fails unless every label and every status is up to date.
    async fn check_labels_and_statuses(&self) -> anyhow::Result<()> {
        let (wrong, behind) = (
            self.fleet.mislabelled_nodes().await?,
            self.fleet.stale_budgets().await?,
        );
        anyhow::ensure!(
            wrong + behind == 0,
            "{wrong} nodes are labelled wrong, {behind} budgets are behind"
        );
        Ok(())
    }

    async fn first_start(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let (begin, budgets) = (operator.started, self.budgets());
        let nodes = self.fleet.size.nodes as u64;
        let is_ready = |now: &Sample| now.ready == budgets;
        self.wait_until("all budgets Ready", operator, is_ready)
            .await?;
        let took = begin.elapsed().as_secs_f64();
        self.row(
            "first start: every budget in force, s",
            took,
            Projection::Linear,
        );
        let is_labelled = |now: &Sample| now.labels >= nodes;
        self.wait_until("all nodes labelled", operator, is_labelled)
            .await?;
        let took = begin.elapsed().as_secs_f64();
        self.row(
            "first start: every node labelled, s",
            took,
            Projection::Linear,
        );
        self.wait_until_quiet(operator).await?;
        self.check_labels_and_statuses().await
    }

    async fn idle(
        &mut self,
        operator: &mut Operator,
        [what, processor]: [&'static str; 2],
    ) -> anyhow::Result<()> {
        let before = self.mark(operator).await?;
        sleep(IDLE_PERIOD).await;
        let after = self.mark(operator).await?;
        let writes = after.sample.writes - before.sample.writes + after.events - before.events;
        self.row(what, writes as f64, Projection::NotProjected);
        let share = (after.operator - before.operator) / before.begin.elapsed().as_secs_f64();
        self.row(processor, share * 100.0, Projection::Linear);
        Ok(())
    }

    /// Measures a restart of the operator without any change.
    async fn restart(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let budgets = self.budgets();
        let all = |now: &Sample| now.reconciles >= budgets;
        self.wait_until("all budgets looked at", operator, all)
            .await?;
        let took = operator.started.elapsed().as_secs_f64();
        self.row(
            "restart, nothing changed: every budget looked at, s",
            took,
            Projection::Linear,
        );
        self.wait_until_quiet(operator).await?;
        let writes = operator.sample().await?.writes;
        self.row(
            "restart, nothing changed: writes",
            writes as f64,
            Projection::NotProjected,
        );
        let (_, peak) = operator.memory()?;
        self.row(
            "restart: peak of resident memory, MiB",
            peak,
            Projection::Linear,
        );
        Ok(())
    }

    /// Changes every budget and a tenth of the nodes.
    async fn change_everything(&mut self) -> anyhow::Result<()> {
        self.fleet.patch_budgets(32).await?;
        let some: Vec<usize> = (0..self.fleet.size.nodes).step_by(10).collect();
        self.fleet.replace_pods(&some).await
    }

    /// Measures a restart of the operator after many changes.
    async fn resync(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let begin = operator.started;
        // An operator that still lists writes nothing either.
        let budgets = self.budgets();
        let all = |now: &Sample| now.reconciles >= budgets;
        self.wait_until("all budgets looked at", operator, all)
            .await?;
        let settled = self.wait_until_quiet(operator).await?;
        self.check_labels_and_statuses().await?;
        let took = settled.duration_since(begin).as_secs_f64();
        self.row(
            "restart, every budget and a tenth of the nodes changed: all as it should be, s",
            took,
            Projection::Linear,
        );
        Ok(())
    }

    /// Records the rates of a burst since `before`.
    async fn burst(
        &mut self,
        operator: &mut Operator,
        before: &Checkpoint,
        [rate, processor, servers]: [&'static str; 3],
    ) -> anyhow::Result<()> {
        let after = self.mark(operator).await?;
        let took = after.begin.duration_since(before.begin).as_secs_f64();
        let looks = (after.sample.reconciles - before.sample.reconciles).max(1) as f64;
        self.row(rate, looks / took, Projection::NotProjected);
        let each = (after.operator - before.operator) / looks;
        self.row(processor, each * 1000.0, Projection::Linear);
        let share = (after.servers - before.servers) / took;
        self.row(servers, share, Projection::NotProjected);
        anyhow::ensure!(after.sample.failed == before.sample.failed, "looks failed");
        Ok(())
    }

    /// Changes every budget repeatedly.
    async fn amendments(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let before = self.mark(operator).await?;
        for round in 0.. {
            self.fleet.patch_budgets(33 + round % 2).await?;
            if before.begin.elapsed() > AMENDMENT_PERIOD {
                break;
            }
        }
        let rows = [
            "every budget amended, again and again: reconciles/s",
            "the same: operator's processor time for each, ms",
            "the same: processors taken by API server and etcd",
        ];
        self.burst(operator, &before, rows).await?;
        self.wait_until_quiet(operator).await?;
        self.check_labels_and_statuses().await
    }

    /// Edits the context policy of one budget, which the agents of all nodes must know.
    async fn policy_edits(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        const EDITS: usize = 10;
        let before = self.mark(operator).await?;
        let mut longest = Duration::ZERO;
        for edit in 0..EDITS {
            longest = longest.max(self.fleet.edit_policy(10 + edit).await?);
        }
        self.wait_until_quiet(operator).await?;
        let policies = operator.sample().await?.policies - before.sample.policies;
        self.row(
            "a context policy edited: its GpuNamespace is written within, s (the longest of 10)",
            longest.as_secs_f64(),
            Projection::NotProjected,
        );
        self.row(
            "the same: writes for each edit, whatever the number of nodes",
            policies as f64 / EDITS as f64,
            Projection::NotProjected,
        );
        self.check_labels_and_statuses().await
    }

    /// Changes the allocatable memory of one node, which concerns every budget, faster than the
    /// operator reconciles all budgets.
    async fn change_one_node_repeatedly(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let before = self.mark(operator).await?;
        for round in 1.. {
            self.fleet.agents[0].withheld = round;
            self.fleet.report([0]).await?;
            if before.begin.elapsed() > AMENDMENT_PERIOD {
                break;
            }
            sleep(POLL_INTERVAL).await;
        }
        let writes = operator.sample().await?.writes - before.sample.writes;
        let rows = [
            "one node's offer changed, again and again: reconciles/s",
            "the same: operator's processor time for each, ms",
            "the same: processors taken by API server and etcd",
        ];
        self.burst(operator, &before, rows).await?;
        self.progress.report(format_args!("  {writes} writes"));
        self.wait_until_quiet(operator).await?;
        self.check_labels_and_statuses().await
    }

    /// Poisons a context on every other node, which its agent restarts.
    async fn restarted_contexts(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let nodes: Vec<usize> = (0..self.fleet.size.nodes).step_by(2).collect();
        let before = self.mark(operator).await?;
        for node in &nodes {
            self.fleet.agents[*node].report_poisoned(*node, "Restart");
        }
        self.fleet.report(nodes.iter().copied()).await?;
        for node in &nodes {
            self.fleet.agents[*node].report_restarted();
        }
        self.fleet.report(nodes.iter().copied()).await?;
        let reported_after = before.begin.elapsed().as_secs_f64();
        self.wait_until_quiet(operator).await?;
        let writes = self.writes_since(operator, &before).await?;
        self.row(
            "storm on half of the nodes: told within, s",
            reported_after,
            Projection::NotProjected,
        );
        let each = writes / nodes.len() as f64;
        self.row(
            "storm: writes per fault that the agent ends",
            each,
            Projection::NotProjected,
        );
        self.check_labels_and_statuses().await
    }

    /// Poisons a context on every other node beyond the maximum of restarts, so that the operator
    /// evicts its pod.
    async fn evicted_pods(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let nodes: Vec<usize> = (0..self.fleet.size.nodes).step_by(2).collect();
        let before = self.mark(operator).await?;
        for node in &nodes {
            self.fleet.agents[*node].report_poisoned(*node, "BeyondMaximum");
        }
        self.fleet.report(nodes.iter().copied()).await?;
        let wanted = before.sample.evictions + nodes.len() as u64;
        let all = |now: &Sample| now.evictions >= wanted;
        self.wait_until("all pods evicted", operator, all).await?;
        let took = before.begin.elapsed().as_secs_f64();
        for node in &nodes {
            let agent = &mut self.fleet.agents[*node];
            agent.faults.clear();
            agent.pods.remove(0);
        }
        self.fleet.report(nodes.iter().copied()).await?;
        self.wait_until_quiet(operator).await?;
        let writes = self.writes_since(operator, &before).await?;
        self.row(
            "storm: every pod beyond its restarts evicted, s",
            took,
            Projection::Linear,
        );
        let each = writes / nodes.len() as f64;
        self.row(
            "storm: writes per fault that evicts, labels of nodes and Events included",
            each,
            Projection::NotProjected,
        );
        self.check_labels_and_statuses().await
    }

    /// Counts the writes since `before`, Events included.
    async fn writes_since(
        &self,
        operator: &mut Operator,
        before: &Checkpoint,
    ) -> anyhow::Result<f64> {
        let after = self.mark(operator).await?;
        let writes = after.sample.writes - before.sample.writes;
        Ok((writes + after.events - before.events) as f64)
    }

    /// Replaces pods on random nodes.
    async fn churn(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let mut random = StdRng::seed_from_u64(6);
        let before = self.mark(operator).await?;
        let (mut reports, mut replaced) = (0_u32, 0_u32);
        while before.begin.elapsed() < CHURN_PERIOD {
            let some = NODES_PER_STEP.min(self.fleet.size.nodes);
            let nodes = sample(&mut random, self.fleet.size.nodes, some).into_vec();
            self.fleet.replace_pods(&nodes).await?;
            reports += 2 * u32::try_from(some)?;
            replaced += u32::try_from(some)?;
        }
        let after = self.mark(operator).await?;
        let took = after.begin.duration_since(before.begin).as_secs_f64();
        self.row(
            "churn: pods replaced/s",
            f64::from(replaced) / took,
            Projection::NotProjected,
        );
        self.row(
            "churn: GpuNodes' reports/s",
            f64::from(reports) / took,
            Projection::NotProjected,
        );
        let labels = (after.sample.labels - before.sample.labels) as f64;
        self.row(
            "churn: node label writes/s",
            labels / took,
            Projection::NotProjected,
        );
        let others = (after.sample.writes - before.sample.writes) as f64 - labels;
        self.row(
            "churn: other writes/s",
            others / took,
            Projection::NotProjected,
        );
        let plans = (after.sample.plans - before.sample.plans).max(1) as f64;
        let planned = (after.sample.plan_micros - before.sample.plan_micros) as f64;
        self.row(
            "churn: time of a plan, ms",
            planned / plans / 1e3,
            Projection::Linear,
        );
        let share = (after.operator - before.operator) / took;
        self.row(
            "churn: operator's processor, %",
            share * 100.0,
            Projection::Linear,
        );
        let ended = Instant::now();
        let settled = self.wait_until_quiet(operator).await?;
        let took = settled.saturating_duration_since(ended).as_secs_f64();
        self.row(
            "churn: all labels right after it, s",
            took,
            Projection::NotProjected,
        );
        self.check_labels_and_statuses().await
    }
}
