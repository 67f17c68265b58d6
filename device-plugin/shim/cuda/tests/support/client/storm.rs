//! Many random calls for one line of input: what a soak needs.
//!
//! ```text
//! begin                  -> ok | err CODE  (has a context, as soon as there is an agent to ask)
//! storm SEED COUNT SHARE -> ok DENIED USED LONGEST BUCKETS...  (COUNT calls, SHARE bytes held)
//! grab BYTES             -> ok COUNT CODE  (allocates until that is refused)
//! give                   -> ok             (frees what was grabbed)
//! linger MILLISECONDS    -> ok PID         (forks a child that lives so long)
//! ```
//!
//! `USED` is what is held after the last call, `LONGEST` nanoseconds. A bucket counts the calls
//! that took up to two to the power of its place nanoseconds.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Cuda;
use rng::Rng;

#[path = "../../soak/rng.rs"]
pub(super) mod rng;

/// Buckets of the histogram: the last one ends at 2^39 ns, nine minutes.
const BUCKETS: usize = 40;

const OUT_OF_MEMORY: i32 = 2;
const INVALID_CONTEXT: i32 = 201;

/// The smallest size. The driver takes multiples of [`CHUNK`] without rounding, and chunks for
/// pieces.
const SMALLEST: u64 = 4096;
const PIECE: u64 = 1 << 20;
const CHUNK: u64 = 2 << 20;

/// The longest time that a forked child outlives its killed parent.
const CHILD: u64 = 300;

/// The state between two lines.
#[derive(Default)]
pub(super) struct Storm {
    held: Vec<(u64, u64)>,
    grabbed: Vec<u64>,
}

impl Storm {
    /// Runs one line, if it is a command of this module.
    pub(super) fn run(&mut self, cuda: &Cuda, words: &[&str]) -> Option<String> {
        let number = |index: usize| words[index].parse::<u64>().expect("a number");
        match words[0] {
            "storm" => Some(self.storm(cuda, Rng::seeded(number(1)), number(2), number(3))),
            "begin" => Some(begin(cuda)),
            "grab" => loop {
                match cuda.alloc(number(1)) {
                    Ok(pointer) => self.grabbed.push(pointer),
                    Err(code) => break Some(format!("ok {} {code}", self.grabbed.len())),
                }
            },
            "give" => {
                for pointer in self.grabbed.drain(..) {
                    assert_eq!(cuda.free(pointer), 0);
                }
                Some("ok".to_owned())
            }
            "linger" => {
                let child = fork_a_sleeper(Duration::from_millis(number(1)));
                Some(format!("ok {child}"))
            }
            _ => None,
        }
    }

    /// Returns what the driver takes: the chunks that hold pieces, and whole chunks.
    fn used(&self) -> u64 {
        let is_piece = |(_, bytes): &&(u64, u64)| *bytes <= PIECE;
        let pieces = self.held.iter().filter(is_piece);
        let chunks: BTreeSet<u64> = pieces.map(|(pointer, _)| pointer / CHUNK).collect();
        let whole = self.held.iter().filter(|held| !is_piece(held));
        chunks.len() as u64 * CHUNK + whole.map(|(_, bytes)| bytes).sum::<u64>()
    }

    fn storm(&mut self, cuda: &Cuda, mut rng: Rng, count: u64, share: u64) -> String {
        let (mut denied, mut longest, mut buckets) = (0_u64, 0, [0_u64; BUCKETS]);
        // Use goes up and down, so that some programs hit the limit while others leave room.
        let wanted = rng.below(2 * share);
        for _ in 0..count {
            let start = Instant::now();
            denied += u64::from(self.step(cuda, &mut rng, share, wanted));
            let took = u64::try_from(start.elapsed().as_nanos()).expect("not for centuries");
            longest = took.max(longest);
            buckets[(took.max(1).ilog2() as usize + 1).min(BUCKETS - 1)] += 1;
        }
        let buckets: Vec<String> = buckets.iter().map(u64::to_string).collect();
        format!(
            "ok {denied} {} {longest} {}",
            self.used(),
            buckets.join(" ")
        )
    }

    /// Makes one call. Returns whether it was denied.
    fn step(&mut self, cuda: &Cuda, rng: &mut Rng, share: u64, wanted: u64) -> bool {
        match rng.below(10_000) {
            0..150 => drop(cuda.info()),
            150..152 => {
                fork_a_sleeper(Duration::from_millis(rng.below(CHILD)));
            }
            152..158 => close_sockets(),
            // Other programs take what one returns: now and then all of it.
            158..160 => {
                for (pointer, _) in self.held.drain(..) {
                    assert_eq!(cuda.free(pointer), 0);
                }
            }
            roll => {
                let grow = (roll % 4 != 0) == (self.used() < wanted);
                if grow || self.held.is_empty() {
                    return self.allocate(cuda, rng, share);
                }
                let place = rng.below(self.held.len() as u64) as usize;
                let (pointer, _) = self.held.swap_remove(place);
                assert_eq!(cuda.free(pointer), 0);
            }
        }
        false
    }

    fn allocate(&mut self, cuda: &Cuda, rng: &mut Rng, share: u64) -> bool {
        // As many sizes of each order of magnitude, up to an eighth of the share.
        let pieces = u64::from((PIECE / SMALLEST).ilog2()) + 1;
        let orders = u64::from((share / 8 / CHUNK).max(1).ilog2()) + 1;
        let bytes = match rng.below(pieces + orders) {
            piece if piece < pieces => SMALLEST << piece,
            order => CHUNK * (rng.below(1 << (order - pieces)) + 1),
        };
        match cuda.alloc(bytes) {
            Ok(pointer) => {
                self.held.push((pointer, bytes));
                false
            }
            Err(OUT_OF_MEMORY) => true,
            Err(code) => panic!("an allocation answered {code}"),
        }
    }
}

/// Retains the primary context, which needs an agent that knows the size of a context.
fn begin(cuda: &Cuda) -> String {
    let start = Instant::now();
    loop {
        match cuda.info() {
            Ok(_) => return "ok".to_owned(),
            Err(INVALID_CONTEXT) if start.elapsed() < Duration::from_secs(5) => {
                if cuda.retain() != 0 {
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
            Err(code) => return format!("err {code}"),
        }
    }
}

/// Forks a child that keeps this process's driver memory, whatever becomes of this process (fact
/// F13). Returns its pid.
fn fork_a_sleeper(time: Duration) -> libc::pid_t {
    let time = libc::timespec {
        tv_sec: time.as_secs() as libc::time_t,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    // SAFETY: children are not reaped, and a child only sleeps and exits.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        let child = libc::fork();
        if child == 0 {
            libc::nanosleep(&raw const time, std::ptr::null_mut());
            libc::_exit(0);
        }
        child
    }
}

/// Closes every socket, as daemons do, which cuts the session.
fn close_sockets() {
    for fd in 3..64 {
        let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: fstat writes the structure, for which zeros are values too.
        let mode = unsafe {
            libc::fstat(fd, stat.as_mut_ptr());
            stat.assume_init().st_mode
        };
        if mode & libc::S_IFMT == libc::S_IFSOCK {
            // SAFETY: no code here uses a socket, and the shim detects that its own is gone.
            unsafe { libc::close(fd) };
        }
    }
}
