//! A worker that cannot be killed, and one that does not answer.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::bed::{Fixture, GIB, compile_c, open_retrying};
use crate::common::eventually;
use crate::common::kubelet::Pod;
use crate::machine::GPU;
use crate::tenant::Opened;

/// Holds on to a process that dies, until it is dropped. None where this machine lets nobody.
struct Tracer(Child);

impl Tracer {
    fn attach(pid: Pid) -> Option<Tracer> {
        let (_folder, program) = compile_c("tracer.c");
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
async fn gpu_takes_no_pods_while_its_provisioner_cannot_be_killed() {
    let bed = Fixture::new().await;
    let pod = bed.machine.run("a", 8).await;
    let mut tenant = bed.tenant(&pod);
    assert!(matches!(
        open_retrying(&mut tenant, "weights", GIB),
        Ok(Opened::Write { .. })
    ));
    // The sentinel's GPU may be another one: its worker goes on.
    let workers = bed.workers();
    let held: Vec<_> = workers.iter().map(|pid| Tracer::attach(*pid)).collect();
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
        open_retrying(&mut tenant, "more", GIB),
        Ok(Opened::Write { .. })
    ));
}

/// How long a worker may take to make a GiB, or to sweep as much (`kept/workers.rs`).
const DEADLINE: Duration = Duration::from_secs(10);

/// What a worker takes of its GPU (F3 in docs/facts.md), and the sentinel.
const PROVISIONER_BYTES: u64 = 4 << 20;
const EXPORT_KEEP_ALIVE_BYTES: u64 = 2 << 20;

/// A process that is stopped, until this is dropped.
struct StoppedProvisioner(Pid);

/// The worker of a pod's GPU.
fn worker(bed: &Fixture, pod: &Pod) -> Pid {
    let (_, gpu) = bed.allocation_and_gpu(pod);
    let mut workers = bed.workers().into_iter();
    let of_gpu = workers.find(|pid| {
        let words = fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_nonzero()));
        words.unwrap().contains(&gpu)
    });
    of_gpu.unwrap()
}

impl StoppedProvisioner {
    /// The worker of a pod's GPU, of which a GiB was made: once the sentinel is made too nobody
    /// else asks it.
    async fn worker(bed: &Fixture, pod: &Pod) -> StoppedProvisioner {
        let sim = bed.machine.lab.sim().unwrap();
        let is_all = || {
            let workers = bed.workers().len() as u64 * PROVISIONER_BYTES;
            sim.used(0) + sim.used(1) == GIB + EXPORT_KEEP_ALIVE_BYTES + workers
        };
        eventually("the sentinel", is_all).await;
        let pid = worker(bed, pod);
        kill_process(pid, Signal::STOP).unwrap();
        StoppedProvisioner(pid)
    }
}

impl Drop for StoppedProvisioner {
    fn drop(&mut self) {
        // It was killed, unless the test failed.
        let _ = kill_process(self.0, Signal::CONT);
    }
}

#[tokio::test]
async fn hung_provisioner_is_killed_and_replaced() {
    let bed = Fixture::new().await;
    let pod = bed.machine.run("a", 8).await;
    let mut tenant = bed.tenant(&pod);
    assert!(open_retrying(&mut tenant, "weights", GIB).is_ok());
    let (stopped, begun) = (StoppedProvisioner::worker(&bed, &pod).await, Instant::now());
    let opened = tenant.open("more", GIB);
    assert!(matches!(opened, Ok(Opened::Write { .. })), "{opened:?}");
    let took = begun.elapsed();
    assert!((DEADLINE..2 * DEADLINE).contains(&took), "{took:?}");
    assert_ne!(worker(&bed, &pod), stopped.0);
}

#[tokio::test]
async fn provisioner_sweeps_after_many_releases() {
    let bed = Fixture::new().await;
    let pod = bed.machine.run("a", 8).await;
    let mut tenant = bed.tenant(&pod);
    let Ok(Opened::Write { lease, .. }) = open_retrying(&mut tenant, "weights", GIB) else {
        panic!("it is there");
    };
    // Who asks it for anything gives it up.
    let (stopped, begun) = (StoppedProvisioner::worker(&bed, &pod).await, Instant::now());
    let discarded = tenant.ask(&format!("discard {lease}"));
    assert_eq!(discarded.as_deref(), Some("discarded"));
    eventually("the worker's end", || !bed.workers().contains(&stopped.0)).await;
    assert!(begun.elapsed() >= DEADLINE);
}
