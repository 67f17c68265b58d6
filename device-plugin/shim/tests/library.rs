//! The library as a loader sees it: its names, and what it needs of the C library.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod support;
#[path = "../table.rs"]
#[allow(dead_code, reason = "the build script uses all of it")]
mod table;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use table::Symbol;

/// The newest glibc version that the shim may need: that of CentOS 7 and the manylinux2014 wheels.
const NEWEST_GLIBC: (u32, u32) = (2, 17);

/// Where drivers lie on machines that have one.
const REAL: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
];

/// What binutils' `objdump -T` prints: one dynamic symbol a line.
fn dynamic_symbols(library: &Path) -> String {
    let output = Command::new("objdump")
        .arg("-T")
        .arg(library)
        .output()
        .expect("binutils comes with the linker");
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

fn exported(library: &Path) -> BTreeSet<String> {
    let symbols = dynamic_symbols(library);
    let defined = symbols
        .lines()
        .filter(|line| line.contains(".text") || line.contains(".bss") || line.contains(".data"));
    defined
        .filter_map(|line| line.split_whitespace().last())
        .map(str::to_owned)
        .collect()
}

fn symbols() -> BTreeSet<String> {
    let symbols = table::parse(include_str!("../symbols.txt")).unwrap();
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
fn the_library_exports_the_table_and_nothing_else() {
    let (exported, table) = (exported(&shim()), symbols());
    assert_eq!(
        table.difference(&exported).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "not exported"
    );
    assert_eq!(
        exported.difference(&table).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "not in the table"
    );
    assert!(table.len() >= 682 + 25);
}

#[test]
fn the_table_has_every_symbol_of_the_driver_on_this_machine() {
    let Some(real) = REAL.iter().map(Path::new).find(|path| path.exists()) else {
        println!("no driver here: the table is held against the shim only");
        return;
    };
    let missing: Vec<_> = exported(real).difference(&symbols()).cloned().collect();
    assert!(
        missing.is_empty(),
        "add these to symbols.txt with their class: {missing:?}"
    );
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_library_needs_no_newer_glibc_than_documented() {
    let symbols = dynamic_symbols(&shim());
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
    let needed: BTreeSet<String> = dynamic_section()
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| Some(line.split_once('[')?.1.trim_end_matches(']').to_owned()))
        .collect();
    assert_eq!(needed, of_glibc.map(str::to_owned).into());
}

#[test]
fn the_library_is_known_by_the_drivers_name_stays_loaded_and_reads_no_environment() {
    let dynamic = dynamic_section();
    assert!(dynamic.contains("soname: [libcuda.so.1]"), "{dynamic}");
    assert!(
        dynamic.contains("NODELETE"),
        "a dlclose would forget what is charged: {dynamic}"
    );
    for path in sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            !text.contains("env::var") && !text.contains("getenv"),
            "{}",
            path.display()
        );
    }
}

fn dynamic_section() -> String {
    let output = Command::new("readelf").arg("-d").arg(shim()).output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}

/// Every file below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .flat_map(|path| {
            if path.is_dir() {
                sources(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

#[test]
fn no_other_library_can_take_the_place_of_a_hook_inside_the_shim() {
    let output = Command::new("objdump")
        .arg("-R")
        .arg(shim())
        .output()
        .unwrap();
    let relocations = String::from_utf8(output.stdout).unwrap();
    assert!(relocations.contains("R_"), "relocations were read at all");
    let by_name: Vec<_> = relocations
        .lines()
        .filter(|line| line.contains(" cu"))
        .collect();
    assert!(by_name.is_empty(), "{}", by_name.join("\n"));
}
