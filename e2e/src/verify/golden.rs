//! Compares the golden files of version 0.1.0 with their checksums, so that a message and its
//! golden frame cannot change together.

use std::fs;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::paths;

const FOLDER: &str = "e2e/compat/0.1.0";

/// The file that grows: each new message has a line.
const FRAMES: &str = "frames.txt";

/// The files of version 0.1.0: their lengths in bytes, and the first 128 bits of their SHA-256.
const GOLDEN: &[(&str, usize, &str)] = &[
    (
        "crds/gpumemorybudgets.yaml",
        28_412,
        "1b96626a35486b3904117c50d492afd2",
    ),
    (
        "crds/gpunamespaces.yaml",
        3_340,
        "d470e825b9cce837cb3240bd879eea51",
    ),
    (
        "crds/gpunodes.yaml",
        47_277,
        "414b858a3a3eb0ff821eadc5c98a4697",
    ),
    ("frames.txt", 7_373, "9b4843e3bb3d7457f10052f0f9bc8eb0"),
    ("state/cdi.json", 6_896, "3277276ab1515e5cdbb61194f5f3af8a"),
    (
        "state/checkpoint.json",
        1_778,
        "6452048840cff7af3ccf21c9a5e9cc4e",
    ),
    (
        "state/contexts.json",
        184,
        "46524eb9815dcd9fc7eea21fad874634",
    ),
    (
        "state/generations.json",
        827,
        "5640e52bfbc6b5e907f57c4a9e4b13fa",
    ),
    (
        "state/leases.jsonl",
        944,
        "67a6b29604b4b0b6fc204da070d5ef0f",
    ),
    (
        "state/namespaces.json",
        237,
        "7c3da36fb4b3868c0a644c66822adf93",
    ),
    ("state/offers.json", 267, "bbb63c40b8e45a7391fe08c63e9419a8"),
    (
        "state/registrations.json",
        186,
        "e468bde69f0e04d8e5fa0c594479d902",
    ),
    (
        "state/scrubbed.json",
        226,
        "acd75abe776778a31c84baf6f8b25aea",
    ),
    (
        "state/session.json",
        823,
        "6fedfd06aa776ac14e900f90c5311ad7",
    ),
];

/// Returns the golden files that are not there as they were.
fn changed<'a>(folder: &Path, golden: &[(&'a str, usize, &str)]) -> Vec<&'a str> {
    let is_changed = |(file, length, sum): &&(&str, usize, &str)| {
        let content = fs::read(folder.join(file)).unwrap_or_default();
        let grows = *file == FRAMES;
        let first = content
            .get(..*length)
            .filter(|_| grows || content.len() == *length);
        first.map(checksum).as_deref() != Some(sum)
    };
    let changed = golden.iter().filter(is_changed);
    changed.map(|(file, ..)| *file).collect()
}

fn checksum(content: &[u8]) -> String {
    let sum = Sha256::digest(content);
    sum[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Fails if a golden file of version 0.1.0 is not there as it was.
///
/// # Errors
/// Names each changed file.
pub(super) fn check() -> anyhow::Result<()> {
    let changed = changed(&paths::repository().join(FOLDER), GOLDEN);
    anyhow::ensure!(
        changed.is_empty(),
        "golden files of 0.1.0 have changed: {changed:?}; give the message a new name or number, \
         and restore them"
    );
    println!("{} golden files are as they were", GOLDEN.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_appended_frames_are_no_change() {
        let folder = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| fs::write(folder.path().join(file), text).unwrap();
        let sum = checksum(b"one\n");
        let golden = [(FRAMES, 4, &*sum), ("state.json", 4, &*sum)];
        assert_eq!(
            changed(folder.path(), &golden),
            [FRAMES, "state.json"],
            "they are not there"
        );
        write(FRAMES, "one\ntwo\n");
        write("state.json", "one\n");
        assert!(changed(folder.path(), &golden).is_empty());
        write(FRAMES, "two\none\n");
        write("state.json", "one\ntwo\n");
        assert_eq!(changed(folder.path(), &golden), [FRAMES, "state.json"]);
    }
}
