//! The library as a loader sees it: its names, and what it needs of the C library.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest glibc version that the shim may need: that of CentOS 7 and the manylinux2014 wheels.
const NEWEST_GLIBC: (u32, u32) = (2, 17);

/// Where drivers lie on machines that have one.
const REAL: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    "/usr/lib64/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
];

/// What `headers.sh` writes.
const HEADERS: &str = include_str!("../headers.txt");

/// What a tool of binutils, which comes with the linker, says of a library.
fn said(tool: &str, option: &str, library: &Path) -> String {
    let output = Command::new(tool)
        .arg(option)
        .arg(library)
        .output()
        .unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

fn exported(library: &Path) -> BTreeSet<String> {
    let symbols = said("objdump", "-T", library);
    let defined = symbols.lines().filter(|line| {
        [".text", ".bss", ".data"]
            .iter()
            .any(|section| line.contains(section))
    });
    defined
        .filter_map(|line| line.split_whitespace().last())
        .map(str::to_owned)
        .collect()
}

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
fn the_library_exports_the_table_and_nothing_else() {
    let (exported, table) = (exported(&shim()), table());
    let none = Vec::<&String>::new();
    assert_eq!(
        table.difference(&exported).collect::<Vec<_>>(),
        none,
        "not exported"
    );
    assert_eq!(
        exported.difference(&table).collect::<Vec<_>>(),
        none,
        "not in the table"
    );
    assert!(table.len() >= 444);
}

#[test]
fn the_table_has_every_symbol_of_the_drivers_on_this_machine() {
    let real = REAL.iter().map(PathBuf::from).find(|path| path.exists());
    let simulated = support::built().join("libbursar_sim_nvml.so");
    for library in real.into_iter().chain([simulated]) {
        let missing: Vec<_> = exported(&library).difference(&table()).cloned().collect();
        assert!(
            missing.is_empty(),
            "{}: add these to nvml-symbols.txt with their class: {missing:?}",
            library.display()
        );
    }
}

#[test]
fn the_table_has_every_function_that_a_published_header_declares() {
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
fn the_list_of_the_headers_is_what_its_script_writes() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("headers.sh");
    let output = Command::new(script).output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), HEADERS);
}

#[test]
fn every_function_that_lists_processes_or_tells_the_cards_memory_is_the_shims_own() {
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
fn the_library_needs_no_newer_glibc_than_documented() {
    let symbols = said("objdump", "-T", &shim());
    let newer: Vec<_> = symbols
        .lines()
        .filter(|line| {
            let version = line
                .split("GLIBC_")
                .nth(1)
                .and_then(|rest| rest.split(')').next())
                .unwrap_or("0.0");
            let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
            (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) > NEWEST_GLIBC
        })
        .collect();
    assert!(newer.is_empty(), "{}", newer.join("\n"));
    assert!(symbols.contains("GLIBC_2.2.5"), "versions were read at all");
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_library_needs_nothing_that_an_image_with_glibc_may_lack() {
    // The loader ends a program whose preloaded library needs what is not there.
    let of_glibc = [
        "ld-linux-x86-64.so.2",
        "libc.so.6",
        "libdl.so.2",
        "libpthread.so.0",
    ];
    let needed: BTreeSet<String> = said("readelf", "-d", &shim())
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| Some(line.split_once('[')?.1.trim_end_matches(']').to_owned()))
        .collect();
    assert_eq!(needed, of_glibc.map(str::to_owned).into());
}

#[test]
fn the_library_is_known_by_the_drivers_name_stays_loaded_and_reads_no_environment() {
    let dynamic = said("readelf", "-d", &shim());
    assert!(dynamic.contains("soname: [libnvidia-ml.so.1]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for folder in [source.clone(), source.join("hooks")] {
        for path in std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
        {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let reads = text.contains("env::var") || text.contains("getenv");
            assert!(!reads, "{}", path.display());
        }
    }
}

#[test]
fn no_other_library_can_take_the_place_of_a_hook_inside_the_shim() {
    let relocations = said("objdump", "-R", &shim());
    assert!(relocations.contains("R_"), "relocations were read at all");
    let by_name: Vec<_> = relocations
        .lines()
        .filter(|line| line.contains(" nvml"))
        .collect();
    assert!(by_name.is_empty(), "{}", by_name.join("\n"));
}
