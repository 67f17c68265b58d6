//! Runs the programs that check the runtime on GPUs over the simulated driver.
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use bursar_sim_lab::SimMachine;
use serde_json::{Value, json};

/// Two GPUs of little memory, because `sources` computes checksums of half of it.
const SMALL_GPUS: &str = r#"
[[gpu]]
name = "NVIDIA H200"
uuid = "GPU-00000000-0000-0000-0000-000000000001"
memory = "1536Mi"
minor = 0

[[gpu]]
name = "NVIDIA H200"
uuid = "GPU-00000000-0000-0000-0000-000000000002"
memory = "1536Mi"
minor = 1
"#;

/// Runs a program, and returns its output.
fn run(machine: &SimMachine, program: &str, arguments: &[&str]) -> String {
    let output = machine.command(program).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {text}{errors}");
    text
}

#[test]
fn programs_find_no_error_over_the_simulated_driver() {
    let machine = SimMachine::new(SMALL_GPUS).unwrap();
    let sources = run(&machine, env!("CARGO_BIN_EXE_sources"), &[]);
    assert!(
        sources.lines().all(|line| line.starts_with("ok ")),
        "{sources}"
    );
    assert_eq!(sources.lines().count(), 10);
    run(&machine, env!("CARGO_BIN_EXE_references"), &["0"]);
    let peers = run(&machine, env!("CARGO_BIN_EXE_peers"), &["4"]);
    let peers: Value = serde_json::from_str(&peers).unwrap();
    assert_eq!((&peers["copies"], &peers["wrong"]), (&json!(30), &json!(0)));
}
