//! Reads and writes the host: clocks, processes, cgroups, memory, driver files and checkpoints.

pub mod checkpoint;
pub mod clock;
pub mod driver_files;
pub mod pod_cgroups;
pub mod pod_namespaces;
pub mod procfs;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
