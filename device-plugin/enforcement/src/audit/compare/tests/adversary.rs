//! Runs random histories of hostile pods beside an honest one, and audits each second.
//!
//! A hostile pod takes memory past the shim with every way to hide whose it is: it changes its
//! root, ends its main thread, forks after it took memory and exits, takes memory in a container
//! without GPU memory, makes each client in a child that ends, or steers pids to those of its ended
//! processes. After each audit:
//!
//! | promise | evidence |
//! |---|---|
//! | nobody innocent is named, charged or ended | findings, charges and kills |
//! | no finding names a process that started after its pid was first listed (`*`) | findings |
//! | granted <= quota, or found | pods beyond quota and allowance are found within 20 audits |
//!
//! `*` unless the process has the driver open without a session
//!
//! `BURSAR_ADVERSARY_STEPS=1000000` sets the number of steps, `BURSAR_ADVERSARY_SEED` the seed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use bursar_config::AuditPolicy;
use bursar_ledger::units::PodUid;

use super::*;
use crate::audit::consecutive::ConsecutiveFindings;
use crate::audit::listings::{AnswerTimes, Listings};
use crate::audit::policy::action;

const STEPS: u64 = 30_000;
/// Few pids, so that they are reused, but not within two audits: the kernel gives all others first.
const PIDS: u32 = 64;
const REUSED_AFTER: u64 = 200;
const QUOTA_MIB: u64 = 4096;
const HOSTILE: [u64; 2] = [1, 2];
const HONEST: u64 = 3;
/// The audits within which memory beyond the quotas has to be found.
const FOUND_WITHIN: u32 = 20;

static KILL: LazyLock<AuditConfig> = LazyLock::new(|| AuditConfig {
    policy: AuditPolicy::Kill,
    ..LIMITS
});

struct Random(u64);

impl Random {
    /// A number below `most` (splitmix64).
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % most
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        let index = self.below(of.len().max(1) as u64);
        of.get(index as usize).copied()
    }
}

#[derive(Clone, Debug)]
struct FakeProcess {
    start: u64,
    pod: u64,
    cgroup: &'static str,
    /// Granted MiB, if it has a session.
    session: Option<u64>,
    forked: bool,
    /// The clients whose files it has.
    files: BTreeSet<u64>,
    /// The address at which it has mapped device nodes; a forked child has its parent's.
    mapped: Option<u64>,
}

/// A client of the driver, which lives as long as a process has its files.
#[derive(Clone, Debug)]
struct Client {
    pid: u32,
    mib: u64,
    has_context: bool,
}

#[derive(Default)]
struct FakeNode {
    now: u64,
    next_pid: u32,
    next_client: u64,
    ended_at: BTreeMap<u32, u64>,
    processes: BTreeMap<u32, FakeProcess>,
    clients: BTreeMap<u64, Client>,
    /// The pods whose mounts no process shows.
    hidden: BTreeSet<u64>,
    /// The honest pod's exited sessions whose memory its children have, each with its grant.
    exited: BTreeMap<u32, u64>,
    listings: Listings,
    first_listed: BTreeMap<u32, u64>,
    consecutive: ConsecutiveFindings,
    /// The audits for which the hostile pods have had too much and no finding.
    unfound: u32,
    kills: u64,
}

impl FakeNode {
    fn spawn(&mut self, pod: u64, cgroup: &'static str, parent: Option<u32>) -> u32 {
        let parent = parent.and_then(|pid| self.processes.get(&pid)).cloned();
        loop {
            self.next_pid = self.next_pid % PIDS + 1;
            let ended_at = self.ended_at.get(&self.next_pid);
            let is_free = ended_at.is_none_or(|at| self.now >= at + REUSED_AFTER);
            if is_free && !self.processes.contains_key(&self.next_pid) {
                break;
            }
        }
        let process = FakeProcess {
            start: self.now,
            pod,
            cgroup,
            session: None,
            forked: parent.is_some(),
            files: parent.iter().flat_map(|of| of.files.clone()).collect(),
            mapped: parent.and_then(|of| of.mapped),
        };
        self.processes.insert(self.next_pid, process);
        self.next_pid
    }

    /// Lets the process `holder` have the files of a client that the process `creator` made.
    fn take(&mut self, creator: u32, holder: u32, mib: u64, has_context: bool) {
        let id = self.next_client;
        self.next_client += 1;
        let client = Client {
            pid: creator,
            mib,
            has_context,
        };
        self.clients.insert(id, client);
        if let Some(process) = self.processes.get_mut(&holder) {
            process.files.insert(id);
            process.mapped.get_or_insert(1_000 + id);
        }
    }

    fn exit(&mut self, pid: u32) {
        self.ended_at.insert(pid, self.now);
        if let Some(FakeProcess {
            session: Some(granted),
            pod: HONEST,
            ..
        }) = self.processes.remove(&pid)
        {
            self.exited.insert(pid, granted);
        }
        let held: BTreeSet<u64> = self
            .processes
            .values()
            .flat_map(|of| of.files.clone())
            .collect();
        self.clients.retain(|id, _| held.contains(id));
        let listed: BTreeSet<u32> = self.clients.values().map(|client| client.pid).collect();
        self.exited.retain(|pid, _| listed.contains(pid));
    }

    fn of_pod(&self, pod: u64) -> Vec<u32> {
        let own = self
            .processes
            .iter()
            .filter(|(_, process)| process.pod == pod);
        own.map(|(pid, _)| *pid).collect()
    }

    fn granted(&self, pod: u64) -> u64 {
        let own = self.processes.values().filter(|process| process.pod == pod);
        let live: u64 = own.filter_map(|process| process.session).sum();
        let exited: u64 = match pod {
            HONEST => self.exited.values().sum(),
            _ => 0,
        };
        live + exited
    }

    fn step(&mut self, random: &mut Random) {
        self.now += random.below(3);
        if random.below(3) == 0 {
            return self.honest_step(random);
        }
        let pod = HOSTILE[random.below(2) as usize];
        let own = self.of_pod(pod);
        let Some(pid) = random
            .pick(&own)
            .filter(|_| own.len() < 6 || random.below(2) == 0)
        else {
            if own.len() < 6 {
                let cgroup = if random.below(4) == 0 { "sidecar" } else { "c" };
                self.spawn(pod, cgroup, None);
            }
            return;
        };
        let mib = [2, 518, 2048, 20_000][random.below(4) as usize];
        match random.below(12) {
            0 | 1 => self.take(pid, pid, mib, random.below(2) == 0),
            2 => drop(self.hidden.insert(pod)),
            3 => drop(self.hidden.remove(&pod)),
            4 if own.len() < 6 => drop(self.spawn(pod, "c", Some(pid))),
            5 | 6 => self.exit(pid),
            7 => {
                let room = QUOTA_MIB - self.granted(pod).min(QUOTA_MIB);
                if let Some(process) = self.processes.get_mut(&pid).filter(|of| of.cgroup == "c") {
                    process.session.get_or_insert(random.below(room + 1));
                }
            }
            // Its children make a client each, and end.
            8 => {
                for _ in 0..random.below(4) {
                    let child = self.spawn(pod, "c", None);
                    self.take(child, pid, mib, true);
                    self.exit(child);
                }
            }
            // The next process gets the pid of an ended one that the driver still lists.
            9 => {
                let ended = self.clients.values().map(|client| client.pid);
                let ended: Vec<u32> = ended
                    .filter(|pid| !self.processes.contains_key(pid))
                    .collect();
                if let Some(pid) = random.pick(&ended) {
                    self.next_pid = if pid == 1 { PIDS } else { pid - 1 };
                }
            }
            // The process unmaps the driver's nodes.
            10 => {
                if let Some(process) = self.processes.get_mut(&pid) {
                    process.mapped = None;
                }
            }
            _ => {}
        }
    }

    /// A program starts, uses what it was granted, forks a worker or exits.
    fn honest_step(&mut self, random: &mut Random) {
        let own = self.of_pod(HONEST);
        let Some(pid) = random
            .pick(&own)
            .filter(|_| own.len() >= 5 || random.below(2) == 0)
        else {
            self.spawn(HONEST, "c", None);
            return;
        };
        let process = self.processes[&pid].clone();
        match random.below(4) {
            0 if process.session.is_none() && !process.forked => {
                let room = QUOTA_MIB - self.granted(HONEST).min(QUOTA_MIB);
                if room > 600 {
                    let mib = 518 + random.below(room - 517);
                    if let Some(process) = self.processes.get_mut(&pid) {
                        process.session = Some(mib);
                    }
                    self.now += 20;
                    self.take(pid, pid, mib, true);
                }
            }
            1 if own.len() < 6 => drop(self.spawn(HONEST, "c", Some(pid))),
            2 => self.exit(pid),
            _ => {}
        }
    }

    fn live(&self, pid: u32, started_before: u64) -> Option<LiveProcess> {
        let process = self.processes.get(&pid)?;
        let owner = ProcessOwner::Container {
            pod: pod(process.pod),
            cgroup: process.cgroup.to_owned(),
        };
        let start = process.start;
        (start < started_before).then_some(LiveProcess { start, owner })
    }

    fn usage(&self, number: u64) -> ContainerUsage {
        let own = self
            .processes
            .iter()
            .filter(|(_, process)| process.pod == number);
        let members = own.filter_map(|(pid, process)| {
            Some(ProcessCredit {
                process: Process {
                    pid: *pid,
                    start: process.start,
                },
                granted: vec![Bytes::mib(process.session?)],
                tampered: false,
            })
        });
        let members: Vec<_> = members.collect();
        let exited = match number {
            HONEST => self.exited.clone(),
            _ => BTreeMap::new(),
        };
        let left: u64 = exited.values().sum();
        let live = Bytes::mib(self.granted(number) - left);
        let account = AccountBalance {
            granted: live,
            used: live,
            exited: Bytes::mib(left),
            ..AccountBalance::empty(Account::Gpu(gpu()), Bytes::mib(QUOTA_MIB))
        };
        ContainerUsage {
            pod: pod(number),
            cgroup: None,
            processes: members,
            exited_pids: exited.into_keys().collect(),
            ..ContainerUsage::empty(number, vec![account])
        }
    }

    fn attested(&self) -> AttestedState {
        let mut state = AttestedState {
            exited_pids: self.exited.keys().copied().collect(),
            ..AttestedState::default()
        };
        for (pid, process) in &self.processes {
            if self.hidden.contains(&process.pod) || process.cgroup != "c" {
                let owner = ProcessOwner::Container {
                    pod: pod(process.pod),
                    cgroup: process.cgroup.to_owned(),
                };
                let start = process.start;
                let user = LiveProcess { start, owner };
                if process.mapped.is_some() {
                    state.device_users.insert(*pid, user);
                }
                continue;
            }
            let of = AllocationId::from_bits(process.pod);
            state
                .allocations
                .insert((pod(process.pod), "c".to_owned()), of);
            let running = AttestedProcess {
                start: process.start,
                forked: process.forked,
                has_shim: true,
                device_mappings: process.mapped.into_iter().collect(),
                managed_mapped: 0,
            };
            state.processes.insert(*pid, (of, running));
        }
        state
    }

    fn sample(&mut self) -> GpuSample {
        let before = std::mem::take(&mut self.listings);
        let times = AnswerTimes {
            asked_at: self.now,
            answered_at: self.now,
        };
        let mut bytes: BTreeMap<u32, (u64, bool)> = BTreeMap::new();
        for client in self.clients.values() {
            let (sum, has_context) = bytes.entry(client.pid).or_default();
            *sum += client.mib;
            *has_context |= client.has_context;
        }
        self.first_listed.retain(|pid, _| bytes.contains_key(pid));
        let (mut listed, mut unlisted, mut listings) = (Vec::new(), 0, Listings::default());
        for (pid, (mib, has_context)) in bytes {
            self.first_listed.entry(pid).or_insert(self.now);
            let find = |started_before| self.live(pid, started_before);
            let (live, is_gone) = listings.add(&before, pid, times, find);
            if !has_context && live.is_none() {
                unlisted += mib;
                continue;
            }
            listed.push(ListedProcess {
                pid,
                bytes: Some(Bytes::mib(mib)),
                sm_percent: None,
                live,
                is_gone,
            });
        }
        self.listings = listings;
        GpuSample {
            unattributed: Some(Bytes::mib(unlisted)),
            ..sample(listed)
        }
    }

    /// Audits, ends whom the policy ends, and returns the broken promise.
    fn audit(&mut self) -> Result<(), String> {
        self.now += 100;
        let sample = self.sample();
        let usage: Vec<_> = [1, 2, HONEST].map(|pod| self.usage(pod)).into();
        let mut known = self.attested();
        if !sample.processes.iter().any(|listed| listed.is_gone) {
            known.device_users.clear();
        }
        let result = compare_accounts(&[sample], &usage, &known, &KILL);
        let honest = (pod(HONEST), AllocationId::from_bits(HONEST));
        for finding in &result.findings {
            if let Some(what) = self.accuses(finding, &honest) {
                return Err(format!("{what}: {finding:?}"));
            }
        }
        if result
            .untracked_memory
            .keys()
            .any(|(of, _)| *of == honest.1)
        {
            return Err(format!(
                "the honest pod is charged: {:?}",
                result.untracked_memory
            ));
        }
        self.check_found(&result)?;
        let counts = self.consecutive.count(&result.findings, &BTreeSet::new());
        for (finding, strikes) in result.findings.iter().zip(counts) {
            for Process { pid, .. } in action(finding, strikes, &KILL, |_| true).kill {
                self.kills += 1;
                self.exit(pid);
            }
        }
        Ok(())
    }

    /// Why a finding is about an innocent.
    fn accuses(
        &self,
        finding: &Finding,
        (honest, allocation): &(PodUid, AllocationId),
    ) -> Option<&'static str> {
        let named: Vec<Process> = match finding {
            Finding::UntrackedProcess { process, .. } | Finding::Holder { process, .. } => {
                vec![*process]
            }
            Finding::OverQuota { processes, .. } => processes.clone(),
            _ => Vec::new(),
        };
        let of = match finding {
            Finding::UntrackedProcess { allocation, .. } | Finding::Holder { allocation, .. } => {
                *allocation
            }
            Finding::Unaccounted { only_container, .. } => *only_container,
            Finding::OverQuota { allocation, .. }
            | Finding::TamperedPage { allocation, .. }
            | Finding::OverManaged { allocation, .. } => Some(*allocation),
        };
        let is_honest = |process: &Process| {
            let found = self.processes.get(&process.pid);
            found.is_some_and(|found| pod(found.pod) == *honest)
        };
        let is_later = |process: &Process| {
            let first = self.first_listed.get(&process.pid);
            let found = self.processes.get(&process.pid);
            let is_open =
                found.is_some_and(|found| !found.files.is_empty() && found.session.is_none());
            first.is_some_and(|first| process.start >= *first) && !is_open
        };
        match () {
            () if of == Some(*allocation) => Some("the honest pod is accused"),
            () if named.iter().any(is_honest) => Some("an honest process is accused"),
            () if named.iter().any(is_later) => Some("a later process is accused"),
            () => None,
        }
    }

    /// Both pods together: one may report use that the other has.
    fn check_found(&mut self, result: &AuditResult) -> Result<(), String> {
        let own = self
            .processes
            .values()
            .filter(|process| process.pod != HONEST);
        let files: BTreeSet<u64> = own.flat_map(|process| process.files.clone()).collect();
        let held: u64 = files.iter().map(|id| self.clients[id].mib).sum();
        let allowance = (KILL.process_allowance.0 >> 20) + QUOTA_MIB / 10;
        // The honest pod's allowance too may hide some.
        let most = 2 * QUOTA_MIB + 3 * allowance + (KILL.tolerance.0 >> 20);
        let is_unfound = held > most && result.findings.is_empty();
        self.unfound = if is_unfound { self.unfound + 1 } else { 0 };
        match self.unfound < FOUND_WITHIN {
            true => Ok(()),
            false => Err(format!("hostile pods have {held} MiB and no finding")),
        }
    }
}

#[test]
fn hostile_pod_is_found_and_no_innocent_is_accused() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let seed = number("BURSAR_ADVERSARY_SEED").unwrap_or_else(|| {
        let since = std::time::UNIX_EPOCH.elapsed().unwrap();
        u64::from(since.subsec_nanos())
    });
    println!("BURSAR_ADVERSARY_SEED={seed}");
    let (mut random, mut steps, mut kills) = (Random(seed), 0, 0);
    let most = number("BURSAR_ADVERSARY_STEPS").unwrap_or(STEPS);
    while steps < most {
        let mut node = FakeNode {
            now: 1_000,
            ..FakeNode::default()
        };
        for round in 0..200 {
            // Hostile pods rest now and then, so that an audit's window passes.
            let busy = if round % 50 < 25 { random.below(6) } else { 0 };
            for _ in 0..busy {
                node.step(&mut random);
            }
            steps += busy;
            if let Err(broken) = node.audit() {
                panic!("{broken}\nBURSAR_ADVERSARY_SEED={seed}, after {steps} steps");
            }
        }
        kills += node.kills;
    }
    println!("{steps} steps, {kills} processes ended");
    assert!(kills > 0, "the model's policy ends nobody");
}
