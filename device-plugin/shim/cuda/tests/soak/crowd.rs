//! Runs all programs at once, and stops them now and then to compare them with the model.
//!
//! The model is small: each program knows what it holds, in whole units. The agent's records, the
//! driver and the quota must agree with the sum, to the unit.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::Plan;
use crate::agent::{Agent, CROWD, CrowdAccount, NEIGHBOUR};
use crate::judge::Judge;
use crate::life::{Counts, Life, Scene, Watched};
use crate::rng::Rng;
use crate::room::{CONTEXT, Container, Program, Room};
use crate::times::Times;

/// The crowd's quota.
const QUOTA: u64 = 48 << 30;

/// The driver takes multiples of this without rounding.
const CHUNK: u64 = 2 << 20;

/// Descriptors that the agent has open besides a socket, a pidfd and a credit page a process: its
/// runtime's, the listeners, the simulated driver's files.
const DESCRIPTORS: u64 = 48;

/// Memory is discharged within this time after it is free, on a busy machine.
const RELEASED_WITHIN: Duration = Duration::from_secs(5);

/// How often the driver's figures are read.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The most that 99 of 100 of the neighbour's calls may take, each a round trip to the agent.
const NEIGHBOUR_WITHIN: Duration = Duration::from_millis(500);

/// The result of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    plan: Plan,
    took: Duration,
    counts: Counts,
    restarts: u32,
    looks: u64,
    neighbour: Times,
    pub(crate) violations: Vec<String>,
}

impl Outcome {
    /// Returns the result as one line.
    pub(crate) fn closing_line(&self) -> String {
        let Counts {
            operations,
            denied,
            kills,
            execs,
            exits,
            stops,
            times,
        } = &self.counts;
        format!(
            "soak: {operations} operations by {} processes in {:.0?} (seed {}): {denied} denied, {kills} kills, \
             {execs} execs, {exits} exits, {stops} stops, {} agent restarts, {} looks, {} violations; calls {}; \
             neighbour {}",
            self.plan.processes,
            self.took,
            self.plan.seed,
            self.restarts,
            self.looks,
            self.violations.len(),
            times.line(),
            self.neighbour.line(),
        )
    }
}

/// State that all threads of a run share.
struct Run {
    plan: Plan,
    room: Room,
    container: Container,
    judge: Judge,
    counts: Mutex<Counts>,
    places: Vec<(Mutex<Life>, Watched)>,
    /// Locked for writing while every program must stand still.
    gate: RwLock<()>,
    agent: Mutex<Agent>,
    neighbours: Vec<u32>,
    /// The charge of a program without allocations: its context, where contexts are charged.
    idle: AtomicU64,
    /// Incremented with each end and each start of an agent: odd while there is none.
    agents: AtomicU64,
    done: AtomicBool,
}

/// Ends the run when its thread panics: the others would wait for that thread's operations.
struct EndOnPanic<'a>(&'a AtomicBool);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// Runs the whole plan.
pub(crate) fn run(plan: Plan) -> Outcome {
    let room = Room::new();
    let container = room.container(CROWD);
    let next_door = room.container(NEIGHBOUR);
    let agent = Agent::start(room.path(), QUOTA);
    let neighbours = [next_door.start(false), next_door.start(false)];
    let share = QUOTA / plan.processes as u64;
    let life = |number| Life::new(Rng::of(plan.seed, number), share);
    let run = Run {
        plan,
        container,
        judge: Judge::new(),
        counts: Mutex::default(),
        places: (0..plan.processes as u64)
            .map(|number| (Mutex::new(life(number)), Watched::default()))
            .collect(),
        gate: RwLock::new(()),
        agent: Mutex::new(agent),
        neighbours: neighbours.iter().map(Program::pid).collect(),
        idle: AtomicU64::new(0),
        agents: AtomicU64::new(0),
        done: AtomicBool::new(false),
        room,
    };
    run.learn_what_idle_programs_use();
    let start = Instant::now();
    let (restarts, looks, neighbour) = thread::scope(|scope| {
        let _end = EndOnPanic(&run.done);
        let neighbour = scope.spawn(|| {
            let _end = EndOnPanic(&run.done);
            run.neighbour(neighbours)
        });
        let looks = scope.spawn(|| {
            let _end = EndOnPanic(&run.done);
            run.look()
        });
        let restarts = scope.spawn(|| {
            let _end = EndOnPanic(&run.done);
            run.restart_the_agent()
        });
        for (life, watched) in &run.places {
            let scene = run.scene(watched);
            let run = &run;
            scope.spawn(move || {
                let _end = EndOnPanic(&run.done);
                while !run.is_done() {
                    let _open = run.gate.read().unwrap();
                    life.lock().unwrap().turn(scene);
                }
            });
        }
        run.stop_now_and_then();
        run.done.store(true, Ordering::Relaxed);
        (
            restarts.join().unwrap(),
            looks.join().unwrap(),
            neighbour.join().unwrap(),
        )
    });
    Outcome {
        plan,
        took: start.elapsed(),
        counts: run.counts.into_inner().unwrap(),
        restarts,
        looks,
        neighbour,
        violations: run.judge.violations(),
    }
}

impl Run {
    fn scene<'a>(&'a self, watched: &'a Watched) -> Scene<'a> {
        Scene {
            container: &self.container,
            judge: &self.judge,
            counts: &self.counts,
            watched,
        }
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Relaxed)
    }

    fn operations(&self) -> u64 {
        self.counts.lock().unwrap().operations
    }

    fn restarts(&self) -> u32 {
        (self.agents.load(Ordering::SeqCst) / 2) as u32
    }

    fn learn_what_idle_programs_use(&self) {
        let mut agent = self.agent.lock().unwrap();
        for (life, watched) in &self.places {
            let mut life = life.lock().unwrap();
            let answer = life.ask(self.scene(watched), "info");
            self.judge.hold(answer.is_some(), || {
                "a program without memory is gone".to_owned()
            });
        }
        let used = agent.account().used;
        self.idle
            .store(used / self.places.len() as u64, Ordering::Relaxed);
    }

    /// Waits until so many operations and restarts were done.
    fn wait_for(&self, operations: u64, restarts: u32) {
        let is_so = || self.operations() >= operations && self.restarts() >= restarts;
        while !is_so() && !self.is_done() {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the agent and starts another, evenly over the run.
    fn restart_the_agent(&self) -> u32 {
        let mut rng = Rng::of(self.plan.seed, 1 << 32);
        let part = self.plan.operations / u64::from(self.plan.restarts + 1);
        while self.restarts() < self.plan.restarts && !self.is_done() {
            self.wait_for(part * u64::from(self.restarts() + 1), 0);
            thread::sleep(rng.time(Duration::from_millis(20)));
            let away = rng.time(Duration::from_millis(40));
            let _open = self.gate.read().unwrap();
            let mut agent = self.agent.lock().unwrap();
            self.agents.fetch_add(1, Ordering::SeqCst);
            agent.end();
            thread::sleep(away);
            *agent = Agent::start(self.room.path(), QUOTA);
            // The agent answers once it serves.
            agent.account();
            self.agents.fetch_add(1, Ordering::SeqCst);
        }
        self.restarts()
    }

    /// Reads what the driver charges to the crowd, continuously. Returns the number of reads.
    fn look(&self) -> u64 {
        let sim = self.room.sim();
        let mut looks = 0;
        while !self.is_done() {
            let charged = self.charged(&sim);
            self.judge.hold(charged <= QUOTA, || {
                format!("the driver charges {charged} bytes to the crowd, whose quota is {QUOTA}")
            });
            for (_, watched) in &self.places {
                watched.end_if_it_hangs(&self.judge);
            }
            looks += 1;
            thread::sleep(LOOK_EVERY);
        }
        looks
    }

    /// Returns what the driver charges to the crowd, without its contexts.
    fn charged(&self, sim: &bursar_sim_state::Sim) -> u64 {
        let processes = sim.usage(0).processes;
        let crowd = processes
            .iter()
            .filter(|process| !self.neighbours.contains(&process.pid));
        crowd
            .map(|process| process.bytes.saturating_sub(CONTEXT))
            .sum()
    }

    /// Makes calls that need the agent, from another container. Returns their times while there was
    /// an agent.
    fn neighbour(&self, [mut first, mut second]: [Program; 2]) -> Times {
        // With a sibling, every query of free memory asks the agent.
        for program in [&mut first, &mut second] {
            let started = program.begin();
            self.judge.hold(started.is_ok(), || {
                format!("the neighbour starts with {started:?}")
            });
        }
        let mut times = Times::default();
        while !self.is_done() {
            let (agent, start) = (self.agents.load(Ordering::SeqCst), Instant::now());
            let answer = first.numbers("info");
            // Without an agent the shim alone answers, so that time does not count.
            if agent % 2 == 0 && agent == self.agents.load(Ordering::SeqCst) {
                times.note(start.elapsed().as_nanos() as u64);
            }
            self.judge.hold(answer.is_ok(), || {
                format!("the neighbour's info answered {answer:?}")
            });
            thread::sleep(Duration::from_millis(5));
        }
        let most = Duration::from_nanos(times.all_but_one_in(100));
        self.judge.hold(most <= NEIGHBOUR_WITHIN, || {
            format!("one in a hundred of the neighbour's calls took more than {most:?}")
        });
        times
    }

    /// Lets the crowd work, and stops it now and then to compare it with the model.
    fn stop_now_and_then(&self) {
        let stops = self.plan.stops;
        for stop in 1..=stops {
            // The last stop waits for the last agent too.
            let restarts = if stop == stops { self.plan.restarts } else { 0 };
            self.wait_for(self.plan.operations * stop / stops, restarts);
            let _closed = self.gate.write().unwrap();
            self.hold_against_the_model();
        }
    }

    /// Compares the agent's records, the driver and the model while every program stands still.
    /// Then checks that exactly what fits is granted.
    fn hold_against_the_model(&self) {
        let sim = self.room.sim();
        let mut agent = self.agent.lock().unwrap();
        let mut places: Vec<_> = self
            .places
            .iter()
            .map(|(life, _)| life.lock().unwrap())
            .collect();
        for (life, (_, watched)) in places.iter_mut().zip(&self.places) {
            // Only now the agent learns of an exec.
            life.ask(self.scene(watched), "info");
        }
        self.wait_for_the_dead(&sim, &mut agent);
        let model: u64 = places.iter().map(|life| life.used).sum();
        let idle = self.idle.load(Ordering::Relaxed) * places.len() as u64;
        let account = self.account_that_agrees(&mut agent, &mut places, model + idle);
        self.judge.hold(account.over == 0, || {
            format!(
                "in {} of {} reads the account was above the quota",
                account.over, account.reads
            )
        });
        let most = DESCRIPTORS + 3 * account.processes;
        self.judge.hold(account.descriptors <= most, || {
            format!("the agent has more than {most} descriptors open: {account:?}")
        });
        let charged = self.charged(&sim);
        self.judge.hold(charged == model, || {
            format!("the driver charges {charged} bytes to the crowd, whose programs hold {model}")
        });
        let free = QUOTA.saturating_sub(account.used) / CHUNK * CHUNK;
        self.all_that_is_free(&mut places, free);
        for parts in [13, 200] {
            self.race(&mut places, free, free / parts / CHUNK * CHUNK);
        }
    }

    /// Waits until the memory of dead programs is discharged, soon after the driver has it back.
    fn wait_for_the_dead(&self, sim: &bursar_sim_state::Sim, agent: &mut Agent) {
        let living = self.places.len() + self.neighbours.len();
        let start = Instant::now();
        while sim.usage(0).processes.len() > living && start.elapsed() < Duration::from_secs(5) {
            thread::sleep(Duration::from_millis(5));
        }
        let free = Instant::now().max(agent.since);
        loop {
            let account = agent.account();
            if account.exited == 0 {
                return;
            }
            if free.elapsed() > RELEASED_WITHIN {
                self.judge.violation(format!(
                    "memory of the dead is free and not released: {account:?}"
                ));
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the agent's records, once every program has connected to this agent.
    fn account_that_agrees(
        &self,
        agent: &mut Agent,
        places: &mut [std::sync::MutexGuard<'_, Life>],
        model: u64,
    ) -> CrowdAccount {
        let start = Instant::now();
        loop {
            for (life, (_, watched)) in places.iter_mut().zip(&self.places) {
                let answer = life.program(self.scene(watched)).numbers("info");
                self.judge
                    .hold(answer.is_ok(), || format!("info answered {answer:?}"));
            }
            let account = agent.account();
            if account.used == model && account.processes == self.places.len() as u64 {
                return account;
            }
            if start.elapsed() > Duration::from_secs(3) {
                self.judge.violation(format!(
                    "the programs hold {model} bytes, and the account is {account:?}"
                ));
                return account;
            }
        }
    }

    /// Asserts that one program gets all free memory, though others have idle credit, and that no
    /// program gets more.
    fn all_that_is_free(&self, places: &mut [std::sync::MutexGuard<'_, Life>], free: u64) {
        let (first, second) = (0, 1 % places.len());
        let mut ask = |who: usize, line: String| {
            let life = places.get_mut(who).zip(self.places.get(who));
            life.and_then(|(life, (_, watched))| life.ask(self.scene(watched), &line))
        };
        let Some(more) = (free > 0).then_some(free) else {
            return;
        };
        let answer = ask(first, format!("alloc {more}"));
        let pointer = answer
            .as_deref()
            .and_then(|answer| answer.strip_prefix("ok "));
        let Some(pointer) = pointer else {
            self.judge.violation(format!(
                "{more} bytes are free, and asked for they are {answer:?}"
            ));
            return;
        };
        let over = ask(second, format!("alloc {CHUNK}"));
        self.judge.hold(over.as_deref() == Some("err 2"), || {
            format!("nothing is free, and a chunk more is {over:?}")
        });
        let freed = ask(first, format!("free {pointer}"));
        self.judge.hold(freed.as_deref() == Some("ok"), || {
            format!("a free is {freed:?}")
        });
    }

    /// Asserts that racing programs get exactly the parts that fit.
    fn race(&self, places: &mut [std::sync::MutexGuard<'_, Life>], free: u64, part: u64) {
        if part == 0 {
            return;
        }
        let mut all = |line: &str| -> Vec<Option<String>> {
            let mut all: Vec<_> = places.iter_mut().zip(&self.places).collect();
            for (life, (_, watched)) in &mut all {
                life.tell(self.scene(watched), line);
            }
            all.iter_mut()
                .map(|(life, (_, watched))| life.hear(self.scene(watched)))
                .collect()
        };
        let answers = all(&format!("grab {part}"));
        let got: Option<u64> = answers
            .iter()
            .map(|answer| {
                let (count, code) = answer.as_deref()?.strip_prefix("ok ")?.split_once(' ')?;
                (code == "2").then_some(())?;
                count.parse::<u64>().ok()
            })
            .sum();
        self.judge.hold(got == Some(free / part), || {
            format!(
                "{} parts of {part} bytes fit, and those who raced got {got:?}",
                free / part
            )
        });
        all("give");
    }
}
