//! Verifies that each library's README lists exactly the functions that the library exports.
//!
//! `BLESS=1 cargo test -p bursar-sim-lab --test exports` writes the lists again.
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use bursar_sim_lab::{ONE_GPU, SimMachine};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const MARK: &str = "\n<!-- What follows is written by `BLESS=1 cargo test -p bursar-sim-lab --test exports`. -->\n";

fn exported(library: &Path, prefix: &str) -> BTreeSet<String> {
    let output = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--format=posix"])
        .arg(library)
        .output()
        .unwrap();
    assert!(output.status.success());
    let names = String::from_utf8(output.stdout).unwrap();
    let name = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    names
        .lines()
        .map(name)
        .filter(|name| name.starts_with(prefix))
        .collect()
}

fn list(title: &str, names: impl IntoIterator<Item = String>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    format!("\n# {title} ({})\n{}\n", names.len(), names.join(",\n"))
}

fn check(readme: PathBuf, expected: &str) {
    let text = std::fs::read_to_string(&readme).unwrap();
    let (words, _) = text.split_once(MARK).unwrap_or((&text, ""));
    let wanted = format!("{words}{MARK}{expected}");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&readme, &wanted).unwrap();
    }
    let now = std::fs::read_to_string(&readme).unwrap();
    assert!(now == wanted, "{} is stale", readme.display());
}

#[test]
fn readme_lists_entry_points_of_libcuda() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda");
    let source = std::fs::read_to_string(folder.join("src/unsupported.rs")).unwrap();
    let (_, block) = source.split_once("unsupported! {\n").unwrap();
    let in_name_only: BTreeSet<String> = block
        .split([',', '}'])
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
        .collect();
    let all = exported(&machine.library("libcuda.so.1"), "cu");
    assert!(in_name_only.is_subset(&all));
    let works = list("Entry points", all.difference(&in_name_only).cloned());
    check(
        folder.join("README.md"),
        &format!(
            "{works}{}",
            list("Entry points that answer NOT_SUPPORTED", in_name_only)
        ),
    );
}

#[test]
fn readme_lists_entry_points_of_libnvidia_ml() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../nvml");
    check(
        folder.join("README.md"),
        &list(
            "Entry points",
            exported(&machine.library("libnvidia-ml.so.1"), "nvml"),
        ),
    );
}
