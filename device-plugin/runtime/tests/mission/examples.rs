//! Runs the examples of `device-plugin/runtime/examples`, which programs copy.
#![allow(
    dead_code,
    reason = "the tests pass the fake agent's socket instead of calling `main`"
)]

#[path = "../../examples/allocate.rs"]
mod allocate;
#[path = "../../examples/block_uses.rs"]
mod block_uses;
#[path = "../../examples/budgets.rs"]
pub(crate) mod budgets;
#[path = "../../examples/cudarc_interop.rs"]
pub(crate) mod cudarc_interop;
#[path = "../support/fake_agent.rs"]
mod fake_agent;
#[path = "../../examples/foreign_work.rs"]
mod foreign_work;
#[path = "../../examples/launch.rs"]
mod launch;
#[path = "../../examples/managed_memory.rs"]
pub(crate) mod managed_memory;
#[path = "../../examples/peer_copy.rs"]
mod peer_copy;
#[path = "../../examples/physical.rs"]
mod physical;
#[path = "../../examples/retained_memory.rs"]
mod retained_memory;
#[path = "../../examples/subscription.rs"]
pub(crate) mod subscription;
#[path = "../../examples/tasks.rs"]
mod tasks;
#[path = "../../examples/tokens.rs"]
mod tokens;
#[path = "../../examples/typed_memory.rs"]
mod typed_memory;

use std::fs;
use std::path::Path;
use std::process::Command;

use bursar_runtime::retained::LeaseClient;
use bursar_runtime::{DeviceRuntime, TokenClient};
use bursar_sim_lab::{ONE_GPU, TWO_GPUS, run_in_subprocess};
use fake_agent::{FakeAgent, GPU};

#[test]
fn allocate_takes_blocks_from_the_pool() {
    run_in_subprocess(ONE_GPU, |_| {
        allocate::main().unwrap();
        let pool = DeviceRuntime::for_ordinal(0).unwrap().statistics();
        assert_eq!((pool.blocks, pool.slabs), (0, 1));
    });
}

#[test]
fn typed_memory_is_copied_in_and_out() {
    run_in_subprocess(ONE_GPU, |_| typed_memory::main().unwrap());
}

#[test]
fn launch_fills_memory() {
    run_in_subprocess(ONE_GPU, |_| launch::main().unwrap());
}

#[test]
fn tasks_allocate_copy_and_free() {
    run_in_subprocess(ONE_GPU, |_| {
        tasks::main().unwrap();
        assert_eq!(DeviceRuntime::for_ordinal(0).unwrap().budget().used, 0);
    });
}

#[test]
fn block_uses_leave_no_memory_in_use() {
    run_in_subprocess(ONE_GPU, |_| {
        block_uses::main().unwrap();
        assert_eq!(DeviceRuntime::for_ordinal(0).unwrap().budget().used, 0);
    });
}

#[test]
fn foreign_work_is_ordered_and_recorded() {
    run_in_subprocess(ONE_GPU, |_| foreign_work::main().unwrap());
}

#[test]
fn physical_memory_is_created_exported_and_mapped() {
    run_in_subprocess(ONE_GPU, |_| physical::main().unwrap());
}

#[test]
fn peer_copy_arrives_on_the_other_gpu() {
    run_in_subprocess(TWO_GPUS, |_| peer_copy::main().unwrap());
}

#[test]
fn retained_memory_is_found_by_the_next_open() {
    run_in_subprocess(ONE_GPU, |_| {
        let agent = FakeAgent::start(|program| Command::new(program));
        let runtime = DeviceRuntime::for_ordinal(0).unwrap();
        let client = LeaseClient::with_socket(runtime.context(), &agent.socket());
        let lease = retained_memory::open(&client).unwrap().lease();
        let found = retained_memory::open(&client).unwrap();
        assert_eq!(found.lease(), lease);
        let mut content = [0; 6];
        found.read(0, &mut content).unwrap();
        assert_eq!(&content, b"loaded");
    });
}

/// The public half of the fake agent's key.
const KEY: &str = "8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c";

#[test]
fn token_is_verified_and_redeemed() {
    run_in_subprocess(ONE_GPU, |_| {
        let agent = FakeAgent::start(|program| Command::new(program));
        let client = TokenClient::with_socket(&agent.socket());
        let memory = tokens::exchange(&client, &KEY.parse().unwrap()).unwrap();
        assert_eq!((&*memory.gpu, memory.block), (GPU, 3));
    });
}

/// The longest example, in lines of code.
const MAX_LINES: usize = 30;

/// Counts the lines that are no comment, import or inner attribute, and not empty.
fn lines_of_code(source: &str) -> usize {
    let mut in_import = false;
    let is_code = |line: &&str| {
        in_import |= line.starts_with("use ");
        let skipped = in_import || line.is_empty() || line.starts_with("//");
        in_import &= !line.ends_with(';');
        !skipped && !line.starts_with("#!")
    };
    source.lines().map(str::trim).filter(is_code).count()
}

#[test]
fn examples_are_short_and_listed_in_the_docs() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = fs::read_to_string(package.join("../../docs/internals/runtime.md")).unwrap();
    for entry in fs::read_dir(package.join("examples")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let lines = lines_of_code(&fs::read_to_string(&path).unwrap());
        assert!((1..=MAX_LINES).contains(&lines), "{name}: {lines} lines");
        assert!(docs.contains(&format!("| [{name}](")), "{name}");
    }
}
