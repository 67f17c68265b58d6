//! Builds, installs and tests the Python package's wheel over the simulated driver with NumPy.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

#[path = "../../tests/support/fake_agent.rs"]
mod fake_agent;

use std::path::{Path, PathBuf};
use std::process::Command;

use bursar_sim_lab::{ONE_GPU, SimMachine};
use fake_agent::FakeAgent;

/// Array library of the tests.
const NUMPY: &str = "numpy==2.4.6";

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../python")
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?} failed\n{stdout}\n{stderr}"
    );
    stdout
}

/// Returns a Python with NumPy, created once beside cargo's output.
fn python(target: &Path) -> PathBuf {
    let environment = target.join("python-numpy");
    let python = environment.join("bin/python");
    let has_numpy = Command::new(&python).args(["-c", "import numpy"]).output();
    if !has_numpy.is_ok_and(|output| output.status.success()) {
        run(Command::new("python3")
            .args(["-m", "venv"])
            .arg(&environment));
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", NUMPY]));
    }
    python
}

/// Builds the library and returns cargo's output folder.
fn libraries() -> PathBuf {
    bursar_sim_lab::build(&["bursar-capi"], &["--lib"]).unwrap()
}

#[test]
fn wheel_installs_and_passes_its_tests() {
    let (folder, target) = (tempfile::tempdir().unwrap(), libraries());
    let python = python(&target);
    let wheel = |folder: &Path| {
        let mut build = Command::new(&python);
        let build = build
            .arg(package().join("build_wheel.py"))
            .arg(target.join("libbursar.so"));
        run(build.arg(folder)).trim_end().to_owned()
    };
    let built = wheel(folder.path());
    let again = tempfile::tempdir().unwrap();
    let bytes = |path: String| std::fs::read(path).unwrap();
    assert!(bytes(built.clone()) == bytes(wheel(again.path())));

    let site = folder.path().join("site");
    let mut install = Command::new(&python);
    install.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
    ]);
    run(install.arg(&site).arg(&built));

    let lab = SimMachine::new(ONE_GPU).unwrap();
    let fake_agent = FakeAgent::start(|program| lab.command(program));
    for test in ["test_index.py", "test_vllm.py", "test_retained.py"] {
        let mut tests = lab.command(&python);
        tests
            .arg(package().join("tests").join(test))
            .env("PYTHONPATH", &site)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("BURSAR_TEST_SOCKET", fake_agent.socket());
        run(&mut tests);
    }
}
