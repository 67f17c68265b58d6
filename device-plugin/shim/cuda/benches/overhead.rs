//! Measures the shim's cost on the simulated driver: two programs of one processor, by turns. A
//! row's ratio is the median of its turns' ratios.
//!
//! The benchmark times a forwarded call, and allocate + free of linear and of stream-ordered
//! memory, with room and at the quota. The simulated driver is faster than a real one, so the
//! ratios are worse than on a GPU. On one, allocate + free takes 45 us, or 480 ns in stream order
//! (fact F9). The absolute difference is what to watch. The benchmark also times the start of a
//! process that never uses CUDA, and its memory, because every process of a container loads the
//! entries of the shims.
//!
//! `cargo bench -p bursar-shim --bench overhead -- ROW` measures the rows that have this word in
//! their names. `e2e/gpu/shims.py` runs it on a real GPU.

#[path = "../tests/support/mod.rs"]
mod support;

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use support::{Client, Container, MIB};

/// The turns of a row. Each is short, so that the clock of its processor hardly changes within it.
const TURNS: usize = 21;

/// Returns the median time of one call, in nanoseconds, or of their ratios.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Lets the programs that this thread starts from now on run on its processor alone, or on all of
/// `processors`: by turns on two processors of a shared machine, one can have twice the clock.
fn pin(processors: Option<&CpuSet>) {
    let mut one = CpuSet::new();
    one.set(rustix::thread::sched_getcpu());
    sched_setaffinity(None, processors.unwrap_or(&one)).expect("it may choose among its own");
}

fn is_wanted(row: &str) -> bool {
    let words = std::env::args().skip(1);
    let words: Vec<String> = words.filter(|word| !word.starts_with("--")).collect();
    words.is_empty() || words.iter().any(|word| row.contains(word))
}

fn compare(name: &str, bare: &mut Client, shim: &mut Client, command: &str, calls: u64) {
    if !is_wanted(name) {
        return;
    }
    let mut times = [Vec::new(), Vec::new()];
    for turn in 0..TURNS {
        for side in [turn % 2, 1 - turn % 2] {
            let program = if side == 0 { &mut *bare } else { &mut *shim };
            times[side].push(program.ok(command)[0] as f64 / calls as f64);
        }
    }
    let ratios = times[0]
        .iter()
        .zip(&times[1])
        .map(|(bare, shim)| shim / bare);
    let ratio = median(ratios.collect());
    let [native, hooked] = times.map(median);
    println!("{name:<28} native {native:>8.1} ns  shim {hooked:>8.1} ns  {ratio:.4}x");
}

/// The argument of a [`Starter`]'s process, before the program that it starts.
const STARTER: &str = "--starter";
/// Programs that use no GPU, how often a turn starts each, and the turns.
const WITHOUT_GPU: [(&[&str], usize, usize); 4] = [
    (&["/bin/true"], 10, 300),
    (&["/bin/sh", "-c", "/bin/true; /bin/true"], 5, 200),
    (&["python3", "-S", "-c", "pass"], 3, 100),
    (
        &["python3", "-c", "import json, email.message, asyncio"],
        2,
        60,
    ),
];

/// Starts a program where `/etc/ld.so.preload` is a list of its own.
struct Starter(Child);

impl Starter {
    /// `folder` becomes the process's `/etc`.
    fn new(folder: &Path, list: &str, starts: usize, program: &[&str]) -> Starter {
        let own = std::env::current_exe().expect("it runs");
        let script = "cp -a /etc \"$0\" && printf '%s' \"$1\" > \"$0/etc/ld.so.preload\" \
             && mount --bind \"$0/etc\" /etc && shift && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script]);
        command.arg(folder).arg(list).arg(own).arg(STARTER);
        command.arg(starts.to_string()).args(program);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Starter(command.spawn().expect("util-linux is installed"))
    }

    /// The shortest of some starts, in nanoseconds.
    fn shortest(&mut self) -> f64 {
        let ask = self.0.stdin.as_mut().expect("it is a pipe");
        ask.write_all(b"\n").expect("it waits for a line");
        let mut answer = [0; 8];
        let answers = self.0.stdout.as_mut().expect("it is a pipe");
        answers.read_exact(&mut answer).expect("it answers each");
        u64::from_le_bytes(answer) as f64
    }

    /// Is the process of a starter, until its parent ends.
    fn serve(mut words: impl Iterator<Item = String>) {
        let starts = words.next().and_then(|word| word.parse().ok());
        let starts: usize = starts.expect("a number");
        let mut program = Command::new(words.next().expect("a program"));
        program.args(words);
        let mut start = |_| {
            let start = Instant::now();
            assert!(program.status().expect("there is one").success());
            start.elapsed().as_nanos() as u64
        };
        let mut byte = [0];
        while std::io::stdin().read_exact(&mut byte).is_ok() {
            let shortest = (0..starts).map(&mut start).min().unwrap_or_default();
            let mut output = std::io::stdout();
            let answered = output.write_all(&shortest.to_le_bytes());
            answered.and_then(|()| output.flush()).expect("it is read");
        }
    }
}

/// Compares programs that use no GPU without and with the files of a container's
/// `/etc/ld.so.preload`, and with as many libraries without content: no entry can cost less. By
/// turns, each figure the shortest of some starts, because load only adds time.
fn compare_starts() {
    let container = Container::with_quota(256 * MIB);
    let folder = tempfile::tempdir().expect("there is room");
    let (_, installed) = support::installed::install_shims(folder.path(), &container.sim(), "1.0");
    let list = std::fs::read_to_string(installed.join("ld.so.preload")).expect("it is installed");
    let names = list.lines().filter_map(|line| line.rsplit('/').next());
    let entries: Vec<String> = names
        .map(|name| installed.join(name).display().to_string())
        .collect();
    let empty = |number| {
        let library = folder.path().join(format!("empty{number}.so"));
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-o"]);
        let ended = compiler.arg(&library).status();
        assert!(ended.expect("cc is installed").success());
        library.display().to_string()
    };
    let empty: Vec<String> = (0..entries.len()).map(empty).collect();

    let lists = [String::new(), empty.join("\n"), entries.join("\n")];
    for (program, starts, turns) in WITHOUT_GPU {
        let starters = lists.each_ref().map(|list| {
            let etc = tempfile::tempdir_in(folder.path()).expect("there is room");
            Starter::new(&etc.keep(), list, starts, program)
        });
        compare_program(&program.join(" "), starters, turns);
    }
    let kib = [String::new(), entries.join(" ")].map(|preload| proportional_kib(&preload));
    let [native, preloaded] = kib;
    println!(
        "a sleeping process           native {native:>8} KiB  entries {preloaded:>4} KiB (PSS)"
    );
}

/// Compares the starts of one program: without a library, with empty ones, and with the entries.
fn compare_program(name: &str, mut starters: [Starter; 3], turns: usize) {
    let mut times = [const { Vec::new() }; 3];
    for turn in 0..turns {
        let mut order = [0, 1, 2];
        order.rotate_left(turn % 3);
        for side in order {
            times[side].push(starters[side].shortest());
        }
    }
    for Starter(process) in &mut starters {
        drop(process.stdin.take());
        process.wait().expect("it ends with its input");
    }
    for (side, what) in [(1, "empty libraries"), (2, "entries")] {
        let logs = times[0].iter().zip(&times[side]);
        let logs: Vec<f64> = logs.map(|(without, with)| (with / without).ln()).collect();
        let mean = logs.iter().sum::<f64>() / turns as f64;
        let squares: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
        let deviation = 2.0 * (squares / (turns * (turns - 1)) as f64).sqrt();
        let [native, preloaded] = [0, side].map(|side| median(times[side].clone()) / 1e3);
        println!(
            "{name:<28} native {native:>8.0} us  {what} {preloaded:>5.0} us  {:.3}x \
             ({:.3} to {:.3}), {turns} turns",
            mean.exp(),
            (mean - deviation).exp(),
            (mean + deviation).exp()
        );
    }
}

/// Returns the memory of a sleeping process (`Pss` of `smaps_rollup`, proc(5)).
fn proportional_kib(preload: &str) -> u64 {
    let mut process = Command::new("/bin/sleep")
        .arg("60")
        .env("LD_PRELOAD", preload)
        .spawn()
        .expect("there is one");
    std::thread::sleep(Duration::from_millis(200));
    let rollup = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", process.id()));
    process
        .kill()
        .and_then(|()| process.wait())
        .expect("it sleeps");
    let rollup = rollup.expect("it slept");
    let line = rollup.lines().find(|line| line.starts_with("Pss:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    kib.expect("proc(5)")
}

fn main() {
    let mut words = std::env::args();
    if words.any(|word| word == STARTER) {
        return Starter::serve(words);
    }
    if is_wanted("/bin/true") && !support::is_real() {
        compare_starts();
    }
    // A pair takes a real driver longer.
    let (pairs, small) = match support::is_real() {
        true => (1_000, 2_000),
        false => (5_000, 5_000),
    };
    let container = Container::with_quota(256 * MIB);
    let all = sched_getaffinity(None).expect("it has some");
    pin(None);
    let (mut bare, mut shim) = (container.bare_program(), container.program());
    for (name, command, calls) in [
        ("forwarded call", "query 20000".to_owned(), 20_000),
        ("launch", "launches 20000".to_owned(), 20_000),
        (
            "cuMemAlloc + cuMemFree 2 MiB",
            format!("churn {pairs} {}", 2 * MIB),
            pairs,
        ),
    ] {
        compare(name, &mut bare, &mut shim, &command, calls);
    }
    small_pieces(&mut bare, &mut shim, 1, small);
    // Freed memory stays in the pool, as in a program that allocates often.
    for program in [&mut bare, &mut shim] {
        let pool = program.ok("devicepool 0")[0];
        program.ok(format!("threshold {pool} {}", u64::MAX));
    }
    for (name, bytes) in [
        ("async alloc + free 1 MiB", MIB),
        ("async alloc + free, at quota", 250 * MIB),
    ] {
        let command = format!("asyncchurn {} {bytes}", 5 * pairs);
        compare(name, &mut bare, &mut shim, &command, 5 * pairs);
    }
    drop((bare, shim));
    pin(Some(&all));
    let (mut bare, mut shim) = (container.bare_program(), container.program());
    small_pieces(&mut bare, &mut shim, 8, small);
}

/// Compares allocate + free of small pieces by some threads.
fn small_pieces(bare: &mut Client, shim: &mut Client, threads: u64, calls: u64) {
    // One piece is kept, so that the driver keeps the chunk.
    let kept = [&mut *bare, &mut *shim].map(|program| program.ok("alloc 512")[0]);
    let command = format!("churns {threads} {calls} 4096");
    let name = format!("4 KiB by {threads} threads");
    compare(&name, bare, shim, &command, calls);
    for (program, piece) in [bare, shim].into_iter().zip(kept) {
        program.ok(format!("free {piece}"));
    }
}
