//! Compiles the C programs that look for the driver, once.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/loader/client.c");

/// The folder of an image's own libcuda.
pub const COMPAT: &str = "/usr/local/cuda/compat";

/// How each program is compiled: its name, the compiler, and whether it is linked against libcuda.
const PROGRAMS: &[(&str, &[&str], bool)] = &[
    ("client", &["cc"], false),
    ("client-linked", &["cc"], true),
    ("client-static", &["cc", "-static"], false),
    #[cfg(target_arch = "x86_64")]
    ("client-32", &["cc", "-m32"], false),
    #[cfg(target_arch = "x86_64")]
    ("client-32-linked", &["cc", "-m32"], true),
    ("client-musl", &["musl-gcc"], false),
    ("client-musl-linked", &["musl-gcc"], true),
];

/// Returns the folder of the compiled programs.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER
        .get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            for (name, compiler, linked) in PROGRAMS {
                compile(folder.path(), name, compiler, *linked);
            }
            folder
        })
        .path()
}

fn compile(folder: &Path, name: &str, compiler: &[&str], linked: bool) {
    let cc = || {
        let mut command = Command::new(compiler[0]);
        command.args(&compiler[1..]).current_dir(folder);
        command
    };
    let mut program = cc();
    program.args(["-w", "-o", name, SOURCE]);
    if linked {
        // The linker needs only the name and the functions of the driver.
        let functions =
            "cuInit(){} cuDevicePrimaryCtxRetain(){} cuCtxSetCurrent(){} cuMemAlloc_v2(){}";
        std::fs::write(folder.join("functions.c"), functions).unwrap();
        run(cc().args([
            "-w",
            "-shared",
            "-nostdlib",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            "libcuda.so",
            "functions.c",
        ]));
        // DT_RPATH, which comes before the library path; DT_RUNPATH comes after it.
        program.args(["-DLINKED", "-L.", "-lcuda"]);
        program.arg(format!("-Wl,--disable-new-dtags,-rpath,{COMPAT}"));
    } else {
        program.arg("-ldl");
    }
    run(&mut program);
}

/// Runs a command that must succeed.
pub fn run(command: &mut Command) {
    let output = command.output();
    let output = output.unwrap_or_else(|error| {
        panic!("{command:?}: {error} (Debian packages gcc, gcc-multilib and musl-tools)")
    });
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {stderr} (Debian packages gcc, gcc-multilib and musl-tools)"
    );
}

/// Returns the path of a library of the C compiler, by name.
pub fn system_library(compiler: &[&str], name: &str) -> Option<PathBuf> {
    let output = Command::new(compiler[0])
        .args(&compiler[1..])
        .arg(format!("-print-file-name={name}"))
        .output()
        .ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    path.is_absolute().then_some(path)
}
