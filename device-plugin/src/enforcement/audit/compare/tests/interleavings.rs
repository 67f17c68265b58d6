//! Processes that come, use a GPU and end, in every order with the steps of an audit.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::enforcement::audit::collect::living;
use crate::procfs::tests::stat;

/// Few pids, so that they come again.
const PIDS: u32 = 4;
/// What each process takes, in MiB.
const TAKES: u64 = 600;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Born,
    /// It said hello, as the shim does before it makes a context.
    Member,
    /// The driver lists it.
    Context,
    /// Ended, and neither reaped nor known to the ledger for dead.
    Ended,
    /// The ledger knows that it ended. It may still be there as a zombie.
    Retired,
}

#[derive(Clone, Copy, Debug)]
struct Actor {
    start: u64,
    stage: Stage,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A process comes, or goes on to its next stage.
    Advance(u32),
    /// A process that ended is reaped.
    Reap(u32),
    /// A forked child holds what a process has, for as long as it likes.
    Hold(u32),
    LetGo(u32),
    /// The ledger asks the driver about the dead.
    Settle,
    /// The clock goes on.
    Tick,
}

/// The steps of an audit, in an order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Audit {
    Driver,
    Books,
    Identify,
}

const AS_IT_IS: [Audit; 3] = [Audit::Driver, Audit::Books, Audit::Identify];
const BOOKS_LAST: [Audit; 3] = [Audit::Driver, Audit::Identify, Audit::Books];

#[derive(Default)]
struct Node {
    now: u64,
    actors: BTreeMap<u32, Actor>,
    /// Pids of the dead that the ledger charges.
    retired: BTreeSet<u32>,
    held: BTreeSet<u32>,
    /// Pids of the dead that the driver lists, for somebody holds what they had.
    left: BTreeSet<u32>,
}

impl Node {
    fn step(&mut self, step: Step) {
        match step {
            Step::Advance(pid) => self.advance(pid),
            Step::Reap(pid) => {
                let gone = self.actors.get(&pid);
                if gone.is_some_and(|actor| actor.stage == Stage::Retired) {
                    self.actors.remove(&pid);
                }
            }
            Step::Hold(pid) => {
                let lives = self.actors.get(&pid);
                if lives.is_some_and(|actor| actor.stage == Stage::Context) {
                    self.held.insert(pid);
                }
            }
            Step::LetGo(pid) => {
                self.held.remove(&pid);
                self.left.remove(&pid);
            }
            Step::Settle => {
                let listed: BTreeSet<u32> = self.listed().into_iter().collect();
                self.retired.retain(|pid| listed.contains(pid));
            }
            Step::Tick => self.now += 1,
        }
    }

    fn advance(&mut self, pid: u32) {
        let Some(actor) = self.actors.get_mut(&pid) else {
            let (start, stage) = (self.now, Stage::Born);
            self.actors.insert(pid, Actor { start, stage });
            return;
        };
        actor.stage = match actor.stage {
            Stage::Born => Stage::Member,
            Stage::Member => {
                // A driver takes more than a tick to make a context.
                self.now += 1;
                Stage::Context
            }
            Stage::Context => {
                if self.held.remove(&pid) {
                    self.left.insert(pid);
                }
                Stage::Ended
            }
            Stage::Ended | Stage::Retired => {
                self.retired.insert(pid);
                Stage::Retired
            }
        }
    }

    fn listed(&self) -> Vec<u32> {
        let uses = |(pid, actor): (&u32, &Actor)| (actor.stage == Stage::Context).then_some(*pid);
        let living: BTreeSet<u32> = self.actors.iter().filter_map(uses).collect();
        living.union(&self.left).copied().collect()
    }

    fn books(&self) -> Books {
        let member = |(pid, actor): (&u32, &Actor)| {
            let is_member = matches!(actor.stage, Stage::Member | Stage::Context | Stage::Ended);
            is_member.then_some(MemberBooks {
                process: Process {
                    pid: *pid,
                    start: actor.start,
                },
                granted: vec![Bytes::mib(TAKES)],
                forged: false,
            })
        };
        let members: Vec<_> = self.actors.iter().filter_map(member).collect();
        let amount = |count: usize| Bytes::mib(TAKES * count as u64);
        let account = AccountBooks {
            granted: amount(members.len()),
            used: amount(members.len()),
            retired: amount(self.retired.len()),
            ..AccountBooks::unused(Account::Gpu(gpu()), Bytes::gib(16))
        };
        Books {
            pod: pod(1),
            home: Some("c".into()),
            members,
            retired: self.retired.iter().copied().collect(),
            ..Books::unused(1, vec![account])
        }
    }

    fn alive(&self, pid: u32, asked: u64) -> Option<Alive> {
        let actor = self.actors.get(&pid)?;
        let ended = matches!(actor.stage, Stage::Ended | Stage::Retired);
        let owner = Owner::Container {
            pod: pod(1),
            cgroup: "c".into(),
        };
        living(&stat(actor.start, ended), owner, asked)
    }
}

/// What an audit finds whose steps are done in that order, each before the program's step of that number.
fn found_among(steps: &[Step], order: [Audit; 3], at: [usize; 3]) -> Vec<Finding> {
    let mut node = Node::default();
    let (mut asked, mut listed, mut books) = (0, Vec::new(), None);
    let mut containers = Containers::default();
    let mut alive = BTreeMap::new();
    for number in 0..=steps.len() {
        for (audit, _) in order.into_iter().zip(at).filter(|(_, at)| *at == number) {
            match audit {
                Audit::Driver => {
                    containers.exited.clone_from(&node.retired);
                    asked = node.now;
                    listed = node.listed();
                }
                Audit::Books => books = Some(node.books()),
                Audit::Identify => {
                    let all = listed.iter();
                    alive = all.map(|pid| (*pid, node.alive(*pid, asked))).collect();
                }
            }
        }
        if let Some(step) = steps.get(number) {
            node.step(*step);
        }
    }
    let listed = listed.into_iter().map(|pid| Listed {
        pid,
        bytes: Some(Bytes::mib(TAKES)),
        alive: alive.remove(&pid).flatten(),
    });
    let books: Vec<Books> = books.into_iter().collect();
    judge(&[seen(listed.collect())], &books, &containers, &LIMITS).findings
}

fn step() -> impl Strategy<Value = Step> {
    let pid = 1..=PIDS;
    prop_oneof![
        6 => pid.clone().prop_map(Step::Advance),
        2 => pid.clone().prop_map(Step::Reap),
        1 => pid.clone().prop_map(Step::Hold),
        1 => pid.prop_map(Step::LetGo),
        1 => Just(Step::Settle),
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
    fn no_order_of_honest_lives_and_an_audit_is_a_finding((steps, at) in history()) {
        prop_assert_eq!(found_among(&steps, AS_IT_IS, at), []);
    }
}

#[test]
fn reused_pid_is_no_finding_when_its_memory_is_freed_meanwhile() {
    let dies_and_comes_again = [
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
    let is_freed = [Step::LetGo(1), Step::Settle];
    let steps: Vec<Step> = dies_and_comes_again.into_iter().chain(is_freed).collect();
    let (asked, end) = (dies_and_comes_again.len(), steps.len());
    assert_eq!(found_among(&steps, AS_IT_IS, [asked, end, end]), []);
}

#[test]
fn a_death_between_the_list_and_the_books_is_no_finding() {
    let uses = [
        Step::Tick,
        Step::Advance(1),
        Step::Advance(1),
        Step::Advance(1),
        Step::Tick,
    ];
    let dies = [
        Step::Advance(1),
        Step::Advance(1),
        Step::Reap(1),
        Step::Settle,
    ];
    let steps: Vec<Step> = uses.into_iter().chain(dies).collect();
    let (before, after) = (uses.len(), steps.len());
    assert_eq!(found_among(&steps, AS_IT_IS, [before, after, after]), []);
    // What was so once: who NVML's processes are was found out before the books were read.
    let accused = found_among(&steps, BOOKS_LAST, [before, before, after]);
    assert_eq!(accused.len(), 1, "the model can accuse: {accused:?}");
}
