//! What containers have, and what the audit found.

use std::collections::BTreeSet;
use std::time::Duration;

use bursar_protocol::sticky::ErrorClass;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::{OfGpu, Registering};
use crate::attest::Reason;
use crate::audit::judge::{Finding, Verdict};
use crate::node::core::BoundContainer;
use crate::sessions::{Account, Books, Decision, Fault};
use crate::units::{Bytes, GpuUuid};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfContainer {
    namespace: String,
    pod: String,
    container: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfAccount {
    #[prometheus(flatten)]
    of: OfContainer,
    account: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfAmount {
    #[prometheus(flatten)]
    of: OfAccount,
    amount: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfFunction {
    #[prometheus(flatten)]
    of: OfContainer,
    function: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfReason {
    #[prometheus(flatten)]
    of: OfContainer,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfLayer {
    #[prometheus(flatten)]
    of: OfContainer,
    layer: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfFinding {
    finding: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfFault {
    cause: String,
    action: &'static str,
}

/// One container at a moment.
#[derive(Clone, Copy, Debug)]
pub struct ContainerFigures<'a> {
    /// Who it is.
    pub container: &'a BoundContainer,
    /// Its books.
    pub books: &'a Books,
    /// Whether it is enforced, where it runs: none for a reason is well.
    pub attested: Option<Option<Reason>>,
    /// Whether the driver itself holds it.
    pub limited: bool,
    /// Whether no look at its pod came back for a while.
    pub hangs: bool,
}

/// The metrics; the families' series are those of what is there now.
#[derive(Clone, Debug)]
pub(super) struct Audited {
    memory: Family<OfAmount, Gauge>,
    drift: Family<OfAccount, Gauge>,
    denied: Family<OfFunction, Counter>,
    requests: Family<OfContainer, Counter>,
    unclosed: Family<OfContainer, Gauge>,
    enforced: Family<OfReason, Gauge>,
    layers: Family<OfLayer, Gauge>,
    residual: Family<OfGpu, Gauge>,
    intruders: Family<OfGpu, Gauge>,
    stale: Family<OfGpu, Gauge>,
    findings: Family<OfFinding, Counter>,
    kills: Counter,
    generation: Family<OfContainer, Gauge>,
    poisoned: Family<OfFault, Counter>,
    seconds: Histogram,
}

impl Audited {
    pub(super) fn new(r: &mut Registry) -> Self {
        Self {
            memory: r.with(
                "bursar_container_memory_bytes",
                "Memory of a container's account by amount",
                Family::default(),
            ),
            drift: r.with(
                "bursar_container_drift_bytes",
                "What NVML charges to a container's processes less what the ledger says that they use",
                Family::default(),
            ),
            denied: r.with(
                "bursar_container_denied",
                "Allocations denied for want of quota, by the driver's function",
                Family::default(),
            ),
            requests: r.with(
                "bursar_container_credit_requests",
                "Requests for credit that the agent answered",
                Family::default(),
            ),
            unclosed: r.with(
                "bursar_container_unclosed_sockets",
                "Sockets of a container's processes that wait to be closed",
                Family::default(),
            ),
            enforced: r.with(
                "bursar_container_enforced",
                "1 while a running container is held to its quota as far as it can be seen",
                Family::default(),
            ),
            layers: r.with(
                "bursar_container_layer",
                "1 while this layer holds a running container to its quota: shim, audit, driver",
                Family::default(),
            ),
            residual: r.with(
                "bursar_gpu_residual_bytes",
                "What is in use of a GPU less what NVML charges to processes",
                Family::default(),
            ),
            intruders: r.with(
                "bursar_gpu_intruders",
                "Processes that use a GPU without a session",
                Family::default(),
            ),
            stale: r.with(
                "bursar_gpu_audit_stale",
                "1 while NVML has not told for a while who uses a GPU",
                Family::default(),
            ),
            findings: r.with(
                "bursar_agent_findings",
                "Findings of the audit, each once for as long as it stands",
                Family::default(),
            ),
            kills: r.with(
                "bursar_agent_audit_kills",
                "Processes killed by the audit's policy",
                Counter::default(),
            ),
            generation: r.with(
                "bursar_container_generation",
                "Process images of a container that said hello, replaced ones too",
                Family::default(),
            ),
            poisoned: r.with(
                "bursar_agent_poisoned_contexts",
                "Process images whose context a fault poisoned",
                Family::default(),
            ),
            seconds: r.with(
                "bursar_agent_audit_seconds",
                "Time of one audit, the wait for NVML included",
                super::seconds(),
            ),
        }
    }

    fn containers(
        &self,
        containers: &[ContainerFigures<'_>],
        verdict: &Verdict,
        stale: &BTreeSet<GpuUuid>,
    ) {
        self.memory.clear();
        self.drift.clear();
        self.denied.clear();
        self.requests.clear();
        self.generation.clear();
        self.unclosed.clear();
        self.enforced.clear();
        self.layers.clear();
        for ContainerFigures {
            container,
            books,
            attested,
            limited,
            hangs,
        } in containers
        {
            let of = of_container(container);
            let requests = self.requests.get_or_create_owned(&of);
            set(&requests, books.requests);
            let generation = i64::try_from(books.generation).unwrap_or(i64::MAX);
            self.generation.get_or_create_owned(&of).set(generation);
            let unclosed = i64::try_from(books.unclosed).unwrap_or(i64::MAX);
            self.unclosed.get_or_create_owned(&of).set(unclosed);
            for (function, count) in &books.denied {
                let label = OfFunction {
                    of: of.clone(),
                    function: function.clone(),
                };
                set(&self.denied.get_or_create_owned(&label), *count);
            }
            if let Some(lack) = attested {
                let label = OfReason {
                    of: of.clone(),
                    reason: lack.map_or("", Reason::as_str),
                };
                let enforced = self.enforced.get_or_create_owned(&label);
                enforced.set(lack.is_none().into());
                let audited = !hangs && books.gpus().all(|gpu| !stale.contains(gpu));
                let layers = [
                    ("shim", lack.is_none()),
                    ("audit", audited),
                    ("driver", *limited),
                ];
                for (layer, holds) in layers {
                    let of = of.clone();
                    let gauge = self.layers.get_or_create_owned(&OfLayer { of, layer });
                    gauge.set(holds.into());
                }
            }
            for account in &books.accounts {
                let name = match &account.account {
                    Account::Gpu(gpu) => gpu.as_str(),
                    Account::Managed => "managed",
                };
                let amounts = [
                    ("quota", account.quota),
                    ("granted", account.granted),
                    ("used", account.used),
                    ("retired", account.retired),
                    ("leased", account.leased),
                    ("outside", account.outside),
                    ("peak", account.peak),
                ];
                let of = OfAccount {
                    of: of.clone(),
                    account: name.to_owned(),
                };
                for (amount, Bytes(bytes)) in amounts {
                    let of = of.clone();
                    let gauge = self.memory.get_or_create_owned(&OfAmount { of, amount });
                    gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
                }
                if let Account::Gpu(gpu) = &account.account
                    && let Some(drift) = verdict.drift.get(&(books.allocation, gpu.clone()))
                {
                    self.drift.get_or_create_owned(&of).set(*drift);
                }
            }
        }
    }

    fn gpus(&self, verdict: &Verdict, gpus: &BTreeSet<GpuUuid>, stale: &BTreeSet<GpuUuid>) {
        self.residual.clear();
        self.intruders.clear();
        self.stale.clear();
        let label = |gpu: &GpuUuid| OfGpu {
            gpu: gpu.to_string(),
        };
        for (gpu, bytes) in &verdict.residual {
            self.residual.get_or_create_owned(&label(gpu)).set(*bytes);
        }
        for (gpu, count) in &verdict.intruders {
            let count = i64::try_from(*count).unwrap_or(i64::MAX);
            self.intruders.get_or_create_owned(&label(gpu)).set(count);
        }
        for gpu in gpus {
            let gauge = self.stale.get_or_create_owned(&label(gpu));
            gauge.set(stale.contains(gpu).into());
        }
    }
}

impl super::Metrics {
    /// What containers and GPUs have, as one audit found it. What is no longer there is no longer in the metrics;
    /// the figures of GPUs that did not answer are not either.
    pub fn set_audit(
        &self,
        containers: &[ContainerFigures<'_>],
        verdict: &Verdict,
        gpus: &BTreeSet<GpuUuid>,
        stale: &BTreeSet<GpuUuid>,
    ) {
        let _page = self.page();
        self.audited.containers(containers, verdict, stale);
        self.audited.gpus(verdict, gpus, stale);
    }

    /// An audit took so long.
    pub fn audited(&self, took: Duration) {
        self.audited.seconds.observe(took.as_secs_f64());
    }

    /// The audit found something new.
    pub fn found(&self, finding: &Finding) {
        let finding = finding.kind();
        let label = OfFinding { finding };
        self.audited.findings.get_or_create(&label).inc();
    }

    /// A fault poisoned a context.
    pub fn poisoned(&self, fault: &Fault) {
        let cause = match (fault.cuda_error, fault.xid) {
            // Tenants make up any number.
            (Some(code), _) if ErrorClass::of(code) == ErrorClass::Unknown => "cuda-unknown".into(),
            (Some(code), _) => format!("cuda-{code}"),
            (None, Some(xid)) => format!("xid-{xid}"),
            (None, None) => String::new(),
        };
        let action = fault.decision().map_or("fence", Decision::as_str);
        let label = OfFault { cause, action };
        self.audited.poisoned.get_or_create(&label).inc();
    }

    /// The audit killed a process.
    pub fn killed(&self) {
        self.audited.kills.inc();
    }
}

/// A counter that is kept elsewhere.
fn set(counter: &Counter, count: u64) {
    let counted = counter.get();
    counter.inc_by(count.saturating_sub(counted));
}

fn of_container(container: &BoundContainer) -> OfContainer {
    let holder = container.holder.as_ref();
    let pod = holder.and_then(|holder| holder.pod.as_ref());
    OfContainer {
        namespace: pod.map(|pod| pod.namespace.clone()).unwrap_or_default(),
        // The UID where the kubelet told no name.
        pod: pod.map_or_else(|| container.pod.to_string(), |pod| pod.name.clone()),
        container: holder
            .map(|holder| holder.container.clone())
            .unwrap_or_default(),
    }
}
