//! Tests the library's exported names, and its dependencies on the C library.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

#[path = "../../common/tests/support/elf.rs"]
mod elf;
mod support;
#[path = "../build/symbol_table.rs"]
#[allow(dead_code, reason = "the build script uses all of it")]
mod symbol_table;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use symbol_table::Symbol;

/// Paths of the driver on machines that have one.
const REAL: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
];

fn symbols() -> BTreeSet<String> {
    let symbols = symbol_table::parse(include_str!("../symbols.txt")).unwrap();
    let names = symbols.iter().map(|symbol| match symbol {
        Symbol::Function(function) => function.name,
        Symbol::Variable(name, _) => name,
    });
    names.map(str::to_owned).collect()
}

fn shim() -> PathBuf {
    support::built().join("libbursar_shim.so")
}

#[test]
fn library_exports_exactly_the_table() {
    let table = symbols();
    elf::exports_exactly(&shim(), &table);
    assert!(table.len() >= 682 + 25);
}

#[test]
fn table_has_every_symbol_of_this_machines_driver() {
    let Some(real) = REAL.iter().map(Path::new).find(|path| path.exists()) else {
        println!("no driver here: the table is held against the shim only");
        return;
    };
    let missing: Vec<_> = elf::exported(real)
        .difference(&symbols())
        .cloned()
        .collect();
    assert!(
        missing.is_empty(),
        "add these to symbols.txt with their class: {missing:?}"
    );
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
    elf::is_named_and_stays_loaded(&shim(), "libcuda.so.1");
    elf::reads_no_environment(Path::new(env!("CARGO_MANIFEST_DIR")));
}

/// Finds the functions of a folder's sources that take a pointer to write to.
fn functions_with_outputs(folder: &str) -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut found = Vec::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for hook in text.split("fn ").skip(1) {
            let (name, rest) = hook.split_once('(').unwrap_or_default();
            let arguments = rest.split(')').next().unwrap_or_default();
            let is_hook = name.starts_with("cu") || name.starts_with("nvml");
            if is_hook && name.chars().any(char::is_uppercase) && arguments.contains("*mut") {
                found.push(name.to_owned());
            }
        }
    }
    found
}

#[test]
fn each_hook_with_an_output_has_a_row_of_null() {
    /// These take an input by a pointer.
    const INPUTS: &[&str] = &["cuStreamBeginCaptureToCig", "cuStreamBeginRecaptureToGraph"];
    let rows = include_str!("../../../../e2e/gpu/nulls.py");
    let mut hooks = functions_with_outputs("src/hooks");
    hooks.extend(functions_with_outputs("../nvml/src/hooks"));
    assert!(hooks.len() > 50, "{hooks:?}");
    let is_row = |hook: &String| {
        let base = hook.trim_end_matches("_ptsz");
        INPUTS.contains(&base)
            || rows.contains(&format!("\"{base}\""))
            || rows.contains(&format!("\"{hook}\""))
    };
    let missing: Vec<_> = hooks.iter().filter(|hook| !is_row(hook)).collect();
    assert!(missing.is_empty(), "add these to nulls.py: {missing:?}");
}

#[test]
fn hooks_cannot_be_interposed_by_another_library() {
    elf::binds_its_own(&shim(), "cu");
}
