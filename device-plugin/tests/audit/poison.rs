//! Programs whose kernels fault, and what the agent does about their containers.

use std::time::{Duration, Instant};

use crate::container::{Container, PLAIN, machine};
use crate::found::value;
use crate::machine::Machine;

/// How long the agent may take to act on what it was told.
const SOON: Duration = Duration::from_secs(2);
/// How long it waits for a report of what the kernel's log says.
const GRACE: Duration = Duration::from_secs(5);

async fn counted(machine: &Machine, cause: &str, action: &str) -> i64 {
    let labels = format!("cause=\"{cause}\" action=\"{action}\"");
    let name = "bursar_agent_poisoned_contexts_total";
    value(machine, name, &labels).await.unwrap_or(0)
}

/// How long the program lives on.
async fn until_killed(program: &mut Container) -> Duration {
    let begun = Instant::now();
    while program.is_alive() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it lives on");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    begun.elapsed()
}

#[tokio::test]
async fn a_program_that_reports_its_fault_gets_its_error_and_its_container_is_killed() {
    let machine = machine("").await;
    let pod = machine.admit("a", 8).await;
    let mut program = Container::start(&machine, &pod, PLAIN).await;
    program.ok("open libcuda.so.1");
    program.ok("fault");
    assert_eq!(program.call("sync"), "err 700");
    let took = until_killed(&mut program).await;
    assert!(took < SOON, "{took:?}");
    assert_eq!(counted(&machine, "cuda-700", "restart").await, 1);
}

#[tokio::test]
async fn a_program_that_never_asks_the_driver_again_is_known_from_the_kernels_log() {
    let machine = machine("").await;
    let pod = machine.admit("a", 8).await;
    let neighbour = machine.admit("b", 4).await;
    let mut program = Container::start(&machine, &pod, PLAIN).await;
    let mut other = Container::start(&machine, &neighbour, PLAIN).await;
    other.ok("open libcuda.so.1");
    program.ok("open libcuda.so.1");
    program.ok("fault");
    let took = until_killed(&mut program).await;
    assert!((GRACE - SOON..GRACE + SOON).contains(&took), "{took:?}");
    assert_eq!(counted(&machine, "xid-31", "fence").await, 1);
    other.ok("alloc 4096");
    other.ok("sync");
}
