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
pub const MIN_BACKOFF: Duration = Duration::from_millis(100);
/// Longest pause; doubling stops here.
pub const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// A stream that lived this long forgives the failures before it.
pub const STABLE_AFTER: Duration = Duration::from_secs(10);
/// How long after an accepted registration the kubelet may take to ask for ListAndWatch.
pub const STREAM_TIMEOUT: Duration = Duration::from_secs(1);

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
pub enum OwnServer {
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
pub struct Observation {
    /// `kubelet.sock`, where it exists.
    pub kubelet: Option<SocketId>,
    /// Our server and its socket.
    pub own: OwnServer,
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
pub struct StateMachine {
    phase: Phase,
    /// The last `kubelet.sock` seen; a different one forgives all failures.
    kubelet: Option<SocketId>,
    /// The next pause.
    backoff: Duration,
    /// Neither serve nor register before this.
    not_before: Option<Instant>,
}

impl Default for StateMachine {
    fn default() -> Self {
        Self {
            phase: Phase::Unregistered,
            kubelet: None,
            backoff: MIN_BACKOFF,
            not_before: None,
        }
    }
}

impl StateMachine {
    /// Whether the kubelet follows this resource's devices now.
    pub fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Live { .. })
    }

    /// Takes in what is seen now and says what to do.
    pub fn next_step(&mut self, seen: Observation, now: Instant) -> Step {
        if seen.kubelet.is_some() && seen.kubelet != self.kubelet {
            self.kubelet = seen.kubelet;
            self.reset_backoff();
        }
        self.phase = self.next_phase(seen, now);
        match (self.phase, seen.own, seen.kubelet) {
            (_, OwnServer::Missing, _) => self.unless_backing_off(Step::Serve, now),
            (Phase::Unregistered, OwnServer::Serving { .. }, Some(_)) => {
                self.unless_backing_off(Step::Register, now)
            }
            (Phase::Unregistered, OwnServer::Serving { .. }, None) => Step::Idle(None),
            (Phase::Accepted { since, .. }, ..) => Step::Idle(Some(since + STREAM_TIMEOUT)),
            (Phase::Live { .. }, ..) => Step::Idle(None),
        }
    }

    /// Serving began.
    pub fn server_started(&mut self) {
        self.not_before = None;
    }

    /// The kubelet accepted the registration that was begun when `seen` was seen.
    pub fn registration_accepted(&mut self, seen: Observation, now: Instant) {
        if let Observation {
            kubelet: Some(kubelet),
            own: OwnServer::Serving { server, opened, .. },
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
    pub fn attempt_failed(&mut self, now: Instant) {
        self.not_before = Some(now + self.backoff);
        self.backoff = (self.backoff * 2).min(MAX_BACKOFF);
    }

    /// The phase that follows from what is seen.
    fn next_phase(&mut self, seen: Observation, now: Instant) -> Phase {
        match self.phase {
            Phase::Unregistered => Phase::Unregistered,
            Phase::Accepted {
                kubelet,
                server,
                opened_before,
                since,
            } => match seen.own {
                OwnServer::Serving { server: s, .. } if s != server => Phase::Unregistered,
                _ if is_recreated(seen.kubelet, kubelet) => Phase::Unregistered,
                OwnServer::Serving { open, opened, .. } if opened > opened_before && open > 0 => {
                    Phase::Live {
                        kubelet,
                        server,
                        since: now,
                    }
                }
                OwnServer::Serving { opened, .. } if opened > opened_before => {
                    self.stream_ended(now)
                }
                _ if now >= since + STREAM_TIMEOUT => self.stream_ended(now),
                _ => self.phase,
            },
            Phase::Live {
                kubelet,
                server,
                since,
            } => match seen.own {
                OwnServer::Serving { server: s, .. } if s != server => Phase::Unregistered,
                _ if is_recreated(seen.kubelet, kubelet) => Phase::Unregistered,
                OwnServer::Serving { open: 0, .. } => {
                    if now >= since + STABLE_AFTER {
                        self.reset_backoff();
                    }
                    self.stream_ended(now)
                }
                _ => self.phase,
            },
        }
    }

    fn stream_ended(&mut self, now: Instant) -> Phase {
        self.attempt_failed(now);
        Phase::Unregistered
    }

    fn reset_backoff(&mut self) {
        self.backoff = MIN_BACKOFF;
        self.not_before = None;
    }

    fn unless_backing_off(&self, step: Step, now: Instant) -> Step {
        match self.not_before {
            Some(at) if now < at => Step::Idle(Some(at)),
            _ => step,
        }
    }
}

/// Whether a kubelet socket is there and is not the one that was registered with.
fn is_recreated(seen: Option<SocketId>, registered: SocketId) -> bool {
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

    fn seen(kubelet: Option<SocketId>, own: OwnServer) -> Observation {
        Observation { kubelet, own }
    }

    fn serving(server: u32, open: u32, opened: u64) -> OwnServer {
        OwnServer::Serving {
            server,
            open,
            opened,
        }
    }

    /// A machine with its registration accepted and its stream open.
    fn live(now: Instant) -> StateMachine {
        let mut machine = StateMachine::default();
        let quiet = seen(Some(KUBELET), serving(0, 0, 0));
        assert_eq!(machine.next_step(quiet, now), Step::Register);
        machine.registration_accepted(quiet, now);
        let open = seen(Some(KUBELET), serving(0, 1, 1));
        assert_eq!(machine.next_step(open, now), Step::Idle(None));
        assert!(machine.is_live());
        machine
    }

    #[test]
    fn machine_serves_before_it_registers() {
        let (mut machine, now) = (StateMachine::default(), Instant::now());
        assert_eq!(
            machine.next_step(seen(Some(KUBELET), OwnServer::Missing), now),
            Step::Serve
        );
        machine.server_started();
        assert_eq!(
            machine.next_step(seen(Some(KUBELET), serving(0, 0, 0)), now),
            Step::Register
        );
    }

    #[test]
    fn machine_serves_and_waits_without_a_kubelet() {
        let (mut machine, now) = (StateMachine::default(), Instant::now());
        assert_eq!(
            machine.next_step(seen(None, OwnServer::Missing), now),
            Step::Serve
        );
        assert_eq!(
            machine.next_step(seen(None, serving(0, 0, 0)), now),
            Step::Idle(None)
        );
    }

    #[test]
    fn ended_stream_is_registered_again_after_the_backoff() {
        let now = Instant::now();
        let mut machine = live(now);
        let ended = seen(Some(KUBELET), serving(0, 0, 1));
        let resume = now + MIN_BACKOFF;
        assert_eq!(machine.next_step(ended, now), Step::Idle(Some(resume)));
        assert!(!machine.is_live());
        assert_eq!(machine.next_step(ended, resume), Step::Register);
    }

    #[test]
    fn recreated_kubelet_socket_is_registered_at_once() {
        let now = Instant::now();
        let mut machine = live(now);
        let (ended, restarted) = (serving(0, 0, 1), Some(RESTARTED));
        machine.next_step(seen(Some(KUBELET), ended), now);
        assert_eq!(
            machine.next_step(seen(restarted, ended), now),
            Step::Register
        );
    }

    #[test]
    fn restarted_kubelet_that_removed_the_socket_is_served_anew() {
        let now = Instant::now();
        let mut machine = live(now);
        assert_eq!(
            machine.next_step(seen(Some(RESTARTED), OwnServer::Missing), now),
            Step::Serve
        );
        machine.server_started();
        assert_eq!(
            machine.next_step(seen(Some(RESTARTED), serving(1, 0, 0)), now),
            Step::Register
        );
    }

    #[test]
    fn wiped_directory_is_served_anew_while_the_old_stream_lives() {
        let now = Instant::now();
        let mut machine = live(now);
        assert_eq!(
            machine.next_step(seen(Some(KUBELET), OwnServer::Missing), now),
            Step::Serve
        );
        machine.server_started();
        assert_eq!(
            machine.next_step(seen(Some(KUBELET), serving(1, 0, 0)), now),
            Step::Register
        );
    }

    #[test]
    fn registration_without_a_stream_is_repeated() {
        let (mut machine, now) = (StateMachine::default(), Instant::now());
        let quiet = seen(Some(KUBELET), serving(0, 0, 0));
        machine.next_step(quiet, now);
        machine.registration_accepted(quiet, now);
        let late = now + STREAM_TIMEOUT;
        assert_eq!(machine.next_step(quiet, now), Step::Idle(Some(late)));
        assert_eq!(
            machine.next_step(quiet, late),
            Step::Idle(Some(late + MIN_BACKOFF))
        );
        assert_eq!(machine.next_step(quiet, late + MIN_BACKOFF), Step::Register);
    }

    #[test]
    fn stream_that_ended_between_observations_is_noticed() {
        let (mut machine, now) = (StateMachine::default(), Instant::now());
        let quiet = seen(Some(KUBELET), serving(0, 0, 0));
        machine.next_step(quiet, now);
        machine.registration_accepted(quiet, now);
        let flashed = seen(Some(KUBELET), serving(0, 0, 1));
        assert_eq!(
            machine.next_step(flashed, now),
            Step::Idle(Some(now + MIN_BACKOFF))
        );
    }

    #[test]
    fn older_stream_does_not_confirm_a_new_registration() {
        let (mut machine, now) = (StateMachine::default(), Instant::now());
        let old = seen(Some(KUBELET), serving(0, 1, 1));
        machine.next_step(old, now);
        machine.registration_accepted(old, now);
        machine.next_step(old, now);
        assert!(!machine.is_live());
    }

    #[test]
    fn backoff_doubles_to_a_bound_and_resets_with_a_new_kubelet() {
        let (mut machine, mut now) = (StateMachine::default(), Instant::now());
        let quiet = seen(Some(KUBELET), serving(0, 0, 0));
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert_eq!(machine.next_step(quiet, now), Step::Register);
            machine.attempt_failed(now);
            let Step::Idle(Some(until)) = machine.next_step(quiet, now) else {
                panic!("no pause")
            };
            pauses.push((until - now).as_millis());
            now = until;
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        machine.next_step(quiet, now);
        machine.attempt_failed(now);
        let restarted = seen(Some(RESTARTED), serving(0, 0, 0));
        assert_eq!(machine.next_step(restarted, now), Step::Register);
        machine.attempt_failed(now);
        assert_eq!(
            machine.next_step(restarted, now),
            Step::Idle(Some(now + MIN_BACKOFF))
        );
    }

    #[test]
    fn stable_stream_resets_the_backoff() {
        let now = Instant::now();
        let mut machine = live(now);
        machine.backoff = MAX_BACKOFF;
        let ended = seen(Some(KUBELET), serving(0, 0, 1));
        let later = now + STABLE_AFTER;
        assert_eq!(
            machine.next_step(ended, later),
            Step::Idle(Some(later + MIN_BACKOFF))
        );
    }

    #[test]
    fn failed_socket_is_retried_after_the_backoff() {
        let (mut machine, now) = (StateMachine::default(), Instant::now());
        let missing = seen(Some(KUBELET), OwnServer::Missing);
        assert_eq!(machine.next_step(missing, now), Step::Serve);
        machine.attempt_failed(now);
        assert_eq!(
            machine.next_step(missing, now),
            Step::Idle(Some(now + MIN_BACKOFF))
        );
        assert_eq!(machine.next_step(missing, now + MIN_BACKOFF), Step::Serve);
    }
}
