use bursar_ledger::units::PodUid;
use bursar_protocol::messages::Response;

use super::*;
use crate::{ContainerResolver, Process};

/// The index of the account of managed memory in a container with one GPU.
const MANAGED: usize = 1;

/// Knows every process.
struct FakeHost;

impl ContainerResolver for FakeHost {
    fn process(&self, pid: u32) -> Option<Process> {
        Some(Process { pid, start: 1 })
    }

    fn container(&self, _pid: u32, _pod: &PodUid) -> Option<String> {
        Some("a".to_owned())
    }
}

fn gpu() -> GpuUuid {
    "GPU-aaaa".parse().unwrap()
}

/// The memory of a container with this many units of one GPU.
fn memory(quota: u32) -> ContainerMemory {
    let mut memory = ContainerMemory::new(&SessionSpec {
        allocation: AllocationId::from_bits(1),
        pod: "p".parse().unwrap(),
        gpus: vec![(gpu(), Bytes(Units(quota).bytes()))],
        managed: Bytes::ZERO,
        device_ids: None,
    });
    memory.restore_quotas(&[]);
    memory
}

/// Admits a process that uses its page at once.
fn admit(memory: &mut ContainerMemory, pid: u32) -> CreditPage {
    let process = Process { pid, start: 1 };
    let admitted = memory.admit(process, 7, 2, &[], &FakeHost);
    let page = CreditPage::open(admitted.ok().unwrap().page).unwrap();
    memory.update_exports(pid);
    page
}

/// Grants units of an account to a process, and charges some of them.
fn grant(memory: &mut ContainerMemory, pid: u32, page: &CreditPage, account: usize, units: u32) {
    let granted = memory.reserve_credit(pid, account, Units(units)).unwrap();
    assert!(memory.grant_to_page(pid, account, granted));
    page.slot(account).unwrap().charge(Units(units)).unwrap();
}

fn queried(memory: &ContainerMemory) -> u64 {
    match memory.answer_query(0, Some(0)) {
        Response::Usage { used, .. } => used,
        other => panic!("{other:?}"),
    }
}

#[test]
fn pages_and_answers_count_each_kind_of_charge_once() {
    let mut memory = memory(1_000);
    let pages = [1, 2].map(|pid| admit(&mut memory, pid));
    grant(&mut memory, 1, &pages[0], 0, 1);
    grant(&mut memory, 2, &pages[1], 0, 2);
    grant(&mut memory, 2, &pages[1], MANAGED, 4);
    let exited = admit(&mut memory, 3);
    grant(&mut memory, 3, &exited, 0, 8);
    memory.end_image(Process { pid: 3, start: 1 }, 7).unwrap();
    memory.charge_lease(5, 0, Units(16)).unwrap();
    let untracked = BTreeMap::from([(4, Bytes(Units(32).bytes()))]);
    memory.set_untracked(&Account::Gpu(gpu()), untracked);
    assert!(memory.set_overhead(&gpu(), Units(64)));
    memory.credit.set_sibling_charges(vec![Units(128)]);
    memory.refresh_pages();
    assert_eq!(queried(&memory), Units(255).bytes());
    let [first, second] = [&pages[0], &pages[1]].map(|page| page.slot(0).unwrap().others());
    assert_eq!((first, second), (Units(254), Units(253)));
    let in_use = memory.balances()[0].in_use();
    assert_eq!(in_use, Bytes(Units(127).bytes()), "without the siblings");
}

#[test]
fn idle_credit_is_taken_only_where_it_suffices() {
    let mut memory = memory(100);
    let page = admit(&mut memory, 1);
    grant(&mut memory, 1, &page, 0, 60);
    let slot = page.slot(0).unwrap();
    assert!(slot.discharge(Units(50)));
    admit(&mut memory, 2);
    assert_eq!(memory.idle_credit_for(2, 0), Units(50));
    assert!(memory.reserve_credit(2, 0, Units(91)).is_err());
    assert_eq!(slot.word().granted, 60, "not even 50 of the 51 missing");
    assert_eq!(memory.reserve_credit(2, 0, Units(90)), Ok(Units(90)));
    assert_eq!(slot.word().granted, 10);
}

#[test]
fn lowered_quota_takes_idle_credit_alone() {
    let mut memory = memory(100);
    let page = admit(&mut memory, 1);
    grant(&mut memory, 1, &page, 0, 80);
    let slot = page.slot(0).unwrap();
    assert!(slot.discharge(Units(30)));
    let account = Account::Gpu(gpu());
    assert!(memory.order_quota(&account, Some(Units(40))));
    assert!(!memory.order_quota(&account, Some(Units(40))));
    assert!(memory.reclaim_excess() && !memory.reclaim_excess());
    assert_eq!((slot.quota(), slot.word().granted), (Units(40), 50));
    assert!(!memory.request_quota(&Account::Gpu("GPU-other".parse().unwrap()), Units(1)));
}
