//! Compares the symbol table with the published headers (`headers.txt`, written by `headers.sh`).

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

#[path = "../build/symbol_table.rs"]
#[allow(dead_code, reason = "the build script uses all of it")]
mod symbol_table;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use symbol_table::{Function, Handling, ProcAddress, REGISTER_ARGUMENTS, Symbol};

const HEADERS: &str = include_str!("../headers.txt");

/// Forms that cuda.h makes by a macro, and that have no type in cudaTypedefs.h.
const WITHOUT_TYPE: [&str; 2] = ["cuGetProcAddress@11030/ptsz", "cuGetProcAddress@12000/ptsz"];

/// Classes whose functions may take memory.
const MEMORY: [&str; 3] = ["allocates", "imports", "limits"];

/// Parts of the names of functions that take memory.
const PARTS: [&str; 8] = [
    "Alloc", "Create", "Import", "Reserve", "Load", "Open", "Retain", "Pool",
];

/// Parts of the names of functions that only query, or change who may access memory.
const ASKING: [&str; 3] = ["Get", "IsLoaded", "SetAccess"];

fn functions() -> Vec<Function<'static>> {
    let symbols = symbol_table::parse(include_str!("../symbols.txt")).unwrap();
    let functions = symbols.into_iter().filter_map(|symbol| match symbol {
        Symbol::Function(function) => Some(function),
        Symbol::Variable(..) => None,
    });
    functions.collect()
}

/// Returns what the headers declare: symbols, and with an `@` the names for `cuGetProcAddress` with
/// the number of arguments.
fn declared() -> BTreeMap<&'static str, Option<usize>> {
    let lines = HEADERS.lines().filter(|line| !line.starts_with('#'));
    let names = lines.map(|line| line.split(' ').next().unwrap());
    names
        .map(|name| match name.split_once('=') {
            Some((question, count)) => (question, Some(count.parse().unwrap())),
            None => (name, None),
        })
        .collect()
}

fn question(proc: ProcAddress<'_>) -> String {
    let mode = proc.per_thread.map(|mode| format!("/{mode}"));
    format!("{}@{}{}", proc.base, proc.since, mode.unwrap_or_default())
}

#[test]
fn table_has_every_function_of_the_headers() {
    let functions = functions();
    let known: BTreeSet<String> = functions
        .iter()
        .flat_map(|function| [Some(function.name.to_owned()), function.proc.map(question)])
        .flatten()
        .collect();
    let declared = declared();
    assert!(declared.len() > 1300 && declared.contains_key("cuMemAlloc@3020"));
    let missing: Vec<_> = declared
        .keys()
        .filter(|name| !known.contains(**name))
        .collect();
    assert!(
        missing.is_empty(),
        "add these to symbols.txt with their class: {missing:?}"
    );
}

#[test]
fn proc_entries_of_the_table_are_in_the_headers() {
    let declared = declared();
    for proc in functions().into_iter().filter_map(|function| function.proc) {
        let asked = question(proc);
        assert!(
            declared.contains_key(asked.as_str()) || WITHOUT_TYPE.contains(&asked.as_str()),
            "{asked}"
        );
    }
}

#[test]
fn proc_entries_match_their_symbols() {
    for function in functions() {
        let Some(proc) = function.proc else { continue };
        assert_eq!(proc.base, symbol_table::base_name(function.name));
        let suffix = proc.per_thread.map(|mode| format!("_{mode}"));
        assert_eq!(
            suffix.is_some(),
            function.name.ends_with("_ptds") || function.name.ends_with("_ptsz")
        );
        assert!(function.name.ends_with(&suffix.unwrap_or_default()));
    }
}

#[test]
fn watched_functions_have_the_headers_argument_counts() {
    let declared = declared();
    let watched = functions()
        .into_iter()
        .filter_map(|function| match function.handling {
            Some(Handling::Watch { arguments }) => {
                Some((question(function.proc.unwrap()), arguments))
            }
            _ => None,
        });
    let mut beyond = 0;
    for (asked, arguments) in watched {
        let declared = declared[asked.as_str()].unwrap();
        assert_eq!(arguments, declared.max(REGISTER_ARGUMENTS), "{asked}");
        beyond += usize::from(arguments > REGISTER_ARGUMENTS);
    }
    assert!(beyond > 4, "launches are among them");
}

#[test]
fn memory_functions_are_hooked_or_refused_or_have_a_reason() {
    let silent: Vec<_> = functions()
        .into_iter()
        .filter(|function| MEMORY.contains(&function.class))
        .filter(|function| function.handling.is_none() && function.reason.is_none())
        .map(|function| function.name)
        .collect();
    assert!(silent.is_empty(), "{silent:?}");
}

#[test]
fn neutral_functions_with_memory_names_have_a_reason() {
    let looks = |name: &str| {
        PARTS.iter().any(|part| name.contains(part))
            && !ASKING.iter().any(|part| name.contains(part))
    };
    let unclassified: Vec<_> = functions()
        .into_iter()
        .filter(|function| function.class == "neutral" && looks(function.name))
        .filter(|function| function.handling.is_none() && function.reason.is_none())
        .map(|function| function.name)
        .collect();
    assert!(unclassified.is_empty(), "{unclassified:?}");
}

#[test]
#[ignore = "needs the network and pip: run it when headers.sh changes"]
fn headers_txt_equals_the_output_of_its_script() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("headers.sh");
    let output = Command::new(script).output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), HEADERS);
}
