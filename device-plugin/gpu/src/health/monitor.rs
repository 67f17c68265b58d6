//! Tracks the health of one GPU through its events.

use std::time::{Duration, Instant};

use super::super::xid::{XidAction, required_action};
use super::{Health, HealthEvent, HealthThresholds, PersistedHealth, UnhealthyReason};

/// The health of one GPU.
#[derive(Debug, Clone)]
pub(crate) struct HealthMonitor {
    policy: HealthThresholds,
    state: State,
    memory: PersistedHealth,
    /// Failed probes in a row.
    failures: u32,
    /// The failed probes in a row in which NVML answered and the GPU did not.
    unanswered: u32,
    /// The recovery time that the next recovery needs.
    recovery_time: Duration,
    recovered_at: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Healthy,
    Unhealthy {
        reason: UnhealthyReason,
        last_failure: Instant,
        good_probes: u32,
    },
}

impl HealthMonitor {
    /// Monitors a GPU that NVML just listed; unhealthy if the previous agent left it awaiting a
    /// reset.
    pub(crate) fn new(policy: HealthThresholds, memory: PersistedHealth, now: Instant) -> Self {
        let memory = match memory.drained {
            true => memory,
            false => memory.after_return(),
        };
        Self::unlisted(policy, memory, now)
    }

    /// Monitors a GPU that NVML does not list, as the previous agent of the same boot recorded it.
    pub(crate) fn unlisted(
        policy: HealthThresholds,
        memory: PersistedHealth,
        now: Instant,
    ) -> Self {
        let mut monitor = Self {
            policy,
            state: State::Healthy,
            memory,
            failures: 0,
            unanswered: 0,
            recovery_time: policy.recovery_time,
            recovered_at: None,
        };
        let reason = match memory {
            PersistedHealth { drained: true, .. } => Some(UnhealthyReason::Drained),
            PersistedHealth {
                awaits_reset: Some(code),
                ..
            } => Some(UnhealthyReason::Xid(code)),
            PersistedHealth { away: true, .. } => Some(UnhealthyReason::Lost),
            PersistedHealth { .. } => None,
        };
        if let Some(reason) = reason {
            monitor.state = monitor.enter_unhealthy(reason, now);
        }
        monitor
    }

    /// Marks a GPU unhealthy that has never answered this agent.
    pub(crate) fn mark_unverified(&mut self, now: Instant) {
        if matches!(self.state, State::Healthy) {
            self.state = self.enter_unhealthy(UnhealthyReason::NoAnswer, now);
        }
    }

    /// The present verdict.
    pub(crate) fn health(&self) -> Health {
        match self.state {
            State::Healthy => Health::Healthy,
            State::Unhealthy { reason, .. } => Health::Unhealthy(reason),
        }
    }

    /// The record for the next agent.
    pub(crate) fn memory(&self) -> PersistedHealth {
        self.memory
    }

    /// Records whether the GPU is to be drained, and returns whether that is new.
    pub(crate) fn set_draining(&mut self, draining: bool) -> bool {
        std::mem::replace(&mut self.memory.draining, draining) != draining
    }

    pub(crate) fn record(&mut self, event: HealthEvent, now: Instant) {
        self.memory.drained = event == HealthEvent::Drained;
        match event {
            HealthEvent::ProbeSucceeded => {
                self.mark_present();
                self.count_good_probe(now);
            }
            HealthEvent::ProbeFailed | HealthEvent::NvmlUnavailable => {
                self.failures = self.failures.saturating_add(1);
                self.unanswered = self
                    .unanswered
                    .saturating_add((event == HealthEvent::ProbeFailed).into());
                self.memory.away |= self.unanswered >= self.policy.failed_probes;
                if self.failures >= self.policy.failed_probes {
                    self.mark_unhealthy(UnhealthyReason::NoAnswer, now);
                } else if let State::Unhealthy { reason, .. } = self.state {
                    self.mark_unhealthy(reason, now);
                }
            }
            HealthEvent::CallTimedOut => {
                self.failures = self.failures.saturating_add(1);
                self.mark_unhealthy(UnhealthyReason::NoAnswer, now);
            }
            HealthEvent::NotListed => {
                self.memory.away = true;
                self.mark_unhealthy(UnhealthyReason::Lost, now);
            }
            HealthEvent::Xid(code) => match required_action(code) {
                XidAction::Ignore | XidAction::RestartApplication => {}
                XidAction::Transient => self.mark_unhealthy(UnhealthyReason::Xid(code), now),
                XidAction::ResetGpu | XidAction::RestartNode => self.require_reset(code, now),
            },
            HealthEvent::Drained => {
                self.memory.away = true;
                // A drain ends every earlier failure, so the next one is no relapse.
                self.recovery_time = self.policy.recovery_time;
                self.state = unhealthy(UnhealthyReason::Drained, now);
            }
        }
    }

    fn mark_present(&mut self) {
        (self.failures, self.unanswered) = (0, 0);
        self.memory = self.memory.after_return();
    }

    /// The first reason stays: failures that follow an XID 79 are its consequence.
    fn mark_unhealthy(&mut self, reason: UnhealthyReason, now: Instant) {
        self.state = match self.state {
            State::Healthy
            | State::Unhealthy {
                reason: UnhealthyReason::Drained,
                ..
            } => self.enter_unhealthy(reason, now),
            State::Unhealthy { reason: first, .. } => unhealthy(first, now),
        };
    }

    /// A reason that needs a reset replaces the first one, unless the GPU is absent already.
    fn require_reset(&mut self, code: u64, now: Instant) {
        let first = self.memory.awaits_reset.is_none();
        self.mark_unhealthy(UnhealthyReason::Xid(code), now);
        if first && !self.memory.away {
            self.state = unhealthy(UnhealthyReason::Xid(code), now);
        }
        self.memory.awaits_reset.get_or_insert(code);
    }

    fn enter_unhealthy(&mut self, reason: UnhealthyReason, now: Instant) -> State {
        let relapsed = self
            .recovered_at
            .is_some_and(|at| now.saturating_duration_since(at) < self.policy.relapse_window);
        self.recovery_time = if relapsed {
            (self.recovery_time * 2).min(self.policy.max_recovery_time)
        } else {
            self.policy.recovery_time
        };
        unhealthy(reason, now)
    }

    fn count_good_probe(&mut self, now: Instant) {
        let State::Unhealthy {
            last_failure: failed_at,
            good_probes: probes,
            ..
        } = &mut self.state
        else {
            return;
        };
        *probes = probes.saturating_add(1);
        let has_waited = now.saturating_duration_since(*failed_at) >= self.recovery_time;
        if *probes >= self.policy.good_probes && has_waited && self.memory.awaits_reset.is_none() {
            self.recovered_at = Some(now);
            self.state = State::Healthy;
        }
    }
}

fn unhealthy(reason: UnhealthyReason, now: Instant) -> State {
    State::Unhealthy {
        reason,
        last_failure: now,
        good_probes: 0,
    }
}
