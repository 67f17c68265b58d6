//! Text and tokens that a tenant, the kubelet or a file shapes, searched for a second each.
//!
//! Each test starts from the samples in `fuzz/corpus/<target>` and changes them. Inputs differ from run to run; a
//! failure prints the seed that repeats it (`BOLERO_RANDOM_SEED`). A longer search:
//! `BOLERO_RANDOM_ITERATIONS=1000000 cargo test -p bursar-device-plugin --test fuzz`, or with a time,
//! `BOLERO_RANDOM_TEST_TIME_MS`. Frames are searched by the protocol's own test of this name.

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

/// Checks what becomes of the samples of a target.
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

/// The same where bytes that are no UTF-8 were replaced, as the agent reads such files.
fn search_text(target: &str, check: impl Fn(&str) + RefUnwindSafe) {
    search(target, |bytes| check(&String::from_utf8_lossy(bytes)));
}
