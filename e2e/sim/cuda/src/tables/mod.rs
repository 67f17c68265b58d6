//! Declares the tables that a process image owns, one for each kind of driver object.
//!
//! A table cannot reach the process image that owns it. Imports run from the entry points to
//! [`crate::process`], and from there to the tables.

pub(crate) mod address_space;
pub(crate) mod arrays;
pub(crate) mod captures;
pub(crate) mod chunks;
pub(crate) mod contexts;
pub(crate) mod devices;
pub(crate) mod graphs;
pub(crate) mod libraries;
pub(crate) mod modules;
pub(crate) mod multicasts;
pub(crate) mod pieces;
pub(crate) mod pools;
pub(crate) mod residency;
pub(crate) mod streams;
pub(crate) mod vmm;
