//! Kills the agent before and after each rename, fsync and unlink: while pods start and end, and in
//! the start after that. The next agent must find a clean node.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::timeout;

use crate::common::{eventually, steps};
use crate::machine::{GPU, Machine};

/// The most time until the node is clean after the agent's death.
const CLEAN_WITHIN: Duration = Duration::from_secs(10);
/// The steps between two deaths in the default tier, which has no common factor with the two steps
/// of each call.
const STRIDE: usize = 11;
/// The fewest steps of a run and of a start. With fewer ones the library counts nothing.
const FEWEST: [usize; 2] = [30, 4];

/// When the agent dies.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// While pods start and end.
    Run,
    /// In its start on a node with pods.
    Start,
}

/// The node of one death.
struct Node {
    machine: Machine,
    library: PathBuf,
}

impl Node {
    async fn new(library: &Path) -> Node {
        Node {
            machine: Machine::new().await,
            library: library.to_owned(),
        }
    }

    /// Starts an agent that dies at this step of its own; 0 is never.
    fn start_agent(&mut self, dies_at: usize) {
        let mut command = self.machine.command();
        let file = self.machine.path("steps");
        steps::die_at(&mut command, &self.library, &file, dies_at);
        self.machine.start_agent_with(command);
    }

    /// Acts until the agent is dead. Returns whether it was.
    async fn until_dead(&self, act: impl AsyncFnOnce(&Machine) -> Option<()>) -> bool {
        steps::until_dead(|| self.machine.is_agent_running(), act(&self.machine)).await
    }
}

/// Two pods start, one of them ends, a third starts, and the second ends.
async fn pods_come_and_go(machine: &Machine) -> Option<()> {
    machine.kubelet.until_allocatable(GPU, 32).await;
    let first = machine.try_run("a", 10).await?;
    let second = machine.try_run("b", 12).await?;
    machine.end(&first);
    machine.try_run("c", 14).await?;
    machine.end(&second);
    let left = || machine.devices().len() == 1 && machine.sockets() == 1;
    eventually("one pod is left", left).await;
    Some(())
}

/// The next agent keeps the pods that run, releases the others, and offers all memory again.
async fn assert_clean(mut machine: Machine, description: &str) {
    machine.reap_agent();
    let found = timeout(CLEAN_WITHIN, machine.start_successor()).await;
    assert!(found.is_ok(), "{description}: it does not register");
    for pod in &machine.kubelet.pods() {
        if machine.kubelet.assigned(pod, "main", GPU).is_empty() {
            // The kubelet was about to admit it.
            machine.kubelet.pod_deleted(pod);
            continue;
        }
        fs::create_dir_all(machine.cgroup(pod)).unwrap();
        let started = timeout(CLEAN_WITHIN, machine.until_started(pod)).await;
        assert!(started.is_ok(), "{description}: {} does not start", pod.uid);
        machine.end(pod);
    }
    let nothing = || machine.devices().is_empty() && machine.sockets() == 0;
    let clean = timeout(CLEAN_WITHIN, eventually("nothing left", nothing)).await;
    assert!(clean.is_ok(), "{description}: {:?}", machine.devices());
    for name in ["whole", "other"] {
        let pod = machine.admit(name, 16).await;
        let started = timeout(CLEAN_WITHIN, machine.until_started(&pod)).await;
        assert!(started.is_ok(), "{description}: memory is lost");
    }
    // The next write of a record replaces its temporary file. Those in the state folder are rare.
    for folder in ["run", "cdi"] {
        let left = steps::temporary_files(&machine.path(folder));
        assert!(left.is_empty(), "{description}: {left:?}");
    }
}

/// Lets the agent die at a step. Returns the steps of an agent that does not die.
async fn die_at(library: &Path, phase: Phase, step: usize) -> Option<usize> {
    let mut node = Node::new(library).await;
    let died = match phase {
        Phase::Run => {
            node.start_agent(step);
            node.until_dead(pods_come_and_go).await
        }
        Phase::Start => {
            node.machine.start_agent();
            pods_come_and_go(&node.machine).await.unwrap();
            node.machine.kill_agent();
            let before = node.machine.registrations();
            node.start_agent(step);
            node.until_dead(async |machine| {
                machine.until_registered(before).await;
                Some(())
            })
            .await
        }
    };
    let steps = steps::count(&node.machine.path("steps"));
    if !died {
        node.machine.kill_agent();
        return Some(steps);
    }
    assert_clean(node.machine, &format!("{phase:?}, step {step}")).await;
    None
}

async fn die_at_each(stride: usize) {
    let folder = tempfile::tempdir().unwrap();
    let library = steps::library(folder.path());
    for (phase, fewest) in [Phase::Run, Phase::Start].into_iter().zip(FEWEST) {
        let all = die_at(&library, phase, 0).await.expect("it does not die");
        assert!(all >= fewest, "{phase:?}: only {all} steps");
        let mut deaths = 0;
        for step in (1..=all).step_by(stride) {
            deaths += usize::from(die_at(&library, phase, step).await.is_none());
        }
        println!("{phase:?}: {all} steps, {deaths} deaths");
        assert!(
            deaths * stride * 2 >= all,
            "{phase:?}: only {deaths} deaths"
        );
    }
}

#[tokio::test]
async fn agent_that_dies_at_a_step_leaves_a_clean_node() {
    die_at_each(STRIDE).await;
}

#[tokio::test]
#[ignore = "takes minutes"]
async fn agent_that_dies_at_any_step_leaves_a_clean_node() {
    for _ in 0..3 {
        die_at_each(1).await;
    }
}
