//! Bursar's Kubernetes API: `GpuMemoryBudget` and `GpuNode`.

pub mod quantity;
