//! Tests the agent's limit of open files.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Returns the soft and the hard limit of a process's open files.
fn descriptor_limits(pid: u32) -> Option<(String, String)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    let mut words = line.split_whitespace().map(str::to_owned);
    Some((words.next()?, words.next()?))
}

#[test]
fn agent_raises_its_descriptor_limit_to_the_maximum() {
    let folder = tempfile::tempdir().unwrap();
    // This file never exists: the agent waits for its configuration before it starts anything else.
    let config = folder.path().join("agent.toml");
    let status = Command::new("mkfifo").arg(&config).status().unwrap();
    assert!(status.success());
    let mut agent = Command::new("sh")
        .args([
            "-c",
            "ulimit -Sn 64; exec \"$0\" --node-name n --config \"$1\"",
        ])
        .arg(env!("CARGO_BIN_EXE_bursar-agent"))
        .arg(&config)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let name = format!("/proc/{}/comm", agent.id());
    // The shell that lowers the limit has the same pid before it executes the agent.
    let is_agent = || std::fs::read_to_string(&name).is_ok_and(|name| name != "sh\n");
    let raised = loop {
        match descriptor_limits(agent.id()) {
            Some((soft, hard)) if is_agent() && soft == hard => break true,
            _ if start.elapsed() > Duration::from_secs(10) => break false,
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    agent.kill().unwrap();
    agent.wait().unwrap();
    assert!(raised, "the soft limit stays below the hard one");
}
