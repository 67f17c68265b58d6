//! Runs the credit word and the migration between pages in every order of threads, and of the
//! memory model.
//!
//! [`Agent`] and [`Process`] do to a word what `sessions/container.rs` and the shim's
//! `agent_client.rs` do, without sockets. A hello is a call under the agent's lock, as it is there.
//! Loom runs each model in all interleavings with at most [`PREEMPTIONS`] preemptions.

use std::sync::atomic::Ordering;

use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::*;

/// Most defects show with two; each more costs ten times the time.
const PREEMPTIONS: usize = 3;

atomic_u64_like!(AtomicU64);

type Page = Arc<AtomicCredit<AtomicU64>>;

fn page() -> Page {
    Arc::new(AtomicCredit(AtomicU64::new(0)))
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(model);
}

/// The agent's record of one process, and the page that the agent believes the process uses.
struct Agent {
    granted: u32,
    page: Page,
    uses_page: bool,
}

impl Agent {
    fn grant(&mut self, n: u32) -> bool {
        // The record comes first, as it is written before the process learns of the grant.
        self.granted += n;
        let granted = self.page.grant(n);
        if !granted {
            self.granted -= n;
        }
        granted
    }

    /// Takes back idle credit for another process. Returns the amount.
    fn take_back(&mut self, at_most: u32) -> u32 {
        if !self.uses_page {
            return 0;
        }
        let taken = self.page.reclaim(at_most.min(self.granted));
        self.granted -= taken.min(self.granted);
        taken
    }

    /// Handles another hello of the same image, with its usage.
    fn hello(&mut self, used: u32, page: &Page) {
        page.set(CreditWord {
            granted: self.granted,
            used,
        });
        self.page = Arc::clone(page);
        self.uses_page = false;
    }
}

/// One process with two pages, of which it uses one.
struct Process {
    pages: [Page; 2],
    current: AtomicUsize,
    moving: Mutex<()>,
}

impl Process {
    fn page(&self) -> &Page {
        &self.pages[self.current.load(Ordering::Acquire)]
    }

    /// Charges as `accounting::charge_units` does, but requests no credit.
    fn charge(&self, n: u32) -> bool {
        loop {
            match self.page().charge(n) {
                Ok(()) => return true,
                Err(CreditError::Frozen) => drop(self.moving.lock().unwrap()),
                Err(CreditError::Short(_) | CreditError::TooLarge) => return false,
            }
        }
    }

    fn discharge(&self, n: u32) {
        while !self.page().discharge(n) {
            drop(self.moving.lock().unwrap());
        }
    }

    /// Reconnects as `agent_client::open_session` does. The agent's welcome may come too late.
    fn reconnect(&self, agent: &Mutex<Agent>, in_time: bool) {
        let _moving = self.moving.lock().unwrap();
        let word = self.pages[0].freeze();
        agent.lock().unwrap().hello(word.used, &self.pages[1]);
        if in_time {
            self.current.store(1, Ordering::Release);
        } else {
            self.pages[0].set(word);
        }
    }
}

fn granted_to(n: u32) -> (Arc<Process>, Arc<Mutex<Agent>>) {
    let pages = [page(), page()];
    let mut agent = Agent {
        granted: 0,
        page: Arc::clone(&pages[0]),
        uses_page: true,
    };
    assert!(agent.grant(n));
    let process = Process {
        pages,
        current: AtomicUsize::new(0),
        moving: Mutex::new(()),
    };
    (Arc::new(process), Arc::new(Mutex::new(agent)))
}

#[test]
fn charges_grants_and_reclaims_never_lose_a_unit() {
    check(|| {
        let (process, agent) = granted_to(2);
        let other = {
            let process = Arc::clone(&process);
            thread::spawn(move || {
                let first = process.charge(1);
                let second = process.charge(2);
                if first {
                    process.discharge(1);
                }
                u32::from(second) * 2
            })
        };
        let sibling = {
            let agent = Arc::clone(&agent);
            thread::spawn(move || {
                let taken = agent.lock().unwrap().take_back(2);
                agent.lock().unwrap().grant(1);
                taken
            })
        };
        let own = u32::from(process.charge(1));
        let (others, taken) = (other.join().unwrap(), sibling.join().unwrap());
        let (word, granted) = (process.page().word(), agent.lock().unwrap().granted);
        assert_eq!(word.used, own + others);
        assert!(word.used <= word.granted);
        assert_eq!((word.granted, granted + taken), (granted, 3));
    });
}

#[test]
fn last_unit_is_charged_by_exactly_one_thread() {
    check(|| {
        let (process, _agent) = granted_to(1);
        let other = {
            let process = Arc::clone(&process);
            thread::spawn(move || process.charge(1))
        };
        let own = process.charge(1);
        assert!(own ^ other.join().unwrap());
    });
}

#[test]
fn migration_loses_no_charge_and_gains_no_credit() {
    check(|| {
        let (process, agent) = granted_to(3);
        assert!(process.charge(1));
        let other = {
            let process = Arc::clone(&process);
            thread::spawn(move || {
                process.discharge(1);
                u32::from(process.charge(2)) * 2
            })
        };
        let sibling = {
            let agent = Arc::clone(&agent);
            thread::spawn(move || agent.lock().unwrap().take_back(3))
        };
        process.reconnect(&agent, true);
        let (used, taken) = (other.join().unwrap(), sibling.join().unwrap());
        let (word, granted) = (process.page().word(), agent.lock().unwrap().granted);
        assert_eq!((word.used, word.granted), (used, granted));
        assert!(word.used <= word.granted);
        assert_eq!(granted + taken, 3);
    });
}

#[test]
fn abandoned_migration_reclaims_no_credit_in_use() {
    check(|| {
        let (process, agent) = granted_to(2);
        let sibling = {
            let agent = Arc::clone(&agent);
            thread::spawn(move || agent.lock().unwrap().take_back(2))
        };
        process.reconnect(&agent, false);
        let used = u32::from(process.charge(2)) * 2;
        let taken = sibling.join().unwrap();
        assert!(
            used + taken <= 2,
            "{used} are used and {taken} are another's"
        );
    });
}
