//! What one program of the crowd does, life after life.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::dice::Dice;
use crate::judge::Judge;
use crate::room::{Container, Program};
use crate::times::Times;

/// Calls for one line: a kill in the middle of them loses their count.
const BATCH: u64 = 500;

/// A program is killed this long after a batch began, at most: within it, as a rule.
const KILL_WITHIN: Duration = Duration::from_millis(20);

/// A program is killed this long after its start, at most: within its hello, as a rule.
const KILL_NEWBORN_WITHIN: Duration = Duration::from_millis(30);

/// The longest that a program is stopped for.
const STOP: Duration = Duration::from_millis(200);

/// What no call may take: the shim waits 10 s for an agent that is being replaced, and once only.
const LONGEST_CALL: Duration = Duration::from_secs(15);

/// After this, an answer does not come any more.
pub(crate) const HANGS: Duration = Duration::from_secs(30);

/// What was done by all.
#[derive(Debug, Default)]
pub(crate) struct Tally {
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
    dice: Dice,
    share: u64,
    program: Option<Program>,
    /// What the program holds, by its own account.
    pub(crate) used: u64,
}

/// What the crowd knows about a place while its program works.
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
            // SAFETY: whoever waits for its answer has not waited for the child yet.
            unsafe { libc::kill(pid as i32, libc::SIGKILL) };
        }
    }
}

/// What a place works with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene<'a> {
    pub(crate) container: &'a Container,
    pub(crate) judge: &'a Judge,
    pub(crate) tally: &'a Mutex<Tally>,
    pub(crate) watched: &'a Watched,
}

impl Life {
    /// A place without a program yet.
    pub(crate) fn new(dice: Dice, share: u64) -> Life {
        Life {
            dice,
            share,
            program: None,
            used: 0,
        }
    }

    /// The program, which is started where there is none.
    pub(crate) fn program(&mut self, scene: Scene<'_>) -> &mut Program {
        if self.program.is_none() {
            self.used = 0;
            let mut program = scene.container.start(true);
            scene.watch(&program);
            let said = program.begin();
            scene.rest();
            scene
                .judge
                .hold(said.is_ok(), || format!("a program starts with {said:?}"));
            self.program = Some(program);
        }
        self.program.as_mut().unwrap()
    }

    /// One line to the program and its answer.
    pub(crate) fn ask(&mut self, scene: Scene<'_>, line: &str) -> Option<String> {
        self.tell(scene, line);
        self.hear(scene)
    }

    /// A line to the program, whose answer is awaited from now on.
    pub(crate) fn tell(&mut self, scene: Scene<'_>, line: &str) {
        let program = self.program(scene);
        scene.watch(program);
        program.tell(line);
    }

    /// The answer.
    pub(crate) fn hear(&mut self, scene: Scene<'_>) -> Option<String> {
        let answer = self.program(scene).hear();
        scene.rest();
        answer
    }

    /// The next thing that happens.
    pub(crate) fn turn(&mut self, scene: Scene<'_>) {
        match self.dice.below(100) {
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
        let time = self.dice.time(STOP);
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
        let mut tally = scene.tally.lock().unwrap();
        tally.operations += BATCH;
        tally.denied += denied;
        if stop {
            tally.stops += 1;
        } else {
            tally.times.add(*longest, buckets);
        }
    }

    fn kill(&mut self, scene: Scene<'_>) {
        let (line, time) = (self.storm(), self.dice.time(KILL_WITHIN));
        self.program(scene).tell(&line);
        std::thread::sleep(time);
        self.end();
        scene.tally.lock().unwrap().kills += 1;
    }

    fn kill_a_newborn(&mut self, scene: Scene<'_>) {
        self.end();
        let mut program = scene.container.start(true);
        program.tell("begin");
        std::thread::sleep(self.dice.time(KILL_NEWBORN_WITHIN));
        program.kill();
        scene.tally.lock().unwrap().kills += 2;
    }

    fn exec(&mut self, scene: Scene<'_>) {
        self.tell(scene, "exec");
        let said = self.program(scene).begin();
        scene.rest();
        self.used = 0;
        scene
            .judge
            .hold(said.is_ok(), || format!("an exec answered {said:?}"));
        scene.tally.lock().unwrap().execs += 1;
    }

    fn exit(&mut self, scene: Scene<'_>) {
        if let Some(program) = self.program.take() {
            scene.watch(&program);
            program.leave();
            scene.rest();
            scene.tally.lock().unwrap().exits += 1;
        }
    }

    fn end(&mut self) {
        if let Some(program) = self.program.take() {
            program.kill();
        }
    }

    fn storm(&mut self) -> String {
        format!("storm {} {BATCH} {}", self.dice.below(1 << 31), self.share)
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
