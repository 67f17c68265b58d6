//! The simgpu command.
fn main() {}
