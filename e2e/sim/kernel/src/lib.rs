//! The simulated driver's kernel module, which programs call through its control node.
//!
//! | module | job |
//! |---|---|
//! | [`calls`] | decodes calls, and reads and writes their parameters in the caller |
//! | [`fuse`] | serves a folder with one file by the FUSE protocol |
//! | [`module`] | answers calls: clients, objects, slices |
//! | [`turns`] | gives groups turns: pure |

pub mod calls;
pub mod fuse;
pub mod module;
pub mod turns;
