//! Bursar's Kubernetes API: `GpuMemoryBudget` and `GpuNode`.
