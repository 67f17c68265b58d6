use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bursar_gpu::memory_sample::ProcessMemory;
use bursar_ledger::BootTime;
use bursar_ledger::units::{Bytes, GpuUuid, LeaseId, PodUid};

use bursar_protocol::VERSION;
use bursar_protocol::credit::CreditWord;
use bursar_protocol::credit_page::{CreditPage, PageError};
use bursar_protocol::messages::HeldCredit;
use bursar_protocol::units::Units;

use super::super::checkpoint::SessionCheckpoint;
use super::super::orphan_bound::OwnMemory;
use super::memory::UNCHARGED_MARGIN_WITH_CONTEXT;
use super::pages::PagePool;
use super::recording::RECLAIM_WINDOW;
use super::*;

const MIB: u64 = 1 << 20;

/// Resolves pids below 1000 to the container "a" and pids below 2000 to "b"; other pids are
/// foreign.
struct FakeHost;

impl ContainerResolver for FakeHost {
    fn process(&self, pid: u32) -> Option<Process> {
        (pid != 666).then_some(Process { pid, start: 1 })
    }

    fn container(&self, pid: u32, _pod: &PodUid) -> Option<String> {
        match pid {
            0..1000 => Some("a".to_owned()),
            1000..2000 => Some("b".to_owned()),
            _ => None,
        }
    }

    /// Processes below 100 are in no namespace but the host's.
    fn namespace_pids(&self, pid: u32) -> Vec<u32> {
        match pid {
            0..100 => vec![pid],
            _ => vec![pid, pid % 100],
        }
    }
}

struct Fixture {
    folder: tempfile::TempDir,
    quota: Bytes,
    served_before: bool,
    now: BootTime,
}

impl Fixture {
    fn with_quota(quota: Bytes) -> Fixture {
        Fixture {
            folder: tempfile::tempdir().unwrap(),
            quota,
            served_before: false,
            now: BootTime(3_600_000),
        }
    }

    fn start(&self) -> Container {
        self.restart().0
    }

    fn restart(&self) -> (Container, Vec<RestoredProcess>) {
        let served = SessionSpec {
            allocation: "00000000000000aa".parse().unwrap(),
            pod: "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap(),
            gpus: vec![("GPU-aaaa".parse().unwrap(), self.quota)],
            managed: Bytes::ZERO,
            device_ids: None,
        };
        let record = self.folder.path().join("record.json");
        Container::restore(
            served,
            SessionCheckpoint::open(record).unwrap(),
            self.served_before,
            &FakeHost,
            self.now,
        )
    }
}

fn hello(container: &mut Container, pid: u32, image: u64) -> Result<CreditPage, RejectReason> {
    hello_with(container, pid, image, &[])
}

fn hello_with(
    container: &mut Container,
    pid: u32,
    image: u64,
    holdings: &[HeldCredit],
) -> Result<CreditPage, RejectReason> {
    let admitted = container.handle_hello(
        Process { pid, start: 1 },
        image,
        VERSION,
        holdings,
        &FakeHost,
    )?;
    Ok(CreditPage::open(admitted.process.page).unwrap())
}

fn units(bytes: u64) -> Units {
    Units::holding(bytes).unwrap()
}

/// Applies a sample in which the driver charges only one process.
fn settle_one(container: &mut Container, pid: u32, charged: Bytes) {
    settle_with(container, &[(pid, charged)]);
}

fn settle_with(container: &mut Container, charged: &[(u32, Bytes)]) {
    let charged = charged.iter();
    let charges = charged.map(|(pid, bytes)| (*pid, Some(*bytes))).collect();
    let queried = container.reclaim_query().unwrap_or_default();
    container.apply_samples(&queried, &[charges], &FakeHost, BootTime::default());
}

fn is_granted(answer: &Response) -> bool {
    matches!(answer, Response::Granted { .. })
}

fn charge_all(container: &mut Container, page: &CreditPage, pid: u32, bytes: u64) {
    let need = units(bytes);
    let slot = page.slot(0).unwrap();
    if let Err(bursar_protocol::credit::CreditError::Short(missing)) = slot.charge(need) {
        assert!(is_granted(&container.request(pid, 0, Units(missing))));
        slot.charge(need).unwrap();
    }
}

#[test]
fn credit_is_in_the_page_when_the_grant_arrives() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    assert_eq!(page.slot(0).unwrap().quota(), units(1 << 30));
    let Response::Granted { units: granted, .. } = container.request(1, 0, units(MIB)) else {
        panic!()
    };
    assert_eq!(
        page.slot(0).unwrap().word(),
        CreditWord {
            granted: granted.0,
            used: 0
        }
    );
}

#[test]
fn idle_credit_is_reclaimed_for_another_process() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let first = hello(&mut container, 1, 7).unwrap();
    let second = hello(&mut container, 2, 8).unwrap();
    charge_all(&mut container, &first, 1, MIB);
    assert!(first.slot(0).unwrap().word().idle() > 0);
    let rest = units((1 << 30) - MIB);
    assert!(!is_granted(&container.request(2, 0, Units(rest.0 + 1))));
    assert!(is_granted(&container.request(2, 0, rest)));
    assert_eq!(first.slot(0).unwrap().word().idle(), 0);
    assert_eq!(second.slot(0).unwrap().word().granted, rest.0);
}

#[test]
fn tampered_page_gains_nothing() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut container = fixture.start();
    let liar = hello(&mut container, 1, 7).unwrap();
    let honest = hello(&mut container, 2, 8).unwrap();
    charge_all(&mut container, &honest, 2, 128 * MIB);
    for word in [
        CreditWord {
            granted: u32::MAX - 1,
            used: 0,
        },
        CreditWord {
            granted: 0,
            used: u32::MAX - 1,
        },
        CreditWord::FROZEN,
        CreditWord {
            granted: u32::MAX,
            used: u32::MAX,
        },
    ] {
        liar.slot(0).unwrap().set(word);
        container.memory.refresh_pages();
        assert!(honest.slot(0).unwrap().others() <= units(128 * MIB));
        let _ = container.request(1, 0, units(MIB));
        assert!(!is_granted(&container.request(2, 0, units(256 * MIB))));
        let usage = container.container_usage().accounts.remove(0);
        assert!(usage.granted.0 <= usage.quota.0, "{usage:?}");
    }
}

#[test]
fn exec_marks_the_former_images_grants_exited() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, 1 << 30);
    let after = hello(&mut container, 1, 8).unwrap();
    assert_eq!(
        after.slot(0).unwrap().word(),
        CreditWord {
            granted: 0,
            used: 0
        }
    );
    assert_eq!(
        container.container_usage().accounts[0].exited,
        Bytes::gib(1)
    );
    assert!(!is_granted(&container.request(1, 0, units(1))));
    settle_one(&mut container, 1, Bytes::mib(1500));
    assert!(
        !is_granted(&container.request(1, 0, units(1))),
        "more than a context is still charged"
    );
    settle_one(&mut container, 1, Bytes::mib(518));
    assert!(is_granted(&container.request(1, 0, units(1 << 30))));
}

#[test]
fn exited_process_stays_charged_until_the_driver_freed_all() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let dead = hello(&mut container, 1, 7).unwrap();
    let other = hello(&mut container, 2, 8).unwrap();
    charge_all(&mut container, &dead, 1, 1 << 30);
    container.handle_exit(Process { pid: 1, start: 1 }, 7);
    assert_eq!(other.slot(0).unwrap().others(), units(1 << 30));
    settle_one(&mut container, 1, Bytes::gib(1));
    assert!(!is_granted(&container.request(2, 0, units(1))));
    settle_one(&mut container, 1, Bytes::ZERO);
    assert!(is_granted(&container.request(2, 0, units(1 << 30))));
    assert_eq!(
        (
            other.slot(0).unwrap().others(),
            other.slot(0).unwrap().siblings()
        ),
        (Units::ZERO, 0)
    );
}

#[test]
fn late_exit_of_a_replaced_image_changes_nothing() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    hello(&mut container, 1, 7).unwrap();
    hello(&mut container, 1, 8).unwrap();
    container.handle_exit(Process { pid: 1, start: 1 }, 7);
    assert_eq!(container.container_usage().processes.len(), 1);
}

#[test]
fn restarted_agent_charges_processes_before_their_hello() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut before = fixture.start();
    let page = hello(&mut before, 1, 7).unwrap();
    charge_all(&mut before, &page, 1, 255 * MIB);
    drop(before);

    let (mut after, known) = fixture.restart();
    assert_eq!(
        known
            .iter()
            .map(|known| (known.process.pid, known.image))
            .collect::<Vec<_>>(),
        [(1, 7)]
    );
    let other = hello(&mut after, 2, 8).unwrap();
    assert_eq!(other.slot(0).unwrap().others(), units(255 * MIB));
    assert!(!is_granted(&after.request(2, 0, units(2 * MIB))));
    assert!(is_granted(&after.request(2, 0, units(MIB))));

    let word = page.slot(0).unwrap().freeze();
    let account = messages::Account::Device("GPU-aaaa".to_owned());
    let held = HeldCredit {
        account,
        granted: Units(word.granted),
        used: Units(word.used),
    };
    let moved = hello_with(&mut after, 1, 7, &[held]).unwrap();
    assert_eq!(moved.slot(0).unwrap().word(), word);
    after.handle_refresh(1);
    assert!(moved.slot(0).unwrap().discharge(units(255 * MIB)));
    assert!(is_granted(&after.request(2, 0, units(255 * MIB))));
}

#[test]
fn process_is_marked_exited_when_it_ended_without_an_agent() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut before = fixture.start();
    let page = hello(&mut before, 666, 7).unwrap();
    charge_all(&mut before, &page, 666, 1 << 30);
    let (mut after, known) = fixture.restart();
    assert!(known.is_empty());
    assert_eq!(after.container_usage().accounts[0].exited, Bytes::gib(1));
    let is_settling = |after: &mut Container| {
        after.is_reclaim_pending(1, 0, units(1 << 30), Instant::now(), BootTime::default())
    };
    assert!(is_settling(&mut after), "refused before a sample");
    settle_one(&mut after, 666, Bytes::ZERO);
    assert!(!is_settling(&mut after));
    assert_eq!(
        fixture.restart().0.container_usage().accounts[0].exited,
        Bytes::ZERO
    );
}

#[test]
fn unknown_process_is_admitted_within_the_quota() {
    let fixture = Fixture::with_quota(Bytes::mib(256));
    let mut container = fixture.start();
    let account = messages::Account::Device("GPU-aaaa".to_owned());
    let claim = HeldCredit {
        account,
        granted: units(1 << 40),
        used: Units::ZERO,
    };
    let page = hello_with(&mut container, 1, 7, &[claim]).unwrap();
    assert_eq!(page.slot(0).unwrap().word().granted, units(256 * MIB).0);
}

#[test]
fn process_of_another_container_is_rejected() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    assert_eq!(
        hello(&mut container, 5000, 1).err(),
        Some(RejectReason::Identity)
    );
    hello(&mut container, 1, 7).unwrap();
    assert_eq!(
        hello(&mut container, 1001, 1).err(),
        Some(RejectReason::Identity)
    );
    container.handle_exit(Process { pid: 1, start: 1 }, 7);
    hello(&mut container, 1001, 1).expect("the container was restarted under another id");
}

#[test]
fn query_lists_pids_of_the_callers_namespace() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    for (pid, mib) in [(101, 100), (102, 20), (3, 3), (104, 4)] {
        let page = hello(&mut container, pid, 7).unwrap();
        charge_all(&mut container, &page, pid, mib * MIB);
    }
    hello(&mut container, 105, 7).unwrap();
    container.handle_exit(Process { pid: 104, start: 1 }, 7);
    let gpu = messages::Account::Device("GPU-aaaa".to_owned());
    let Response::Usage {
        quota,
        used,
        processes,
    } = container.query_usage(199, &gpu, &FakeHost).unwrap()
    else {
        panic!("not a usage");
    };
    let exited = container.container_usage().accounts[0].exited.0;
    assert!(exited >= 4 * MIB);
    assert_eq!((quota, used), (1 << 30, 123 * MIB + exited));
    let listed: Vec<_> = processes
        .iter()
        .map(|process| (process.pid, process.bytes / MIB))
        .collect();
    assert_eq!(listed, [(1, 100), (2, 20)], "by the pids inside");
    let Ok(Response::Usage { processes, .. }) = container.query_usage(50, &gpu, &FakeHost) else {
        panic!("not a usage");
    };
    let pids: Vec<_> = processes.iter().map(|process| process.pid).collect();
    assert_eq!(pids, [3, 101, 102], "by the host's");
}

#[test]
fn query_is_rejected_for_other_processes_and_accounts() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let gpu = messages::Account::Device("GPU-aaaa".to_owned());
    assert!(
        container.query_usage(1001, &gpu, &FakeHost).is_ok(),
        "the container has no process yet"
    );
    hello(&mut container, 1, 7).unwrap();
    for stranger in [1001, 5000] {
        assert_eq!(
            container.query_usage(stranger, &gpu, &FakeHost),
            Err(RejectReason::Identity)
        );
    }
    let other = messages::Account::Device("GPU-bbbb".to_owned());
    assert_eq!(
        container.query_usage(2, &other, &FakeHost),
        Err(RejectReason::Account)
    );
}

#[test]
fn process_is_rejected_when_the_container_is_full() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    for pid in 0..MAX_PROCESSES as u32 {
        hello(&mut container, pid, 1).unwrap();
    }
    assert_eq!(
        hello(&mut container, 999, 1).err(),
        Some(RejectReason::Busy)
    );
    hello(&mut container, 0, 1).expect("one that is known may come again");
}

#[test]
fn process_keeps_its_state_when_no_page_is_left() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, 512 * MIB);
    let before = container.container_usage().accounts;
    *container.memory.pages_mut() =
        PagePool::new(|_| Err(PageError::NotAPage("out of descriptors")));
    for image in [7, 8] {
        assert_eq!(
            hello(&mut container, 1, image).err(),
            Some(RejectReason::Busy)
        );
        assert_eq!(
            container.container_usage().accounts,
            before,
            "as image {image}"
        );
    }
    container.handle_exit(Process { pid: 1, start: 1 }, 7);
    assert_eq!(
        container.container_usage().processes.len(),
        0,
        "its exit still counts"
    );
}

#[test]
fn refresh_takes_time_linear_in_processes() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let mut quickest = |from: u32, to: u32| {
        for pid in from..to {
            hello(&mut container, pid, 1).unwrap();
        }
        let time = || {
            let start = std::time::Instant::now();
            container.memory.refresh_pages();
            start.elapsed()
        };
        (0..50).map(|_| time()).min().unwrap()
    };
    let (few, many) = (quickest(0, 32), quickest(32, 512));
    // 16 times as many processes take 256 times as long if the work for each grows with their
    // number.
    assert!(many < few * 80, "{few:?} for 32, {many:?} for 512");
}

#[test]
fn checkpoint_is_not_written_when_unchanged() {
    let fixture = Fixture::with_quota(Bytes::mib(64));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, 64 * MIB);
    let path = fixture.folder.path().join("record.json");
    std::fs::remove_file(&path).unwrap();
    container.request(1, 0, Units::ZERO);
    container.memory.refresh_pages();
    assert!(!path.exists());
    page.slot(0).unwrap().discharge(units(MIB));
    let other = hello(&mut container, 2, 7).unwrap();
    charge_all(&mut container, &other, 2, MIB);
    assert_eq!(
        fixture.restart().0.container_usage().accounts[0].granted,
        Bytes::mib(64)
    );
}

#[test]
fn lower_quota_refuses_until_enough_is_freed() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, 512 * MIB);
    let gpu = Account::Gpu("GPU-aaaa".parse().unwrap());
    container.set_requested_quota(&gpu, Bytes::mib(256));
    assert_eq!(page.slot(0).unwrap().quota(), units(256 * MIB));
    assert!(!is_granted(&container.request(1, 0, units(MIB))));
    container.set_requested_quota(&gpu, Bytes::gib(1));
    assert!(is_granted(&container.request(1, 0, units(MIB))));
}

fn gpu() -> Account {
    Account::Gpu("GPU-aaaa".parse().unwrap())
}

#[test]
fn quota_override_reclaims_freed_credit_and_is_capped() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, 800 * MIB);
    container.override_quota(&gpu(), Some(Bytes::mib(500)));
    let slot = page.slot(0).unwrap();
    assert_eq!(slot.quota(), units(500 * MIB));
    let usage = container.container_usage();
    assert_eq!(
        usage.accounts[0].granted,
        Bytes::mib(800),
        "what is used stays"
    );
    assert!(slot.discharge(units(200 * MIB)));
    container.reclaim_excess();
    assert!(
        slot.charge(Units(1)).is_err(),
        "what was freed above it is not used again"
    );
    assert!(slot.discharge(units(200 * MIB)));
    container.reclaim_excess();
    assert_eq!(
        container.container_usage().accounts[0].granted,
        Bytes::mib(500)
    );
    assert!(slot.charge(units(100 * MIB)).is_ok());
    assert!(!is_granted(&container.request(1, 0, Units(1))));
    container.override_quota(&gpu(), Some(Bytes::gib(100)));
    assert_eq!(slot.quota(), units(1 << 30));
    container.override_quota(&gpu(), None);
    charge_all(&mut container, &page, 1, 524 * MIB);
    assert!(slot.charge(Units(1)).is_err() && !is_granted(&container.request(1, 0, Units(1))));
}

#[test]
fn quota_override_reclaims_idle_credit_beside_other_charges() {
    let [eight, ten] = [Bytes::gib(8), Bytes::gib(10)];
    for leased in [true, false] {
        let fixture = Fixture::with_quota(Bytes::gib(16));
        let mut container = fixture.start();
        let page = hello(&mut container, 1, 7).unwrap();
        match leased {
            true => container
                .charge_lease(&"GPU-aaaa".parse().unwrap(), LeaseId(7), eight)
                .unwrap(),
            false => container.memory.set_untracked(&gpu(), [(2, eight)].into()),
        }
        charge_all(&mut container, &page, 1, eight.0);
        let slot = page.slot(0).unwrap();
        assert!(slot.discharge(units(eight.0)));
        container.override_quota(&gpu(), Some(ten));
        assert_eq!(
            container.container_usage().accounts[0].granted,
            Bytes::gib(2),
            "leased: {leased}"
        );
        assert!(slot.charge(units(eight.0)).is_err() && slot.charge(units(2 << 30)).is_ok());
    }
}

#[test]
fn quota_override_outlives_the_agent() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    container.override_quota(&gpu(), Some(Bytes::mib(500)));
    container.override_quota(&Account::Managed, Some(Bytes::mib(10)));
    let mut container = fixture.start();
    container.set_requested_quota(&Account::Managed, Bytes::mib(64));
    let quotas: Vec<_> = container
        .container_usage()
        .accounts
        .iter()
        .map(|account| account.quota)
        .collect();
    assert_eq!(quotas, [Bytes::mib(500), Bytes::mib(10)]);
    container.override_quota(&gpu(), None);
    container.override_quota(&Account::Managed, None);
    let quotas = fixture
        .start()
        .container_usage()
        .accounts
        .into_iter()
        .map(|account| account.quota);
    assert_eq!(quotas.collect::<Vec<_>>(), [Bytes::gib(1), Bytes::ZERO]);
}

#[test]
fn untracked_bytes_count_for_all_until_hello() {
    let fixture = Fixture::with_quota(Bytes::mib(100));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    container.memory.set_untracked(
        &gpu(),
        BTreeMap::from([(2, Bytes::mib(60)), (1, Bytes::mib(90))]),
    );
    assert_eq!(
        page.slot(0).unwrap().others(),
        units(60 * MIB),
        "its own bytes are charged already"
    );
    assert!(!is_granted(&container.request(1, 0, units(41 * MIB))));
    let holding = HeldCredit {
        account: messages::Account::Device("GPU-aaaa".into()),
        granted: units(60 * MIB),
        used: units(60 * MIB),
    };
    let silent = hello_with(&mut container, 2, 8, &[holding]).unwrap();
    assert_eq!(silent.slot(0).unwrap().word().granted, units(60 * MIB).0);
    assert_eq!(
        container.container_usage().accounts[0].untracked,
        Bytes::ZERO
    );
    assert!(is_granted(&container.request(1, 0, units(40 * MIB))));
}

#[test]
fn overhead_counts_for_all_until_it_falls() {
    let fixture = Fixture::with_quota(Bytes::mib(100));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    let on: GpuUuid = "GPU-aaaa".parse().unwrap();
    container.set_overhead(&on, Bytes::mib(60));
    assert_eq!(page.slot(0).unwrap().others(), units(60 * MIB));
    assert!(!is_granted(&container.request(1, 0, units(41 * MIB))));
    let account = container.container_usage().accounts[0].clone();
    assert_eq!(
        (account.overhead, account.quota),
        (Bytes::mib(60), Bytes::mib(100))
    );
    container.set_overhead(&on, Bytes::gib(9));
    assert_eq!(
        page.slot(0).unwrap().others(),
        units(100 * MIB),
        "at most the quota"
    );
    container.set_overhead(&on, Bytes::ZERO);
    assert_eq!(page.slot(0).unwrap().others(), Units::ZERO);
    assert!(is_granted(&container.request(1, 0, units(100 * MIB))));
    container.set_overhead(&"GPU-other".parse().unwrap(), Bytes::mib(60));
    assert_eq!(
        container.container_usage().accounts[0].overhead,
        Bytes::ZERO
    );
}

#[test]
fn page_is_tampered_when_its_grant_differs() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let (first, second) = (
        hello(&mut container, 1, 7).unwrap(),
        hello(&mut container, 2, 8).unwrap(),
    );
    charge_all(&mut container, &first, 1, 300 * MIB);
    charge_all(&mut container, &second, 2, 300 * MIB);
    let forged = |container: &Container| -> Vec<bool> {
        container
            .container_usage()
            .processes
            .iter()
            .map(|member| member.tampered)
            .collect()
    };
    assert_eq!(forged(&container), [false, false]);
    second.slot(0).unwrap().grant(Units(1));
    assert_eq!(forged(&container), [false, true]);
    first.slot(0).unwrap().freeze();
    assert_eq!(
        forged(&container),
        [false, true],
        "it moves to another page"
    );
}

#[test]
fn denials_are_counted_by_a_bounded_set_of_functions() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    container.record_denial(1, 0, 1, "cuMemAlloc_v2");
    container.record_denial(1, 0, 1, "cuMemAlloc_v2");
    container.record_denial(1, 0, 1, "a b");
    assert_eq!(
        container.container_usage().denied,
        [("cuMemAlloc_v2".into(), 2), ("other".into(), 1)]
    );
    for number in 0..100 {
        container.record_denial(1, 0, 1, &format!("f{number}"));
    }
    let denied = container.container_usage().denied;
    assert!(denied.len() <= 32, "{}", denied.len());
    assert_eq!(denied.iter().map(|(_, count)| count).sum::<u64>(), 103);
}

#[test]
fn refusals_by_the_driver_are_counted_apart_from_denials() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    for function in ["driver:cuMemAlloc_v2", "driver:"] {
        container.record_denial(1, 0, MIB, function);
    }
    let usage = container.container_usage();
    assert_eq!(usage.driver_refusals, 2);
    assert_eq!((usage.denied, usage.last_denied), (Vec::new(), None));
}

#[test]
fn denial_keeps_the_figures_of_its_moment_when_its_process_ends() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, 800 * MIB);
    container.record_denial(1, 0, 256 * MIB, "cuMemAlloc_v2");
    let last_denied = |container: &Container| container.container_usage().last_denied.unwrap();
    let first = last_denied(&container);
    assert_eq!(first.quota, Bytes::gib(1));
    assert!(first.free < Bytes::mib(256), "{first:?}");
    container.handle_exit(Process { pid: 1, start: 1 }, 7);
    settle_one(&mut container, 1, Bytes::ZERO);
    assert_eq!(last_denied(&container), first);
}

#[test]
fn process_keeps_its_grant_when_it_never_adopts_a_new_page() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, MIB);
    let granted = page.slot(0).unwrap().word().granted;
    // The process connects again, was stopped meanwhile, and goes on with its former page.
    hello(&mut container, 1, 7).unwrap();
    hello(&mut container, 2, 8).unwrap();
    let rest = (1 << 30) - units_of(granted);
    assert!(!is_granted(&container.request(2, 0, units(rest + MIB))));
    assert!(is_granted(&container.request(2, 0, units(rest))));
    assert!(
        page.slot(0)
            .unwrap()
            .charge(units(units_of(granted) - MIB))
            .is_ok()
    );
    let usage = container.container_usage().accounts.remove(0);
    assert!(usage.granted.0 <= usage.quota.0, "{usage:?}");
}

#[test]
fn used_page_is_not_reused_when_hellos_are_abandoned() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, MIB);
    let charged = page.slot(0).unwrap().word();
    for _ in 0..3 {
        hello(&mut container, 1, 7).unwrap();
    }
    hello(&mut container, 2, 8).unwrap();
    assert_eq!(page.slot(0).unwrap().word(), charged);
}

fn units_of(granted: u32) -> u64 {
    Units(granted).bytes()
}

fn start_exporter(container: &mut Container, bytes: u64) -> CreditPage {
    let page = hello(container, 1, 7).unwrap();
    charge_all(container, &page, 1, bytes);
    page.slot(0).unwrap().export(units(bytes));
    container.handle_refresh(1);
    page
}

#[test]
fn orphaned_exports_stay_charged_until_the_bound_is_zero() {
    let fixture = Fixture::with_quota(Bytes::gib(4));
    let mut container = fixture.start();
    start_exporter(&mut container, 4 << 30);
    hello(&mut container, 2, 8).unwrap();
    container.handle_exit(Process { pid: 1, start: 1 }, 7);
    settle_one(&mut container, 1, Bytes::ZERO);
    assert!(
        !is_granted(&container.request(2, 0, units(1))),
        "no bound is proven yet"
    );
    let gpu = "GPU-aaaa".parse().unwrap();
    let queried = container.memory.orphaned_exports(&gpu).unwrap();
    assert!(!container.cap_orphaned_exports(&gpu, Bytes::gib(5), &queried));
    assert!(container.cap_orphaned_exports(&gpu, Bytes::gib(3), &queried));
    assert_eq!(
        container.container_usage().accounts[0].exited,
        Bytes::gib(3)
    );
    assert_eq!(
        container.memory.exported_bytes(),
        [(gpu.clone(), Bytes::gib(3))]
    );
    assert!(
        !container.cap_orphaned_exports(&gpu, Bytes::ZERO, &queried),
        "the query is outdated"
    );
    let queried = container.memory.orphaned_exports(&gpu).unwrap();
    assert!(container.cap_orphaned_exports(&gpu, Bytes::ZERO, &queried));
    assert_eq!(container.memory.orphaned_exports(&gpu), None);
    assert!(is_granted(&container.request(2, 0, units(4 << 30))));
}

#[test]
fn own_memory_is_used_credit_and_not_granted_credit() {
    let fixture = Fixture::with_quota(Bytes::gib(4));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, 3 << 30);
    assert!(page.slot(0).unwrap().discharge(units(2 << 30)));
    let own = container.memory.own_memory_on(&"GPU-aaaa".parse().unwrap());
    let expected = OwnMemory {
        allocation: "00000000000000aa".parse().unwrap(),
        charged: Bytes::gib(1),
        exported: Bytes::ZERO,
        uncharged_margin: UNCHARGED_MARGIN_WITH_CONTEXT,
    };
    assert_eq!(own, [(1, expected)].into());
    assert_eq!(
        container.memory.own_memory_on(&"GPU-bbbb".parse().unwrap()),
        BTreeMap::new()
    );
}

#[test]
fn exports_are_capped_by_the_grant() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    start_exporter(&mut container, 64 * MIB);
    let page = hello(&mut container, 2, 8).unwrap();
    charge_all(&mut container, &page, 2, 64 * MIB);
    page.slot(0).unwrap().export(Units::MAX);
    let granted = container.container_usage().accounts[0].granted;
    for (pid, image) in [(1, 7), (2, 8)] {
        container.handle_exit(Process { pid, start: 1 }, image);
    }
    assert_eq!(container.container_usage().accounts[0].exited, granted);
}

#[test]
fn exports_stay_charged_when_the_page_is_lowered() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = start_exporter(&mut container, 512 * MIB);
    page.slot(0).unwrap().set_exported(Units::ZERO);
    container.handle_refresh(1);
    container.handle_exit(Process { pid: 1, start: 1 }, 7);
    settle_one(&mut container, 1, Bytes::ZERO);
    assert_eq!(
        container.container_usage().accounts[0].exited,
        Bytes(512 * MIB)
    );
}

#[test]
fn exports_outlive_the_agent_and_the_process() {
    for dies in [false, true] {
        let fixture = Fixture::with_quota(Bytes::gib(1));
        let mut before = fixture.start();
        start_exporter(&mut before, 1 << 30);
        if dies {
            before.handle_exit(Process { pid: 1, start: 1 }, 7);
            settle_one(&mut before, 1, Bytes::ZERO);
        }
        drop(before);
        let mut after = fixture.start();
        after.handle_exit(Process { pid: 1, start: 1 }, 7);
        settle_one(&mut after, 1, Bytes::ZERO);
        assert_eq!(
            after.container_usage().accounts[0].exited,
            Bytes::gib(1),
            "exited before: {dies}"
        );
        let record = fixture.folder.path().join("record.json");
        let found = SessionCheckpoint::open(record)
            .unwrap()
            .read()
            .unwrap()
            .exported_bytes();
        assert_eq!(
            found,
            after.memory.exported_bytes(),
            "the checkpoint alone shows as much"
        );
    }
}

#[test]
fn sample_from_before_an_exit_releases_nothing() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    let queried = container.reclaim_query().unwrap_or_default();
    charge_all(&mut container, &page, 1, 1 << 30);
    container.handle_exit(Process { pid: 1, start: 1 }, 7);
    container.apply_samples(
        &queried,
        &[ProcessMemory::default()],
        &FakeHost,
        BootTime::default(),
    );
    assert_eq!(
        container.container_usage().accounts[0].exited,
        Bytes::gib(1)
    );
    settle_one(&mut container, 1, Bytes::ZERO);
    assert_eq!(container.container_usage().accounts[0].exited, Bytes::ZERO);
}

/// Restarts the agent with this content of the checkpoint, or without one.
fn restart_with_checkpoint(content: Option<&str>) -> (Fixture, Container) {
    let mut fixture = Fixture::with_quota(Bytes::gib(4));
    fixture.served_before = true;
    let path = fixture.folder.path().join("record.json");
    if let Some(content) = content {
        std::fs::write(&path, content).unwrap();
    }
    let container = fixture.start();
    let kept = std::fs::read_to_string(path.with_extension("unread")).ok();
    assert_eq!(kept.as_deref(), content, "it is kept under another name");
    (fixture, container)
}

#[test]
fn lost_checkpoint_is_replaced_by_the_drivers_figures() {
    let truncated = r#"{"processes":[{"process":{"pid":1,"sta"#;
    for content in [
        None,
        Some(""),
        Some("\0\0\0\0"),
        Some(truncated),
        Some("[]"),
        Some(r#"{"processes":[],"exited":[]}"#),
        Some(r#"{"version":2,"processes":[],"exited":[]}"#),
    ] {
        let (fixture, mut container) = restart_with_checkpoint(content);
        hello(&mut container, 2, 8).unwrap();
        assert!(
            !is_granted(&container.request(2, 0, units(1))),
            "{content:?}: no sample yet"
        );
        let charged = [(1, Bytes::gib(3)), (5000, Bytes::gib(9))];
        settle_with(&mut container, &charged);
        let over = units(1 << 30).saturating_add(Units(1));
        assert!(!is_granted(&container.request(2, 0, over)), "{content:?}");
        hello(&mut container, 2, 8).unwrap();
        // Each further agent reads the loss from the checkpoint.
        let mut again = fixture.start();
        hello(&mut again, 2, 8).unwrap();
        assert!(!is_granted(&again.request(2, 0, units(1))), "{content:?}");
        settle_with(&mut again, &charged);
        assert!(!is_granted(&again.request(2, 0, over)), "{content:?}");
        // A process that says hello is charged its claim, and no less than the driver's figure
        // without a context.
        hello(&mut again, 1, 7).unwrap();
        assert_eq!(
            again.container_usage().accounts[0].granted,
            Bytes::gib(2),
            "{content:?}"
        );
        assert!(is_granted(&again.request(2, 0, units(2 << 30))));
        assert!(!fixture.start().recorder.is_lost());
    }
}

#[test]
fn new_container_is_granted_without_a_sample() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    hello(&mut container, 1, 7).unwrap();
    assert!(is_granted(&container.request(1, 0, units(1 << 30))));
}

#[test]
fn request_is_refused_when_the_checkpoint_fails() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, MIB);
    let before = container.container_usage().accounts;
    // A folder in the place of the temporary file makes every write fail.
    let temporary = fixture.folder.path().join("record.tmp");
    std::fs::create_dir(&temporary).unwrap();
    assert!(!is_granted(&container.request(1, 0, units(512 * MIB))));
    assert_eq!(
        (
            container.container_usage().accounts[0].granted,
            container.container_usage().accounts[0].used
        ),
        (before[0].granted, before[0].used)
    );
    assert_eq!(
        fixture.start().container_usage().accounts[0].granted,
        before[0].granted
    );
    std::fs::remove_dir(temporary).unwrap();
    assert!(is_granted(&container.request(1, 0, units(512 * MIB))));
}

mod events;
mod managed;
mod poisoned;
mod recording;
mod siblings;

#[test]
fn uncharged_lease_is_charged_when_it_is_released() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let gpu: GpuUuid = "GPU-aaaa".parse().unwrap();
    let half = Bytes::mib(512);
    assert!(container.release_lease(&gpu, LeaseId(7), half));
    assert_eq!(
        container.charge_lease(&gpu, LeaseId(8), Bytes::gib(1)),
        Err(half)
    );
    let mut again = fixture.start();
    assert_eq!(
        again.charge_lease(&gpu, LeaseId(8), Bytes::gib(1)),
        Err(half)
    );
}
