use proptest::prelude::*;

mod interleavings;

use super::*;
use crate::config::AuditPolicy;
use crate::sessions::MemberBooks;

const LIMITS: AuditConfig = AuditConfig {
    policy: AuditPolicy::Report,
    tolerance: Bytes::mib(64),
    process_allowance: Bytes::gib(1),
    kill_after: 3,
};

fn gpu() -> GpuUuid {
    "GPU-a".parse().unwrap()
}

fn pod(number: u64) -> PodUid {
    format!("pod-{number}").parse().unwrap()
}

/// A process, its start ten times its pid.
fn process(pid: u32) -> Process {
    let start = u64::from(pid) * 10;
    Process { pid, start }
}

/// A container with a quota in MiB, and its members with what each was granted and uses.
fn books(number: u64, quota: u64, members: &[(u32, u64)]) -> Books {
    let granted: u64 = members.iter().map(|(_, granted)| granted).sum();
    let account = AccountBooks {
        granted: Bytes::mib(granted),
        used: Bytes::mib(granted),
        peak: Bytes::mib(granted),
        ..AccountBooks::unused(Account::Gpu(gpu()), Bytes::mib(quota))
    };
    let member = |(pid, granted): &(u32, u64)| MemberBooks {
        process: process(*pid),
        granted: vec![Bytes::mib(*granted)],
        forged: false,
    };
    Books {
        pod: pod(number),
        home: Some("c".into()),
        members: members.iter().map(member).collect(),
        ..Books::unused(number, vec![account])
    }
}

/// A listed process in the container of that number; the host's for zero.
fn listed(number: u64, pid: u32, mib: u64) -> Listed {
    let owner = match number {
        0 => Owner::Host,
        number => Owner::Container {
            pod: pod(number),
            cgroup: "c".into(),
        },
    };
    let start = process(pid).start;
    Listed {
        pid,
        bytes: Some(Bytes::mib(mib)),
        alive: Some(Alive { start, owner }),
    }
}

fn seen(processes: Vec<Listed>) -> GpuSeen {
    GpuSeen {
        gpu: gpu(),
        residual: 0,
        unlisted: Some(Bytes::ZERO),
        left: Bytes::ZERO,
        processes,
    }
}

fn found(processes: Vec<Listed>, books: &[Books], containers: &Containers) -> Vec<&'static str> {
    let verdict = judge(&[seen(processes)], books, containers, &LIMITS);
    verdict.findings.iter().map(Finding::kind).collect()
}

fn shims(pids: &[(u32, bool)]) -> Containers {
    let pids = pids.iter().map(|(pid, shim)| (1, *pid, *shim, &[][..]));
    attested(pids)
}

/// Processes: the container of each, its pid, whether it has the shim, and where it has the driver's devices mapped.
fn attested<'a>(processes: impl IntoIterator<Item = (u64, u32, bool, &'a [u64])>) -> Containers {
    let running = |(number, pid, shim, devices): (u64, u32, bool, &[u64])| {
        let running = Running {
            start: process(pid).start,
            forked: false,
            shim,
            devices: devices.iter().copied().collect(),
        };
        (pid, (AllocationId::from_bits(number), running))
    };
    Containers {
        processes: processes.into_iter().map(running).collect(),
        ..Containers::default()
    }
}

/// A GPU with 600 MiB that are charged to nobody.
fn held(processes: Vec<Listed>) -> GpuSeen {
    GpuSeen {
        unlisted: Some(Bytes::mib(600)),
        ..seen(processes)
    }
}

/// The processes that may hold memory of nobody, and whether each is of the only container with such.
fn holders(seen: GpuSeen, books: &[Books], containers: &Containers) -> Vec<(u32, bool)> {
    let verdict = judge(&[seen], books, containers, &LIMITS);
    let holder = |finding: &Finding| match finding {
        Finding::Holder { process, alone, .. } => Some((process.pid, *alone)),
        _ => None,
    };
    verdict.findings.iter().filter_map(holder).collect()
}

#[test]
fn a_process_with_the_driver_and_no_session_is_a_holder_while_memory_is_of_nobody() {
    let books = [books(1, 1024, &[])];
    let containers = attested([(1, 5, true, &[100][..])]);
    assert_eq!(holders(held(vec![]), &books, &containers), [(5, true)]);
    assert_eq!(holders(seen(vec![]), &books, &containers), []);
    let without = attested([(1, 5, false, &[100][..])]);
    assert_eq!(holders(held(vec![]), &books, &without), [(5, true)]);
}

#[test]
fn contextless_memory_beyond_the_quota_is_found_with_a_session() {
    let member = books(1, 4096, &[(5, 0)]);
    let beyond = vec![listed(1, 5, 20 * 1024)];
    let kinds = found(beyond, &[member], &Containers::default());
    assert_eq!(kinds, ["over-quota"]);
}

#[test]
fn listed_dead_that_no_ledger_knows_are_of_nobody() {
    let dead = Listed {
        alive: None,
        ..listed(1, 5, 600)
    };
    let books = [books(1, 1024, &[])];
    let verdict = judge(&[seen(vec![dead])], &books, &Containers::default(), &LIMITS);
    assert_eq!(verdict.unaccounted[&gpu()], Bytes::mib(600 - 64));
}

#[test]
fn honest_processes_are_no_holders_whatever_is_of_nobody() {
    let books = [books(1, 1024, &[(5, 100)])];
    let processes = [
        (1, 5, true, &[100, 200][..]),
        (1, 6, true, &[200][..]),
        (1, 7, true, &[][..]),
    ];
    let containers = attested(processes);
    let listed = vec![listed(1, 5, 100)];
    assert_eq!(
        holders(held(listed), &books, &containers),
        [],
        "a session, its forked child, and a program that asks NVML"
    );
    let mut older = attested([(1, 8, true, &[300][..])]);
    older.since = process(8).start + 1;
    assert_eq!(holders(held(vec![]), &books, &older), []);
}

#[test]
fn a_forked_child_is_no_holder_while_its_dead_parent_is_charged() {
    let mut of_it = books(1, 1024, &[]);
    let mut containers = attested([(1, 6, true, &[100][..])]);
    let child = &mut containers.processes.get_mut(&6).unwrap().1;
    child.forked = true;
    assert_eq!(
        holders(held(vec![]), &[of_it.clone()], &containers),
        [(6, true)]
    );
    of_it.retired = vec![5];
    assert_eq!(holders(held(vec![]), &[of_it], &containers), []);
}

#[test]
fn a_child_with_a_driver_of_its_own_is_a_holder() {
    let books = [books(1, 1024, &[(5, 100)])];
    let processes = [(1, 5, true, &[100][..]), (1, 6, true, &[100, 300][..])];
    let containers = attested(processes);
    assert_eq!(holders(held(vec![]), &books, &containers), [(6, true)]);
}

#[test]
fn holders_of_several_containers_are_all_named_and_none_is_alone() {
    let books = [books(1, 1024, &[]), books(2, 1024, &[])];
    let processes = [(1, 5, true, &[100][..]), (2, 6, true, &[100][..])];
    let found = holders(held(vec![]), &books, &attested(processes));
    assert_eq!(found, [(5, false), (6, false)]);
}

#[test]
fn memory_of_nobody_is_of_the_only_container_that_uses_the_driver() {
    let of = |processes: &[(u64, u32, bool, &[u64])]| {
        let members = [books(1, 1024, &[(5, 0)]), books(2, 1024, &[(6, 0)])];
        let containers = attested(processes.iter().copied());
        let verdict = judge(&[held(vec![])], &members, &containers, &LIMITS);
        match verdict.findings.as_slice() {
            [Finding::Unaccounted { only, .. }] => *only,
            other => panic!("{other:?}"),
        }
    };
    let (one, other) = ((1, 5, true, &[100][..]), (2, 6, true, &[100][..]));
    assert_eq!(of(&[one]), Some(AllocationId::from_bits(1)));
    assert_eq!(of(&[one, other]), None);
    assert_eq!(of(&[]), None);
}

#[test]
fn a_process_without_session_or_shim_is_an_intruder_of_its_container() {
    let books = [books(1, 1024, &[])];
    let verdict = judge(
        &[seen(vec![listed(1, 5, 600)])],
        &books,
        &shims(&[(5, false)]),
        &LIMITS,
    );
    let Finding::Intruder {
        process: who,
        allocation,
        ..
    } = &verdict.findings[0]
    else {
        panic!("{verdict:?}");
    };
    assert_eq!(
        (*who, *allocation),
        (process(5), Some(AllocationId::from_bits(1)))
    );
    assert_eq!(verdict.intruders[&gpu()], 1);
    let outside = &verdict.outside[&(AllocationId::from_bits(1), gpu())];
    assert_eq!(
        outside[&5],
        Bytes::mib(600),
        "charged at the driver's figure"
    );
}

#[test]
fn a_process_with_the_shim_and_no_session_went_past_it_unless_an_earlier_agent_may_have_known_it() {
    let books = [books(1, 4096, &[])];
    let mut containers = shims(&[(5, true)]);
    let judged = |containers: &Containers| {
        judge(
            &[seen(vec![listed(1, 5, 600)])],
            &books,
            containers,
            &LIMITS,
        )
    };
    assert_eq!(judged(&containers).findings[0].kind(), "intruder");
    containers.since = process(5).start + 1;
    let verdict = judged(&containers);
    assert_eq!(verdict.findings, []);
    let outside = &verdict.outside[&(AllocationId::from_bits(1), gpu())];
    assert_eq!(
        outside[&5],
        Bytes::mib(600),
        "charged at the driver's figure"
    );
    containers
        .processes
        .values_mut()
        .for_each(|(_, running)| running.shim = false);
    assert_eq!(judged(&containers).findings[0].kind(), "intruder");
}

#[test]
fn the_hosts_processes_and_those_of_other_pods_are_intruders_that_nobody_is_charged_for() {
    let books = [books(1, 1024, &[])];
    let verdict = judge(
        &[seen(vec![listed(0, 5, 600), listed(9, 6, 600)])],
        &books,
        &shims(&[]),
        &LIMITS,
    );
    let owners: Vec<_> = verdict
        .findings
        .iter()
        .map(|finding| match finding {
            Finding::Intruder {
                owner,
                allocation: None,
                ..
            } => owner.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(owners[0], Owner::Host);
    assert_eq!(owners[1], listed(9, 6, 0).alive.unwrap().owner);
    assert!(verdict.outside.is_empty());
}

#[test]
fn a_pid_that_came_again_is_not_the_member_that_had_it() {
    let mut again = listed(1, 5, 600);
    again.alive.as_mut().unwrap().start += 1;
    let books = [books(1, 1024, &[(5, 600)])];
    assert_eq!(
        found(vec![again], &books, &shims(&[(5, false)])),
        ["intruder"]
    );
}

#[test]
fn the_dead_whose_memory_stays_are_known_and_one_that_is_gone_is_no_finding() {
    let mut dead = listed(1, 5, 600);
    dead.alive = None;
    let mut of_it = books(1, 1024, &[]);
    assert_eq!(
        found(vec![dead.clone()], &[of_it.clone()], &shims(&[])),
        [""; 0]
    );
    of_it.retired = vec![5];
    of_it.accounts[0].retired = Bytes::mib(600);
    let verdict = judge(&[seen(vec![dead])], &[of_it], &shims(&[]), &LIMITS);
    assert_eq!(verdict.findings, []);
    assert_eq!(verdict.drift[&(AllocationId::from_bits(1), gpu())], 0);
}

#[test]
fn who_gets_the_pid_of_a_dead_process_is_charged_for_what_that_left() {
    let mut of_it = books(1, 8192, &[]);
    of_it.retired = vec![5];
    of_it.accounts[0].retired = Bytes::mib(600);
    // Of the host, of another pod, and of the container itself.
    for number in [0, 9, 1] {
        let again = |mib| found(vec![listed(number, 5, mib)], &[of_it.clone()], &shims(&[]));
        assert_eq!(again(600), [""; 0], "{number}");
        assert_eq!(again(600 + 1024 + 1), ["intruder"], "{number}");
    }
}

#[test]
fn a_quota_with_its_tolerance_and_one_allowance_may_be_used_and_one_byte_more_may_not() {
    let of_it = [books(1, 1024, &[(5, 1024), (6, 0)])];
    // The second process adds a tenth of the quota, not an allowance of its own.
    let most = Bytes(Bytes::mib(1024 + 64 + 1024).0 + Bytes::mib(1024).0 / 10);
    let listed = |bytes: Bytes| {
        let mut first = listed(1, 5, 0);
        first.bytes = Some(bytes);
        vec![first, listed(1, 6, 0)]
    };
    assert_eq!(found(listed(most), &of_it, &shims(&[])), [""; 0]);
    let more = Bytes(most.0 + 1);
    let verdict = judge(&[seen(listed(more))], &of_it, &shims(&[]), &LIMITS);
    let Finding::OverQuota { processes, .. } = &verdict.findings[0] else {
        panic!("{verdict:?}");
    };
    assert_eq!(
        *processes,
        [process(5)],
        "the one that has more than it was granted"
    );
}

#[test]
fn processes_without_room_for_their_contexts_are_a_finding() {
    // Sixteen contexts of 518 MiB that nobody charges, in a quota of 4 GiB.
    let members: Vec<_> = (5..21).map(|pid| (pid, 0)).collect();
    let listed = (5..21).map(|pid| listed(1, pid, 518)).collect();
    let of_it = [books(1, 4096, &members)];
    assert_eq!(found(listed, &of_it, &shims(&[])), ["over-quota"]);
}

#[test]
fn an_export_that_is_listed_accounts_for_nothing_unlisted() {
    let quota = 7 * 1024;
    let mut of_it = books(1, quota, &[(5, quota)]);
    of_it.accounts[0].exported = Bytes::mib(quota);
    let judged = |listed: Listed, unlisted: u64| {
        let gpu_seen = GpuSeen {
            unlisted: Some(Bytes::mib(unlisted)),
            ..seen(vec![listed])
        };
        let verdict = judge(&[gpu_seen], &[of_it.clone()], &shims(&[]), &LIMITS);
        let kinds = verdict.findings.iter().map(Finding::kind);
        kinds.collect::<Vec<_>>()
    };
    assert_eq!(judged(listed(1, 5, 518), quota - 518), [""; 0], "honest");
    assert_eq!(judged(listed(1, 5, quota), quota), ["unaccounted"]);
    // What another listed process of the container imported is not unlisted either.
    let imported = quota / 2;
    assert_eq!(judged(listed(1, 5, imported), quota), ["unaccounted"]);
}

#[test]
fn managed_memory_on_a_gpu_is_accounted_for() {
    let mut of_it = books(1, 1024, &[(5, 600)]);
    let managed = AccountBooks {
        used: Bytes::gib(8),
        ..AccountBooks::unused(Account::Managed, Bytes::gib(8))
    };
    of_it.accounts.push(managed);
    let gpu_seen = GpuSeen {
        unlisted: Some(Bytes::gib(8)),
        ..seen(vec![listed(1, 5, 600)])
    };
    let verdict = judge(&[gpu_seen], &[of_it], &shims(&[]), &LIMITS);
    assert_eq!(verdict.findings, []);
}

#[test]
fn a_quota_made_smaller_than_what_is_granted_is_no_finding_while_frees_catch_up() {
    let mut of_it = books(1, 4096, &[(5, 4096)]);
    of_it.accounts[0].quota = Bytes::mib(1024);
    assert_eq!(
        found(vec![listed(1, 5, 4096 + 518)], &[of_it], &shims(&[])),
        [""; 0]
    );
}

#[test]
fn memory_that_nobody_is_charged_for_is_told_unless_the_ledger_knows_who_exported_it() {
    let mut gpu_seen = GpuSeen {
        residual: 600 << 20,
        unlisted: Some(Bytes::mib(600)),
        ..seen(vec![])
    };
    let mut of_it = books(1, 1024, &[]);
    let verdict = judge(&[gpu_seen.clone()], &[of_it.clone()], &shims(&[]), &LIMITS);
    assert_eq!(verdict.findings.len(), 1);
    assert_eq!(verdict.residual[&gpu()], 600 << 20);
    let mut untold = gpu_seen.clone();
    untold.unlisted = None;
    untold.processes = vec![Listed {
        bytes: None,
        ..listed(0, 5, 0)
    }];
    let verdict = judge(&[untold], &[of_it.clone()], &shims(&[]), &LIMITS);
    let kinds: Vec<_> = verdict.findings.iter().map(Finding::kind).collect();
    assert_eq!(kinds, ["intruder"], "it may be that process's");
    of_it.accounts[0].retired = Bytes::mib(300);
    of_it.accounts[0].exported = Bytes::mib(300);
    of_it.accounts[0].used = Bytes::mib(300);
    assert_eq!(
        judge(&[gpu_seen.clone()], &[of_it], &shims(&[]), &LIMITS).findings,
        []
    );
    gpu_seen.left = Bytes::mib(600);
    assert_eq!(
        judge(&[gpu_seen], &[], &shims(&[]), &LIMITS).findings,
        [],
        "of pods that ended"
    );
}

#[test]
fn a_page_with_another_grant_than_the_books_is_a_finding_without_any_gpu_seen() {
    let mut of_it = books(1, 1024, &[(5, 10), (6, 10)]);
    of_it.members[1].forged = true;
    let verdict = judge(&[], &[of_it], &shims(&[]), &LIMITS);
    let expected = Finding::ForgedPage {
        allocation: AllocationId::from_bits(1),
        process: process(6),
    };
    assert_eq!(verdict.findings, [expected]);
}

/// A process: what it was granted and what it has besides, in MiB, and whether it has a session.
type Program = (u64, u64, bool);

/// Containers with their quota in MiB and their processes.
fn world() -> impl Strategy<Value = Vec<(u64, Vec<Program>)>> {
    // All of a container together have no more besides than one allowance.
    let process = (0..2048_u64, 0..=256_u64, any::<bool>());
    let container = prop::collection::vec(process, 0..5).prop_flat_map(|processes| {
        let granted: u64 = processes.iter().map(|(granted, ..)| granted).sum();
        (granted..=granted + 4096, Just(processes))
    });
    prop::collection::vec(container, 0..5)
}

proptest! {
    #[test]
    fn honest_containers_are_no_finding_and_whatever_is_listed_is_accounted_for(world in world()) {
        let (mut all, mut processes, mut pid) = (Vec::new(), Vec::new(), 100);
        for (number, (quota, of_it)) in (1..).zip(&world) {
            let mut members = Vec::new();
            for (granted, besides, session) in of_it {
                pid += 1;
                processes.push(listed(number, pid, granted + besides));
                if *session {
                    members.push((pid, *granted));
                }
            }
            all.push(books(number, *quota, &members));
        }
        let charged: u64 = processes.iter().filter_map(|listed| listed.bytes).map(|bytes| bytes.0).sum();
        let gpu_seen = seen(processes);
        // Sessions are lacking because an earlier agent's records are lost.
        let containers = Containers { since: u64::MAX, ..Containers::default() };
        let verdict = judge(std::slice::from_ref(&gpu_seen), &all, &containers, &LIMITS);
        prop_assert_eq!(&verdict.findings, &[]);
        prop_assert_eq!(verdict.residual[&gpu()], 0);
        let known: i64 = all.iter().map(|books| books.accounts[0].used.0 as i64).sum();
        let drift: i64 = verdict.drift.values().sum();
        prop_assert_eq!(drift + known, charged as i64, "each process counts once");
    }

    #[test]
    fn memory_beyond_all_allowances_is_always_found_whoever_has_it(
        quota in 0..4096_u64, granted in 0..4096_u64, over in 1..4096_u64, session: bool, mapped: bool,
    ) {
        let granted = granted.min(quota);
        let members = if session { vec![(5, granted)] } else { vec![] };
        // One process: its allowance alone, no part of the quota besides.
        let has = listed(1, 5, quota + 64 + 1024 + over);
        let found = found(vec![has], &[books(1, quota, &members)], &shims(&[(5, mapped)]));
        prop_assert!(found.contains(&"over-quota"));
        prop_assert_eq!(found.contains(&"intruder"), !session);
    }
}
