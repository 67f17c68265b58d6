//! Inspects a library by binutils, which come with the linker.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest glibc version that a shim may need: that of CentOS 7 and the manylinux2014 wheels.
const NEWEST_GLIBC: (u32, u32) = (2, 17);

/// Returns the output of a tool for a library.
pub fn tool_output(tool: &str, option: &str, library: &Path) -> String {
    let output = Command::new(tool)
        .arg(option)
        .arg(library)
        .output()
        .expect("binutils comes with the linker");
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the names that a library exports.
pub fn exported(library: &Path) -> BTreeSet<String> {
    let symbols = tool_output("objdump", "-T", library);
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

/// Asserts that a library exports exactly these names.
pub fn exports_exactly(library: &Path, table: &BTreeSet<String>) {
    let exported = exported(library);
    let none = Vec::<&String>::new();
    assert_eq!(
        table.difference(&exported).collect::<Vec<_>>(),
        none,
        "not exported"
    );
    assert_eq!(
        exported.difference(table).collect::<Vec<_>>(),
        none,
        "not in the table"
    );
}

/// Asserts that a library needs no newer version of glibc than [`NEWEST_GLIBC`].
pub fn needs_an_old_glibc(library: &Path) {
    let symbols = tool_output("objdump", "-T", library);
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

/// glibc's libraries that a shim needs.
pub const GLIBC: &[&str] = &[
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libpthread.so.0",
];

/// Asserts that a library depends on these only. The loader ends a program whose preloaded library
/// has a missing dependency.
pub fn needs_exactly(library: &Path, libraries: &[&str]) {
    let needed: BTreeSet<String> = tool_output("readelf", "-d", library)
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| Some(line.split_once('[')?.1.trim_end_matches(']').to_owned()))
        .collect();
    let expected = libraries.iter().map(|name| (*name).to_owned());
    assert_eq!(needed, expected.collect());
}

/// Asserts a library's SONAME, and that `dlclose`, which would forget charges, does not unload it.
pub fn is_named_and_stays_loaded(library: &Path, soname: &str) {
    let dynamic = tool_output("readelf", "-d", library);
    assert!(
        dynamic.contains(&format!("soname: [{soname}]")),
        "{dynamic}"
    );
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
}

/// Asserts that no other library can interpose the library's own functions with this prefix.
pub fn binds_its_own(library: &Path, prefix: &str) {
    let relocations = tool_output("objdump", "-R", library);
    assert!(relocations.contains("R_"), "relocations were read at all");
    let by_name: Vec<_> = relocations
        .lines()
        .filter(|line| line.contains(&format!(" {prefix}")))
        .collect();
    assert!(by_name.is_empty(), "{}", by_name.join("\n"));
}

/// Asserts that no source of a shim, with the crate of both, reads the environment.
pub fn reads_no_environment(shim: &Path) {
    let folders = ["src", "../common/src", "../common/included"];
    let folders = folders.map(|folder| shim.join(folder));
    for path in folders.iter().flat_map(|folder| sources(folder)) {
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            !text.contains("env::var") && !text.contains("getenv"),
            "{}",
            path.display()
        );
    }
}

/// Lists every file below a folder.
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
