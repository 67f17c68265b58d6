//! The simulated GPUs.
