//! Kills the agent before and after each rename, fsync and unlink: while pods start and end, and in
//! the start after that. The next agent must find a clean node.

use std::path::{Path, PathBuf};

use crate::common::{eventually, steps};
use crate::machine::{GPU, Machine};

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
    let description = format!("{phase:?}, step {step}");
    node.machine.replace_dead_agent(&description).await;
    node.machine.assert_clean(&description).await;
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
