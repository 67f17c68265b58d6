use super::*;

/// The index of the account of managed memory in a container with one GPU.
const MANAGED: u8 = 1;

fn charge(container: &mut Container, page: &CreditPage, account: u8, bytes: u64) -> bool {
    let slot = page.slot(usize::from(account)).unwrap();
    if slot.charge(units(bytes)).is_ok() {
        return true;
    }
    let missing = units(bytes).saturating_sub(Units(slot.word().idle()));
    is_granted(&container.request(1, account, missing)) && slot.charge(units(bytes)).is_ok()
}

#[test]
fn quota_of_the_gpu_covers_managed_memory() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    assert_eq!(page.slot(1).unwrap().quota(), units(256 * MIB));
    assert!(charge(&mut container, &page, MANAGED, 100 * MIB));
    assert!(!charge(&mut container, &page, 0, 157 * MIB));
    assert!(charge(&mut container, &page, 0, 156 * MIB));
    assert!(!charge(&mut container, &page, MANAGED, 1), "both are full");
    let [of_gpu, managed] = container.container_usage().accounts.try_into().unwrap();
    assert_eq!(
        (of_gpu.used, of_gpu.managed),
        (Bytes::mib(156), Bytes::mib(100))
    );
    assert_eq!(
        (of_gpu.in_use(), of_gpu.peak),
        (Bytes::mib(256), Bytes::mib(256))
    );
    assert_eq!((managed.quota, managed.used), (Bytes::ZERO, Bytes::ZERO));
}

#[test]
fn freed_managed_memory_is_given_to_the_gpus_account() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    assert!(charge(&mut container, &page, MANAGED, 256 * MIB));
    assert!(page.slot(1).unwrap().discharge(units(256 * MIB)));
    assert!(charge(&mut container, &page, 0, 256 * MIB));
    assert!(page.slot(0).unwrap().discharge(units(256 * MIB)));
    assert!(
        charge(&mut container, &page, MANAGED, 256 * MIB),
        "and back"
    );
}

#[test]
fn managed_memory_that_was_freed_is_remembered() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    assert!(charge(&mut container, &page, 0, MIB));
    assert!(!container.container_usage().had_managed);
    assert!(charge(&mut container, &page, MANAGED, MIB));
    assert!(page.slot(1).unwrap().discharge(units(MIB)));
    assert!(
        charge(&mut container, &page, 0, 255 * MIB),
        "it is given away"
    );
    let usage = container.container_usage();
    assert_eq!(
        (usage.had_managed, usage.accounts[0].managed),
        (true, Bytes::ZERO)
    );
}

#[test]
fn programs_see_covered_memory_as_used() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    let slot = page.slot(0).unwrap();
    assert_eq!(slot.siblings(), 0);
    assert!(charge(&mut container, &page, MANAGED, 100 * MIB));
    container.handle_refresh(1);
    assert_eq!(slot.others(), units(100 * MIB));
    assert!(slot.siblings() > 0, "the process must ask for the figure");
    assert!(page.slot(1).unwrap().discharge(units(60 * MIB)));
    container.handle_refresh(1);
    assert_eq!(slot.others(), units(40 * MIB));
}

#[test]
fn managed_quota_of_the_pod_ends_the_cover() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut container = fixture.start();
    container.set_requested_quota(&Account::Managed, Bytes::gib(1));
    let page = hello(&mut container, 1, 7).unwrap();
    assert!(charge(&mut container, &page, MANAGED, 1 << 30));
    assert!(!charge(&mut container, &page, MANAGED, 1));
    assert!(charge(&mut container, &page, 0, 256 * MIB));
}

#[test]
fn lower_quota_of_the_gpu_lowers_that_of_covered_memory() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    container.override_quota(&gpu(), Some(Bytes::mib(64)));
    assert_eq!(page.slot(1).unwrap().quota(), units(64 * MIB));
    assert!(!charge(&mut container, &page, MANAGED, 65 * MIB));
    assert!(charge(&mut container, &page, MANAGED, 64 * MIB));
    container.override_quota(&Account::Managed, Some(Bytes::ZERO));
    assert!(page.slot(1).unwrap().discharge(units(64 * MIB)));
    container.reclaim_excess();
    assert!(
        !charge(&mut container, &page, MANAGED, 1),
        "an admin allows none"
    );
    assert!(charge(&mut container, &page, 0, 64 * MIB));
}

#[test]
fn exited_process_frees_its_covered_memory() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    assert!(charge(&mut container, &page, MANAGED, 256 * MIB));
    container.handle_exit(Process { pid: 1, start: 1 }, 7);
    let _next = hello(&mut container, 2, 8).unwrap();
    assert!(!is_granted(&container.request(2, 0, units(MIB))));
    assert!(container.is_reclaim_pending(
        2,
        0,
        units(256 * MIB),
        Instant::now(),
        BootTime::default()
    ));
    settle_one(&mut container, 1, Bytes::ZERO);
    assert!(is_granted(&container.request(2, 0, units(256 * MIB))));
}

#[test]
fn managed_memory_outlives_no_process_whatever_its_page_says() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    assert!(charge(&mut container, &page, MANAGED, 256 * MIB));
    page.slot(1).unwrap().set_exported(units(256 * MIB));
    container.handle_exit(Process { pid: 1, start: 1 }, 7);
    settle_one(&mut container, 1, Bytes::ZERO);
    let _next = hello(&mut container, 2, 8).unwrap();
    assert!(is_granted(&container.request(2, 0, units(256 * MIB))));
}

#[test]
fn processes_learn_what_can_be_evicted_before_and_after_hello() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut container = fixture.start();
    let first = hello(&mut container, 1, 7).unwrap();
    container
        .memory
        .set_evictable(&"GPU-aaaa".parse().unwrap(), Bytes::mib(100));
    container
        .memory
        .set_evictable(&"GPU-other".parse().unwrap(), Bytes::mib(7));
    let second = hello(&mut container, 2, 8).unwrap();
    for page in [first, second] {
        assert_eq!(page.slot(0).unwrap().evictable(), units(100 * MIB));
        assert_eq!(page.slot(1).unwrap().evictable(), Units::ZERO);
    }
}
