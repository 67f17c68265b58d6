//! Decides when to serve and when to register: pure.
//!
//! The [`lifecycle`](super::lifecycle) observes the directory, the server and the clock, and
//! performs the step that [`StateMachine::next_step`] returns. The state of one resource:
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
//!             │   Register fails: back-off           │ no stream in time,      │ end: pause
//!             └──────────────────────────────────────┴─────────────────────────┘
//!                        kubelet.sock recreated: at once, back-off reset
//! ```
//!
//! Four properties of the kubelet require this (`pkg/kubelet/cm/devicemanager`, Kubernetes 1.36):
//! - Kubernetes 1.37 refuses an endpoint that is still connected, and then forgets its client.
//!   So nothing marks the devices unhealthy when the plugin ends, and Allocate meets a dead socket.
//!   Each Register therefore has a server of its own.
//! - The kubelet never repeats a ListAndWatch call that has ended, so the plugin has to register
//!   again.
//! - When a stream ends, the kubelet disconnects the resource's *present* client. A plugin that has
//!   registered again too soon loses its new connection. The agent therefore pauses after each end,
//!   and never ends a stream in order to replace it.
//! - The kubelet removes every socket of the directory when it starts, then creates its own.

use std::time::{Duration, Instant};

/// The pause after the first failure, and after an ended stream.
pub const MIN_BACKOFF: Duration = Duration::from_millis(100);
/// The longest pause of the exponential back-off.
pub const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// The life of a stream that resets the back-off.
pub(crate) const STABLE_AFTER: Duration = Duration::from_secs(10);
/// The time for the kubelet to call ListAndWatch after it has accepted a registration.
pub(crate) const STREAM_TIMEOUT: Duration = Duration::from_secs(1);

/// Identifies a `kubelet.sock`: a recreated one belongs to a restarted kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketId {
    /// The device of the file system.
    pub dev: u64,
    /// The inode number, which file systems reuse.
    pub ino: u64,
    /// The time of the last status change, in nanoseconds.
    pub(crate) ctime_ns: i128,
}

/// The state of the agent's server for the resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnServer {
    /// No server runs, or the socket file is missing or belongs to another server.
    Missing,
    /// A server runs, and its socket file exists.
    Serving {
        /// The number of the server in this process: a new server has to be registered.
        server: u32,
        /// The open ListAndWatch streams of the server.
        open: u32,
        /// The ListAndWatch streams that the server has ever had.
        opened: u64,
    },
}

/// One observation of the plugin directory and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observation {
    /// The `kubelet.sock`, if any.
    pub kubelet: Option<SocketId>,
    /// The agent's server and its socket.
    pub own: OwnServer,
}

/// The next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Serve on a new socket in place of the present one, then call
    /// [`StateMachine::server_started`] or [`StateMachine::attempt_failed`].
    Serve,
    /// Call Register, then [`StateMachine::registration_accepted`] or
    /// [`StateMachine::attempt_failed`].
    Register,
    /// Wait for a change, or until the given time.
    Idle(Option<Instant>),
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Unregistered,
    Accepted {
        kubelet: SocketId,
        server: u32,
        since: Instant,
    },
    Live {
        kubelet: SocketId,
        server: u32,
        since: Instant,
    },
}

/// The registration of one resource with the kubelet.
#[derive(Debug)]
pub(crate) struct StateMachine {
    phase: Phase,
    /// The last observed `kubelet.sock`: a different one resets the back-off.
    kubelet: Option<SocketId>,
    /// The pause after the next failure.
    backoff: Duration,
    /// The end of the present pause.
    not_before: Option<Instant>,
    /// The server of the last Register, which is not registered again.
    attempted_server: Option<u32>,
}

impl Default for StateMachine {
    fn default() -> Self {
        Self {
            phase: Phase::Unregistered,
            kubelet: None,
            backoff: MIN_BACKOFF,
            not_before: None,
            attempted_server: None,
        }
    }
}

impl StateMachine {
    /// Whether the kubelet has a ListAndWatch stream open.
    pub(crate) fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Live { .. })
    }

    /// Updates the state by an observation and returns the next step.
    pub(crate) fn next_step(&mut self, observation: Observation, now: Instant) -> Step {
        if observation.kubelet.is_some() && observation.kubelet != self.kubelet {
            self.kubelet = observation.kubelet;
            self.reset_backoff();
        }
        self.phase = self.next_phase(observation, now);
        match (self.phase, observation.own, observation.kubelet) {
            (_, OwnServer::Missing, _) => self.unless_backing_off(Step::Serve, now),
            (Phase::Unregistered, OwnServer::Serving { server, .. }, Some(_)) => {
                if self.attempted_server == Some(server) {
                    return self.unless_backing_off(Step::Serve, now);
                }
                let step = self.unless_backing_off(Step::Register, now);
                if step == Step::Register {
                    self.attempted_server = Some(server);
                }
                step
            }
            (Phase::Unregistered, OwnServer::Serving { .. }, None) => Step::Idle(None),
            (Phase::Accepted { since, .. }, ..) => Step::Idle(Some(since + STREAM_TIMEOUT)),
            (Phase::Live { .. }, ..) => Step::Idle(None),
        }
    }

    /// The server has started.
    pub(crate) fn server_started(&mut self) {
        self.not_before = None;
    }

    /// The kubelet has accepted the registration that followed this observation.
    pub(crate) fn registration_accepted(&mut self, observation: Observation, now: Instant) {
        if let Observation {
            kubelet: Some(kubelet),
            own: OwnServer::Serving { server, .. },
        } = observation
        {
            self.phase = Phase::Accepted {
                kubelet,
                server,
                since: now,
            };
        }
    }

    /// A step has failed: starts a pause.
    pub(crate) fn attempt_failed(&mut self, now: Instant) {
        self.not_before = Some(now + self.backoff);
        self.backoff = (self.backoff * 2).min(MAX_BACKOFF);
    }

    /// The phase that follows from an observation.
    fn next_phase(&mut self, observation: Observation, now: Instant) -> Phase {
        match self.phase {
            Phase::Unregistered => Phase::Unregistered,
            Phase::Accepted {
                kubelet,
                server,
                since,
            } => match observation.own {
                OwnServer::Serving { server: s, .. } if s != server => Phase::Unregistered,
                _ if is_recreated(observation.kubelet, kubelet) => Phase::Unregistered,
                OwnServer::Serving { open, .. } if open > 0 => Phase::Live {
                    kubelet,
                    server,
                    since: now,
                },
                OwnServer::Serving { opened, .. } if opened > 0 => self.stream_ended(now),
                _ if now >= since + STREAM_TIMEOUT => self.stream_ended(now),
                _ => self.phase,
            },
            Phase::Live {
                kubelet,
                server,
                since,
            } => match observation.own {
                OwnServer::Serving { server: s, .. } if s != server => Phase::Unregistered,
                _ if is_recreated(observation.kubelet, kubelet) => Phase::Unregistered,
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

/// Whether there is a kubelet socket other than the registered one.
fn is_recreated(present: Option<SocketId>, registered: SocketId) -> bool {
    present.is_some_and(|present| present != registered)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    fn observation(kubelet: Option<SocketId>, own: OwnServer) -> Observation {
        Observation { kubelet, own }
    }

    fn serving(server: u32, open: u32, opened: u64) -> OwnServer {
        OwnServer::Serving {
            server,
            open,
            opened,
        }
    }

    /// A machine with an accepted registration and an open stream.
    fn live(now: Instant) -> StateMachine {
        let mut machine = StateMachine::default();
        let no_stream = observation(Some(KUBELET), serving(0, 0, 0));
        assert_eq!(machine.next_step(no_stream, now), Step::Register);
        machine.registration_accepted(no_stream, now);
        let open = observation(Some(KUBELET), serving(0, 1, 1));
        assert_eq!(machine.next_step(open, now), Step::Idle(None));
        assert!(machine.is_live());
        machine
    }

    /// Asserts that the machine serves on a new socket and registers that one.
    fn registers_anew(machine: &mut StateMachine, observation: Observation, now: Instant) {
        assert_eq!(machine.next_step(observation, now), Step::Serve);
        machine.server_started();
        let fresh = Observation {
            own: serving(1, 0, 0),
            ..observation
        };
        assert_eq!(machine.next_step(fresh, now), Step::Register);
    }

    /// A step of the kubelet, of its directory or of time.
    #[derive(Debug, Clone, Copy)]
    enum Change {
        Opens,
        Ends,
        Restarts,
        Leaves,
        WipesDirectory,
        Refuses(bool),
        Passes(u64),
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            Just(Change::Opens),
            Just(Change::Ends),
            Just(Change::Restarts),
            Just(Change::Leaves),
            Just(Change::WipesDirectory),
            any::<bool>().prop_map(Change::Refuses),
            (0..6_000_u64).prop_map(Change::Passes),
        ]
    }

    proptest! {
        /// Kubernetes 1.37 strikes a client that registers an endpoint a second time.
        #[test]
        fn no_server_is_registered_twice(changes in prop::collection::vec(change(), 0..80)) {
            let (mut machine, mut now) = (StateMachine::default(), Instant::now());
            let (mut server, mut exists, mut open, mut opened) = (0, false, 0, 0);
            let (mut kubelet, mut refuses) = (Some(KUBELET), false);
            let mut registered = std::collections::BTreeSet::new();
            for change in changes {
                match change {
                    Change::Opens if exists && registered.contains(&server) => (open, opened) = (1, opened + 1),
                    Change::Opens => {}
                    Change::Ends => open = 0,
                    Change::Restarts => {
                        let before = kubelet.map_or(0, |kubelet| kubelet.ctime_ns);
                        kubelet = Some(SocketId { ctime_ns: before + 1, ..KUBELET });
                    }
                    Change::Leaves => kubelet = None,
                    Change::WipesDirectory => exists = false,
                    Change::Refuses(all) => refuses = all,
                    Change::Passes(milliseconds) => now += Duration::from_millis(milliseconds),
                }
                for _ in 0..8 {
                    let own = match exists {
                        true => serving(server, open, opened),
                        false => OwnServer::Missing,
                    };
                    match machine.next_step(observation(kubelet, own), now) {
                        Step::Serve => {
                            (server, exists, open, opened) = (server + 1, true, 0, 0);
                            machine.server_started();
                        }
                        Step::Register => {
                            prop_assert!(registered.insert(server), "server {server}");
                            match refuses {
                                true => machine.attempt_failed(now),
                                false => machine.registration_accepted(observation(kubelet, own), now),
                            }
                        }
                        Step::Idle(_) => break,
                    }
                }
            }
        }
    }

    #[test]
    fn machine_serves_before_it_registers() {
        let (mut machine, now) = (StateMachine::default(), Instant::now());
        assert_eq!(
            machine.next_step(observation(Some(KUBELET), OwnServer::Missing), now),
            Step::Serve
        );
        machine.server_started();
        assert_eq!(
            machine.next_step(observation(Some(KUBELET), serving(0, 0, 0)), now),
            Step::Register
        );
    }

    #[test]
    fn machine_serves_and_waits_without_a_kubelet() {
        let (mut machine, now) = (StateMachine::default(), Instant::now());
        assert_eq!(
            machine.next_step(observation(None, OwnServer::Missing), now),
            Step::Serve
        );
        assert_eq!(
            machine.next_step(observation(None, serving(0, 0, 0)), now),
            Step::Idle(None)
        );
    }

    #[test]
    fn ended_stream_is_registered_again_after_the_backoff() {
        let now = Instant::now();
        let mut machine = live(now);
        let ended = observation(Some(KUBELET), serving(0, 0, 1));
        let resume = now + MIN_BACKOFF;
        assert_eq!(machine.next_step(ended, now), Step::Idle(Some(resume)));
        assert!(!machine.is_live());
        registers_anew(&mut machine, ended, resume);
    }

    #[test]
    fn recreated_kubelet_socket_is_registered_at_once() {
        let now = Instant::now();
        let mut machine = live(now);
        let (ended, restarted) = (serving(0, 0, 1), Some(RESTARTED));
        machine.next_step(observation(Some(KUBELET), ended), now);
        registers_anew(&mut machine, observation(restarted, ended), now);
    }

    #[test]
    fn restarted_kubelet_that_removed_the_socket_is_served_anew() {
        let now = Instant::now();
        let mut machine = live(now);
        assert_eq!(
            machine.next_step(observation(Some(RESTARTED), OwnServer::Missing), now),
            Step::Serve
        );
        machine.server_started();
        assert_eq!(
            machine.next_step(observation(Some(RESTARTED), serving(1, 0, 0)), now),
            Step::Register
        );
    }

    #[test]
    fn wiped_directory_is_served_anew_while_the_old_stream_lives() {
        let now = Instant::now();
        let mut machine = live(now);
        assert_eq!(
            machine.next_step(observation(Some(KUBELET), OwnServer::Missing), now),
            Step::Serve
        );
        machine.server_started();
        assert_eq!(
            machine.next_step(observation(Some(KUBELET), serving(1, 0, 0)), now),
            Step::Register
        );
    }

    #[test]
    fn registration_without_a_stream_is_repeated() {
        let (mut machine, now) = (StateMachine::default(), Instant::now());
        let no_stream = observation(Some(KUBELET), serving(0, 0, 0));
        machine.next_step(no_stream, now);
        machine.registration_accepted(no_stream, now);
        let late = now + STREAM_TIMEOUT;
        assert_eq!(machine.next_step(no_stream, now), Step::Idle(Some(late)));
        assert_eq!(
            machine.next_step(no_stream, late),
            Step::Idle(Some(late + MIN_BACKOFF))
        );
        registers_anew(&mut machine, no_stream, late + MIN_BACKOFF);
    }

    #[test]
    fn stream_that_ended_between_observations_is_noticed() {
        let (mut machine, now) = (StateMachine::default(), Instant::now());
        let no_stream = observation(Some(KUBELET), serving(0, 0, 0));
        machine.next_step(no_stream, now);
        machine.registration_accepted(no_stream, now);
        let flashed = observation(Some(KUBELET), serving(0, 0, 1));
        assert_eq!(
            machine.next_step(flashed, now),
            Step::Idle(Some(now + MIN_BACKOFF))
        );
    }

    #[test]
    fn backoff_doubles_to_a_bound_and_resets_with_a_new_kubelet() {
        let (mut machine, mut now) = (StateMachine::default(), Instant::now());
        let mut pauses = Vec::new();
        for server in 0..8 {
            let no_stream = observation(Some(KUBELET), serving(server, 0, 0));
            assert_eq!(machine.next_step(no_stream, now), Step::Register);
            machine.attempt_failed(now);
            let Step::Idle(Some(until)) = machine.next_step(no_stream, now) else {
                panic!("no pause")
            };
            pauses.push((until - now).as_millis());
            now = until;
            assert_eq!(machine.next_step(no_stream, now), Step::Serve);
            machine.server_started();
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        machine.next_step(observation(Some(KUBELET), serving(8, 0, 0)), now);
        machine.attempt_failed(now);
        let restarted = observation(Some(RESTARTED), serving(9, 0, 0));
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
        let ended = observation(Some(KUBELET), serving(0, 0, 1));
        let later = now + STABLE_AFTER;
        assert_eq!(
            machine.next_step(ended, later),
            Step::Idle(Some(later + MIN_BACKOFF))
        );
    }

    #[test]
    fn failed_socket_is_retried_after_the_backoff() {
        let (mut machine, now) = (StateMachine::default(), Instant::now());
        let missing = observation(Some(KUBELET), OwnServer::Missing);
        assert_eq!(machine.next_step(missing, now), Step::Serve);
        machine.attempt_failed(now);
        assert_eq!(
            machine.next_step(missing, now),
            Step::Idle(Some(now + MIN_BACKOFF))
        );
        assert_eq!(machine.next_step(missing, now + MIN_BACKOFF), Step::Serve);
    }
}
