//! Holds the weights of pods in the compute time of one GPU, from outside their containers.
//!
//! | module | job |
//! |---|---|
//! | [`effect`] | tests whether a GPU keeps to slices |
//! | [`holder`] | keeps the slices of all groups at what the weights say |
//! | [`node`] | finds the groups of processes, and asks the kernel module |
//! | [`orders`] | decides what a holder is told: pure |
//! | [`process`] | runs the holder in a process that the agent may kill |
//! | [`task`] | runs the holders and the tests in the agent; [`child`] talks to their processes |
//! | [`turns`] | divides a round among pods by weight: pure |

mod child;
pub mod effect;
pub mod holder;
pub mod node;
mod orders;
pub mod process;
pub mod task;
pub mod turns;
