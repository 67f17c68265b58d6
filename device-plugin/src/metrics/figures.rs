//! Encodes the figures of GPUs and of their retained memory.

use std::collections::BTreeMap;
use std::fmt;

use bursar_crds::Amount;
use bursar_crds::context_policy::FaultAction;
use bursar_crds::gpu_node::{ComputeState, GpuCompute, GpuStatus, HealthStatus, RuntimeState};
use bursar_crds::numbers::to_i64;
use bursar_gpu_node::report::{NodeReport, ready_condition};
use bursar_metrics::{EncodeFamilies, FamilyEncoder, Label, gauge_value, gpu_label};
use bursar_retained::status::RetainedStatus;

/// The figures of the latest report.
#[derive(Debug, Default)]
pub(super) struct ReportFigures(pub(super) Option<NodeReport>);

impl EncodeFamilies for ReportFigures {
    fn encode(&self, tables: &mut FamilyEncoder<'_>) -> fmt::Result {
        let Some(report) = &self.0 else {
            return Ok(());
        };
        encode_memory(report, tables)?;
        encode_compute(report, tables)?;
        encode_health(report, tables)
    }
}

fn of_each_gpu(report: &NodeReport, figure: impl Fn(&GpuStatus) -> i64) -> Vec<(Label, i64)> {
    let gpus = report.status.gpus.iter();
    gpus.map(|gpu| (gpu_label(&gpu.uuid), figure(gpu)))
        .collect()
}

fn encode_memory(report: &NodeReport, tables: &mut FamilyEncoder<'_>) -> fmt::Result {
    let quantum = bytes_of(report.status.quantum.as_ref());
    let capacity = |gpu: &GpuStatus| i64::from(gpu.capacity) * quantum;
    tables.gauges(
        "bursar_gpu_memory_size_bytes",
        "Memory of a GPU, as the driver reports it",
        of_each_gpu(report, |gpu| bytes_of(Some(&gpu.memory))),
    )?;
    tables.gauges(
        "bursar_gpu_memory_capacity_bytes",
        "Memory of a GPU that pods can have",
        of_each_gpu(report, capacity),
    )?;
    let by_state = report.status.gpus.iter().flat_map(|gpu| {
        let free = i64::from(gpu.free) * quantum;
        let leaked = report.exported.get(&gpu.uuid);
        let states = [
            ("free", free),
            ("bound", (capacity(gpu) - free).max(0)),
            ("leaked", leaked.map_or(0, |leaked| to_i64(leaked.bytes.0))),
            ("withheld", bytes_of(gpu.withheld.as_ref())),
        ];
        states.map(|(state, bytes)| (with_state(&gpu.uuid, state), bytes))
    });
    tables.gauges(
        "bursar_gpu_memory_bytes",
        "Memory of a GPU by state: bound, free, leaked, withheld",
        by_state.collect(),
    )
}

fn encode_compute(report: &NodeReport, tables: &mut FamilyEncoder<'_>) -> fmt::Result {
    let figures = |figure: fn(&GpuCompute) -> i64| {
        let gpus = report.status.gpus.iter();
        gpus.filter_map(|gpu| Some((gpu_label(&gpu.uuid), figure(gpu.compute.as_ref()?))))
            .collect()
    };
    tables.gauges(
        "bursar_gpu_compute_enforced",
        "1 where weights of compute time hold on the GPU, 0 where they do not, -1 where it was not tested",
        figures(|compute| match compute.state {
            ComputeState::Enforced => 1,
            ComputeState::NotEnforced => 0,
            ComputeState::NotTested | ComputeState::Unknown => -1,
        }),
    )?;
    tables.gauges(
        "bursar_gpu_compute_hidden_groups",
        "Channel groups on the GPU that belong to no known process",
        figures(|compute| compute.hidden_groups.into()),
    )
}

fn encode_health(report: &NodeReport, tables: &mut FamilyEncoder<'_>) -> fmt::Result {
    let status = &report.status;
    tables.gauges(
        "bursar_gpu_healthy",
        "1 while new pods may be bound to the GPU",
        of_each_gpu(report, |gpu| {
            (gpu.health.status == HealthStatus::Healthy).into()
        }),
    )?;
    let infos = status.gpus.iter().map(|gpu| {
        let labels = [
            ("gpu", gpu.uuid.clone()),
            ("index", gpu.index.to_string()),
            ("model", gpu.model.clone()),
            ("driver", status.driver_version.clone().unwrap_or_default()),
        ];
        (labels, 1)
    });
    tables.gauges(
        "bursar_gpu_info",
        "Index, model and driver of a GPU; always 1",
        infos.collect(),
    )?;
    let mut open: BTreeMap<_, i64> = BTreeMap::new();
    for fault in &status.faults {
        let action = fault.action.map_or("undecided", FaultAction::label);
        let labels = [("gpu", fault.gpu.as_str()), ("action", action)];
        *open.entry(labels).or_default() += 1;
    }
    tables.gauges(
        "bursar_gpu_faults_open",
        "Open faults of a GPU and of programs on it, by action",
        open.into_iter().collect(),
    )?;
    let ready = ready_condition(&report.conditions);
    let conditions = std::iter::once(&ready).chain(&report.conditions);
    let conditions = conditions.map(|update| {
        let value = update.holds.map_or(-1, i64::from);
        ([("condition", update.type_)], value)
    });
    tables.gauges(
        "bursar_node_condition",
        "1 while a condition of the node is True, 0 while it is False, -1 while it is Unknown",
        conditions.collect(),
    )
}

/// The retained leases and the allocator runtime of each GPU.
#[derive(Debug, Default)]
pub(super) struct RetainedFigures(pub(super) RetainedStatus);

impl EncodeFamilies for RetainedFigures {
    fn encode(&self, tables: &mut FamilyEncoder<'_>) -> fmt::Result {
        let live = || self.0.live.iter();
        let runtimes = || self.0.runtimes.iter();
        let leases = live().map(|(gpu, (leases, _))| (gpu_label(gpu), gauge_value(*leases)));
        tables.gauges(
            "bursar_gpu_retained_leases",
            "Leases of retained memory in the fd store",
            leases.collect(),
        )?;
        let bytes = live().map(|(gpu, (_, bytes))| (gpu_label(gpu), to_i64(bytes.0)));
        tables.gauges(
            "bursar_gpu_retained_bytes",
            "Retained memory in the fd store",
            bytes.collect(),
        )?;
        let states = runtimes().flat_map(|(gpu, runtime)| {
            RuntimeState::ALL.map(|state| {
                let is_in_state = runtime.state == state;
                (with_state(gpu, runtime_state(state)), is_in_state.into())
            })
        });
        tables.gauges(
            "bursar_gpu_runtime_state",
            "1 for the state of the GPU's allocator runtime, 0 for every other",
            states.collect(),
        )?;
        let starts = runtimes().map(|(gpu, runtime)| (gpu_label(gpu), runtime.starts));
        tables.counters(
            "bursar_gpu_runtime_starts",
            "Starts of the GPU's allocator runtime",
            starts.collect(),
        )?;
        let failures = runtimes().flat_map(|(gpu, runtime)| {
            let failures = runtime.failures.iter();
            failures.map(|(class, count)| {
                let labels = [("gpu", gpu.as_str()), ("class", class.as_str())];
                (labels, *count)
            })
        });
        tables.counters(
            "bursar_gpu_runtime_failures",
            "Failures of the GPU's allocator runtime, by class",
            failures.collect(),
        )
    }
}

fn with_state(gpu: impl ToString, state: &str) -> [(&'static str, String); 2] {
    [("gpu", gpu.to_string()), ("state", state.to_owned())]
}

/// The state of an allocator runtime as a label.
const fn runtime_state(state: RuntimeState) -> &'static str {
    match state {
        RuntimeState::Stopped => "stopped",
        RuntimeState::Starting => "starting",
        RuntimeState::Ready => "ready",
        RuntimeState::Refused => "refused",
        RuntimeState::Stuck => "stuck",
        RuntimeState::Drained => "drained",
        RuntimeState::Unknown => "unknown",
    }
}

/// The amount in bytes; zero where it is absent.
fn bytes_of(amount: Option<&Amount>) -> i64 {
    amount
        .and_then(|amount| amount.bytes().ok())
        .map_or(0, to_i64)
}
