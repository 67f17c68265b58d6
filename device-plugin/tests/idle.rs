//! Counts the allocations that an idle agent makes for each pod. This program is also the agent.
//!
//! Processor time depends on the machine, but the number of allocations depends on the agent's work
//! alone. The count leaves out work that needs no memory.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

mod common;

use std::alloc::System;
use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use bursar_compute::process as compute;
use bursar_config::Config;
use bursar_device_plugin::RunOptions;
use bursar_enforcement::attestation::device_access;
use bursar_gpu::nvml;
use libtest_mimic::{Arguments, Failed, Trial};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use common::PATIENCE;
use common::node::{Node, Outcome};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The first argument of the program when it runs as the agent. The second is the path of the
/// configuration.
const AGENT: &str = "agent";

const PODS: usize = 250;

/// How long an idle agent is observed: four rounds of its work of each second.
const WINDOW: Duration = Duration::from_secs(4);

/// The most allocations for a pod in a second. The agent reads the pod's usage, cgroup and
/// processes once a second.
const MOST: usize = 150;

fn main() -> ExitCode {
    let mut words = env::args_os().skip(1);
    match words.next() {
        Some(word) if word == device_access::SUBCOMMAND => return device_access::run_child(words),
        Some(word) if word == nvml::SUBCOMMAND => return nvml::run_child(words),
        Some(word) if word == compute::SUBCOMMAND => return compute::run_child(words),
        Some(word) if word == AGENT => {
            run_agent(words.next().unwrap().as_ref());
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let trial = Trial::test("idle_agent_allocates_little_for_each_of_250_pods", || {
        let runtime = Runtime::new()?;
        let per_pod = runtime
            .block_on(count_idle_allocations())
            .map_err(Failed::from)?;
        println!("{per_pod} allocations for each of {PODS} pods in a second");
        match per_pod <= MOST {
            true => Ok(()),
            false => Err(format!("{per_pod} allocations are more than {MOST}").into()),
        }
    });
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code()
}

/// Runs the agent, which prints how many allocations it has made for each line of its input.
fn run_agent(config: &Path) {
    let config = Config::load(config).unwrap();
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let options = RunOptions::new("idle".to_owned(), None);
    runtime.spawn(bursar_device_plugin::run(
        config,
        options,
        CancellationToken::new(),
    ));
    for line in std::io::stdin().lines() {
        line.unwrap();
        println!("{}", ALLOCATOR.stats().allocations);
        std::io::stdout().flush().unwrap();
    }
}

/// Returns the allocations for a pod in a second: those of the first idle window, or of the last
/// one within [`PATIENCE`]. Before that, the agent may still work on the last pod's start.
async fn count_idle_allocations() -> Outcome<usize> {
    let mut node = Node::new(8, 80, |lab, config| {
        let mut command = lab.command(env::current_exe().unwrap());
        command
            .arg(AGENT)
            .arg(config)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        command
    })
    .await?;
    let mut input = node.agent.stdin.take().ok_or("no input")?;
    let mut lines = BufReader::new(node.agent.stdout.take().ok_or("no output")?).lines();
    let mut allocations = || -> Outcome<usize> {
        writeln!(input)?;
        Ok(lines.next().ok_or("the agent has ended")??.parse()?)
    };
    for number in 0..PODS {
        node.start(&format!("p{number}"), 1).await?;
    }
    let start = Instant::now();
    loop {
        let before = allocations()?;
        tokio::time::sleep(WINDOW).await;
        let per_pod = (allocations()? - before) / PODS / WINDOW.as_secs() as usize;
        if per_pod <= MOST || start.elapsed() > PATIENCE {
            return Ok(per_pod);
        }
        println!("not idle yet: {per_pod} allocations");
    }
}
