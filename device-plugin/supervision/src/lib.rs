//! Supervises the allocator runtime of each GPU, and checks that its driver clears freed memory.
//!
//! ```text
//!   inventory, drains --> supervision --> provisioners: one process for each healthy GPU
//!                                           |--> runtimes (pure): the state of each process
//!                                           +--> CUDA fitness: what its starts told of the GPU
//!   scrub_check: one process for each check of a GPU's driver
//! ```

pub mod provisioners;
pub mod runtimes;
pub mod scrub_check;
pub mod supervision;
