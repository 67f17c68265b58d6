//! Decides when to serve and when to register.
//!
//! Pure: the [`lifecycle`](super::lifecycle) looks at the directory, the server and the clock, and does
//! what [`Machine::look`] says. The state of one resource:
//!
//! ```text
//!                    own socket missing (start, wiped directory, kubelet start)
//!             ┌──────────────────────── Serve ───────────────────────┐
//!             │                                                      │
//!             ▼                                                      │
//!       ┌────────────┐  kubelet.sock is there  ┌──────────┐  stream opens  ┌──────┐
//!       │Unregistered│ ─────── Register ─────▶ │ Accepted │ ─────────────▶ │ Live │
//!       └────────────┘                         └──────────┘                └──────┘
//!             ▲                                      │                         │
//!             │   Register fails: back-off           │ no stream in time,      │ stream ends: back-off
//!             └──────────────────────────────────────┴─────────────────────────┘
//!                        kubelet.sock re-created: at once, back-off forgotten
//! ```
//!
//! Three of the kubelet's manners shape it (`pkg/kubelet/cm/devicemanager`, Kubernetes 1.36):
//! - A ListAndWatch that ended is never asked for again, so its end is a reason to register.
//! - The kubelet's handler of an ended stream disconnects *whatever client the resource has by then*. A
//!   plugin that registers again too soon after a stream's end has its new connection cut, so there is always a short
//!   pause after an end, and a stream is never ended to make room for a new one.
//! - It removes every socket of the directory when it starts, then makes its own.

use std::time::{Duration, Instant};

/// First pause after a failure or an ended stream.
pub const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause; doubling stops here.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A stream that lived this long forgives the failures before it.
pub const STABLE_AFTER: Duration = Duration::from_secs(10);
/// How long after an accepted registration the kubelet may take to ask for ListAndWatch.
pub const STREAM_GRACE: Duration = Duration::from_secs(1);

/// Which `kubelet.sock` this is: a re-created one is a restarted kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketId {
    /// Device of the file system.
    pub dev: u64,
    /// Inode number; file systems reuse it, hence the time.
    pub ino: u64,
    /// Time of the last status change, in nanoseconds.
    pub ctime_ns: i128,
}

/// Our own server, as it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Own {
    /// Nothing serves, or the socket file is gone or not ours any more.
    Missing,
    /// Serving at a socket file that is there.
    Serving {
        /// Number of the server in this process: a new server must be registered anew.
        server: u32,
        /// ListAndWatch streams that are open at that server.
        open: u32,
        /// ListAndWatch streams that it ever had.
        opened: u64,
    },
}

/// What one look at the world saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// `kubelet.sock`, where it exists.
    pub kubelet: Option<SocketId>,
    /// Our server and its socket.
    pub own: Own,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Serve on a fresh socket, then tell [`Machine::served`] or [`Machine::failed`].
    Serve,
    /// Call Register, then tell [`Machine::accepted`] or [`Machine::failed`].
    Register,
    /// Nothing until something changes, or until the given time.
    Idle(Option<Instant>),
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Unregistered,
    Accepted {
        kubelet: SocketId,
        server: u32,
        opened_before: u64,
        since: Instant,
    },
    Live {
        kubelet: SocketId,
        server: u32,
        since: Instant,
    },
}

/// One resource's registration with the kubelet.
#[derive(Debug)]
pub struct Machine {
    phase: Phase,
    /// The last `kubelet.sock` seen; a different one forgives all failures.
    kubelet: Option<SocketId>,
    /// The next pause.
    pause: Duration,
    /// Neither serve nor register before this.
    not_before: Option<Instant>,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            phase: Phase::Unregistered,
            kubelet: None,
            pause: FIRST_PAUSE,
            not_before: None,
        }
    }
}

impl Machine {
    /// Whether the kubelet follows this resource's devices now.
    pub fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Live { .. })
    }

    /// Takes in what is seen now and says what to do.
    pub fn look(&mut self, seen: Seen, now: Instant) -> Step {
        if seen.kubelet.is_some() && seen.kubelet != self.kubelet {
            self.kubelet = seen.kubelet;
            self.forgive();
        }
        self.phase = self.follow(seen, now);
        match (self.phase, seen.own, seen.kubelet) {
            (_, Own::Missing, _) => self.unless_paused(Step::Serve, now),
            (Phase::Unregistered, Own::Serving { .. }, Some(_)) => {
                self.unless_paused(Step::Register, now)
            }
            (Phase::Unregistered, Own::Serving { .. }, None) => Step::Idle(None),
            (Phase::Accepted { since, .. }, ..) => Step::Idle(Some(since + STREAM_GRACE)),
            (Phase::Live { .. }, ..) => Step::Idle(None),
        }
    }

    /// Serving began.
    pub fn served(&mut self) {
        self.not_before = None;
    }

    /// The kubelet accepted the registration that was begun when `seen` was seen.
    pub fn accepted(&mut self, seen: Seen, now: Instant) {
        if let Seen {
            kubelet: Some(kubelet),
            own: Own::Serving { server, opened, .. },
        } = seen
        {
            self.phase = Phase::Accepted {
                kubelet,
                server,
                opened_before: opened,
                since: now,
            };
        }
    }

    /// Serving or registering failed: pause.
    pub fn failed(&mut self, now: Instant) {
        self.not_before = Some(now + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    /// The phase that follows from what is seen.
    fn follow(&mut self, seen: Seen, now: Instant) -> Phase {
        match self.phase {
            Phase::Unregistered => Phase::Unregistered,
            Phase::Accepted {
                kubelet,
                server,
                opened_before,
                since,
            } => match seen.own {
                Own::Serving { server: s, .. } if s != server => Phase::Unregistered,
                _ if is_other(seen.kubelet, kubelet) => Phase::Unregistered,
                Own::Serving { open, opened, .. } if opened > opened_before && open > 0 => {
                    Phase::Live {
                        kubelet,
                        server,
                        since: now,
                    }
                }
                Own::Serving { opened, .. } if opened > opened_before => self.lost(now),
                _ if now >= since + STREAM_GRACE => self.lost(now),
                _ => self.phase,
            },
            Phase::Live {
                kubelet,
                server,
                since,
            } => match seen.own {
                Own::Serving { server: s, .. } if s != server => Phase::Unregistered,
                _ if is_other(seen.kubelet, kubelet) => Phase::Unregistered,
                Own::Serving { open: 0, .. } => {
                    if now >= since + STABLE_AFTER {
                        self.forgive();
                    }
                    self.lost(now)
                }
                _ => self.phase,
            },
        }
    }

    fn lost(&mut self, now: Instant) -> Phase {
        self.failed(now);
        Phase::Unregistered
    }

    fn forgive(&mut self) {
        self.pause = FIRST_PAUSE;
        self.not_before = None;
    }

    fn unless_paused(&self, step: Step, now: Instant) -> Step {
        match self.not_before {
            Some(at) if now < at => Step::Idle(Some(at)),
            _ => step,
        }
    }
}

/// Whether a kubelet socket is there and is not the one that was registered with.
fn is_other(seen: Option<SocketId>, registered: SocketId) -> bool {
    seen.is_some_and(|seen| seen != registered)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KUBELET: SocketId = SocketId {
        dev: 1,
        ino: 10,
        ctime_ns: 100,
    };
    const RESTARTED: SocketId = SocketId {
        dev: 1,
        ino: 10,
        ctime_ns: 200,
    };

    fn seen(kubelet: Option<SocketId>, own: Own) -> Seen {
        Seen { kubelet, own }
    }

    fn serving(server: u32, open: u32, opened: u64) -> Own {
        Own::Serving {
            server,
            open,
            opened,
        }
    }

    /// A machine with its registration accepted and its stream open.
    fn live(now: Instant) -> Machine {
        let mut machine = Machine::default();
        let quiet = seen(Some(KUBELET), serving(0, 0, 0));
        assert_eq!(machine.look(quiet, now), Step::Register);
        machine.accepted(quiet, now);
        let open = seen(Some(KUBELET), serving(0, 1, 1));
        assert_eq!(machine.look(open, now), Step::Idle(None));
        assert!(machine.is_live());
        machine
    }

    #[test]
    fn it_serves_before_it_registers() {
        let (mut machine, now) = (Machine::default(), Instant::now());
        assert_eq!(
            machine.look(seen(Some(KUBELET), Own::Missing), now),
            Step::Serve
        );
        machine.served();
        assert_eq!(
            machine.look(seen(Some(KUBELET), serving(0, 0, 0)), now),
            Step::Register
        );
    }

    #[test]
    fn without_a_kubelet_it_serves_and_waits() {
        let (mut machine, now) = (Machine::default(), Instant::now());
        assert_eq!(machine.look(seen(None, Own::Missing), now), Step::Serve);
        assert_eq!(
            machine.look(seen(None, serving(0, 0, 0)), now),
            Step::Idle(None)
        );
    }

    #[test]
    fn an_ended_stream_is_registered_again_after_a_pause_and_not_before() {
        let now = Instant::now();
        let mut machine = live(now);
        let ended = seen(Some(KUBELET), serving(0, 0, 1));
        let resume = now + FIRST_PAUSE;
        assert_eq!(machine.look(ended, now), Step::Idle(Some(resume)));
        assert!(!machine.is_live());
        assert_eq!(machine.look(ended, resume), Step::Register);
    }

    #[test]
    fn a_re_created_kubelet_socket_is_registered_with_at_once() {
        let now = Instant::now();
        let mut machine = live(now);
        let (ended, restarted) = (serving(0, 0, 1), Some(RESTARTED));
        machine.look(seen(Some(KUBELET), ended), now);
        assert_eq!(machine.look(seen(restarted, ended), now), Step::Register);
    }

    #[test]
    fn a_kubelet_start_that_removes_our_socket_is_served_and_registered_anew() {
        let now = Instant::now();
        let mut machine = live(now);
        assert_eq!(
            machine.look(seen(Some(RESTARTED), Own::Missing), now),
            Step::Serve
        );
        machine.served();
        assert_eq!(
            machine.look(seen(Some(RESTARTED), serving(1, 0, 0)), now),
            Step::Register
        );
    }

    #[test]
    fn a_wiped_directory_is_served_and_registered_anew_while_the_old_stream_lives() {
        let now = Instant::now();
        let mut machine = live(now);
        assert_eq!(
            machine.look(seen(Some(KUBELET), Own::Missing), now),
            Step::Serve
        );
        machine.served();
        assert_eq!(
            machine.look(seen(Some(KUBELET), serving(1, 0, 0)), now),
            Step::Register
        );
    }

    #[test]
    fn an_accepted_registration_without_a_stream_is_made_again() {
        let (mut machine, now) = (Machine::default(), Instant::now());
        let quiet = seen(Some(KUBELET), serving(0, 0, 0));
        machine.look(quiet, now);
        machine.accepted(quiet, now);
        let late = now + STREAM_GRACE;
        assert_eq!(machine.look(quiet, now), Step::Idle(Some(late)));
        assert_eq!(
            machine.look(quiet, late),
            Step::Idle(Some(late + FIRST_PAUSE))
        );
        assert_eq!(machine.look(quiet, late + FIRST_PAUSE), Step::Register);
    }

    #[test]
    fn a_stream_that_opened_and_ended_between_two_looks_was_seen() {
        let (mut machine, now) = (Machine::default(), Instant::now());
        let quiet = seen(Some(KUBELET), serving(0, 0, 0));
        machine.look(quiet, now);
        machine.accepted(quiet, now);
        let flashed = seen(Some(KUBELET), serving(0, 0, 1));
        assert_eq!(
            machine.look(flashed, now),
            Step::Idle(Some(now + FIRST_PAUSE))
        );
    }

    #[test]
    fn a_stream_of_before_is_not_taken_for_the_new_registration_s() {
        let (mut machine, now) = (Machine::default(), Instant::now());
        let old = seen(Some(KUBELET), serving(0, 1, 1));
        machine.look(old, now);
        machine.accepted(old, now);
        machine.look(old, now);
        assert!(!machine.is_live());
    }

    #[test]
    fn pauses_double_up_to_a_bound_and_a_new_kubelet_forgives_them() {
        let (mut machine, mut now) = (Machine::default(), Instant::now());
        let quiet = seen(Some(KUBELET), serving(0, 0, 0));
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert_eq!(machine.look(quiet, now), Step::Register);
            machine.failed(now);
            let Step::Idle(Some(until)) = machine.look(quiet, now) else {
                panic!("no pause")
            };
            pauses.push((until - now).as_millis());
            now = until;
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        machine.look(quiet, now);
        machine.failed(now);
        let restarted = seen(Some(RESTARTED), serving(0, 0, 0));
        assert_eq!(machine.look(restarted, now), Step::Register);
        machine.failed(now);
        assert_eq!(
            machine.look(restarted, now),
            Step::Idle(Some(now + FIRST_PAUSE))
        );
    }

    #[test]
    fn a_stream_that_lasted_forgives_the_failures_before_it() {
        let now = Instant::now();
        let mut machine = live(now);
        machine.pause = LONGEST_PAUSE;
        let ended = seen(Some(KUBELET), serving(0, 0, 1));
        let later = now + STABLE_AFTER;
        assert_eq!(
            machine.look(ended, later),
            Step::Idle(Some(later + FIRST_PAUSE))
        );
    }

    #[test]
    fn a_socket_that_cannot_be_made_is_tried_again_after_a_pause() {
        let (mut machine, now) = (Machine::default(), Instant::now());
        let missing = seen(Some(KUBELET), Own::Missing);
        assert_eq!(machine.look(missing, now), Step::Serve);
        machine.failed(now);
        assert_eq!(
            machine.look(missing, now),
            Step::Idle(Some(now + FIRST_PAUSE))
        );
        assert_eq!(machine.look(missing, now + FIRST_PAUSE), Step::Serve);
    }
}
