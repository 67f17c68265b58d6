//! Encodes the figures of GPUs and of their retained memory.

use bursar_metrics::{EncodeFamilies, FamilyEncoder, GpuLabels};
use prometheus_client::encoding::EncodeLabelSet;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
pub(super) struct GpuStateLabels {
    pub(super) gpu: String,
    pub(super) state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
pub(super) struct GpuInfoLabels {
    pub(super) gpu: String,
    pub(super) index: String,
    pub(super) model: String,
    pub(super) driver: String,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
pub(super) struct NodeConditionLabels {
    pub(super) condition: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
pub(super) struct FaultLabels {
    pub(super) gpu: String,
    pub(super) action: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
pub(super) struct RuntimeFailureLabels {
    pub(super) gpu: String,
    pub(super) class: &'static str,
}

/// The figures of the GPUs in one report.
#[derive(Clone, Debug, Default)]
pub(super) struct GpuFigures {
    pub(super) infos: Vec<(GpuInfoLabels, i64)>,
    pub(super) conditions: Vec<(NodeConditionLabels, i64)>,
    pub(super) faults: Vec<(FaultLabels, i64)>,
    pub(super) sizes: Vec<(GpuLabels, i64)>,
    pub(super) capacities: Vec<(GpuLabels, i64)>,
    pub(super) memory: Vec<(GpuStateLabels, i64)>,
    pub(super) healthy: Vec<(GpuLabels, i64)>,
}

impl EncodeFamilies for GpuFigures {
    fn encode(&self, tables: &mut FamilyEncoder<'_>) -> std::fmt::Result {
        tables.gauges(
            "bursar_gpu_memory_size_bytes",
            "Memory of a GPU, as the driver reports it",
            self.sizes.clone(),
        )?;
        tables.gauges(
            "bursar_gpu_memory_capacity_bytes",
            "Memory of a GPU that pods can have",
            self.capacities.clone(),
        )?;
        tables.gauges(
            "bursar_gpu_memory_bytes",
            "Memory of a GPU by state: bound, free, leaked, withheld",
            self.memory.clone(),
        )?;
        tables.gauges(
            "bursar_gpu_healthy",
            "1 while new pods may be bound to the GPU",
            self.healthy.clone(),
        )?;
        tables.gauges(
            "bursar_gpu_info",
            "Index, model and driver of a GPU; always 1",
            self.infos.clone(),
        )?;
        tables.gauges(
            "bursar_gpu_faults_open",
            "Open faults of a GPU and of programs on it, by action",
            self.faults.clone(),
        )?;
        tables.gauges(
            "bursar_node_condition",
            "1 while a condition of the node is True, 0 while it is False, -1 while it is Unknown",
            self.conditions.clone(),
        )
    }
}

/// The retained leases and the allocator runtime of each GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct RetainedFigures {
    pub(super) leases: Vec<(GpuLabels, i64)>,
    pub(super) bytes: Vec<(GpuLabels, i64)>,
    pub(super) runtime_states: Vec<(GpuStateLabels, i64)>,
    pub(super) runtime_starts: Vec<(GpuLabels, u64)>,
    pub(super) runtime_failures: Vec<(RuntimeFailureLabels, u64)>,
}

impl EncodeFamilies for RetainedFigures {
    fn encode(&self, tables: &mut FamilyEncoder<'_>) -> std::fmt::Result {
        tables.gauges(
            "bursar_gpu_retained_leases",
            "Leases of retained memory in the fd store",
            self.leases.clone(),
        )?;
        tables.gauges(
            "bursar_gpu_retained_bytes",
            "Retained memory in the fd store",
            self.bytes.clone(),
        )?;
        tables.gauges(
            "bursar_gpu_runtime_state",
            "1 for the state of the GPU's allocator runtime, 0 for every other",
            self.runtime_states.clone(),
        )?;
        tables.counters(
            "bursar_gpu_runtime_starts",
            "Starts of the GPU's allocator runtime",
            self.runtime_starts.clone(),
        )?;
        tables.counters(
            "bursar_gpu_runtime_failures",
            "Failures of the GPU's allocator runtime, by class",
            self.runtime_failures.clone(),
        )
    }
}
