//! Tests a provisioner that cannot be killed, and one that does not answer.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::eventually;
use crate::common::kubelet::Pod;
use crate::fixture::{Fixture, GIB, compile_c, open_retrying};
use crate::machine::GPU;
use crate::tenant_process::Opened;

/// Traces a dying process so that it stays, until this is dropped. None where the machine permits
/// no tracing.
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
        let mut line = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        let tracer = Tracer(child);
        (line == "holds\n").then_some(tracer)
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
    let fixture = Fixture::new().await;
    let pod = fixture.machine.run("a", 8).await;
    let mut tenant = fixture.tenant(&pod);
    assert!(matches!(
        open_retrying(&mut tenant, "weights", GIB),
        Ok(Opened::Write { .. })
    ));
    let provisioners = fixture.provisioners();
    let held: Vec<_> = provisioners
        .iter()
        .map(|pid| Tracer::attach(*pid))
        .collect();
    let Some(held) = held.into_iter().collect::<Option<Vec<Tracer>>>() else {
        return eprintln!("skipped: tracing is not permitted here");
    };
    for pid in &provisioners {
        kill_process(*pid, Signal::KILL).unwrap();
    }
    let refused = tenant.open("more", GIB).unwrap_err();
    assert!(refused.starts_with("refused Unavailable"), "{refused}");
    fixture.machine.kubelet.until_allocatable(GPU, 16).await;
    // Containers with memory of the GPU keep it.
    assert!(fixture.machine.devices().len() == 1);
    drop(held);
    let time = fixture.machine.kubelet.until_allocatable(GPU, 32).await;
    assert!(time < Duration::from_secs(10), "{time:?}");
    assert!(matches!(
        open_retrying(&mut tenant, "more", GIB),
        Ok(Opened::Write { .. })
    ));
}

/// The time limit of a provisioner to create a GiB, or to sweep as much
/// (`retained/provisioners.rs`).
const DEADLINE: Duration = Duration::from_secs(10);

/// The GPU memory of a provisioner (F3 in docs/internals/facts.md), and that of the export
/// keep-alive.
const PROVISIONER_BYTES: u64 = 4 << 20;
const EXPORT_KEEP_ALIVE_BYTES: u64 = 2 << 20;

/// A process that is stopped until this is dropped.
struct StoppedProvisioner(Pid);

/// The provisioner of a pod's GPU.
fn provisioner(fixture: &Fixture, pod: &Pod) -> Pid {
    let (_, gpu) = fixture.allocation_and_gpu(pod);
    let mut provisioners = fixture.provisioners().into_iter();
    let pid = provisioners.find(|pid| {
        let words = fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_nonzero()));
        words.unwrap().contains(&gpu)
    });
    pid.unwrap()
}

/// Whether the main thread of a process waits. A thread that has work is runnable, also on a busy
/// machine.
fn is_asleep(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap();
    stat.rsplit_once(") ").unwrap().1.starts_with('S')
}

impl StoppedProvisioner {
    /// Stops the provisioner of a pod's GPU after it has created a GiB. The export keep-alive
    /// exists by then, so the agent sends no other request. Memory exists before the agent has the
    /// answer, so the provisioner must wait for its next request too.
    async fn provisioner(fixture: &Fixture, pod: &Pod) -> StoppedProvisioner {
        let sim = fixture.machine.lab.sim().unwrap();
        // The lease and the keep-alive may be of one provisioner or of two.
        let is_all = || {
            let memory = GIB + EXPORT_KEEP_ALIVE_BYTES;
            let used = sim.used(0) + sim.used(1);
            (1..=2).any(|provisioners| used == memory + provisioners * PROVISIONER_BYTES)
        };
        eventually("the sentinel", is_all).await;
        let pid = provisioner(fixture, pod);
        let mut quiet_polls = 0;
        let is_idle = || {
            quiet_polls = if is_asleep(pid) { quiet_polls + 1 } else { 0 };
            quiet_polls == 50
        };
        eventually("the provisioner's next wait", is_idle).await;
        kill_process(pid, Signal::STOP).unwrap();
        StoppedProvisioner(pid)
    }
}

impl Drop for StoppedProvisioner {
    fn drop(&mut self) {
        // The agent has killed the process, unless the test failed.
        let _ = kill_process(self.0, Signal::CONT);
    }
}

#[tokio::test]
async fn hung_provisioner_is_killed_and_replaced() {
    let fixture = Fixture::new().await;
    let pod = fixture.machine.run("a", 8).await;
    let mut tenant = fixture.tenant(&pod);
    assert!(open_retrying(&mut tenant, "weights", GIB).is_ok());
    let (stopped, start) = (
        StoppedProvisioner::provisioner(&fixture, &pod).await,
        Instant::now(),
    );
    let refused = tenant.open("more", GIB).unwrap_err();
    assert!(refused.starts_with("refused Unavailable"), "{refused}");
    let took = start.elapsed();
    assert!((DEADLINE..2 * DEADLINE).contains(&took), "{took:?}");
    let opened = open_retrying(&mut tenant, "more", GIB);
    assert!(matches!(opened, Ok(Opened::Write { .. })), "{opened:?}");
    assert_ne!(provisioner(&fixture, &pod), stopped.0);
}

#[tokio::test]
async fn provisioner_sweeps_after_many_releases() {
    let fixture = Fixture::new().await;
    let pod = fixture.machine.run("a", 8).await;
    let mut tenant = fixture.tenant(&pod);
    let Ok(Opened::Write { lease, .. }) = open_retrying(&mut tenant, "weights", GIB) else {
        panic!("it is there");
    };
    // The request to sweep times out, so the agent kills this provisioner.
    let (stopped, start) = (
        StoppedProvisioner::provisioner(&fixture, &pod).await,
        Instant::now(),
    );
    let discarded = tenant.ask(&format!("discard {lease}"));
    assert_eq!(discarded.as_deref(), Some("discarded"));
    eventually("the provisioner's end", || {
        !fixture.provisioners().contains(&stopped.0)
    })
    .await;
    assert!(start.elapsed() >= DEADLINE);
}
