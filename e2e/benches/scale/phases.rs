//! What happens to the cluster, one after another, and what is measured of it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bursar_e2e::control_plane::ControlPlane;
use bursar_e2e::objects::Objects;
use bursar_e2e::progress::Progress;
use http::Request;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::index::sample;
use tokio::time::sleep;

use crate::fleet::{Fleet, Size};
use crate::operator::{Operator, Sample, cpu};
use crate::table::{Measured, Projected};

const LOOK: Duration = Duration::from_millis(200);
/// Nothing is written for so long: a label's small change waits 10 s.
const QUIET: Duration = Duration::from_secs(12);
/// How long it is looked whether anything is written when nothing happens.
const IDLE: Duration = Duration::from_secs(10);
/// How long budgets are changed as fast as the API server takes it.
const AMENDED: Duration = Duration::from_secs(10);
const CHURN: Duration = Duration::from_secs(20);
/// How many nodes change in one step of churn.
const CHANGED: usize = 16;
/// Nothing here takes longer.
const BOUND: Duration = Duration::from_secs(400);

/// The cluster, and what was measured.
pub(crate) struct Bench<'a> {
    plane: &'a ControlPlane,
    progress: &'a Progress,
    /// The operator, and where its log goes.
    program: PathBuf,
    log: PathBuf,
    kubeconfig: PathBuf,
    /// The processes of the API server and etcd.
    servers: Vec<i32>,
    fleet: Fleet,
    rows: Vec<Measured>,
}

/// The moment at which something began, and what was used up until then.
struct Mark {
    begin: Instant,
    sample: Sample,
    operator: f64,
    servers: f64,
    events: u64,
}

impl<'a> Bench<'a> {
    /// Makes the objects.
    pub(crate) async fn make(
        plane: &'a ControlPlane,
        progress: &'a Progress,
        (program, log): (PathBuf, PathBuf),
        size: Size,
    ) -> anyhow::Result<Self> {
        let (fleet, rate) = Fleet::make(Objects::new(plane.client()), size).await?;
        progress.say(format_args!("{size:?}: made, {rate:.0} pods a second"));
        let mut servers = plane.processes_named("kube-apiserver").await;
        servers.extend(plane.processes_named("etcd").await);
        Ok(Self {
            kubeconfig: plane.operators_kubeconfig()?,
            plane,
            progress,
            program,
            log,
            servers,
            fleet,
            rows: Vec::new(),
        })
    }

    /// Everything.
    pub(crate) async fn run(mut self) -> anyhow::Result<Vec<Measured>> {
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
        self.one_node_for_all(&mut operator).await?;
        self.restarted_contexts(&mut operator).await?;
        self.evicted_pods(&mut operator).await?;
        self.churn(&mut operator).await?;
        let rows = [
            "at the end: writes in 10 s of quiet",
            "at the end: operator's processor, %",
        ];
        self.idle(&mut operator, rows).await?;
        let (memory, peak) = operator.memory()?;
        self.row("at the end: resident memory, MiB", memory, Projected::Line);
        self.row("its peak, MiB", peak, Projected::Line);
        operator.stop().await?;
        Ok(self.rows)
    }

    fn row(&mut self, what: &'static str, value: f64, projected: Projected) {
        self.progress.say(format_args!("  {what}: {value:.2}"));
        self.rows.push(Measured {
            what,
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

    async fn mark(&self, operator: &mut Operator) -> anyhow::Result<Mark> {
        Ok(Mark {
            begin: Instant::now(),
            sample: operator.sample().await?,
            operator: operator.cpu()?,
            servers: self.servers.iter().filter_map(|pid| cpu(*pid).ok()).sum(),
            events: self.events().await?,
        })
    }

    /// The Events that were made or changed, by the API server's own count; in this group the operator's only.
    async fn events(&self) -> anyhow::Result<u64> {
        let request = Request::get("/metrics").body(Vec::new())?;
        let text = self.plane.client().request_text(request).await?;
        let of_events = text.lines().filter(|line| {
            line.starts_with("apiserver_request_total{")
                && line.contains("group=\"events.k8s.io\"")
                && ["POST", "PATCH"].iter().any(|verb| line.contains(verb))
        });
        let counts = of_events.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        Ok(counts.sum::<f64>() as u64)
    }

    /// Waits until the operator's numbers say so.
    async fn until(
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
            anyhow::ensure!(begin.elapsed() < BOUND, "{what}: {sample:?}");
            sleep(LOOK).await;
        }
    }

    /// Waits until nothing has been written for a while; when that began.
    async fn settled(&self, operator: &mut Operator) -> anyhow::Result<Instant> {
        let begin = Instant::now();
        let (mut last, mut since) = (operator.sample().await?, begin);
        while since.elapsed() < QUIET {
            anyhow::ensure!(begin.elapsed() < BOUND, "it writes and writes: {last:?}");
            sleep(LOOK).await;
            let now = operator.sample().await?;
            if now.writes != last.writes {
                (last, since) = (now, Instant::now());
            }
        }
        Ok(since)
    }

    /// Every label and every status says what is so.
    async fn all_is_right(&self) -> anyhow::Result<()> {
        let (wrong, behind) = (self.fleet.mislabelled().await?, self.fleet.behind().await?);
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
        self.until("all budgets Ready", operator, is_ready).await?;
        let took = begin.elapsed().as_secs_f64();
        self.row(
            "first start: every budget in force, s",
            took,
            Projected::Line,
        );
        let is_labelled = |now: &Sample| now.labels >= nodes;
        self.until("all nodes labelled", operator, is_labelled)
            .await?;
        let took = begin.elapsed().as_secs_f64();
        self.row("first start: every node labelled, s", took, Projected::Line);
        self.settled(operator).await?;
        self.all_is_right().await
    }

    async fn idle(
        &mut self,
        operator: &mut Operator,
        [what, processor]: [&'static str; 2],
    ) -> anyhow::Result<()> {
        let before = self.mark(operator).await?;
        sleep(IDLE).await;
        let after = self.mark(operator).await?;
        let writes = after.sample.writes - before.sample.writes + after.events - before.events;
        self.row(what, writes as f64, Projected::No);
        let share = (after.operator - before.operator) / before.begin.elapsed().as_secs_f64();
        self.row(processor, share * 100.0, Projected::Line);
        Ok(())
    }

    /// The operator starts anew and finds everything as it should be.
    async fn restart(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let budgets = self.budgets();
        let all = |now: &Sample| now.looks >= budgets;
        self.until("all budgets looked at", operator, all).await?;
        let took = operator.started.elapsed().as_secs_f64();
        self.row(
            "restart, nothing changed: every budget looked at, s",
            took,
            Projected::Line,
        );
        self.settled(operator).await?;
        let writes = operator.sample().await?.writes;
        self.row(
            "restart, nothing changed: writes",
            writes as f64,
            Projected::No,
        );
        let (_, peak) = operator.memory()?;
        self.row(
            "restart: peak of resident memory, MiB",
            peak,
            Projected::Line,
        );
        Ok(())
    }

    /// Every budget, and a tenth of the nodes.
    async fn change_everything(&mut self) -> anyhow::Result<()> {
        self.fleet.amend(32).await?;
        let some: Vec<usize> = (0..self.fleet.size.nodes).step_by(10).collect();
        self.fleet.replace_pods(&some).await
    }

    /// The operator starts anew, and much has changed.
    async fn resync(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let begin = operator.started;
        let settled = self.settled(operator).await?;
        self.all_is_right().await?;
        let took = settled.duration_since(begin).as_secs_f64();
        self.row(
            "restart, every budget and a tenth of the nodes changed: all as it should be, s",
            took,
            Projected::Line,
        );
        Ok(())
    }

    /// What a burst came to, from `before` to the last look.
    async fn burst(
        &mut self,
        operator: &mut Operator,
        before: &Mark,
        [rate, processor, servers]: [&'static str; 3],
    ) -> anyhow::Result<()> {
        let after = self.mark(operator).await?;
        let took = after.begin.duration_since(before.begin).as_secs_f64();
        let looks = (after.sample.looks - before.sample.looks).max(1) as f64;
        self.row(rate, looks / took, Projected::No);
        let each = (after.operator - before.operator) / looks;
        self.row(processor, each * 1000.0, Projected::Line);
        let share = (after.servers - before.servers) / took;
        self.row(servers, share, Projected::No);
        anyhow::ensure!(after.sample.failed == before.sample.failed, "looks failed");
        Ok(())
    }

    /// Every budget is changed again and again.
    async fn amendments(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let before = self.mark(operator).await?;
        for round in 0.. {
            self.fleet.amend(33 + round % 2).await?;
            if before.begin.elapsed() > AMENDED {
                break;
            }
        }
        let rows = [
            "every budget amended, again and again: reconciles/s",
            "the same: operator's processor time for each, ms",
            "the same: processors taken by API server and etcd",
        ];
        self.burst(operator, &before, rows).await?;
        self.settled(operator).await?;
        self.all_is_right().await
    }

    /// What one node offers changes again before all are looked at, and that concerns every budget.
    async fn one_node_for_all(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let before = self.mark(operator).await?;
        for round in 1.. {
            self.fleet.agents[0].withheld = round;
            self.fleet.report([0]).await?;
            if before.begin.elapsed() > AMENDED {
                break;
            }
            sleep(LOOK).await;
        }
        let writes = operator.sample().await?.writes - before.sample.writes;
        let rows = [
            "one node's offer changed, again and again: reconciles/s",
            "the same: operator's processor time for each, ms",
            "the same: processors taken by API server and etcd",
        ];
        self.burst(operator, &before, rows).await?;
        self.progress.say(format_args!("  {writes} writes"));
        self.settled(operator).await?;
        self.all_is_right().await
    }

    /// A context on every other node is poisoned, and restarted by its agent.
    async fn restarted_contexts(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let nodes: Vec<usize> = (0..self.fleet.size.nodes).step_by(2).collect();
        let before = self.mark(operator).await?;
        for node in &nodes {
            self.fleet.agents[*node].is_poisoned(*node, "Restart");
        }
        self.fleet.report(nodes.iter().copied()).await?;
        for node in &nodes {
            self.fleet.agents[*node].has_restarted();
        }
        self.fleet.report(nodes.iter().copied()).await?;
        let told = before.begin.elapsed().as_secs_f64();
        self.settled(operator).await?;
        let writes = self.writes_since(operator, &before).await?;
        self.row(
            "storm on half of the nodes: told within, s",
            told,
            Projected::No,
        );
        let each = writes / nodes.len() as f64;
        self.row(
            "storm: writes per fault that the agent ends",
            each,
            Projected::No,
        );
        self.all_is_right().await
    }

    /// The same, restarted too often: its pod has to go.
    async fn evicted_pods(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let nodes: Vec<usize> = (0..self.fleet.size.nodes).step_by(2).collect();
        let before = self.mark(operator).await?;
        for node in &nodes {
            self.fleet.agents[*node].is_poisoned(*node, "BeyondMaximum");
        }
        self.fleet.report(nodes.iter().copied()).await?;
        let wanted = before.sample.evictions + nodes.len() as u64;
        let all = |now: &Sample| now.evictions >= wanted;
        self.until("all pods evicted", operator, all).await?;
        let took = before.begin.elapsed().as_secs_f64();
        for node in &nodes {
            let agent = &mut self.fleet.agents[*node];
            agent.faults.clear();
            agent.pods.remove(0);
        }
        self.fleet.report(nodes.iter().copied()).await?;
        self.settled(operator).await?;
        let writes = self.writes_since(operator, &before).await?;
        self.row(
            "storm: every pod beyond its restarts evicted, s",
            took,
            Projected::Line,
        );
        let each = writes / nodes.len() as f64;
        self.row(
            "storm: writes per fault that evicts, labels of nodes and Events included",
            each,
            Projected::No,
        );
        self.all_is_right().await
    }

    /// Events included.
    async fn writes_since(&self, operator: &mut Operator, before: &Mark) -> anyhow::Result<f64> {
        let after = self.mark(operator).await?;
        let writes = after.sample.writes - before.sample.writes;
        Ok((writes + after.events - before.events) as f64)
    }

    /// Pods come and go everywhere.
    async fn churn(&mut self, operator: &mut Operator) -> anyhow::Result<()> {
        let mut random = StdRng::seed_from_u64(6);
        let before = self.mark(operator).await?;
        let (mut reports, mut replaced) = (0_u32, 0_u32);
        while before.begin.elapsed() < CHURN {
            let some = CHANGED.min(self.fleet.size.nodes);
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
            Projected::No,
        );
        self.row(
            "churn: GpuNodes' reports/s",
            f64::from(reports) / took,
            Projected::No,
        );
        let labels = (after.sample.labels - before.sample.labels) as f64;
        self.row("churn: node label writes/s", labels / took, Projected::No);
        let others = (after.sample.writes - before.sample.writes) as f64 - labels;
        self.row("churn: other writes/s", others / took, Projected::No);
        let share = (after.operator - before.operator) / took;
        self.row(
            "churn: operator's processor, %",
            share * 100.0,
            Projected::Line,
        );
        let ended = Instant::now();
        let settled = self.settled(operator).await?;
        let took = settled.saturating_duration_since(ended).as_secs_f64();
        self.row("churn: all labels right after it, s", took, Projected::No);
        self.all_is_right().await
    }
}
