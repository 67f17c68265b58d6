//! Fuzzes the parsers of text and tokens that a tenant, the kubelet or a file shapes, for a second
//! each.
//!
//! Each test starts from the samples in `fuzz/corpus/<target>` and mutates them. The inputs differ
//! between runs. A failure prints the seed that repeats the failure (`BOLERO_RANDOM_SEED`).
//! `BOLERO_RANDOM_ITERATIONS=1000000 cargo test -p bursar-device-plugin --test fuzz` searches
//! longer, and `BOLERO_RANDOM_TEST_TIME_MS` sets a time. The protocol crate has a test of the same
//! name for frames.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::panic::RefUnwindSafe;
use std::path::Path;

#[path = "../protocol/tests/fuzz/mutate.rs"]
mod mutate;

#[path = "fuzz/files.rs"]
mod files;
#[path = "fuzz/kmsg.rs"]
mod kmsg;
#[path = "fuzz/proc.rs"]
mod proc;
#[path = "fuzz/seal.rs"]
mod seal;

/// Runs `check` on mutations of a target's samples.
fn search(target: &str, check: impl Fn(&[u8]) + RefUnwindSafe) {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fuzz/corpus")).join(target);
    let files = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    let samples: Vec<_> = files
        .iter()
        .map(|file| std::fs::read(file).unwrap())
        .collect();
    bolero::check!()
        .with_generator(mutate::edits())
        .for_each(|edits| check(&edits.apply(&samples)));
}

/// Runs `check` on mutated text. Bytes that are not UTF-8 are replaced, as the agent does when it
/// reads such files.
fn search_text(target: &str, check: impl Fn(&str) + RefUnwindSafe) {
    search(target, |bytes| check(&String::from_utf8_lossy(bytes)));
}
