//! A worker that cannot be killed.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::bed::{Bed, GIB, compiled, open};
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
