//! Runs the program over the simulated driver, and checks the words that the trials read.
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};

use bursar_sim_lab::{ONE_GPU, SimMachine};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;
const UUID: &str = "GPU-00000000-0000-0000-0000-000000000001";

/// A process that is killed at the end of the test.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn probe(machine: &SimMachine, arguments: &[&str]) -> Command {
    let mut command = machine.command(env!("CARGO_BIN_EXE_bursar-probe"));
    command.args(arguments).stdout(Stdio::piped());
    command
}

/// Returns the event that the program prints last, and its exit code.
fn last_event(mut program: Command) -> (Value, Option<i32>) {
    let output = program.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let last = text.lines().last().unwrap();
    (serde_json::from_str(last).unwrap(), output.status.code())
}

#[test]
fn program_reports_and_holds_in_the_trials_words() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let (report, code) = last_event(probe(&machine, &["report"]));
    assert_eq!((report["count"].as_u64(), code), (Some(1), Some(0)));
    let device = &report["devices"][0];
    assert_eq!(
        (&device["ordinal"], &device["uuid"]),
        (&json!(0), &json!(UUID))
    );
    assert_eq!(device["total_mem"], json!(16 * GIB));
    let free = device["free"].as_u64().unwrap();
    for managed in [&["--managed"][..], &[]] {
        let hold = [&["hold", "--bytes=1Gi", "--then=exit"], managed].concat();
        let (holding, code) = last_event(probe(&machine, &hold));
        assert_eq!((&holding["event"], code), (&json!("holding"), Some(0)));
        assert_eq!(holding["got"], json!(GIB));
        assert_eq!(holding["nvml"]["seen"]["total"], json!(16 * GIB));
        if managed.is_empty() {
            // To the last byte: the trials count the driver's allocations.
            assert_eq!(holding["device"]["free"], json!(free - GIB));
        }
    }
}

#[test]
fn program_reports_a_refusal_with_the_drivers_code() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let (refused, code) = last_event(probe(&machine, &["greedy", "--chunk=1Gi", "--then=exit"]));
    assert_eq!((&refused["event"], code), (&json!("refused"), Some(0)));
    assert_eq!(refused["got"], json!(15 * GIB));
    let expected = json!({ "code": 2, "name": "CUDA_ERROR_OUT_OF_MEMORY" });
    assert_eq!(refused["refused"], expected);
    let without_driver = Command::new(env!("CARGO_BIN_EXE_bursar-probe"))
        .arg("report")
        .env("LD_LIBRARY_PATH", "")
        .stdout(Stdio::piped())
        .output();
    let failed: Value = serde_json::from_slice(&without_driver.unwrap().stdout).unwrap();
    let error = failed["error"].as_str().unwrap();
    assert!(
        error.starts_with("failed to load the CUDA driver"),
        "{error}"
    );
}

#[test]
fn program_faults_and_reports_the_drivers_code() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let file = machine.path().join("faults").display().to_string();
    let fault = ["fault", "--times=1", "--file", &file];
    let (faulted, code) = last_event(probe(&machine, &fault));
    assert_eq!((&faulted["event"], code), (&json!("faulted"), Some(1)));
    let expected = json!({ "code": 700, "name": "CUDA_ERROR_ILLEGAL_ADDRESS" });
    assert_eq!(faulted["answer"], expected);
}

#[test]
fn program_obeys_to_the_byte() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let mut program = Program(
        probe(&machine, &["obey"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut input = program.0.stdin.take().unwrap();
    let mut output = BufReader::new(program.0.stdout.take().unwrap());
    let mut free = Vec::new();
    for (order, held) in [
        ("look", 0),
        ("take 4Gi", 4),
        ("free 1Gi", 3),
        ("free 3Gi", 0),
    ] {
        writeln!(input, "{order}").unwrap();
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let holds: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            (&holds["held"], &holds["refused"]),
            (&json!(held * GIB), &Value::Null)
        );
        free.push(holds["device"]["free"].as_u64().unwrap() + held * GIB);
    }
    assert_eq!(free, [free[0]; 4]);
}

#[test]
fn exported_memory_outlives_the_program() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let socket = machine.path().join("parked").display().to_string();
    let mut holder = Program(
        probe(&machine, &["park", "--socket", &socket])
            .spawn()
            .unwrap(),
    );
    let (exported, code) = last_event(probe(
        &machine,
        &["export", "--bytes=64Mi", "--to", &socket],
    ));
    assert_eq!((&exported["event"], code), (&json!("exported"), Some(0)));
    let mut line = String::new();
    let mut output = BufReader::new(holder.0.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    let parked: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(parked, json!({ "event": "parked", "count": 1 }));
    assert_eq!(machine.sim().unwrap().used(0), 64 << 20);
}
