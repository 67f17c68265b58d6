//! Interleaves processes that start, use a GPU and exit with the steps of an audit.

use std::collections::{BTreeMap, BTreeSet};

use bursar_host::testing::stat;
use proptest::prelude::*;

use super::*;
use crate::audit::collect::live_process;

/// Few pids, so that they are reused.
const PIDS: u32 = 4;
const PROCESS_MIB: u64 = 600;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Started,
    /// The shim has connected, as it does before it makes a context.
    HasSession,
    /// The driver lists the process.
    HasContext,
    /// The process has exited; it is not reaped, and the accounts still have its session.
    Ended,
    /// The accounts know that the process has exited; it may still be a zombie.
    ExitKnown,
}

#[derive(Clone, Copy, Debug)]
struct FakeProcess {
    start: u64,
    stage: Stage,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A process starts, or reaches its next stage.
    Advance(u32),
    /// The parent reaps an exited process.
    Reap(u32),
    /// A forked child holds the memory of a process until `Release`.
    Hold(u32),
    Release(u32),
    /// The agent asks the driver which exited processes it still lists.
    Reclaim,
    /// The clock advances.
    Tick,
}

/// The steps of an audit, in an order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Audit {
    Driver,
    Accounts,
    Identify,
}

const AUDIT_ORDER: [Audit; 3] = [Audit::Driver, Audit::Accounts, Audit::Identify];
const ORDER_WITH_ACCOUNTS_LAST: [Audit; 3] = [Audit::Driver, Audit::Identify, Audit::Accounts];

#[derive(Default)]
struct FakeNode {
    now: u64,
    actors: BTreeMap<u32, FakeProcess>,
    /// Pids of exited processes that the accounts charge.
    exited: BTreeSet<u32>,
    held: BTreeSet<u32>,
    /// Pids of exited processes that the driver lists, since a child holds their memory.
    left: BTreeSet<u32>,
}

impl FakeNode {
    fn step(&mut self, step: Step) {
        match step {
            Step::Advance(pid) => self.advance(pid),
            Step::Reap(pid) => {
                let actor = self.actors.get(&pid);
                if actor.is_some_and(|actor| actor.stage == Stage::ExitKnown) {
                    self.actors.remove(&pid);
                }
            }
            Step::Hold(pid) => {
                let actor = self.actors.get(&pid);
                if actor.is_some_and(|actor| actor.stage == Stage::HasContext) {
                    self.held.insert(pid);
                }
            }
            Step::Release(pid) => {
                self.held.remove(&pid);
                self.left.remove(&pid);
            }
            Step::Reclaim => {
                let listed: BTreeSet<u32> = self.listed().into_iter().collect();
                self.exited.retain(|pid| listed.contains(pid));
            }
            Step::Tick => self.now += 1,
        }
    }

    fn advance(&mut self, pid: u32) {
        let Some(actor) = self.actors.get_mut(&pid) else {
            let (start, stage) = (self.now, Stage::Started);
            self.actors.insert(pid, FakeProcess { start, stage });
            return;
        };
        actor.stage = match actor.stage {
            Stage::Started => Stage::HasSession,
            Stage::HasSession => {
                // The driver takes more than a tick to make a context.
                self.now += 1;
                Stage::HasContext
            }
            Stage::HasContext => {
                if self.held.remove(&pid) {
                    self.left.insert(pid);
                }
                Stage::Ended
            }
            Stage::Ended | Stage::ExitKnown => {
                self.exited.insert(pid);
                Stage::ExitKnown
            }
        }
    }

    fn listed(&self) -> Vec<u32> {
        let uses =
            |(pid, actor): (&u32, &FakeProcess)| (actor.stage == Stage::HasContext).then_some(*pid);
        let living: BTreeSet<u32> = self.actors.iter().filter_map(uses).collect();
        living.union(&self.left).copied().collect()
    }

    fn usage(&self) -> ContainerUsage {
        let member = |(pid, actor): (&u32, &FakeProcess)| {
            let is_member = matches!(
                actor.stage,
                Stage::HasSession | Stage::HasContext | Stage::Ended
            );
            is_member.then_some(ProcessCredit {
                process: Process {
                    pid: *pid,
                    start: actor.start,
                },
                granted: vec![Bytes::mib(PROCESS_MIB)],
                tampered: false,
            })
        };
        let members: Vec<_> = self.actors.iter().filter_map(member).collect();
        let amount = |count: usize| Bytes::mib(PROCESS_MIB * count as u64);
        let account = AccountBalance {
            granted: amount(members.len()),
            used: amount(members.len()),
            exited: amount(self.exited.len()),
            ..AccountBalance::empty(Account::Gpu(gpu()), Bytes::gib(16))
        };
        ContainerUsage {
            pod: pod(1),
            cgroup: Some("c".into()),
            processes: members,
            exited_pids: self.exited.iter().copied().collect(),
            ..ContainerUsage::empty(1, vec![account])
        }
    }

    fn alive(&self, pid: u32, requested_at: u64) -> Option<LiveProcess> {
        let actor = self.actors.get(&pid)?;
        let ended = matches!(actor.stage, Stage::Ended | Stage::ExitKnown);
        let owner = ProcessOwner::Container {
            pod: pod(1),
            cgroup: "c".into(),
        };
        live_process(&stat(actor.start, ended), owner, requested_at)
    }
}

/// The findings of an audit whose steps, in that order, come before the given steps of the program.
fn findings_among(steps: &[Step], order: [Audit; 3], at: [usize; 3]) -> Vec<Finding> {
    let mut node = FakeNode::default();
    let (mut requested_at, mut listed, mut usage) = (0, Vec::new(), None);
    let mut containers = AttestedState::default();
    let mut alive = BTreeMap::new();
    for number in 0..=steps.len() {
        for (audit, _) in order.into_iter().zip(at).filter(|(_, at)| *at == number) {
            match audit {
                Audit::Driver => {
                    containers.exited_pids.clone_from(&node.exited);
                    requested_at = node.now;
                    listed = node.listed();
                }
                Audit::Accounts => usage = Some(node.usage()),
                Audit::Identify => {
                    let all = listed.iter();
                    alive = all
                        .map(|pid| (*pid, node.alive(*pid, requested_at)))
                        .collect();
                }
            }
        }
        if let Some(step) = steps.get(number) {
            node.step(*step);
        }
    }
    let listed = listed.into_iter().map(|pid| ListedProcess {
        pid,
        bytes: Some(Bytes::mib(PROCESS_MIB)),
        sm_percent: None,
        live: alive.remove(&pid).flatten(),
        is_gone: false,
    });
    let usage: Vec<ContainerUsage> = usage.into_iter().collect();
    compare_accounts(&[sample(listed.collect())], &usage, &containers, &LIMITS).findings
}

fn step() -> impl Strategy<Value = Step> {
    let pid = 1..=PIDS;
    prop_oneof![
        6 => pid.clone().prop_map(Step::Advance),
        2 => pid.clone().prop_map(Step::Reap),
        1 => pid.clone().prop_map(Step::Hold),
        1 => pid.prop_map(Step::Release),
        1 => Just(Step::Reclaim),
        2 => Just(Step::Tick),
    ]
}

fn history() -> impl Strategy<Value = (Vec<Step>, [usize; 3])> {
    prop::collection::vec(step(), 1..60).prop_flat_map(|steps| {
        let places = prop::array::uniform3(0..=steps.len());
        let in_order = places.prop_map(|mut places| {
            places.sort_unstable();
            places
        });
        (Just(steps), in_order)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]
    #[test]
    fn honest_processes_are_no_finding_in_any_interleaving((steps, at) in history()) {
        prop_assert_eq!(findings_among(&steps, AUDIT_ORDER, at), []);
    }
}

#[test]
fn reused_pid_is_no_finding_when_its_memory_is_freed_meanwhile() {
    let pid_is_reused = [
        Step::Advance(1),
        Step::Advance(1),
        Step::Advance(1),
        Step::Hold(1),
        Step::Advance(1),
        Step::Advance(1),
        Step::Reap(1),
        Step::Advance(1),
        Step::Tick,
    ];
    let frees = [Step::Release(1), Step::Reclaim];
    let steps: Vec<Step> = pid_is_reused.into_iter().chain(frees).collect();
    let (requested_at, end) = (pid_is_reused.len(), steps.len());
    assert_eq!(
        findings_among(&steps, AUDIT_ORDER, [requested_at, end, end]),
        []
    );
}

#[test]
fn exit_between_nvml_and_accounts_is_no_finding() {
    let uses = [
        Step::Tick,
        Step::Advance(1),
        Step::Advance(1),
        Step::Advance(1),
        Step::Tick,
    ];
    let exits = [
        Step::Advance(1),
        Step::Advance(1),
        Step::Reap(1),
        Step::Reclaim,
    ];
    let steps: Vec<Step> = uses.into_iter().chain(exits).collect();
    let (before, after) = (uses.len(), steps.len());
    assert_eq!(
        findings_among(&steps, AUDIT_ORDER, [before, after, after]),
        []
    );
    // In the wrong order, with processes identified before the accounts are read, the audit
    // accuses.
    let accused = findings_among(&steps, ORDER_WITH_ACCOUNTS_LAST, [before, before, after]);
    assert_eq!(accused.len(), 1, "the model can accuse: {accused:?}");
}
