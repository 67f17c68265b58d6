//! Runs honest programs of root in three pods on two GPUs: they allocate, share and exit in the
//! ways that the tests of `enforcement/` do.

use std::time::{Duration, Instant};

use crate::common::PATIENCE;
use crate::common::kubelet::Pod;
use crate::container::Container;
use crate::devices::{DeviceCgroups, gpu_nodes};
use crate::machine::Machine;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The memory that one process exports and another one imports.
const SHARED: u64 = 512 * MIB;
/// Of this many rounds, one ends with another image of the worker, and one kills the exporter while
/// the importer has its memory.
const ROUNDS_PER_EXEC: u64 = 5;
const ROUNDS_PER_KILL: u64 = 3;

/// The programs of each pod.
pub(crate) struct HonestPrograms<'a> {
    machine: &'a Machine,
    pods: [Pod; 3],
    /// Uses every kind of memory, forks, and executes itself again.
    worker: Container,
    /// Its children that may still live.
    children: Vec<u32>,
    exporter: Container,
    importer: Container,
    /// Starts processes that exit after a failed allocation.
    launcher: Container,
    rounds: u64,
    /// The last field: the cgroups are removed after their processes have ended.
    devices: DeviceCgroups,
}

impl<'a> HonestPrograms<'a> {
    pub(crate) async fn start(machine: &'a Machine) -> HonestPrograms<'a> {
        let mut devices = DeviceCgroups::v1(machine);
        let pods = [
            machine.admit("a", 8).await,
            machine.admit("b", 8).await,
            machine.admit("c", 8).await,
        ];
        let worker = start_client(machine, &mut devices, &pods[0]).await;
        let exporter = start_client(machine, &mut devices, &pods[1]).await;
        let importer = start_client(machine, &mut devices, &pods[1]).await;
        let launcher = Container::as_root(machine, &pods[2], "").await;
        devices.add_container(machine, &pods[2], &launcher);
        for program in [&worker, &exporter, &importer] {
            let nodes = gpu_nodes(program);
            assert_eq!(nodes, ["nvidia0", "nvidia1"], "as libcuda makes them");
        }
        HonestPrograms {
            machine,
            devices,
            pods,
            worker,
            children: Vec::new(),
            exporter,
            importer,
            launcher,
            rounds: 0,
        }
    }

    /// Runs each program for a moment.
    pub(crate) async fn run_round(&mut self) {
        self.rounds += 1;
        self.use_memory();
        self.fork();
        if self.rounds.is_multiple_of(ROUNDS_PER_EXEC) {
            assert_eq!(self.worker.call("exec"), "ready");
        }
        self.share_memory().await;
        self.crash();
    }

    fn use_memory(&mut self) {
        let worker = &mut self.worker;
        assert_eq!(worker.call(&format!("alloc {}", 9 * GIB)), "err 2");
        assert_eq!(worker.call(&format!("create {} 0 0", 9 * GIB)), "err 2");
        let pointer = worker.number(&format!("alloc {GIB}"));
        worker.ok(&format!("free {pointer}"));
        worker.ok(&format!("asyncchurn 20 {}", 64 * MIB));
        worker.ok("sync 0");
        worker.ok(&format!("sleepwake 3 {SHARED}"));
        let graph = worker.number(&format!("graph {}", 100 * MIB));
        let executable = worker.number(&format!("instantiate {graph}"));
        worker.ok(&format!("launchgraph {executable}"));
        worker.ok("sync 0");
        worker.ok(&format!("ungraph {executable}"));
        worker.ok("trim");
    }

    /// Forks a child that has all of its parent's memory.
    fn fork(&mut self) {
        self.children.retain(|child| {
            let is_alive = std::path::Path::new(&format!("/proc/{child}")).exists();
            if !is_alive {
                self.machine.remove_process(*child);
            }
            is_alive
        });
        let child = self.worker.number("linger 200") as u32;
        self.machine.adopt(&self.pods[0], child);
        self.children.push(child);
    }

    /// Exports memory to the importer. Now and then the exporter is killed before the importer
    /// releases the memory.
    async fn share_memory(&mut self) {
        let handle = self.create_shared().await;
        let exporter = &mut self.exporter;
        let descriptor = exporter.number(&format!("exporthandle {handle} 1"));
        let name = format!("bursar-{}-{}", self.importer.pid(), self.rounds);
        self.importer.send(&format!("recvfd {name}"));
        exporter.ok(&format!("sendfd {descriptor} {name}"));
        let received = self.importer.read();
        let received = received.strip_prefix("ok ").unwrap();
        let imported = self.importer.number(&format!("importhandle {received}"));
        if self.rounds.is_multiple_of(ROUNDS_PER_KILL) {
            let killed = self.exporter.pid();
            self.exporter = start_client(self.machine, &mut self.devices, &self.pods[1]).await;
            self.machine.remove_process(killed);
            // The driver lists the memory for no process meanwhile.
            tokio::time::sleep(Duration::from_millis(1_500)).await;
        } else {
            exporter.ok(&format!("releasehandle {handle}"));
            exporter.ok(&format!("close {descriptor}"));
        }
        self.importer.ok(&format!("releasehandle {imported}"));
        self.importer.ok(&format!("close {received}"));
    }

    /// Creates the exporter's memory. The pod has the memory of killed exporters until ten samples
    /// in a row prove it free. That takes seconds beside programs that allocate on a busy machine.
    async fn create_shared(&mut self) -> u64 {
        let start = Instant::now();
        loop {
            let answer = self.exporter.call(&format!("create {SHARED} 0 1"));
            if let Some(handle) = answer.strip_prefix("ok ") {
                return handle.split(' ').next().unwrap().parse().unwrap();
            }
            assert!(answer == "err 2" && start.elapsed() < PATIENCE, "{answer}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Lets a process fail to allocate and exit.
    fn crash(&mut self) {
        let milliseconds = [0, 20, 150][self.rounds as usize % 3];
        let child = self
            .launcher
            .number(&format!("child {} {milliseconds}", 9 * GIB)) as u32;
        self.machine.adopt(&self.pods[2], child);
        self.launcher.ok("crash");
        self.machine.remove_process(child);
    }

    /// Checks that all programs are there.
    pub(crate) fn check_alive(&mut self) {
        for program in [
            &mut self.worker,
            &mut self.exporter,
            &mut self.importer,
            &mut self.launcher,
        ] {
            assert!(program.is_alive());
        }
    }

    /// The number of rounds so far.
    pub(crate) fn rounds(&self) -> u64 {
        self.rounds
    }
}

/// Starts the program of the shim's tests in its container's device cgroup, with a context.
pub(crate) async fn start_client(
    machine: &Machine,
    devices: &mut DeviceCgroups,
    pod: &Pod,
) -> Container {
    let mut client = Container::client(machine, pod).await;
    devices.add_container(machine, pod, &client);
    assert_eq!(client.call("go"), "ready");
    client
}
