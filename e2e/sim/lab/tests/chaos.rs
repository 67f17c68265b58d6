//! Verifies the accounting while many processes allocate, free and are killed at random.
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use bursar_sim_lab::{DriverClient, ONE_GPU, SimMachine};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const CLIENTS: u64 = 8;
const STEPS: u64 = 1000;

/// Starts one client after the other. Each ends by SIGKILL, sometimes in the middle of a call.
fn allocate_and_crash(machine: &SimMachine, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut slot: Option<DriverClient> = None;
    let mut requests: Vec<String> = Vec::new();
    for _ in 0..STEPS {
        let Some(client) = &mut slot else {
            let mut new_client = machine.spawn_client().unwrap();
            // A full GPU refuses a context; the next attempt may succeed.
            if new_client.request("context 0").is_ok() {
                slot = Some(new_client);
            }
            continue;
        };
        let size = rng.random_range(1..=1024_u64) << 21;
        match rng.random_range(0..12) {
            0..=3 => requests.extend(
                client
                    .request(&format!("alloc {size}"))
                    .ok()
                    .map(|at| format!("free {at}")),
            ),
            4..=6 => requests.extend(
                client
                    .request(&format!("create {size}"))
                    .ok()
                    .map(|handle| format!("release {handle}")),
            ),
            7 => requests.extend(
                client
                    .request(&format!("poolalloc {size}"))
                    .ok()
                    .map(|at| format!("poolfree {at}")),
            ),
            8..=10 if !requests.is_empty() => {
                let place = rng.random_range(0..requests.len());
                client.request(&requests.swap_remove(place)).unwrap();
            }
            11 => {
                client.send_request(&format!("alloc {size}"));
                slot.take().unwrap().kill();
                requests.clear();
            }
            _ => drop(client.request("sync").unwrap()),
        }
    }
}

/// Ends the watcher when the clients have ended, also by a failed assertion.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn usage_stays_within_gpu_and_returns_to_zero_after_kills() {
    let machine = SimMachine::new(ONE_GPU).unwrap();
    let done = AtomicBool::new(false);
    let highest = thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let (sim, mut highest) = (machine.sim().unwrap(), 0);
            while !done.load(Ordering::Relaxed) {
                let usage = sim.usage(0);
                let listed = usage
                    .processes
                    .iter()
                    .map(|process| process.bytes)
                    .sum::<u64>();
                assert!(
                    listed <= usage.used && usage.used <= usage.total,
                    "{usage:?}"
                );
                highest = highest.max(usage.used);
                thread::sleep(std::time::Duration::from_millis(2));
            }
            highest
        });
        let set_done = SetOnDrop(&done);
        let clients: Vec<_> = (0..CLIENTS)
            .map(|seed| {
                scope.spawn({
                    let machine = &machine;
                    move || allocate_and_crash(machine, seed)
                })
            })
            .collect();
        clients
            .into_iter()
            .for_each(|client| client.join().unwrap());
        drop(set_done);
        watcher.join().unwrap()
    });
    assert!(
        highest > 12 << 30,
        "the card was never nearly full: {highest}"
    );
    assert_eq!(machine.sim().unwrap().used(0), 0);
    let left = std::fs::read_dir(machine.path().join("state/mem"))
        .unwrap()
        .count();
    assert_eq!(left, 0, "files of dead allocations are left");
}
