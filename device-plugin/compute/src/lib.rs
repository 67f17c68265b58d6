//! Holds the weights of pods in the compute time of one GPU, from outside their containers.
//!
//! | module | job |
//! |---|---|
//! | [`holder`] | keeps the slices of all groups at what the weights say |
//! | [`node`] | finds the groups of processes, and asks the kernel module |
//! | [`process`] | runs the holder in a process that the agent may kill |
//! | [`turns`] | divides a round among pods by weight: pure |

pub mod holder;
pub mod node;
pub mod process;
pub mod turns;
