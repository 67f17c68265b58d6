//! Compiles the entries of the shims, which the agent installs for containers.
//!
//! The entries have neither the standard library nor unwinding. Cargo sets both for a whole build,
//! so this script calls the compiler.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

#[path = "../shim/cuda/build/symbol_table.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "the shim's build script uses all of it"
)]
mod symbol_table;

use symbol_table::Symbol;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// One of the driver's libraries, and the shim that its entry opens.
struct Entry<'a> {
    soname: &'a str,
    shim: &'a str,
    functions: Vec<&'a str>,
    /// The names and sizes.
    variables: Vec<(&'a str, usize)>,
    /// The driver's error code of a library that cannot be opened.
    unloadable: u32,
    /// Whether a container's first process opens the shim when it is loaded.
    opens_at_start: bool,
}

fn main() -> Outcome<()> {
    println!("cargo:rerun-if-changed=build.rs");
    for part in ["entry", "common/src", "cuda/build"] {
        println!("cargo:rerun-if-changed=../shim/{part}");
    }
    let (cuda, nvml) = (read("cuda/symbols.txt")?, read("nvml/nvml-symbols.txt")?);
    let mut entry = Entry {
        soname: "libcuda.so.1",
        shim: "cuda-shim.so",
        functions: Vec::new(),
        variables: Vec::new(),
        unloadable: 303,
        opens_at_start: true,
    };
    for symbol in symbol_table::parse(&cuda)? {
        match symbol {
            Symbol::Function(function) => entry.functions.push(function.name),
            Symbol::Variable(name, size) => entry.variables.push((name, size)),
        }
    }
    compile(&entry)?;
    let lines = nvml
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    compile(&Entry {
        soname: "libnvidia-ml.so.1",
        shim: "nvml-shim.so",
        functions: lines.filter_map(|line| line.split(' ').next()).collect(),
        variables: Vec::new(),
        unloadable: 12,
        opens_at_start: false,
    })
}

fn read(file: &str) -> Outcome<String> {
    println!("cargo:rerun-if-changed=../shim/{file}");
    Ok(std::fs::read_to_string(format!("../shim/{file}"))?)
}

/// Compiles the library into cargo's folder for this script's files, under its SONAME.
fn compile(entry: &Entry<'_>) -> Outcome<()> {
    let variable = |name| std::env::var(name);
    let folder = variable("OUT_DIR")?;
    let generated = Path::new(&folder).join(format!("{}.rs", entry.soname));
    std::fs::write(&generated, source(entry)?)?;
    let mut compiler = Command::new(variable("RUSTC")?);
    compiler
        .args([
            "--edition=2024",
            "--crate-name=bursar_entry",
            "--crate-type=cdylib",
        ])
        .args([
            "-Dwarnings",
            "-Cpanic=abort",
            "-Copt-level=3",
            "-Cstrip=symbols",
        ])
        .args(["--target", &variable("TARGET")?])
        .args(["-o", &format!("{folder}/{}", entry.soname)])
        .env("BURSAR_ENTRY", &generated);
    if let Ok(linker) = variable("RUSTC_LINKER") {
        compiler.arg(format!("-Clinker={linker}"));
    }
    for argument in [
        &format!("-Wl,-soname,{}", entry.soname),
        // A program may not close what its memory is charged by.
        "-Wl,-z,nodelete",
        // Each segment costs every program of a container a system call, and its protection once
        // more.
        "-Wl,--no-rosegment",
        "-Wl,-z,norelro",
        "-nostartfiles",
        // A new namespace of `dlmopen` has to open the C library.
        "-Wl,--no-as-needed,-lc",
    ] {
        compiler.arg(format!("-Clink-arg={argument}"));
    }
    if entry.opens_at_start {
        compiler.arg("-Clink-arg=-Wl,-init,bursar_on_load");
    }
    if variable("CARGO_CFG_TARGET_ARCH")? != "x86_64" {
        compiler.arg("-Clink-arg=-Wl,--no-as-needed,-l:libdl.so.2,--as-needed");
    }
    let ended = compiler.arg("../shim/entry/entry.rs").status()?;
    match ended.success() {
        true => Ok(()),
        false => Err(format!("failed to compile {}: {ended}", entry.soname).into()),
    }
}

/// Returns the generated part of the library's source.
fn source(entry: &Entry<'_>) -> Result<String, std::fmt::Error> {
    let (mut text, mut names, mut starts) = (String::new(), String::new(), String::new());
    for (name, size) in &entry.variables {
        writeln!(text, "variable!({name}, {size});")?;
    }
    let mut start = 0;
    for (index, name) in entry.functions.iter().enumerate() {
        writeln!(
            text,
            "forward_from_null!({name}, SLOTS, {index}, lazy_resolve);"
        )?;
        write!(names, "{name}\\0")?;
        write!(starts, "{start}, ")?;
        start += name.len() + 1;
    }
    writeln!(
        text,
        "pub(super) const SHIM: &CStr = c\"/opt/bursar/lib/{}\";\n\
         pub(super) const UNLOADABLE: c_int = {};\n\
         pub(super) const COUNT: usize = {};\n\
         pub(super) static NAMES: [u8; {start}] = *b\"{names}\";\n\
         pub(super) static STARTS: [u16; COUNT] = [{starts}];",
        entry.shim,
        entry.unloadable,
        entry.functions.len()
    )?;
    Ok(text)
}
