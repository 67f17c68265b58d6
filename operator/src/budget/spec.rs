//! Parses a budget's spec into quanta.
//!
//! The CEL rules of the CRD refuse most invalid specs. They do not know the quantum: an amount
//! between two multiples is rounded down, and the condition says so.

use bursar_crds::budget::{Overflow, PerContainer};
use bursar_crds::quantity::QuantityError;
use bursar_crds::{Amount, GpuMemoryBudgetSpec, Quantum};

use crate::quanta::Quanta;

/// Why a spec is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSpec {
    /// A field holds no amount of memory.
    #[error("spec.{field}: {source}")]
    InvalidAmount {
        /// The path of the field below `spec`.
        field: String,
        /// The parse error.
        source: QuantityError,
    },
    /// An amount exceeds its bound.
    #[error("spec.{field} is {amount}, more than {bound} ({most}): lower it, or raise {bound}")]
    AboveBound {
        /// The path of the amount below `spec`.
        field: &'static str,
        /// The amount.
        amount: String,
        /// The path of the bound.
        bound: &'static str,
        /// The bound.
        most: String,
    },
}

/// The parsed spec of a budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedSpec {
    /// Device memory that guaranteed pods may request together.
    pub guaranteed: Quanta,
    /// Device memory that all pods may request together. Never less than `guaranteed`.
    pub limit: Quanta,
    /// Managed memory that all pods may request together.
    pub managed: Quanta,
    /// Hundredths of GPUs' compute time that all pods may request together.
    pub compute: Quanta,
    /// A pod beyond the guarantee becomes a borrowed pod.
    pub overflows: bool,
    /// The amounts that were rounded down, as text for the condition.
    pub rounded: Vec<String>,
    /// The overrides that hold no amount, from before the API server refused them. They invalidate
    /// no other field.
    pub invalid_overrides: Vec<InvalidSpec>,
}

impl ParsedSpec {
    /// Parses `spec`.
    pub fn of(spec: &GpuMemoryBudgetSpec, quantum: Quantum) -> Result<Self, InvalidSpec> {
        let mut reader = Parser {
            quantum,
            rounded: Vec::new(),
        };
        let device = &spec.device_memory;
        let guaranteed = reader.quanta("deviceMemory.guaranteed", &device.guaranteed)?;
        let (limit, bound) = match &device.limit {
            Some(limit) => (reader.quanta("deviceMemory.limit", limit)?, limit),
            None => (guaranteed, &device.guaranteed),
        };
        check_bound(
            "deviceMemory.guaranteed",
            &device.guaranteed,
            "spec.deviceMemory.limit",
            bound,
        )?;
        let none = Amount::from_bytes(0);
        let managed_limit = match &spec.managed_memory {
            Some(managed) => &managed.limit,
            None => &none,
        };
        let managed = reader.quanta("managedMemory.limit", managed_limit)?;
        let PerContainer { max, max_managed } = spec.per_container.clone().unwrap_or_default();
        if let Some(max) = &max {
            reader.quanta("perContainer.max", max)?;
            let (name, bound) = match &device.limit {
                Some(limit) => ("spec.deviceMemory.limit", limit),
                None => ("spec.deviceMemory.guaranteed", &device.guaranteed),
            };
            check_bound("perContainer.max", max, name, bound)?;
        }
        if let Some(max) = &max_managed {
            let field = "perContainer.maxManaged";
            reader.quanta(field, max)?;
            check_bound(field, max, "spec.managedMemory.limit", managed_limit)?;
        }
        Ok(Self {
            guaranteed,
            limit,
            managed,
            compute: Quanta::new(spec.compute.unwrap_or(0).max(0).unsigned_abs().into()),
            overflows: spec.overflow == Overflow::Borrow,
            rounded: reader.rounded,
            invalid_overrides: invalid_overrides(spec).collect(),
        })
    }
}

fn invalid_overrides(spec: &GpuMemoryBudgetSpec) -> impl Iterator<Item = InvalidSpec> {
    let overrides = spec.overrides.iter().enumerate();
    let amounts = overrides.flat_map(|(index, lowered)| {
        [
            ("deviceMemory", &lowered.device_memory),
            ("managedMemory", &lowered.managed_memory),
        ]
        .map(|(field, amount)| (format!("overrides[{index}].{field}"), amount))
    });
    amounts.filter_map(|(field, amount)| parse_bytes(&field, amount.as_ref()?).err())
}

struct Parser {
    quantum: Quantum,
    rounded: Vec<String>,
}

impl Parser {
    fn quanta(&mut self, field: &str, amount: &Amount) -> Result<Quanta, InvalidSpec> {
        let bytes = parse_bytes(field, amount)?;
        let quanta = Quanta::new(self.quantum.floor(bytes).unsigned_abs());
        if quanta.bytes(self.quantum) != bytes {
            let (written, counted) = (&amount.0.0, quanta.text(self.quantum));
            self.rounded
                .push(format!("{field} {written} counts as {counted}"));
        }
        Ok(quanta)
    }
}

fn parse_bytes(field: &str, amount: &Amount) -> Result<u64, InvalidSpec> {
    amount.bytes().map_err(|source| InvalidSpec::InvalidAmount {
        field: field.to_owned(),
        source,
    })
}

fn check_bound(
    field: &'static str,
    amount: &Amount,
    bound: &'static str,
    most: &Amount,
) -> Result<(), InvalidSpec> {
    if parse_bytes(field, amount)? <= parse_bytes(bound, most)? {
        return Ok(());
    }
    Err(InvalidSpec::AboveBound {
        field,
        amount: amount.0.0.clone(),
        bound,
        most: most.0.0.clone(),
    })
}
