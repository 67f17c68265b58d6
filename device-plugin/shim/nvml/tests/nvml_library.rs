//! Tests the library's exported names, and its dependencies on the C library.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

#[path = "../../common/tests/support/elf.rs"]
mod elf;
mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Paths of the driver on machines that have one.
const REAL: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    "/usr/lib64/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
];

/// The output of `headers.sh`.
const HEADERS: &str = include_str!("../headers.txt");

fn table() -> BTreeSet<String> {
    let lines = include_str!("../nvml-symbols.txt").lines();
    let symbols = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    symbols
        .filter_map(|line| line.split(' ').next())
        .map(str::to_owned)
        .collect()
}

fn shim() -> PathBuf {
    support::built().join("libbursar_nvml_shim.so")
}

#[test]
fn library_exports_exactly_the_table() {
    let table = table();
    elf::exports_exactly(&shim(), &table);
    assert!(table.len() >= 444);
}

#[test]
fn table_has_every_symbol_of_this_machines_drivers() {
    let real = REAL.iter().map(PathBuf::from).find(|path| path.exists());
    let simulated = support::built().join("libbursar_sim_nvml.so");
    for library in real.into_iter().chain([simulated]) {
        let missing: Vec<_> = elf::exported(&library)
            .difference(&table())
            .cloned()
            .collect();
        assert!(
            missing.is_empty(),
            "{}: add these to nvml-symbols.txt with their class: {missing:?}",
            library.display()
        );
    }
}

#[test]
fn table_has_every_function_of_the_published_headers() {
    let lines = HEADERS.lines().filter(|line| !line.starts_with('#'));
    let declared: BTreeSet<String> = lines
        .map(|line| line.split(' ').next().unwrap().to_owned())
        .collect();
    assert!(declared.len() >= 440 && declared.contains("nvmlDeviceGetMemoryInfo_v2"));
    let missing: Vec<_> = declared.difference(&table()).cloned().collect();
    assert!(
        missing.is_empty(),
        "add these to nvml-symbols.txt with their class: {missing:?}"
    );
}

#[test]
#[ignore = "needs the network and pip: run it when headers.sh changes"]
fn headers_txt_equals_the_output_of_its_script() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("headers.sh");
    let output = Command::new(script).output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), HEADERS);
}

#[test]
fn functions_that_report_memory_or_processes_are_hooked() {
    let lines = include_str!("../nvml-symbols.txt").lines();
    for line in lines.filter(|line| line.starts_with("nvmlDevice")) {
        let name = line.split(' ').next().unwrap();
        let tells = [
            "RunningProcess",
            "ProcessUtil",
            "ProcessesUtil",
            "MemoryInfo",
            "AccountingStats",
            "AccountingPids",
        ];
        let forwarded = ["Vgpu", "BAR1", "Clear"]
            .iter()
            .any(|word| name.contains(word));
        if tells.iter().any(|word| name.contains(word)) && !forwarded {
            assert!(line.ends_with(" hook"), "{line}");
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn library_needs_no_newer_glibc_than_documented() {
    elf::needs_an_old_glibc(&shim());
}

#[test]
#[cfg(target_arch = "x86_64")]
fn library_depends_on_glibc_only() {
    elf::needs_exactly(&shim(), elf::GLIBC);
}

#[test]
fn library_has_the_drivers_soname_and_reads_no_environment() {
    elf::is_named_and_stays_loaded(&shim(), "libnvidia-ml.so.1");
    elf::reads_no_environment(Path::new(env!("CARGO_MANIFEST_DIR")));
}

#[test]
fn hooks_cannot_be_interposed_by_another_library() {
    elf::binds_its_own(&shim(), "nvml");
}
