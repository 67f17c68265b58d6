//! A worker that cannot be killed, and one that does not answer.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::bed::{Bed, GIB, compiled, open};
use crate::common::eventually;
use crate::common::kubelet::Pod;
use crate::machine::GPU;
use crate::tenant::Opened;

/// Holds on to a process that dies, until it is dropped. None where this machine lets nobody.
struct Tracer(Child);

impl Tracer {
    fn of(pid: Pid) -> Option<Tracer> {
        let (_folder, program) = compiled("tracer.c");
        let mut child = Command::new(program)
            .arg(pid.as_raw_nonzero().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut said).unwrap();
        let tracer = Tracer(child);
        (said == "holds\n").then_some(tracer)
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_gpu_whose_worker_cannot_be_killed_takes_no_pods_until_it_has_ended() {
    let bed = Bed::new().await;
    let pod = bed.machine.run("a", 8).await;
    let mut tenant = bed.tenant(&pod);
    assert!(matches!(
        open(&mut tenant, "weights", GIB),
        Ok(Opened::Write { .. })
    ));
    // The sentinel's GPU may be another one: its worker goes on.
    let workers = bed.workers();
    let held: Vec<_> = workers.iter().map(|pid| Tracer::of(*pid)).collect();
    let Some(held) = held.into_iter().collect::<Option<Vec<Tracer>>>() else {
        return eprintln!("skipped: nobody may trace a process here");
    };
    for pid in &workers {
        kill_process(*pid, Signal::KILL).unwrap();
    }
    let refused = tenant.open("more", GIB).unwrap_err();
    assert!(refused.starts_with("refused Unavailable"), "{refused}");
    bed.machine.kubelet.until_allocatable(GPU, 16).await;
    // Who has memory of it keeps that.
    assert!(bed.machine.devices().len() == 1);
    drop(held);
    let time = bed.machine.kubelet.until_allocatable(GPU, 32).await;
    assert!(time < Duration::from_secs(10), "{time:?}");
    assert!(matches!(
        open(&mut tenant, "more", GIB),
        Ok(Opened::Write { .. })
    ));
}

/// How long a worker may take to make a GiB, or to sweep as much (`kept/workers.rs`).
const DEADLINE: Duration = Duration::from_secs(10);

/// What a worker takes of its GPU (F3 in docs/facts.md), and the sentinel.
const WORKER: u64 = 4 << 20;
const SENTINEL: u64 = 2 << 20;

/// A process that is stopped, until this is dropped.
struct Stopped(Pid);

/// The worker of a pod's GPU.
fn worker(bed: &Bed, pod: &Pod) -> Pid {
    let (_, gpu) = bed.device(pod);
    let mut workers = bed.workers().into_iter();
    let of_gpu = workers.find(|pid| {
        let words = fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_nonzero()));
        words.unwrap().contains(&gpu)
    });
    of_gpu.unwrap()
}

impl Stopped {
    /// The worker of a pod's GPU, of which a GiB was made: once the sentinel is made too nobody
    /// else asks it.
    async fn worker(bed: &Bed, pod: &Pod) -> Stopped {
        let sim = bed.machine.lab.sim().unwrap();
        let is_all = || {
            let workers = bed.workers().len() as u64 * WORKER;
            sim.used(0) + sim.used(1) == GIB + SENTINEL + workers
        };
        eventually("the sentinel", is_all).await;
        let pid = worker(bed, pod);
        kill_process(pid, Signal::STOP).unwrap();
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It was killed, unless the test failed.
        let _ = kill_process(self.0, Signal::CONT);
    }
}

#[tokio::test]
async fn a_worker_that_does_not_answer_in_time_is_killed_and_another_does_what_it_was_asked() {
    let bed = Bed::new().await;
    let pod = bed.machine.run("a", 8).await;
    let mut tenant = bed.tenant(&pod);
    assert!(open(&mut tenant, "weights", GIB).is_ok());
    let (stopped, begun) = (Stopped::worker(&bed, &pod).await, Instant::now());
    let opened = tenant.open("more", GIB);
    assert!(matches!(opened, Ok(Opened::Write { .. })), "{opened:?}");
    let took = begun.elapsed();
    assert!((DEADLINE..2 * DEADLINE).contains(&took), "{took:?}");
    assert_ne!(worker(&bed, &pod), stopped.0);
}

#[tokio::test]
async fn a_worker_is_asked_to_sweep_once_much_was_given_back() {
    let bed = Bed::new().await;
    let pod = bed.machine.run("a", 8).await;
    let mut tenant = bed.tenant(&pod);
    let Ok(Opened::Write { lease, .. }) = open(&mut tenant, "weights", GIB) else {
        panic!("it is there");
    };
    // Who asks it for anything gives it up.
    let (stopped, begun) = (Stopped::worker(&bed, &pod).await, Instant::now());
    let discarded = tenant.ask(&format!("discard {lease}"));
    assert_eq!(discarded.as_deref(), Some("discarded"));
    eventually("the worker's end", || !bed.workers().contains(&stopped.0)).await;
    assert!(begun.elapsed() >= DEADLINE);
}
