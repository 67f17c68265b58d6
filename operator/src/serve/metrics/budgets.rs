//! Encodes the figures of budgets.

use std::collections::BTreeMap;
use std::sync::Arc;

use bursar_crds::budget::QuantaAmount;
use bursar_crds::{GpuMemoryBudget, GpuMemoryBudgetStatus};
use kube::ResourceExt as _;
use kube::runtime::reflector::Store;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::gauge::ConstGauge;

use super::{ConditionLabels, StatusLabels, gauges};

/// One amount of a budget's status: of device memory, and of managed memory where it has one.
type Amounts = fn(&GpuMemoryBudgetStatus) -> (&QuantaAmount, Option<&QuantaAmount>);

/// The metrics of a budget's memory: name, help and amount.
const MEMORY: [(&str, &str, Amounts); 6] = [
    (
        "bursar_budget_memory_guaranteed_bytes",
        "Memory that a budget guarantees",
        |status| (&status.device_memory.guaranteed, None),
    ),
    (
        "bursar_budget_memory_limit_bytes",
        "Most memory that a budget lets pods request",
        |status| {
            (
                &status.device_memory.limit,
                Some(&status.managed_memory.limit),
            )
        },
    ),
    (
        "bursar_budget_memory_requested_bytes",
        "Memory that the pods of a budget request",
        |status| {
            (
                &status.device_memory.requested,
                Some(&status.managed_memory.requested),
            )
        },
    ),
    (
        "bursar_budget_memory_borrowed_bytes",
        "Memory that borrowed pods of a budget request, a part of the requested memory",
        |status| (&status.device_memory.borrowed, None),
    ),
    (
        "bursar_budget_memory_observed_bytes",
        "Memory that the pods of a budget use, as the agents report it",
        |status| {
            (
                &status.device_memory.observed,
                Some(&status.managed_memory.observed),
            )
        },
    ),
    (
        "bursar_budget_memory_peak_bytes",
        "Most memory that the pods of a budget have used at a time",
        |status| {
            (
                &status.device_memory.peak,
                Some(&status.managed_memory.peak),
            )
        },
    ),
];

/// Exports the budgets' statuses at each scrape.
#[derive(Debug)]
pub(super) struct BudgetCollector(pub(super) Store<GpuMemoryBudget>);

impl Collector for BudgetCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let encoder = &mut encoder;
        let budgets = self.0.state();
        encode_memory(encoder, &budgets)?;
        encode_cohorts(encoder, &budgets)?;
        encode_condition_counts(encoder, &budgets)?;
        encode_conditions(encoder, &budgets)
    }
}

fn encode_memory(
    encoder: &mut DescriptorEncoder<'_>,
    budgets: &[Arc<GpuMemoryBudget>],
) -> Result<(), std::fmt::Error> {
    for (name, help, of) in MEMORY {
        let mut family = gauges(encoder, name, help)?;
        for (namespace, status) in statuses(budgets) {
            let (device, managed) = of(status);
            let amounts = [("gpu-memory", Some(device)), ("managed-memory", managed)];
            for (resource, amount) in amounts {
                let Some(amount) = amount else { continue };
                let bytes = amount.bytes.bytes().unwrap_or(0);
                let labels = [("namespace", namespace.as_str()), ("resource", resource)];
                let gauge = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
                gauge.encode(family.encode_family(&labels)?)?;
            }
        }
    }
    Ok(())
}

fn encode_cohorts(
    encoder: &mut DescriptorEncoder<'_>,
    budgets: &[Arc<GpuMemoryBudget>],
) -> Result<(), std::fmt::Error> {
    let help = "Cohort of a budget; always 1";
    let mut family = gauges(encoder, "bursar_budget_info", help)?;
    for budget in budgets.iter().filter(|budget| budget.status.is_some()) {
        let labels = [
            ("namespace", budget.namespace().unwrap_or_default()),
            ("cohort", budget.spec.cohort.clone()),
        ];
        ConstGauge::new(1_i64).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn encode_condition_counts(
    encoder: &mut DescriptorEncoder<'_>,
    budgets: &[Arc<GpuMemoryBudget>],
) -> Result<(), std::fmt::Error> {
    let mut counts: BTreeMap<StatusLabels, i64> = BTreeMap::new();
    for condition in statuses(budgets).flat_map(|(_, status)| &status.conditions) {
        let labels = StatusLabels {
            condition: condition.type_.clone(),
            status: condition.status.clone(),
        };
        *counts.entry(labels).or_default() += 1;
    }
    let help = "Budgets by condition and its status";
    let mut family = gauges(encoder, "bursar_operator_budgets", help)?;
    for (labels, budgets) in counts {
        ConstGauge::new(budgets).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn encode_conditions(
    encoder: &mut DescriptorEncoder<'_>,
    budgets: &[Arc<GpuMemoryBudget>],
) -> Result<(), std::fmt::Error> {
    let help =
        "1 while a condition of a budget is True, 0 while it is False, -1 while it is Unknown";
    let mut family = gauges(encoder, "bursar_budget_condition", help)?;
    for (namespace, status) in statuses(budgets) {
        for condition in &status.conditions {
            let labels = ConditionLabels {
                namespace: namespace.clone(),
                condition: condition.type_.clone(),
            };
            let value: i64 = match condition.status.as_str() {
                "True" => 1,
                "False" => 0,
                _ => -1,
            };
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn statuses(
    budgets: &[Arc<GpuMemoryBudget>],
) -> impl Iterator<Item = (String, &GpuMemoryBudgetStatus)> {
    budgets
        .iter()
        .filter_map(|budget| Some((budget.namespace()?, budget.status.as_ref()?)))
}
