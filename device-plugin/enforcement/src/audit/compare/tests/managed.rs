use super::*;

const MIB: u64 = 1 << 20;

/// A container with one process of pid 5 that has `charged` MiB of managed memory, which the GPU's
/// quota covers or its own quota allows.
fn container(number: u64, charged: u64, is_covered: bool) -> ContainerUsage {
    let mut container = usage(number, 1024, &[(number as u32, 100)]);
    match is_covered {
        true => container.accounts[0].managed = Bytes::mib(charged),
        false => container.accounts.push(AccountBalance {
            used: Bytes::mib(charged),
            ..AccountBalance::empty(Account::Managed, Bytes::mib(charged))
        }),
    }
    container
}

/// Processes, each with its container (also its pid) and the MiB of managed memory it has mapped.
fn mapped(processes: &[(u64, u64)]) -> AttestedState {
    let with_shims = processes.iter();
    let with_shims = with_shims.map(|(number, _)| (*number, *number as u32, true, &[1_u64][..]));
    let mut state = attested(with_shims);
    for (number, mib) in processes {
        let (_, running) = state.processes.get_mut(&(*number as u32)).unwrap();
        running.managed_mapped = mib * MIB;
    }
    state
}

fn findings(unlisted: u64, usage: &[ContainerUsage], containers: &AttestedState) -> Vec<Finding> {
    let processes = usage.iter().map(|container| {
        let pid = container.processes[0].process.pid;
        listed(u64::from(pid), pid, 100)
    });
    let sample = GpuSample {
        unattributed: Some(Bytes::mib(unlisted)),
        ..sample(processes.collect())
    };
    compare_accounts(&[sample], usage, containers, &LIMITS).findings
}

#[test]
fn honest_managed_memory_is_no_finding() {
    for is_covered in [true, false] {
        let usage = [container(1, 900, is_covered)];
        // The driver maps whole blocks, and a pool reserves addresses.
        for at_least in [900, 2_000, 209_920] {
            assert_eq!(findings(900, &usage, &mapped(&[(1, at_least)])), []);
        }
        assert_eq!(findings(900, &usage, &AttestedState::default()), []);
    }
}

#[test]
fn container_with_more_mapped_than_charged_is_named() {
    let usage = [container(1, 100, true), container(2, 500, false)];
    let containers = mapped(&[(1, 4_096), (2, 500)]);
    let expected = Finding::OverManaged {
        allocation: AllocationId::from_bits(1),
        gpu: gpu(),
        charged: Bytes::mib(100),
        mapped: Bytes::mib(4_096),
        bytes: Bytes::mib(2_000 - 600 - 64),
    };
    assert_eq!(findings(2_000, &usage, &containers), [expected]);
    let kinds = |unlisted| -> Vec<&str> {
        let found = findings(unlisted, &usage, &containers);
        found.iter().map(Finding::kind).collect()
    };
    assert_eq!(
        kinds(664),
        [""; 0],
        "nothing is resident beyond the charges"
    );
    assert_eq!(
        kinds(9_000),
        ["over-managed", "unaccounted"],
        "more than it has mapped"
    );
}

#[test]
fn charge_without_a_mapping_explains_nothing() {
    let usage = [container(1, 8_192, false)];
    let kinds = |containers: &AttestedState| -> Vec<&str> {
        let found = findings(4_096, &usage, containers);
        found.iter().map(Finding::kind).collect()
    };
    assert_eq!(kinds(&mapped(&[(1, 0)])), ["unaccounted"]);
    assert_eq!(kinds(&AttestedState::default()), [""; 0], "not read yet");
}

#[test]
fn chunks_that_the_driver_keeps_are_no_finding() {
    let usage = [container(1, 2, true)];
    let mut containers = mapped(&[(1, 4)]);
    assert_eq!(findings(150, &usage, &containers).len(), 1);
    containers.managed_gpus = [gpu()].into();
    assert_eq!(findings(150, &usage, &containers), []);
    assert_eq!(findings(2 + 128 + 64 + 1, &usage, &containers).len(), 1);
}

#[test]
fn chunks_of_managed_memory_freed_between_audits_are_no_finding() {
    let usage = |had_managed| ContainerUsage {
        had_managed,
        ..usage(1, 1024, &[(1, 100)])
    };
    let sample = |processes| GpuSample {
        unattributed: Some(Bytes::mib(126)),
        ..sample(processes)
    };
    let busy = [sample(vec![listed(1, 1, 100)])];
    // Each audit takes the GPUs of the one before.
    let mut gpus = BTreeSet::new();
    let mut kinds = |samples: &[GpuSample], had_managed, agent_start| {
        let (usage, mut known) = ([usage(had_managed)], mapped(&[(1, 0)]));
        known.agent_start = agent_start;
        update_managed_gpus(&mut gpus, samples, &usage, &known);
        known.managed_gpus = gpus.clone();
        let result = compare_accounts(samples, &usage, &known, &LIMITS);
        result
            .findings
            .iter()
            .map(Finding::kind)
            .collect::<Vec<_>>()
    };
    assert_eq!(kinds(&busy, false, 0), ["unaccounted"]);
    assert_eq!(
        kinds(&busy, true, 0),
        [""; 0],
        "it is gone, its chunks are not"
    );
    assert_eq!(
        kinds(&busy, false, 0),
        [""; 0],
        "the container has ended, a context has not"
    );
    kinds(&[sample(Vec::new())], false, 0);
    assert_eq!(
        kinds(&busy, false, 0),
        ["unaccounted"],
        "no context was left"
    );
    assert_eq!(
        kinds(&busy, false, u64::MAX),
        [""; 0],
        "the agent saw not all of its life"
    );
}

#[test]
fn evictable_memory_is_what_is_in_use_and_charged() {
    let usage = [container(1, 900, true), container(2, 500, false)];
    let evictable = |unlisted, containers: &AttestedState| {
        let sample = GpuSample {
            unattributed: Some(Bytes::mib(unlisted)),
            ..sample(vec![])
        };
        compare_accounts(&[sample], &usage, containers, &LIMITS).evictable[&gpu()]
    };
    let mut containers = mapped(&[(1, 900), (2, 500)]);
    assert_eq!(
        evictable(0, &containers),
        Bytes::ZERO,
        "nothing is resident"
    );
    assert_eq!(evictable(1_000, &containers), Bytes::mib(1_000));
    assert_eq!(
        evictable(9_000, &containers),
        Bytes::mib(1_400),
        "others hold the rest"
    );
    containers.managed_gpus = [gpu()].into();
    assert_eq!(evictable(9_000, &containers), Bytes::mib(1_528));
}

proptest! {
    /// Whatever parts of their managed memory are resident, and whatever the driver keeps, honest
    /// containers have no finding. Bytes beyond charges, cache and tolerance always have one.
    #[test]
    fn residency_is_a_finding_only_beyond_the_charges(
        containers in prop::collection::vec((0..4_096_u64, 0..=100_u64, any::<bool>()), 1..6),
        managed_cache in 0..=128_u64,
        held in 0..8_192_u64,
    ) {
        let (mut usage, mut maps, mut resident, mut total_charged) = (vec![], vec![], 0, 0);
        for (number, (charged, percent, is_covered)) in (1..).zip(containers) {
            usage.push(container(number, charged, is_covered));
            maps.push((number, charged));
            resident += charged * percent / 100;
            total_charged += charged;
        }
        let mut known = mapped(&maps);
        known.managed_gpus = [gpu()].into();
        prop_assert_eq!(findings(resident + managed_cache, &usage, &known), vec![]);
        let beyond = resident + managed_cache + held > total_charged + 128 + 64;
        prop_assert_eq!(!findings(resident + managed_cache + held, &usage, &known).is_empty(), beyond);
    }
}
