//! Audits the node once a second: gathers, compares, reports and acts.
//!
//! ```text
//!   pids of exited processes --> NVML (deadline) --> attestation (deadline) --> accounts
//!     --> identities of NVML's processes --> judge --> charges, metrics, Events, kills
//! ```
//!
//! [`judge`](super::judge) and [`gather`](super::gather) say why in this order. No step waits longer
//! than its deadline: the auditor leaves out a GPU or a pod that hangs, and reports it after
//! [`STALE`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::collect::{Questions, identified, is_there};
use super::compare::{Containers, Finding, GpuSeen, Verdict, judge};
use super::consecutive::Strikes;
use super::events;
use super::kill::kill;
use super::namespace_usage::{Kept, Tally};
use super::policy::action;
use super::withheld::Withheld;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::disk::Disk;
use crate::config::{AuditConfig, Config};
use crate::enforcement::attestation::{Around, Attested, Attestor, Lack, Reason, Target};
use crate::enforcement::driver_limits::{self, Limits};
use crate::gpu::nvml::NvmlHandle;
use crate::gpu_node::{Events, NamespaceReport};
use crate::metrics::{AuditFigures, Metrics};
use crate::node::actor::Snapshot;
use crate::node::allocator::BoundContainer;
use crate::procfs::Stat;
use crate::sessions::{Account, Books, Sessions};
use crate::units::{AllocationId, Bytes, GpuUuid, PodUid};

/// From one audit to the next.
const EVERY: Duration = Duration::from_secs(1);
/// How long NVML may take for all GPUs together.
const NVML_LIMIT: Duration = Duration::from_millis(500);
/// How long attestation may take.
const ATTEST_LIMIT: Duration = Duration::from_millis(400);
/// How long a GPU, or a look at a pod, may go without an answer before that is told.
const STALE: Duration = Duration::from_secs(5);

/// How long the agent's start waits for the disk to tell the counts of namespaces.
const TALLY_READ: Duration = Duration::from_secs(1);

/// What the audit says of the node, for its status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Audited {
    /// Whether there was an audit.
    pub begun: bool,
    /// The healthy GPUs that NVML has told nothing about for a while; of others that is known.
    pub stale: BTreeSet<GpuUuid>,
    /// The pods that no look came back from for a while.
    pub hanging: BTreeSet<PodUid>,
    /// The containers that are not held to their quota.
    pub not_enforced: Vec<(BoundContainer, Lack)>,
    /// What the pods of each namespace use, and what befell them.
    pub namespaces: Vec<NamespaceReport>,
}

/// What the audit works with.
pub struct Auditor {
    config: AuditConfig,
    proc: PathBuf,
    nvml: NvmlHandle,
    sessions: Arc<Sessions>,
    snapshots: watch::Receiver<Snapshot>,
    limits: watch::Receiver<Limits>,
    withhold: watch::Sender<BTreeMap<GpuUuid, Bytes>>,
    events: Events,
    metrics: Metrics,
    audited: watch::Sender<Audited>,
    questions: Questions,
    /// When this agent started, in clock ticks since boot.
    since: u64,
    /// A reading that has not come back.
    around: Option<JoinHandle<Around>>,
    pods: BTreeMap<PodUid, Pod>,
    strikes: Strikes,
    withheld: Withheld,
    /// When each GPU last answered; when it was first seen, before that.
    answered: BTreeMap<GpuUuid, Instant>,
    /// What was said of each running container last.
    enforced: BTreeMap<AllocationId, Option<Reason>>,
    tally: Tally,
    tally_file: Disk<Kept>,
}

/// The attestor with what it found.
type Look = JoinHandle<(Box<Attestor>, Vec<Attested>)>;

/// The attestor of a pod: here, or in a look that has not come back.
enum Attesting {
    Idle(Box<Attestor>),
    Looking(Look),
    /// A look panicked: what was known of containers is lost.
    Lost,
}

/// A pod with containers of ours. A process of one may hang in the kernel, and who looks at it with it.
struct Pod {
    attesting: Attesting,
    /// What the last look that came back found.
    attested: Vec<Attested>,
    /// When it did; when the pod was first seen, before that.
    answered: Instant,
}

impl Auditor {
    /// An audit that has not begun, and what it will say.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn new(
        config: &Config,
        nvml: NvmlHandle,
        sessions: Arc<Sessions>,
        snapshots: watch::Receiver<Snapshot>,
        limits: watch::Receiver<Limits>,
        events: Events,
        metrics: Metrics,
    ) -> std::io::Result<(Self, watch::Receiver<Audited>)> {
        let (audited, told) = watch::channel(Audited::default());
        let tally_file = Checkpoint::new(config.paths.state_dir.join("namespaces.json"));
        let tally_file: Disk<Kept> = Disk::open(tally_file, Checkpoint::save)?;
        let kept = tally_file.read(TALLY_READ);
        if kept.is_none() {
            warn!("counts of namespaces begin anew: the disk does not tell them");
        }
        let auditor = Self {
            config: config.audit,
            proc: config.paths.proc.clone(),
            nvml,
            sessions,
            snapshots,
            limits,
            withhold: watch::channel(BTreeMap::new()).0,
            events,
            metrics,
            audited,
            questions: Questions::default(),
            since: own_start(),
            around: None,
            pods: BTreeMap::new(),
            strikes: Strikes::default(),
            withheld: Withheld::default(),
            answered: BTreeMap::new(),
            enforced: BTreeMap::new(),
            tally: Tally::new(config.resources.quantum, kept.unwrap_or_default()),
            tally_file,
        };
        Ok((auditor, told))
    }

    /// Tells what of each GPU is not to be bound.
    #[must_use]
    pub fn withholding(mut self, withhold: watch::Sender<BTreeMap<GpuUuid, Bytes>>) -> Self {
        self.withhold = withhold;
        self
    }

    /// Audits until `stop`.
    pub async fn run(mut self, config: Config, stop: CancellationToken) {
        let mut every = interval(EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(every.tick()).await.is_some() {
            if stop
                .run_until_cancelled(self.audit(&config))
                .await
                .is_none()
            {
                return;
            }
        }
    }

    async fn audit(&mut self, config: &Config) {
        let begun = Instant::now();
        let (gpus, healthy, containers) = {
            let snapshot = self.snapshots.borrow();
            let states = || snapshot.inventory.gpus().iter();
            let gpus: BTreeSet<_> = states().map(|state| state.gpu.uuid.clone()).collect();
            let healthy = states().filter(|state| state.health.is_healthy());
            let healthy: BTreeSet<_> = healthy.map(|state| state.gpu.uuid.clone()).collect();
            (gpus, healthy, snapshot.containers.clone())
        };
        let exited = self.sessions.exited_pids();
        let nvml = self.nvml.clone();
        let answers = self
            .questions
            .ask(&gpus, |gpu| nvml.ask(gpu), begun + NVML_LIMIT)
            .await;
        self.attest(config, &containers).await;
        let attested = self.pods.values().flat_map(|pod| &pod.attested);
        let attested: Vec<Attested> = attested.cloned().collect();
        let hangs = |pod: &Pod| begun.duration_since(pod.answered) >= STALE;
        let hanging = self.pods.iter().filter(|(_, pod)| hangs(pod));
        let hanging: BTreeSet<PodUid> = hanging.map(|(uid, _)| uid.clone()).collect();
        let books = self.sessions.books();
        let mut seen: Vec<GpuSeen> = answers
            .into_iter()
            .map(|(gpu, answer)| identified(gpu, answer, &self.proc))
            .collect();
        // After the books: what a pod leaves is in one of both.
        for gpu in &self.snapshots.borrow().view.gpus {
            let of_it = seen.iter_mut().find(|seen| seen.gpu == gpu.uuid);
            of_it.into_iter().for_each(|seen| {
                seen.left = Bytes(gpu.left.0.saturating_add(gpu.kept.0));
            });
        }
        let mut known = known(&attested, exited, self.since);
        // After the books, as the driver's processes: what was attested may have ended, and its session with it.
        known
            .processes
            .retain(|pid, (_, process)| is_there(&self.proc, *pid, process.start));
        let verdict = judge(&seen, &books, &known, &self.config);
        self.charge(&books, &seen, &verdict);
        self.withhold(&seen, &verdict, &gpus);
        let stale = self.stale(&gpus, &seen, begun);
        let answered = |gpu: &&GpuUuid| seen.iter().any(|seen| seen.gpu == **gpu);
        let silent = gpus.iter().filter(|gpu| !answered(gpu)).cloned().collect();
        self.act(&verdict.findings, &silent, &containers);
        let not_enforced = self.transitions(&containers, &attested);
        self.count(&containers, &books, begun);
        let after = Audited {
            begun: true,
            stale: stale.intersection(&healthy).cloned().collect(),
            hanging: hanging.clone(),
            not_enforced,
            namespaces: self.tally.report(),
        };
        let figures = AuditFigures {
            verdict,
            gpus,
            stale,
            hanging,
            ..self.measured(containers, books, &attested)
        };
        self.metrics.set_audit(figures);
        self.metrics.audited(begun.elapsed());
        self.audited.send_if_modified(|before| {
            let changed = *before != after;
            *before = after;
            changed
        });
    }

    /// Looks at what runs; where that takes too long, what was known of the pod before stands until it comes back.
    async fn attest(&mut self, config: &Config, containers: &[BoundContainer]) {
        let deadline = Instant::now() + ATTEST_LIMIT;
        let mut reading = self.around.take().unwrap_or_else(|| {
            let (paths, driver) = (config.paths.clone(), config.driver.clone());
            spawn_blocking(move || Around::read(&paths, &driver))
        });
        let around = match timeout_at(deadline, &mut reading).await {
            Ok(Ok(around)) => Arc::new(around),
            Ok(Err(error)) => return warn!(%error, "attestation failed"),
            Err(_) => {
                self.around = Some(reading);
                return;
            }
        };
        let mut before = std::mem::take(&mut self.pods);
        let looks = targets(containers).into_iter().map(|target| {
            let uid = target.pod.clone();
            let mut pod = before.remove(&uid).unwrap_or_else(|| Pod {
                attesting: Attesting::Lost,
                attested: Vec::new(),
                answered: Instant::now(),
            });
            let around = around.clone();
            async move {
                pod.look(config, target, around, deadline).await;
                (uid, pod)
            }
        });
        self.pods = join_all(looks).await.into_iter().collect();
    }

    /// What processes without a session have is granted to nobody else.
    fn charge(&self, books: &[Books], seen: &[GpuSeen], verdict: &Verdict) {
        for GpuSeen { gpu, .. } in seen {
            for books in books {
                let outside = verdict.outside.get(&(books.allocation, gpu.clone()));
                let account = Account::Gpu(gpu.clone());
                let had = books.accounts.iter().find(|had| had.account == account);
                if had.is_some_and(|had| had.outside > Bytes::ZERO || outside.is_some()) {
                    let charged = outside.cloned().unwrap_or_default();
                    self.sessions
                        .set_outside(&books.allocation, &account, charged);
                }
            }
        }
    }

    /// What is in use and charged to nobody is bound to nobody.
    fn withhold(&mut self, seen: &[GpuSeen], verdict: &Verdict, gpus: &BTreeSet<GpuUuid>) {
        let told = seen.iter().filter(|seen| seen.unlisted.is_some());
        let told = told.map(|seen| seen.gpu.clone()).collect();
        let after = self.withheld.see(&told, verdict, gpus);
        self.withhold.send_if_modified(|before| {
            let changed = *before != after;
            if changed {
                info!(withheld = ?after, "in use and charged to nobody");
            }
            *before = after;
            changed
        });
    }

    fn stale(
        &mut self,
        gpus: &BTreeSet<GpuUuid>,
        seen: &[GpuSeen],
        now: Instant,
    ) -> BTreeSet<GpuUuid> {
        self.answered.retain(|gpu, _| gpus.contains(gpu));
        for gpu in gpus {
            let answered = self.answered.entry(gpu.clone()).or_insert(now);
            if seen.iter().any(|seen| seen.gpu == *gpu) {
                *answered = now;
            }
        }
        let old = self
            .answered
            .iter()
            .filter(|(_, at)| now.duration_since(**at) >= STALE);
        old.map(|(gpu, _)| gpu.clone()).collect()
    }

    /// The figures of containers for the metrics.
    fn measured(
        &self,
        containers: Arc<[BoundContainer]>,
        books: Vec<Books>,
        attested: &[Attested],
    ) -> AuditFigures {
        let mut lacks: BTreeMap<AllocationId, Option<Reason>> = BTreeMap::new();
        for attested in attested {
            let lack = attested.lack.as_ref().map(|lack| lack.reason);
            // One that is restarting has two for a moment.
            let most = lacks.entry(attested.allocation).or_insert(lack);
            *most = lack.max(*most);
        }
        let books = books.into_iter().map(|books| (books.allocation, books));
        let books: BTreeMap<_, _> = books.collect();
        let limits = self.limits.borrow();
        let limited = containers.iter().filter(|container| {
            let books = books.get(&container.allocation);
            books.is_some_and(|books| driver_limits::holds(&limits, container, books))
        });
        AuditFigures {
            limited: limited.map(|container| container.allocation).collect(),
            attested: lacks,
            containers: Arc::clone(&containers),
            books,
            ..AuditFigures::default()
        }
    }

    fn act(
        &mut self,
        findings: &[Finding],
        silent: &BTreeSet<GpuUuid>,
        containers: &[BoundContainer],
    ) {
        let strikes = self.strikes.count(findings, silent);
        for (finding, strikes) in findings.iter().zip(strikes) {
            let action = action(finding, strikes, &self.config);
            if action.tell {
                warn!(?finding, "audit");
                self.metrics.found(finding);
                events::finding(&self.events, finding, containers);
            }
            for process in action.kill {
                match kill(&self.proc, process) {
                    Ok(true) => {
                        warn!(pid = process.pid, kind = finding.kind(), "killed");
                        self.metrics.killed();
                        events::killed(&self.events, finding, containers);
                    }
                    Ok(false) => {}
                    Err(error) => warn!(pid = process.pid, %error, "not killed"),
                }
            }
        }
    }

    fn count(&mut self, containers: &[BoundContainer], books: &[Books], now: Instant) {
        let before = self.tally.kept().clone();
        self.tally.see(containers, books, now);
        if *self.tally.kept() != before {
            // What is lost with a file that cannot be written are counts.
            self.tally_file.write(self.tally.kept().clone());
        }
    }

    /// Tells of containers that are enforced no longer or again; those that are not now.
    fn transitions(
        &mut self,
        containers: &[BoundContainer],
        attested: &[Attested],
    ) -> Vec<(BoundContainer, Lack)> {
        let mut lacking: BTreeMap<AllocationId, Option<&Lack>> = BTreeMap::new();
        for attested in attested {
            let lack = lacking.entry(attested.allocation).or_default();
            *lack = lack.or(attested.lack.as_ref());
        }
        self.enforced
            .retain(|allocation, _| lacking.contains_key(allocation));
        let mut not_enforced = Vec::new();
        for container in containers {
            let Some(lack) = lacking.get(&container.allocation) else {
                continue;
            };
            let reason = lack.map(|lack| lack.reason);
            let before = self.enforced.insert(container.allocation, reason).flatten();
            if before != reason {
                info!(pod = %container.pod, lack = lack.map(ToString::to_string), "enforcement");
                events::enforcement(&self.events, container, *lack);
            }
            if let Some(lack) = lack {
                not_enforced.push((container.clone(), (*lack).clone()));
            }
        }
        not_enforced
    }
}

impl Pod {
    async fn look(
        &mut self,
        config: &Config,
        target: Target,
        around: Arc<Around>,
        deadline: Instant,
    ) {
        let begin = |mut attestor: Box<Attestor>| {
            spawn_blocking(move || {
                let attested = attestor.look(&target, &around);
                (attestor, attested)
            })
        };
        let mut looking = match std::mem::replace(&mut self.attesting, Attesting::Lost) {
            Attesting::Looking(looking) => looking,
            Attesting::Idle(attestor) => begin(attestor),
            Attesting::Lost => begin(Box::new(Attestor::new(config))),
        };
        match timeout_at(deadline, &mut looking).await {
            Ok(Ok((attestor, attested))) => {
                self.attesting = Attesting::Idle(attestor);
                self.attested = attested;
                self.answered = Instant::now();
            }
            Ok(Err(error)) => warn!(%error, "attestation failed"),
            Err(_) => self.attesting = Attesting::Looking(looking),
        }
    }
}

/// Each pod once.
fn targets(containers: &[BoundContainer]) -> Vec<Target> {
    let pods = containers.iter().filter_map(|container| {
        let cgroup = container.cgroup.clone()?;
        Some((container.pod.clone(), cgroup))
    });
    let pods: BTreeMap<_, _> = pods.collect();
    pods.into_iter()
        .map(|(pod, cgroup)| Target { pod, cgroup })
        .collect()
}

/// Zero where the system does not tell: then no process is older.
fn own_start() -> u64 {
    let text = crate::procfs::read(Path::new("/proc/self/stat")).unwrap_or_default();
    Stat::parse(&text).map_or(0, |stat| stat.start)
}

fn known(attested: &[Attested], exited: BTreeSet<u32>, since: u64) -> Containers {
    let named = |attested: &Attested| {
        let name = (attested.pod.clone(), attested.cgroup.clone());
        (name, attested.allocation)
    };
    let processes = attested.iter().flat_map(|attested| {
        let processes = attested.processes.iter();
        processes.map(|(pid, running)| (attested.allocation, pid, running))
    });
    Containers {
        allocations: attested.iter().map(named).collect(),
        processes: processes
            .map(|(of, pid, running)| (*pid, (of, running.clone())))
            .collect(),
        exited,
        since,
    }
}
