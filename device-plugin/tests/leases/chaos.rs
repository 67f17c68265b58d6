//! Tests leases while tenants, provisioners, the agent and the fd store are killed at random
//! moments: between two requests, and during one.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Pid, Signal, kill_process};

use crate::fixture::{Fixture, GIB, is_transient, open_retrying};
use crate::tenant_process::{GONE, Opened, Tenant};

const ROUNDS: u32 = 50;
/// The rounds in the long tier of `cargo verify`, in which each victim dies amid a request.
const LONG_ROUNDS: u32 = 250;

/// The longest time from a request to the kill, in microseconds.
const MAX_KILL_DELAY_US: u64 = 20_000;

/// The expected content of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// The last commit or discard had no answer, so either result is valid.
    Unknown,
    Content(u64, u64),
}

/// The process to kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Tenant,
    Provisioners,
    Agent,
    FdStore,
}

impl Victim {
    const ALL: [Victim; 4] = [
        Victim::Tenant,
        Victim::Provisioners,
        Victim::Agent,
        Victim::FdStore,
    ];

    /// Sends SIGKILL. The agent and the fd store are restarted at once.
    fn kill(self, fixture: &mut Fixture, tenant: u32) {
        match self {
            Victim::Tenant => {
                let pid = Pid::from_raw(tenant.cast_signed()).unwrap();
                kill_process(pid, Signal::KILL).unwrap();
            }
            Victim::Provisioners => drop(fixture.kill_provisioners()),
            Victim::Agent => {
                fixture.machine.kill_agent();
                fixture.machine.start_agent();
            }
            Victim::FdStore => {
                fixture.kill_fdstore();
                fixture.start_fdstore();
            }
        }
    }
}

/// The agent's reply to a tenant.
enum Reply {
    /// The lease and its mark, and the reply to a discard if there was one.
    Read(u64, u64, Option<String>),
    /// The lease and its mark, and the reply to the commit.
    Wrote(u64, u64, String),
    Refused(String),
}

impl Reply {
    fn is_gone(&self) -> bool {
        match self {
            Reply::Read(_, _, Some(why)) | Reply::Wrote(_, _, why) | Reply::Refused(why) => {
                why == GONE
            }
            Reply::Read(_, _, None) => false,
        }
    }
}

fn open_and_use(tenant: &mut Tenant, name: &str, rng: &mut StdRng, mark: u64) -> Reply {
    let bytes = u64::from(rng.random_range(1..3_u32)) * GIB;
    let discards = rng.random_range(0..4) == 0;
    match open_retrying(tenant, name, bytes) {
        Ok(Opened::Ready { lease, mark }) => {
            Reply::Read(lease, mark, discards.then(|| tenant.discard(lease)))
        }
        Ok(Opened::Write { lease, token }) => {
            Reply::Wrote(lease, mark, tenant.commit(lease, token, mark))
        }
        Err(why) => Reply::Refused(why),
    }
}

/// The expected content of each committed lease.
#[derive(Default)]
struct ExpectedLeases(BTreeMap<&'static str, Expected>);

impl ExpectedLeases {
    /// Forgets all leases after a kill of the fd store. The kill may have come before or after the
    /// request on `name`.
    fn forget_all_but(&mut self, name: &'static str) {
        self.0 = BTreeMap::from([(name, Expected::Unknown)]);
    }

    /// Checks a reply against the expected content of the lease.
    fn check_reply(&mut self, name: &'static str, reply: &Reply) {
        let before = self.0.get(name).copied();
        let unanswered = |why: &str, of: &str| {
            assert!(
                is_transient(why) || why == GONE || why.contains(of),
                "{why}"
            );
            Expected::Unknown
        };
        match reply {
            Reply::Read(lease, mark, discarded) => {
                let read = Expected::Content(*lease, *mark);
                assert_ne!(before, None, "{name} was never committed");
                if before != Some(Expected::Unknown) {
                    assert_eq!(before, Some(read), "{name}");
                }
                match discarded.as_deref() {
                    Some("discarded") => self.0.remove(name),
                    Some(why) => self.0.insert(name, unanswered(why, "Missing")),
                    None => self.0.insert(name, read),
                };
            }
            Reply::Wrote(lease, mark, answer) => {
                let is_lost = matches!(before, Some(Expected::Content(..)));
                assert!(!is_lost, "{name} is lost: {before:?}");
                let now = match answer.as_str() {
                    "committed" => Expected::Content(*lease, *mark),
                    why => unanswered(why, "Fenced"),
                };
                self.0.insert(name, now);
            }
            Reply::Refused(why) => {
                let others = ["Writing", "Quota", GONE];
                assert!(
                    others.iter().any(|known| why.contains(known)),
                    "{name}: {why}"
                );
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn committed_leases_survive_random_kills_and_leak_nothing() {
    let is_long = std::env::var_os("BURSAR_LONG").is_some();
    let rounds = if is_long { LONG_ROUNDS } else { ROUNDS };
    let mut fixture = Fixture::new().await;
    fixture.machine.run("full", 16).await;
    let mut pods = [
        fixture.machine.run("a", 6).await,
        fixture.machine.run("b", 6).await,
    ];
    let mut rng = StdRng::seed_from_u64(3);
    let mut tenants: Vec<Tenant> = pods.iter().map(|pod| fixture.tenant(pod)).collect();
    let mut expected_leases = ExpectedLeases::default();
    let (mut commits, mut reads, mut all_pods) = (0, 0, 0);
    // For each victim, the kills between two requests and the kills during one.
    let mut deaths = BTreeMap::<Victim, [u32; 2]>::new();
    for round in 0..rounds {
        let at = rng.random_range(0..pods.len());
        let name = ["x", "y", "z"][rng.random_range(0..3)];
        let victim = match rng.random_range(0..100) {
            0..15 => Some(Victim::Tenant),
            15..35 => Some(Victim::Provisioners),
            35..38 => Some(Victim::Agent),
            38..42 => Some(Victim::FdStore),
            _ => None,
        };
        // Short delays are likelier because most requests are answered within 2 ms, even more so
        // for rare victims.
        let is_rare = matches!(victim, Some(Victim::Agent | Victim::FdStore));
        let halvings = rng.random_range(if is_rare { 3..6 } else { 0..6 });
        let delay = rng.random_range(0..MAX_KILL_DELAY_US) >> halvings;
        // Some kills come after the answer, however long that takes.
        let after = !is_rare && rng.random_ratio(1, 3);
        let registered = fixture.machine.registrations();
        if victim == Some(Victim::FdStore) {
            expected_leases.forget_all_but(name);
        }
        let (reply, was_amid) = thread::scope(|scope| {
            let (fixture, tenant) = (&mut fixture, &mut tenants[at]);
            let pid = tenant.pid();
            let (answer, until_answered) = mpsc::channel::<()>();
            let killing = victim.map(|victim| {
                scope.spawn(move || {
                    if after {
                        let _ = until_answered.recv();
                    }
                    thread::sleep(Duration::from_micros(delay));
                    let start = Instant::now();
                    victim.kill(fixture, pid);
                    start
                })
            });
            let reply = open_and_use(tenant, name, &mut rng, u64::from(round) + 1);
            let answered = Instant::now();
            drop(answer);
            let killed = killing.map(|killing| killing.join().unwrap());
            (reply, killed.is_some_and(|killed| killed < answered))
        });
        // A tenant that is not killed exits only if it reads other content than was committed.
        assert!(!reply.is_gone() || victim == Some(Victim::Tenant));
        expected_leases.check_reply(name, &reply);
        if let Some(victim) = victim {
            deaths.entry(victim).or_default()[usize::from(was_amid)] += 1;
        }
        match victim {
            // The lease that the tenant was writing is discarded.
            Some(Victim::Tenant) => tenants[at] = fixture.tenant(&pods[at]),
            Some(Victim::Agent) => drop(fixture.machine.until_registered(registered).await),
            Some(Victim::FdStore) => expected_leases.forget_all_but(name),
            Some(Victim::Provisioners) | None => {}
        }
        match reply {
            Reply::Read(..) => reads += 1,
            Reply::Wrote(_, _, answer) => commits += u32::from(answer == "committed"),
            // Discarded memory that the other pod has open stays charged until that pod ends.
            Reply::Refused(why) if why.contains("Quota") => {
                tenants.clear();
                pods.iter().for_each(|pod| fixture.machine.end(pod));
                for (at, pod) in pods.iter_mut().enumerate() {
                    // The memory of the pod's leases is proven free first.
                    *pod = fixture.machine.admit(&format!("p{round}-{at}"), 6).await;
                    fixture.machine.until_started(pod).await;
                    tenants.push(fixture.tenant(pod));
                }
                expected_leases = ExpectedLeases::default();
                all_pods += 1;
            }
            Reply::Refused(_) => {}
        }
    }
    println!(
        "{commits} commits, {reads} reads; deaths between questions, and amid one: {deaths:?}; of all pods: {all_pods}"
    );
    assert!(commits > rounds / 25 && reads > rounds / 25);
    let amid = |victim| deaths.get(&victim).is_some_and(|[_, amid]| *amid > 0);
    assert!(!is_long || Victim::ALL.into_iter().all(amid), "{deaths:?}");
    assert!(deaths.values().map(|[between, _]| between).sum::<u32>() > rounds / 25);
    drop(tenants);
    for pod in &pods {
        fixture.machine.end(pod);
    }
    let whole = fixture.machine.admit("whole", 16).await;
    let start = Instant::now();
    fixture.machine.until_started(&whole).await;
    println!("all of it bound again after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(10));
}
