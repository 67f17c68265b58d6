//! Compares messages and records with those of released versions, in `e2e/compat`.
//!
//! A line or a file that is there is never written again: a test that differs from it fails in
//! every run. `BURSAR_UPDATE=1 cargo test --workspace --lib golden` adds the missing ones, and the
//! tests that lacked them fail in that run too.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use data_encoding::HEXLOWER;
use serde_json::Value;

/// The versions with golden frames and records, the newest last. What is new in the tree belongs to
/// the newest.
const VERSIONS: &[&str] = &["0.1.0"];

const HOW: &str = "run `BURSAR_UPDATE=1 cargo test --workspace --lib golden` once and commit it";

fn folder(version: &str) -> PathBuf {
    let compat = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/compat");
    compat.join(version)
}

fn newest() -> PathBuf {
    folder(VERSIONS.last().expect("there is a version"))
}

fn may_add() -> bool {
    std::env::var_os("BURSAR_UPDATE").is_some()
}

/// A difference between the golden lines and today's bytes.
#[derive(Debug, PartialEq, Eq)]
enum Difference {
    /// There is no line of this name: this one would be it.
    Missing(String),
    /// Released programs send or read other bytes.
    Changed(String),
    /// No test reads the line of this name, though released programs send or read its bytes.
    Unread(String),
    /// A name stands twice, or a line is no name with bytes.
    Invalid(String),
}

/// Compares the golden lines whose names begin with `protocol` with today's names and bytes.
fn compare(golden: &str, protocol: &str, today: &[(String, Vec<u8>)]) -> Vec<Difference> {
    let mut differences = Vec::new();
    let mut lines = BTreeMap::new();
    let is_frame = |line: &&str| !line.is_empty() && !line.starts_with('#');
    for line in golden.lines().filter(is_frame) {
        let parsed = line.split_once(' ');
        let parsed =
            parsed.and_then(|(name, hex)| Some((name, HEXLOWER.decode(hex.as_bytes()).ok()?)));
        let known = parsed.map(|(name, bytes)| lines.insert(name, bytes));
        if !matches!(known, Some(None)) {
            differences.push(Difference::Invalid(line.to_owned()));
        }
    }
    for (name, bytes) in today {
        let name = format!("{protocol}.{name}");
        match lines.remove(&*name) {
            None => {
                let line = format!("{name} {}", HEXLOWER.encode(bytes));
                differences.push(Difference::Missing(line));
            }
            Some(golden) if golden != *bytes => differences.push(Difference::Changed(name)),
            Some(_) => {}
        }
    }
    let prefix = format!("{protocol}.");
    let unread = lines.into_keys().filter(|name| name.starts_with(&prefix));
    differences.extend(unread.map(|name| Difference::Unread(name.to_owned())));
    differences
}

/// Fails unless each of today's messages of a protocol has a golden line with the same bytes, and
/// each golden line one of these messages.
///
/// # Panics
/// As said, and where the files cannot be read.
pub fn assert_frames(protocol: &str, today: &[(String, Vec<u8>)]) {
    let files = VERSIONS
        .iter()
        .map(|version| folder(version).join("frames.txt"));
    let golden: String = files
        .map(|file| fs::read_to_string(file).expect("golden frames"))
        .collect();
    let differences = compare(&golden, protocol, today);
    let missing = differences
        .iter()
        .filter_map(|difference| match difference {
            Difference::Missing(line) => Some(format!("{line}\n")),
            _ => None,
        });
    if may_add() {
        let mut options = fs::OpenOptions::new();
        let file = options.append(true).open(newest().join("frames.txt"));
        let added =
            file.and_then(|mut file| file.write_all(missing.collect::<String>().as_bytes()));
        added.expect("golden frames can be appended");
    }
    assert!(
        differences.is_empty(),
        "{protocol}: {differences:#?}; {HOW} where a line is missing, and never change one"
    );
}

/// Passes the golden record `name` of each version that has it to `read`. `today` is what this
/// version writes.
///
/// # Panics
/// When the newest version has no such record, and where the files cannot be read.
pub fn for_each_record(name: &str, today: impl FnOnce() -> Vec<u8>, mut read: impl FnMut(&[u8])) {
    for version in VERSIONS {
        if let Ok(golden) = fs::read(folder(version).join("state").join(name)) {
            read(&golden);
        }
    }
    let file = newest().join("state").join(name);
    let is_there = file.exists();
    if !is_there && may_add() {
        fs::write(&file, today()).expect("a golden record can be written");
    }
    assert!(is_there, "there was no golden record {name}; {HOW}");
}

/// Fails unless `again`, a record that was read and written again, has every field of `text`.
///
/// # Panics
/// As said.
pub fn assert_keeps_all(again: &Value, text: &Value) {
    assert!(keeps_all(again, text), "{again:#} lacks a part of {text:#}");
}

fn keeps_all(again: &Value, text: &Value) -> bool {
    match (again, text) {
        (Value::Object(again), Value::Object(text)) => text.iter().all(|(name, value)| {
            let kept = again.get(name);
            kept.is_some_and(|kept| keeps_all(kept, value))
        }),
        (Value::Array(again), Value::Array(text)) => {
            let mut pairs = again.iter().zip(text);
            again.len() == text.len() && pairs.all(|(one, other)| keeps_all(one, other))
        }
        _ => again == text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn changed_missing_and_removed_golden_frames_are_found() {
        let of = |name: &str, bytes: &[u8]| (name.to_owned(), bytes.to_vec());
        let golden = "# comment\na.Put 01ff\na.Drop 02\n\nab.Put 03\n";
        let whole = [of("Put", &[1, 255]), of("Drop", &[2])];
        assert_eq!(compare(golden, "a", &whole), []);
        let changed = [of("Put", &[1]), of("Drop", &[2])];
        let difference = Difference::Changed("a.Put".to_owned());
        assert_eq!(compare(golden, "a", &changed), [difference]);
        let difference = Difference::Unread("a.Drop".to_owned());
        assert_eq!(compare(golden, "a", &whole[..1]), [difference]);
        let more = [whole[0].clone(), whole[1].clone(), of("Get", &[7])];
        let difference = Difference::Missing("a.Get 07".to_owned());
        assert_eq!(compare(golden, "a", &more), [difference]);
        for line in ["a.Put 01ff", "a.Get", "a.Get 0", "a.Get FF"] {
            let found = compare(&format!("{golden}{line}\n"), "a", &whole);
            assert_eq!(found, [Difference::Invalid(line.to_owned())]);
        }
    }

    #[test]
    fn lost_field_of_a_record_is_found() {
        let text = json!({ "a": [{ "b": 1 }], "c": null });
        for (again, keeps) in [
            (
                json!({ "a": [{ "b": 1, "later": 2 }], "c": null, "later": 3 }),
                true,
            ),
            (json!({ "a": [{ "b": 2 }], "c": null }), false),
            (json!({ "a": [{}], "c": null }), false),
            (json!({ "a": [], "c": null }), false),
            (json!({ "a": [{ "b": 1 }] }), false),
        ] {
            assert_eq!(keeps_all(&again, &text), keeps, "{again}");
        }
    }
}
