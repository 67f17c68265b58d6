//! Compares 64 processes of one container with a reference model.
//!
//! The processes make 30,000 random calls and are killed at any moment. The agent is killed 4
//! times; with `BURSAR_LONG`, a million and 100. A neighbour must not notice.
//!
//! ```text
//! room     the simulated GPU, the containers' mounts, programs in them
//! agent    a process that serves the containers' sessions, and can be killed
//! life     drives one program of the crowd
//! crowd    all of them, stopped now and then to be compared with the model
//! judge    collects violations
//! times    how long calls took
//! ```
//!
//! `BURSAR_SOAK_SEED=7` repeats the choices of an earlier run: which program is killed after how
//! long. The scheduler's choices are not repeated.

#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

#[path = "../support/mod.rs"]
mod support;

mod agent;
mod crowd;
mod judge;
mod life;
mod rng;
mod room;
mod times;

use std::process::ExitCode;

/// The run that the command line requests.
#[derive(Clone, Copy, Debug)]
struct Plan {
    seed: u64,
    operations: u64,
    processes: usize,
    restarts: u32,
    /// How often the run is stopped and compared with the model.
    stops: u64,
}

impl Plan {
    fn of(arguments: &[String]) -> Plan {
        let given = |name: &str| {
            let place = arguments.iter().position(|argument| argument == name)?;
            arguments.get(place + 1)?.parse::<u64>().ok()
        };
        let long = std::env::var_os("BURSAR_LONG").is_some();
        let (operations, restarts, stops) = if long {
            (1_000_000, 100, 10)
        } else {
            (30_000, 4, 4)
        };
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seed = std::env::var("BURSAR_SOAK_SEED").ok();
        let seed = seed.and_then(|seed| seed.parse().ok());
        Plan {
            seed: seed.unwrap_or(clock.map_or(0, |time| time.as_secs())),
            operations: given("--operations").unwrap_or(operations),
            processes: given("--processes").unwrap_or(64) as usize,
            restarts: given("--restarts").unwrap_or(restarts) as u32,
            stops: given("--stops").unwrap_or(stops),
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, role, folder, quota] = arguments.as_slice()
        && role == agent::ROLE
    {
        agent::serve(folder.as_ref(), quota.parse().unwrap());
    }
    let plan = Plan::of(&arguments);
    println!("soak: seed {}, {plan:?}", plan.seed);
    let outcome = crowd::run(plan);
    println!("{}", outcome.closing_line());
    if outcome.violations.is_empty() {
        return ExitCode::SUCCESS;
    }
    for violation in &outcome.violations {
        println!("violation: {violation}");
    }
    println!(
        "again: BURSAR_SOAK_SEED={} cargo test -p bursar-shim --test soak",
        plan.seed
    );
    ExitCode::FAILURE
}
