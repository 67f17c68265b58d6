use proptest::prelude::*;

mod adversary;
mod interleavings;
mod managed;

use bursar_config::AuditPolicy;
use bursar_sessions::ProcessCredit;

use super::*;

const LIMITS: AuditConfig = AuditConfig {
    policy: AuditPolicy::Report,
    tolerance: Bytes::mib(64),
    process_allowance: Bytes::gib(1),
    kill_after: 3,
    kill_outsiders: true,
    exempt_namespaces: BTreeSet::new(),
    host_programs: BTreeSet::new(),
};

fn gpu() -> GpuUuid {
    "GPU-a".parse().unwrap()
}

fn pod(number: u64) -> PodUid {
    format!("pod-{number}").parse().unwrap()
}

/// A process whose start time is ten times its pid.
fn process(pid: u32) -> Process {
    let start = u64::from(pid) * 10;
    Process { pid, start }
}

/// A container's usage, with a quota in MiB and sessions that use what they were granted.
fn usage(number: u64, quota: u64, members: &[(u32, u64)]) -> ContainerUsage {
    let granted: u64 = members.iter().map(|(_, granted)| granted).sum();
    let account = AccountBalance {
        granted: Bytes::mib(granted),
        used: Bytes::mib(granted),
        peak: Bytes::mib(granted),
        ..AccountBalance::empty(Account::Gpu(gpu()), Bytes::mib(quota))
    };
    let member = |(pid, granted): &(u32, u64)| ProcessCredit {
        process: process(*pid),
        granted: vec![Bytes::mib(*granted)],
        tampered: false,
    };
    ContainerUsage {
        pod: pod(number),
        cgroup: Some("c".into()),
        processes: members.iter().map(member).collect(),
        ..ContainerUsage::empty(number, vec![account])
    }
}

/// A listed process in the container of that number; zero stands for the host.
fn listed(number: u64, pid: u32, mib: u64) -> ListedProcess {
    let owner = match number {
        0 => ProcessOwner::Host,
        number => ProcessOwner::Container {
            pod: pod(number),
            cgroup: "c".into(),
        },
    };
    let start = process(pid).start;
    ListedProcess {
        pid,
        bytes: Some(Bytes::mib(mib)),
        sm_percent: None,
        live: Some(LiveProcess { start, owner }),
        is_gone: false,
    }
}

fn sample(processes: Vec<ListedProcess>) -> GpuSample {
    GpuSample {
        gpu: gpu(),
        unattributed_signed: 0,
        unattributed: Some(Bytes::ZERO),
        unreclaimed_or_retained: Bytes::ZERO,
        processes,
        importers: Vec::new(),
        has_all_holders: true,
    }
}

fn finding_kinds(
    processes: Vec<ListedProcess>,
    usage: &[ContainerUsage],
    containers: &AttestedState,
) -> Vec<&'static str> {
    let result = compare_accounts(&[sample(processes)], usage, containers, &LIMITS);
    result.findings.iter().map(Finding::kind).collect()
}

fn attested_shims(pids: &[(u32, bool)]) -> AttestedState {
    let pids = pids.iter().map(|(pid, shim)| (1, *pid, *shim, &[][..]));
    attested(pids)
}

/// Processes, each with its container, pid, whether it has the shim, and its device mappings.
fn attested<'a>(processes: impl IntoIterator<Item = (u64, u32, bool, &'a [u64])>) -> AttestedState {
    let running = |(number, pid, shim, devices): (u64, u32, bool, &[u64])| {
        let running = AttestedProcess {
            start: process(pid).start,
            forked: false,
            has_shim: shim,
            device_mappings: devices.iter().copied().collect(),
            managed_mapped: 0,
        };
        (pid, (AllocationId::from_bits(number), running))
    };
    AttestedState {
        processes: processes.into_iter().map(running).collect(),
        ..AttestedState::default()
    }
}

/// A sample with 600 MiB that are charged to no process.
fn sample_with_unattributed(processes: Vec<ListedProcess>) -> GpuSample {
    GpuSample {
        unattributed: Some(Bytes::mib(600)),
        ..sample(processes)
    }
}

/// The suspected holders, each with whether its container is the only one that has any.
fn holders(
    sample: GpuSample,
    usage: &[ContainerUsage],
    containers: &AttestedState,
) -> Vec<(u32, bool)> {
    let result = compare_accounts(&[sample], usage, containers, &LIMITS);
    let holder = |finding: &Finding| match finding {
        Finding::Holder {
            process,
            is_only_suspect,
            ..
        } => Some((process.pid, *is_only_suspect)),
        _ => None,
    };
    result.findings.iter().filter_map(holder).collect()
}

#[test]
fn process_is_a_holder_when_driver_is_mapped_without_session() {
    let usage = [usage(1, 1024, &[])];
    let containers = attested([(1, 5, true, &[100][..])]);
    assert_eq!(
        holders(sample_with_unattributed(vec![]), &usage, &containers),
        [(5, true)]
    );
    assert_eq!(holders(sample(vec![]), &usage, &containers), []);
    let without = attested([(1, 5, false, &[100][..])]);
    assert_eq!(
        holders(sample_with_unattributed(vec![]), &usage, &without),
        [(5, true)]
    );
}

#[test]
fn contextless_memory_beyond_the_quota_is_found_with_a_session() {
    let member = usage(1, 4096, &[(5, 0)]);
    let beyond = vec![listed(1, 5, 20 * 1024)];
    let kinds = finding_kinds(beyond, &[member], &AttestedState::default());
    assert_eq!(kinds, ["over-quota"]);
}

#[test]
fn sm_utilization_of_a_container_is_the_sum_up_to_a_whole_gpu() {
    let percents = |processes: &[(u32, Option<u8>)]| {
        let listed = processes.iter().map(|(pid, sm_percent)| ListedProcess {
            sm_percent: *sm_percent,
            ..listed(1, *pid, 20)
        });
        let usage = [usage(1, 4096, &[(5, 1024), (6, 1024)]), usage(2, 1024, &[])];
        let samples = [sample(listed.collect())];
        let result = compare_accounts(&samples, &usage, &AttestedState::default(), &LIMITS);
        result.sm_percents.into_values().collect::<Vec<_>>()
    };
    assert_eq!(percents(&[(5, Some(30)), (6, Some(0))]), [30]);
    assert_eq!(percents(&[(5, Some(80)), (6, Some(70))]), [100]);
    assert_eq!(percents(&[(5, Some(0))]), [0]);
    let none = Vec::<u8>::new();
    assert_eq!(percents(&[(5, None)]), none);
    assert_eq!(percents(&[]), none, "no process of a container is listed");
}

#[test]
fn listed_exited_process_is_unaccounted_without_an_account() {
    let exited = ListedProcess {
        live: None,
        ..listed(1, 5, 600)
    };
    let usage = [usage(1, 1024, &[])];
    let result = compare_accounts(
        &[sample(vec![exited])],
        &usage,
        &AttestedState::default(),
        &LIMITS,
    );
    assert_eq!(result.unaccounted[&gpu()], Bytes::mib(600 - 64));
}

#[test]
fn grants_of_unlisted_processes_explain_unattributed_memory() {
    let unaccounted = |members: &[(u32, u64)], processes: Vec<ListedProcess>| {
        let mut sample = sample(processes);
        sample.unattributed = Some(Bytes::mib(500));
        let usage = [usage(1, 4096, members)];
        let result = compare_accounts(&[sample], &usage, &AttestedState::default(), &LIMITS);
        result.unaccounted[&gpu()]
    };
    let beyond = |explained: u64| Bytes::mib(500 - explained - 64);
    // Process 6 is within `cuInit`, or its exit.
    assert_eq!(unaccounted(&[(6, 518)], vec![]), Bytes::ZERO);
    assert_eq!(unaccounted(&[(6, 100)], vec![]), beyond(100));
    let other = || vec![listed(1, 5, 2_000)];
    assert_eq!(unaccounted(&[(5, 2_000), (6, 518)], other()), Bytes::ZERO);
    assert_eq!(unaccounted(&[(5, 2_000)], other()), beyond(0));
}

#[test]
fn honest_process_is_no_holder_when_memory_is_unattributed() {
    let usage = [usage(1, 1024, &[(5, 100)])];
    let processes = [
        (1, 5, true, &[100, 200][..]),
        (1, 6, true, &[200][..]),
        (1, 7, true, &[][..]),
    ];
    let containers = attested(processes);
    let listed = vec![listed(1, 5, 100)];
    assert_eq!(
        holders(sample_with_unattributed(listed), &usage, &containers),
        [],
        "a session, its forked child, and a program that asks NVML"
    );
    let mut older = attested([(1, 8, true, &[300][..])]);
    older.agent_start = process(8).start + 1;
    assert_eq!(
        holders(sample_with_unattributed(vec![]), &usage, &older),
        []
    );
}

#[test]
fn forked_child_is_no_holder_while_its_parent_is_charged() {
    let mut container = usage(1, 1024, &[]);
    let mut containers = attested([(1, 6, true, &[100][..])]);
    let child = &mut containers.processes.get_mut(&6).unwrap().1;
    child.forked = true;
    assert_eq!(
        holders(
            sample_with_unattributed(vec![]),
            &[container.clone()],
            &containers
        ),
        [(6, true)]
    );
    container.exited_pids = vec![5];
    assert_eq!(
        holders(sample_with_unattributed(vec![]), &[container], &containers),
        []
    );
}

#[test]
fn child_is_a_holder_when_it_maps_the_driver_itself() {
    let usage = [usage(1, 1024, &[(5, 100)])];
    let processes = [(1, 5, true, &[100][..]), (1, 6, true, &[100, 300][..])];
    let containers = attested(processes);
    assert_eq!(
        holders(sample_with_unattributed(vec![]), &usage, &containers),
        [(6, true)]
    );
}

#[test]
fn holders_are_all_named_when_of_several_containers() {
    let usage = [usage(1, 1024, &[]), usage(2, 1024, &[])];
    let processes = [(1, 5, true, &[100][..]), (2, 6, true, &[100][..])];
    let found = holders(
        sample_with_unattributed(vec![]),
        &usage,
        &attested(processes),
    );
    assert_eq!(found, [(5, false), (6, false)]);
}

#[test]
fn unaccounted_memory_names_the_only_container_with_the_gpu() {
    let members = [usage(1, 1024, &[(5, 0)]), usage(2, 1024, &[(6, 0)])];
    let only_container = |members: &[ContainerUsage],
                          processes: &[(u64, u32, bool, &[u64])],
                          listed: &[ListedProcess]| {
        let containers = attested(processes.iter().copied());
        let samples = [sample_with_unattributed(listed.to_vec())];
        let result = compare_accounts(&samples, members, &containers, &LIMITS);
        let only = result.findings.iter().find_map(|finding| match finding {
            Finding::Unaccounted { only_container, .. } => Some(*only_container),
            _ => None,
        });
        only.expect("600 MiB are unaccounted")
    };
    let first = (1, 5, true, &[100][..]);
    let (one, own) = (&members[..1], Some(AllocationId::from_bits(1)));
    assert_eq!(only_container(one, &[first], &[]), own);
    assert_eq!(only_container(one, &[], &[]), None);
    // The other may hold it by a descriptor alone, so that it shows no use of the driver.
    assert_eq!(only_container(&members, &[first], &[]), None);
    // So may a process of the host or of another pod, but not one of its own or of an allowed
    // program.
    for (of, expected) in [(0, None), (3, None), (1, own)] {
        let other = [listed(1, 5, 0), listed(of, 7, 100)];
        assert_eq!(only_container(one, &[first], &other), expected, "{of}");
    }
    let mut allowed = listed(0, 7, 100);
    allowed.live.as_mut().unwrap().owner = ProcessOwner::AllowedHost;
    assert_eq!(only_container(one, &[first], &[allowed]), own);
}

#[test]
fn memory_that_the_host_may_have_left_names_no_container() {
    let members = [usage(1, 1024, &[(5, 0)])];
    let containers = attested([(1, 5, true, &[100][..])]);
    let most = LIMITS.tolerance + MANAGED_CACHE;
    for (bytes, expected) in [
        (most, None),
        (most + Bytes(1), Some(AllocationId::from_bits(1))),
    ] {
        let sample = GpuSample {
            unattributed: Some(bytes),
            ..sample(vec![])
        };
        let result = compare_accounts(&[sample], &members, &containers, &LIMITS);
        let only = result.findings.iter().find_map(|finding| match finding {
            Finding::Unaccounted { only_container, .. } => Some(*only_container),
            _ => None,
        });
        assert_eq!(only, Some(expected), "{bytes}");
    }
}

#[test]
fn process_is_untracked_without_session_or_shim() {
    let usage = [usage(1, 1024, &[])];
    let result = compare_accounts(
        &[sample(vec![listed(1, 5, 600)])],
        &usage,
        &attested_shims(&[(5, false)]),
        &LIMITS,
    );
    let Finding::UntrackedProcess {
        process: found,
        allocation,
        ..
    } = &result.findings[0]
    else {
        panic!("{result:?}");
    };
    assert_eq!(
        (*found, *allocation),
        (process(5), Some(AllocationId::from_bits(1)))
    );
    assert_eq!(result.untracked_processes[&gpu()], 1);
    let untracked = &result.untracked_memory[&(AllocationId::from_bits(1), gpu())];
    assert_eq!(
        untracked[&5],
        Bytes::mib(600),
        "charged at the driver's figure"
    );
}

#[test]
fn process_is_untracked_without_session_unless_agent_is_newer() {
    let usage = [usage(1, 4096, &[])];
    let mut containers = attested_shims(&[(5, true)]);
    let compared = |containers: &AttestedState| {
        compare_accounts(
            &[sample(vec![listed(1, 5, 600)])],
            &usage,
            containers,
            &LIMITS,
        )
    };
    assert_eq!(
        compared(&containers).findings[0].kind(),
        "untracked-process"
    );
    containers.agent_start = process(5).start + 1;
    let result = compared(&containers);
    assert_eq!(result.findings, []);
    let untracked = &result.untracked_memory[&(AllocationId::from_bits(1), gpu())];
    assert_eq!(
        untracked[&5],
        Bytes::mib(600),
        "charged at the driver's figure"
    );
    containers
        .processes
        .values_mut()
        .for_each(|(_, running)| running.has_shim = false);
    assert_eq!(
        compared(&containers).findings[0].kind(),
        "untracked-process"
    );
}

#[test]
fn process_of_host_or_other_pod_is_untracked_and_uncharged() {
    let usage = [usage(1, 1024, &[])];
    let result = compare_accounts(
        &[sample(vec![listed(0, 5, 600), listed(9, 6, 600)])],
        &usage,
        &attested_shims(&[]),
        &LIMITS,
    );
    let owners: Vec<_> = result
        .findings
        .iter()
        .map(|finding| match finding {
            Finding::UntrackedProcess {
                owner,
                allocation: None,
                ..
            } => owner.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(owners[0], ProcessOwner::Host);
    assert_eq!(owners[1], listed(9, 6, 0).live.unwrap().owner);
    assert!(result.untracked_memory.is_empty());
}

/// A listed process in another container of the pod than the one that has GPU memory.
fn listed_in_sidecar(number: u64, pid: u32, mib: u64) -> ListedProcess {
    let mut listed = listed(number, pid, mib);
    let owner = ProcessOwner::Container {
        pod: pod(number),
        cgroup: "sidecar".into(),
    };
    listed.live.as_mut().unwrap().owner = owner;
    listed
}

#[test]
fn process_belongs_to_its_pod_when_its_container_is_unknown() {
    let usage = [usage(1, 1024, &[]), usage(2, 1024, &[])];
    let sample = sample(vec![listed_in_sidecar(1, 5, 600)]);
    let result = compare_accounts(&[sample], &usage, &attested_shims(&[]), &LIMITS);
    let own = AllocationId::from_bits(1);
    let [Finding::UntrackedProcess { allocation, .. }] = &result.findings[..] else {
        panic!("{result:?}");
    };
    assert_eq!(*allocation, Some(own));
    let charged = &result.untracked_memory[&(own, gpu())];
    assert_eq!(*charged, [(5, Bytes::mib(600))].into());
}

#[test]
fn process_belongs_to_the_allocation_whose_cgroup_is_unknown() {
    let of_pod = |number, quota, cgroup: Option<&str>| ContainerUsage {
        pod: pod(1),
        cgroup: cgroup.map(str::to_owned),
        ..usage(number, quota, &[])
    };
    let owner = |usage: &[ContainerUsage], attested: &AttestedState| {
        let sample = sample(vec![listed_in_sidecar(1, 5, 600)]);
        let result = compare_accounts(&[sample], usage, attested, &LIMITS);
        result.untracked_memory.into_keys().next().unwrap().0
    };
    let none = attested_shims(&[]);
    let (first, third) = (AllocationId::from_bits(1), AllocationId::from_bits(3));
    let all_known = [of_pod(1, 4096, Some("a")), of_pod(2, 1024, Some("b"))];
    assert_eq!(owner(&all_known, &none), first, "the largest");
    let unknown = [of_pod(1, 4096, Some("a")), of_pod(3, 1024, None)];
    assert_eq!(owner(&unknown, &none), third);
    let mut attested = none;
    let key = (pod(1), "b".to_owned());
    attested.allocations.insert(key, third);
    assert_eq!(
        owner(&unknown, &attested),
        first,
        "the other has its cgroup"
    );
}

#[test]
fn reused_pid_is_not_the_session_that_had_it() {
    let mut reused = listed(1, 5, 600);
    reused.live.as_mut().unwrap().start += 1;
    let usage = [usage(1, 1024, &[(5, 600)])];
    assert_eq!(
        finding_kinds(vec![reused], &usage, &attested_shims(&[(5, false)])),
        ["untracked-process"]
    );
}

/// A listed process that has ended, long ago or in this audit.
fn ended(pid: u32, mib: u64, is_gone: bool) -> ListedProcess {
    ListedProcess {
        live: None,
        is_gone,
        ..listed(1, pid, mib)
    }
}

#[test]
fn ended_process_is_charged_while_in_usage() {
    let mut container = usage(1, 1024, &[]);
    container.exited_pids = vec![5];
    container.accounts[0].exited = Bytes::mib(600);
    let sample = sample(vec![ended(5, 600, true)]);
    let result = compare_accounts(&[sample], &[container], &attested_shims(&[]), &LIMITS);
    assert_eq!(result.findings, []);
    assert_eq!(result.drift[&(AllocationId::from_bits(1), gpu())], 0);
}

#[test]
fn memory_of_a_listed_ended_process_is_unaccounted_once_it_stays() {
    let usage = [usage(1, 1024, &[])];
    let kinds = |ended| finding_kinds(vec![ended], &usage, &attested_shims(&[]));
    assert_eq!(kinds(ended(5, 60_000, false)), [""; 0], "it may be ending");
    assert_eq!(kinds(ended(5, 60_000, true)), ["unaccounted"]);
    assert_eq!(kinds(ended(5, 60, true)), [""; 0], "within the tolerance");
}

/// Processes outside of attested containers with device nodes mapped, each with its pod and
/// container.
fn device_users(users: &[(u64, u32, &str)]) -> BTreeMap<u32, LiveProcess> {
    let user = |(number, pid, cgroup): &(u64, u32, &str)| {
        let owner = ProcessOwner::Container {
            pod: pod(*number),
            cgroup: (*cgroup).to_owned(),
        };
        let start = process(*pid).start;
        let user = LiveProcess { start, owner };
        (*pid, user)
    };
    users.iter().map(user).collect()
}

#[test]
fn process_that_has_an_ended_ones_mappings_is_a_holder() {
    let all = [usage(1, 1024, &[]), usage(2, 8192, &[(21, 4096)])];
    let left = || sample(vec![ended(5, 60_000, true), listed(2, 21, 4096)]);
    let found = |users: &[(u64, u32, &str)], containers: AttestedState| {
        let containers = AttestedState {
            device_users: device_users(users),
            ..containers
        };
        holders(left(), &all, &containers)
    };
    let none = AttestedState::default;
    let neighbour = (2, 21, "c");
    assert_eq!(found(&[(1, 6, "x"), neighbour], none()), [(6, true)]);
    assert_eq!(found(&[neighbour], none()), [], "it has a session");
    // A pod without GPU memory is a suspect beside it, so that nobody is ended.
    let both = [(1, 6, "x"), (9, 7, "x")];
    assert_eq!(found(&both, none()), [(6, false), (7, false)]);
    // The forked child in an attested container, beside the neighbour and its forked worker.
    let worker = [(2, 21, true, &[100][..]), (2, 22, true, &[100][..])];
    let child = (1, 8, true, &[300][..]);
    assert_eq!(found(&[], attested(worker)), []);
    let with_child = attested(worker.into_iter().chain([child]));
    assert_eq!(found(&[], with_child), [(8, true)]);
    let unread = AttestedState {
        allocations: [((pod(2), "c".into()), AllocationId::from_bits(2))].into(),
        ..none()
    };
    assert_eq!(found(&[(2, 23, "c")], unread), [], "it was not read yet");
    let old = AttestedState {
        agent_start: u64::MAX,
        ..none()
    };
    assert_eq!(found(&[(1, 6, "x")], old), [], "its record may be lost");
    // The holder has a pid that the driver lists for an ended process.
    assert_eq!(found(&[(1, 5, "x")], none()), [(5, true)]);
}

#[test]
fn importer_is_a_holder_when_it_imports_more_than_anybody_exported() {
    let with_exports = |number, pid, exported| {
        let mut container = usage(number, 8192, &[(pid, 4096)]);
        container.accounts[0].exported = Bytes::mib(exported);
        container
    };
    let found = |exported: u64, importers: &[(u64, u32, u64)]| {
        let all = [with_exports(1, 5, 0), with_exports(2, 6, exported)];
        let importers = importers.iter();
        let importers = importers.map(|(number, pid, mib)| listed(*number, *pid, *mib));
        let sample = GpuSample {
            unattributed: Some(Bytes::mib(60_000)),
            importers: importers.collect(),
            ..sample(vec![listed(1, 5, 4096), listed(2, 6, 4096)])
        };
        holders(sample, &all, &AttestedState::default())
    };
    // The figures of the driver differ a little from each other.
    for imported in [59_000, 60_000, 60_005] {
        assert_eq!(found(0, &[(1, 5, imported)]), [(5, true)]);
    }
    assert_eq!(found(0, &[(1, 5, 70_000)]), [], "more than is unaccounted");
    let both = [(1, 5, 30_000), (2, 6, 30_000)];
    assert_eq!(found(0, &both), [(5, false), (6, false)]);
    // The neighbour imports its own exports, each twice.
    let neighbour = [(1, 5, 50_000), (2, 6, 2048)];
    assert_eq!(found(1024, &neighbour), [(5, true)]);
}

#[test]
fn reused_pid_is_charged_for_exited_process_up_to_its_bytes() {
    let mut container = usage(1, 8192, &[]);
    container.exited_pids = vec![5];
    container.accounts[0].exited = Bytes::mib(600);
    // The new process is of the host, of another pod, or of the container itself.
    for number in [0, 9, 1] {
        let reused = |mib| {
            finding_kinds(
                vec![listed(number, 5, mib)],
                &[container.clone()],
                &attested_shims(&[]),
            )
        };
        assert_eq!(reused(600), [""; 0], "{number}");
        assert_eq!(reused(600 + 1024 + 1), ["untracked-process"], "{number}");
    }
}

#[test]
fn container_is_over_quota_one_byte_beyond_its_allowance() {
    let usage = [usage(1, 1024, &[(5, 1024), (6, 0)])];
    // The second process adds a tenth of the quota, not an allowance of its own.
    let most = Bytes(Bytes::mib(1024 + 64 + 1024).0 + Bytes::mib(1024).0 / 10);
    let listed = |bytes: Bytes| {
        let mut first = listed(1, 5, 0);
        first.bytes = Some(bytes);
        vec![first, listed(1, 6, 0)]
    };
    assert_eq!(
        finding_kinds(listed(most), &usage, &attested_shims(&[])),
        [""; 0]
    );
    let more = Bytes(most.0 + 1);
    let result = compare_accounts(
        &[sample(listed(more))],
        &usage,
        &attested_shims(&[]),
        &LIMITS,
    );
    let Finding::OverQuota { processes, .. } = &result.findings[0] else {
        panic!("{result:?}");
    };
    assert_eq!(
        *processes,
        [process(5)],
        "the one that has more than it was granted"
    );
}

#[test]
fn container_is_over_quota_when_contexts_do_not_fit() {
    // Sixteen contexts of 518 MiB that no account charges, in a quota of 4 GiB.
    let members: Vec<_> = (5..21).map(|pid| (pid, 0)).collect();
    let listed = (5..21).map(|pid| listed(1, pid, 518)).collect();
    let usage = [usage(1, 4096, &members)];
    assert_eq!(
        finding_kinds(listed, &usage, &attested_shims(&[])),
        ["over-quota"]
    );
}

#[test]
fn listed_export_accounts_for_no_unattributed_memory() {
    let quota = 7 * 1024;
    let mut container = usage(1, quota, &[(5, quota)]);
    container.accounts[0].exported = Bytes::mib(quota);
    let compared = |listed: ListedProcess, unlisted: u64| {
        let sample = GpuSample {
            unattributed: Some(Bytes::mib(unlisted)),
            ..sample(vec![listed])
        };
        let result = compare_accounts(
            &[sample],
            &[container.clone()],
            &attested_shims(&[]),
            &LIMITS,
        );
        let kinds = result.findings.iter().map(Finding::kind);
        kinds.collect::<Vec<_>>()
    };
    assert_eq!(compared(listed(1, 5, 518), quota - 518), [""; 0], "honest");
    assert_eq!(compared(listed(1, 5, quota), quota), ["unaccounted"]);
    // Memory that another listed process of the container imported is listed too.
    let imported = quota / 2;
    assert_eq!(compared(listed(1, 5, imported), quota), ["unaccounted"]);
}

#[test]
fn managed_memory_on_a_gpu_is_accounted_for() {
    let mut container = usage(1, 1024, &[(5, 600)]);
    let managed = AccountBalance {
        used: Bytes::gib(8),
        ..AccountBalance::empty(Account::Managed, Bytes::gib(8))
    };
    container.accounts.push(managed);
    let sample = GpuSample {
        unattributed: Some(Bytes::gib(8)),
        ..sample(vec![listed(1, 5, 600)])
    };
    let result = compare_accounts(&[sample], &[container], &attested_shims(&[]), &LIMITS);
    assert_eq!(result.findings, []);
}

#[test]
fn lowered_quota_is_no_finding_until_frees_catch_up() {
    let mut container = usage(1, 4096, &[(5, 4096)]);
    container.accounts[0].quota = Bytes::mib(1024);
    assert_eq!(
        finding_kinds(
            vec![listed(1, 5, 4096 + 518)],
            &[container],
            &attested_shims(&[])
        ),
        [""; 0]
    );
}

#[test]
fn unattributed_memory_is_a_finding_unless_charged() {
    let mut sample = GpuSample {
        unattributed_signed: 600 << 20,
        unattributed: Some(Bytes::mib(600)),
        ..sample(vec![])
    };
    let mut container = usage(1, 1024, &[]);
    let result = compare_accounts(
        &[sample.clone()],
        &[container.clone()],
        &attested_shims(&[]),
        &LIMITS,
    );
    assert_eq!(result.findings.len(), 1);
    assert_eq!(result.unattributed_signed[&gpu()], 600 << 20);
    let mut unknown = sample.clone();
    unknown.unattributed = None;
    unknown.processes = vec![ListedProcess {
        bytes: None,
        ..listed(0, 5, 0)
    }];
    let result = compare_accounts(
        &[unknown],
        &[container.clone()],
        &attested_shims(&[]),
        &LIMITS,
    );
    let kinds: Vec<_> = result.findings.iter().map(Finding::kind).collect();
    assert_eq!(kinds, ["untracked-process"], "it may be that process's");
    container.accounts[0].exited = Bytes::mib(300);
    container.accounts[0].exported = Bytes::mib(300);
    container.accounts[0].used = Bytes::mib(300);
    assert_eq!(
        compare_accounts(
            &[sample.clone()],
            &[container],
            &attested_shims(&[]),
            &LIMITS
        )
        .findings,
        []
    );
    sample.unreclaimed_or_retained = Bytes::mib(600);
    assert_eq!(
        compare_accounts(&[sample], &[], &attested_shims(&[]), &LIMITS).findings,
        [],
        "of pods that ended"
    );
}

#[test]
fn tampered_page_is_a_finding_without_any_gpu_sample() {
    let mut container = usage(1, 1024, &[(5, 10), (6, 10)]);
    container.processes[1].tampered = true;
    let result = compare_accounts(&[], &[container], &attested_shims(&[]), &LIMITS);
    let expected = Finding::TamperedPage {
        allocation: AllocationId::from_bits(1),
        process: process(6),
    };
    assert_eq!(result.findings, [expected]);
}

/// A process: its grant and its further memory in MiB, and whether it has a session.
type Program = (u64, u64, bool);

/// Containers, each with its quota in MiB and its processes.
fn node() -> impl Strategy<Value = Vec<(u64, Vec<Program>)>> {
    // The further memory of a container's processes stays within one allowance.
    let process = (0..2048_u64, 0..=256_u64, any::<bool>());
    let container = prop::collection::vec(process, 0..5).prop_flat_map(|processes| {
        let granted: u64 = processes.iter().map(|(granted, ..)| granted).sum();
        (granted..=granted + 4096, Just(processes))
    });
    prop::collection::vec(container, 0..5)
}

proptest! {
    #[test]
    fn honest_containers_are_no_finding_in_any_world(node in node()) {
        let (mut all, mut processes, mut pid) = (Vec::new(), Vec::new(), 100);
        for (number, (quota, programs)) in (1..).zip(&node) {
            let mut members = Vec::new();
            for (granted, overhead, session) in programs {
                pid += 1;
                processes.push(listed(number, pid, granted + overhead));
                if *session {
                    members.push((pid, *granted));
                }
            }
            all.push(usage(number, *quota, &members));
        }
        let charged: u64 = processes.iter().filter_map(|listed| listed.bytes).map(|bytes| bytes.0).sum();
        let sample = sample(processes);
        // Sessions are missing because the records of an earlier agent are lost.
        let containers = AttestedState { agent_start: u64::MAX, ..AttestedState::default() };
        let result = compare_accounts(std::slice::from_ref(&sample), &all, &containers, &LIMITS);
        prop_assert_eq!(&result.findings, &[]);
        prop_assert_eq!(result.unattributed_signed[&gpu()], 0);
        let known: i64 = all.iter().map(|container| container.accounts[0].used.0 as i64).sum();
        let drift: i64 = result.drift.values().sum();
        prop_assert_eq!(drift + known, charged as i64, "each process counts once");
    }

    #[test]
    fn memory_beyond_all_allowances_is_always_a_finding(
        quota in 0..4096_u64, granted in 0..4096_u64, over in 1..4096_u64, session: bool, mapped: bool,
    ) {
        let granted = granted.min(quota);
        let members = if session { vec![(5, granted)] } else { vec![] };
        // A single process gets the process allowance and no part of the quota.
        let process = listed(1, 5, quota + 64 + 1024 + over);
        let found = finding_kinds(vec![process], &[usage(1, quota, &members)], &attested_shims(&[(5, mapped)]));
        prop_assert!(found.contains(&"over-quota"));
        prop_assert_eq!(found.contains(&"untracked-process"), !session);
    }
}
