//! Checks the library against its header: functions, structs, and a C program that uses all of it.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

#[path = "../../tests/support/fake_agent.rs"]
mod fake_agent;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use bursar_sim_lab::{ONE_GPU, SimMachine};
use fake_agent::FakeAgent;
use object::{Object, ObjectSymbol};

const HEADER: &str = include_str!("../include/bursar.h");

/// Builds the library and returns cargo's output folder.
fn libraries() -> PathBuf {
    bursar_sim_lab::build(&["bursar-capi"], &["--lib"]).unwrap()
}

/// Compiles the C program against the library, as strictly as C99 permits.
fn program(folder: &Path) -> PathBuf {
    let (package, program) = (Path::new(env!("CARGO_MANIFEST_DIR")), folder.join("client"));
    let compiled = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-o"])
        .arg(&program)
        .arg(package.join("tests/client.c"))
        .arg("-I")
        .arg(package.join("include"))
        .arg("-L")
        .arg(libraries())
        .arg("-lbursar")
        .status();
    assert!(compiled.unwrap().success());
    program
}

#[test]
fn library_exports_exactly_the_functions_of_the_header() {
    // A declaration may go on in the next line.
    let declared: BTreeSet<&str> = HEADER
        .lines()
        .filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()))
        .filter(|line| line.contains("bursar_") && line.contains('('))
        .filter_map(|line| line.split('(').next()?.rsplit([' ', '*']).next())
        .collect();
    let library = std::fs::read(libraries().join("libbursar.so")).unwrap();
    let file = object::File::parse(&*library).unwrap();
    let exported: BTreeSet<&str> = file
        .dynamic_symbols()
        .filter(|symbol| symbol.is_definition())
        .map(|symbol| symbol.name().unwrap())
        .collect();
    assert_eq!(exported, declared);
    assert_eq!(declared.len(), 13);
}

#[test]
fn structs_and_statuses_have_the_layout_of_the_header() {
    let folder = tempfile::tempdir().unwrap();
    let mut client = Command::new(program(folder.path()));
    let output = client.env("LD_LIBRARY_PATH", libraries()).output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    // Sizes and offsets of the 64-bit ABIs of Linux; the next test uses the library's side.
    let expected =
        "args 72 8 16 48 56 64 4\nview 40 8 16 24 32\ntoken 520 8 memory 552 16 24 40 296\n";
    assert_eq!(printed, expected);
}

#[test]
fn c_program_finds_retained_memory_again() {
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let fake_agent = FakeAgent::start(|program| lab.command(program));
    let folder = tempfile::tempdir().unwrap();
    let mut client = lab.command(program(folder.path()));
    let paths = format!(
        "{}:{}",
        libraries().display(),
        lab.library("libcuda.so.1").parent().unwrap().display()
    );
    let output = client
        .arg(fake_agent.socket())
        .env("LD_LIBRARY_PATH", paths)
        .output()
        .unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    assert!(output.stdout.ends_with(b"done\n"));
}
