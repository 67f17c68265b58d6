//! Drives one program of the crowd, through restarts and execs.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::judge::Judge;
use crate::rng::Rng;
use crate::room::{Container, Program};
use crate::times::Times;

/// Calls for one line: a kill during them loses their count.
const BATCH: u64 = 500;

/// A program is killed at most this long after a batch began, usually within the batch.
const KILL_WITHIN: Duration = Duration::from_millis(20);

/// A program is killed at most this long after its start, usually within its handshake.
const KILL_NEWBORN_WITHIN: Duration = Duration::from_millis(30);

/// The longest time that a program is stopped for.
const STOP: Duration = Duration::from_millis(200);

/// More than any call may take: the shim waits 10 s for a restarting agent, and only once. Each
/// message of the call waits for the messages of all other programs before it.
const LONGEST_CALL: Duration = Duration::from_secs(30);

/// After this time a missing answer counts as a hang. Where the quota is used up, the agent answers
/// at most one message of the container each millisecond. So a batch of each program takes 32 s.
pub(crate) const HANGS: Duration = Duration::from_secs(150);

/// The number of operations of all programs.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) operations: u64,
    pub(crate) denied: u64,
    pub(crate) kills: u64,
    pub(crate) execs: u64,
    pub(crate) exits: u64,
    pub(crate) stops: u64,
    pub(crate) times: Times,
}

/// A place in the crowd.
#[derive(Debug)]
pub(crate) struct Life {
    rng: Rng,
    share: u64,
    program: Option<Program>,
    /// The memory that the program holds, by its own count.
    pub(crate) used: u64,
}

/// The facts that the crowd knows about a place while its program works.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    pid: AtomicU32,
    since: Mutex<Option<Instant>>,
}

impl Watched {
    /// Kills the program if it has not answered for too long.
    pub(crate) fn end_if_it_hangs(&self, judge: &Judge) {
        let mut since = self.since.lock().unwrap();
        if since.is_some_and(|since| since.elapsed() > HANGS) {
            *since = None;
            let pid = self.pid.load(Ordering::Relaxed);
            judge.violation(format!("program {pid} hangs"));
            // SAFETY: the thread that waits for the answer has not reaped the child yet.
            unsafe { libc::kill(pid as i32, libc::SIGKILL) };
        }
    }
}

/// The tools of a place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene<'a> {
    pub(crate) container: &'a Container,
    pub(crate) judge: &'a Judge,
    pub(crate) counts: &'a Mutex<Counts>,
    pub(crate) watched: &'a Watched,
}

impl Life {
    /// Creates a place without a program.
    pub(crate) fn new(rng: Rng, share: u64) -> Life {
        Life {
            rng,
            share,
            program: None,
            used: 0,
        }
    }

    /// Returns the program, and starts one where there is none.
    pub(crate) fn program(&mut self, scene: Scene<'_>) -> &mut Program {
        if self.program.is_none() {
            self.used = 0;
            let mut program = scene.container.start(true);
            scene.watch(&program);
            let started = program.begin();
            scene.rest();
            scene.judge.hold(started.is_ok(), || {
                format!("a program starts with {started:?}")
            });
            self.program = Some(program);
        }
        self.program.as_mut().unwrap()
    }

    /// Sends a line to the program and returns the answer.
    pub(crate) fn ask(&mut self, scene: Scene<'_>, line: &str) -> Option<String> {
        self.tell(scene, line);
        self.hear(scene)
    }

    /// Sends a line to the program, and starts the time limit of its answer.
    pub(crate) fn tell(&mut self, scene: Scene<'_>, line: &str) {
        let program = self.program(scene);
        scene.watch(program);
        program.tell(line);
    }

    /// Returns the answer.
    pub(crate) fn hear(&mut self, scene: Scene<'_>) -> Option<String> {
        let answer = self.program(scene).hear();
        scene.rest();
        answer
    }

    /// Makes the next random step.
    pub(crate) fn turn(&mut self, scene: Scene<'_>) {
        match self.rng.below(100) {
            0..3 => self.kill_a_newborn(scene),
            3..13 => self.kill(scene),
            13..17 => self.exec(scene),
            17..20 => self.exit(scene),
            20..22 => self.batch(scene, true),
            _ => self.batch(scene, false),
        }
    }

    fn batch(&mut self, scene: Scene<'_>, stop: bool) {
        let line = self.storm();
        let time = self.rng.time(STOP);
        self.tell(scene, &line);
        if stop {
            std::thread::sleep(time / 10);
            self.program(scene).signal(libc::SIGSTOP);
            std::thread::sleep(time);
            self.program(scene).signal(libc::SIGCONT);
        }
        let answer = self.hear(scene);
        let numbers: Option<Vec<u64>> = answer.as_deref().and_then(|answer| {
            let words = answer.strip_prefix("ok ")?.split(' ');
            words.map(|word| word.parse().ok()).collect()
        });
        let Some([denied, used, longest, buckets @ ..]) = numbers.as_deref() else {
            scene.judge.violation(format!("{line} answered {answer:?}"));
            self.end();
            return;
        };
        self.used = *used;
        let stopped = if stop { time } else { Duration::ZERO };
        scene
            .judge
            .in_time("a call", *longest, LONGEST_CALL + stopped);
        let mut counts = scene.counts.lock().unwrap();
        counts.operations += BATCH;
        counts.denied += denied;
        if stop {
            counts.stops += 1;
        } else {
            counts.times.add(*longest, buckets);
        }
    }

    fn kill(&mut self, scene: Scene<'_>) {
        let (line, time) = (self.storm(), self.rng.time(KILL_WITHIN));
        self.program(scene).tell(&line);
        std::thread::sleep(time);
        self.end();
        scene.counts.lock().unwrap().kills += 1;
    }

    fn kill_a_newborn(&mut self, scene: Scene<'_>) {
        self.end();
        let mut program = scene.container.start(true);
        program.tell("begin");
        std::thread::sleep(self.rng.time(KILL_NEWBORN_WITHIN));
        program.kill();
        scene.counts.lock().unwrap().kills += 2;
    }

    fn exec(&mut self, scene: Scene<'_>) {
        self.tell(scene, "exec");
        let started = self.program(scene).begin();
        scene.rest();
        self.used = 0;
        scene
            .judge
            .hold(started.is_ok(), || format!("an exec answered {started:?}"));
        scene.counts.lock().unwrap().execs += 1;
    }

    fn exit(&mut self, scene: Scene<'_>) {
        if let Some(program) = self.program.take() {
            scene.watch(&program);
            program.leave();
            scene.rest();
            scene.counts.lock().unwrap().exits += 1;
        }
    }

    fn end(&mut self) {
        if let Some(program) = self.program.take() {
            program.kill();
        }
    }

    fn storm(&mut self) -> String {
        format!("storm {} {BATCH} {}", self.rng.below(1 << 31), self.share)
    }
}

impl Scene<'_> {
    fn watch(&self, program: &Program) {
        self.watched.pid.store(program.pid(), Ordering::Relaxed);
        *self.watched.since.lock().unwrap() = Some(Instant::now());
    }

    fn rest(&self) {
        *self.watched.since.lock().unwrap() = None;
    }
}
