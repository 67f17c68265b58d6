//! From a budget and the facts to its status: pure.

mod judge;
mod status;
mod terms;

pub use status::status;
pub use terms::{InvalidSpec, Terms};

#[cfg(test)]
mod tests;
