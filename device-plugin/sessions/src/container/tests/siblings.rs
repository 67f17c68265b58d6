//! Shows that the containers of one claim share its quota, and that charges of the first count
//! against the next.

use proptest::prelude::*;

use super::*;
use crate::container::siblings::ClaimSiblings;

/// An init container and the main container of one claim.
struct Claim {
    _folder: tempfile::TempDir,
    init: Container,
    main: Container,
}

fn container(folder: &tempfile::TempDir, allocation: &str, quota: Bytes) -> Container {
    let served = SessionSpec {
        allocation: allocation.parse().unwrap(),
        pod: "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap(),
        gpus: vec![(gpu(), quota)],
        managed: Bytes::ZERO,
        device_ids: None,
    };
    let record = folder.path().join(format!("{allocation}.json"));
    Container::restore(
        served,
        SessionCheckpoint::open(record).unwrap(),
        false,
        &FakeHost,
        BootTime::default(),
    )
    .0
}

fn gpu() -> GpuUuid {
    "GPU-aaaa".parse().unwrap()
}

fn claim(quota: Bytes) -> Claim {
    let folder = tempfile::tempdir().unwrap();
    let siblings = ClaimSiblings::default();
    let [init, main] = ["00000000000000aa", "00000000000000bb"].map(|allocation| {
        let mut container = container(&folder, allocation, quota);
        container.memory.join_claim(siblings.clone());
        container
    });
    Claim {
        _folder: folder,
        init,
        main,
    }
}

/// Whether a container's process can get these bytes.
fn can_have(container: &mut Container, pid: u32, bytes: u64) -> bool {
    let answer = container.request(pid, 0, units(bytes));
    if let Response::Granted { units, .. } = answer {
        container.memory.credit_mut().revoke(pid, 0, units);
        container.write_checkpoint();
    }
    is_granted(&answer)
}

#[test]
fn exports_count_against_the_next_container_of_a_claim() {
    let Claim {
        mut init,
        mut main,
        _folder,
    } = claim(Bytes::gib(4));
    start_exporter(&mut init, 3 << 30);
    init.handle_exit(Process { pid: 1, start: 1 }, 7);
    settle_one(&mut init, 1, Bytes::ZERO);
    let page = hello(&mut main, 1002, 9).unwrap();
    assert_eq!(page.slot(0).unwrap().others(), units(3 << 30));
    assert!(!can_have(&mut main, 1002, (1 << 30) + 1));
    assert!(can_have(&mut main, 1002, 1 << 30));
    let queried = init.memory.orphaned_exports(&gpu()).unwrap();
    assert!(init.cap_orphaned_exports(&gpu(), Bytes::ZERO, &queried));
    assert!(can_have(&mut main, 1002, 4 << 30));
}

#[test]
fn charges_count_against_the_next_container_of_a_claim() {
    let Claim {
        mut init,
        mut main,
        _folder,
    } = claim(Bytes::gib(4));
    let page = hello(&mut init, 1, 7).unwrap();
    charge_all(&mut init, &page, 1, 4 << 30);
    hello(&mut main, 1002, 9).unwrap();
    assert!(!can_have(&mut main, 1002, 1), "its process lives");
    init.handle_exit(Process { pid: 1, start: 1 }, 7);
    assert!(!can_have(&mut main, 1002, 1), "no sample yet");
    assert!(
        main.is_reclaim_pending(1002, 0, units(1 << 30), Instant::now(), BootTime::default()),
        "it is about to be back"
    );
    settle_one(&mut init, 1, Bytes::ZERO);
    assert!(
        !main.is_reclaim_pending(1002, 0, units(1 << 30), Instant::now(), BootTime::default()),
        "it is back, and a request for it waits no more"
    );
    assert!(can_have(&mut main, 1002, 4 << 30));
    init.charge_lease(&gpu(), LeaseId(5), Bytes::gib(3))
        .unwrap();
    assert!(!can_have(&mut main, 1002, 2 << 30), "a lease");
    assert!(
        main.charge_lease(&gpu(), LeaseId(6), Bytes::gib(2))
            .is_err()
    );
    assert!(main.charge_lease(&gpu(), LeaseId(6), Bytes::gib(1)).is_ok());
    init.close();
    assert!(can_have(&mut main, 1002, 3 << 30));
}

#[test]
fn exports_of_another_claim_are_inherited_within_the_quota() {
    let folder = tempfile::tempdir().unwrap();
    let main = || container(&folder, "00000000000000bb", Bytes::gib(4));
    assert_eq!(main().inherit_exports(&gpu(), Bytes::gib(6)), Bytes::gib(4));
    // The next agent reads the inherited exports from the checkpoint.
    let mut main = main();
    hello(&mut main, 1002, 9).unwrap();
    assert!(!can_have(&mut main, 1002, 1));
    assert_eq!(main.memory.exported_bytes(), [(gpu(), Bytes::gib(4))]);
    let queried = main.memory.orphaned_exports(&gpu()).unwrap();
    assert!(main.cap_orphaned_exports(&gpu(), Bytes::gib(1), &queried));
    assert!(can_have(&mut main, 1002, 3 << 30));
    let other_gpu = "GPU-bbbb".parse().unwrap();
    assert_eq!(main.inherit_exports(&other_gpu, Bytes::gib(1)), Bytes::ZERO);
}

#[derive(Clone, Debug)]
enum Step {
    Asks(bool, u64),
    Exports(bool, u64),
    Dies(bool),
    Settles(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let (which, mib) = (any::<bool>(), 1..600_u64);
    prop_oneof![
        3 => (which, mib.clone()).prop_map(|(which, mib)| Step::Asks(which, mib)),
        1 => (which, mib).prop_map(|(which, mib)| Step::Exports(which, mib)),
        1 => which.prop_map(Step::Dies),
        1 => which.prop_map(Step::Settles),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The quota holds whichever of the containers live, also for both at once.
    #[test]
    fn containers_of_a_claim_never_exceed_its_quota(steps in prop::collection::vec(step(), 0..30)) {
        let Claim { init, main, _folder } = claim(Bytes::gib(1));
        let mut both = [(init, 1, None), (main, 1002, None)];
        for (number, step) in steps.into_iter().enumerate() {
            let (Step::Asks(which, _) | Step::Exports(which, _) | Step::Dies(which) | Step::Settles(which)) = step;
            let (container, pid, page) = &mut both[usize::from(which)];
            let image = number as u64 + 1;
            let process = Process { pid: *pid, start: 1 };
            match step {
                Step::Asks(_, mib) => {
                    page.get_or_insert_with(|| (hello(container, *pid, image).unwrap(), image));
                    container.request(*pid, 0, units(mib * MIB));
                }
                Step::Exports(_, mib) => if let Some((page, _)) = page {
                    page.slot(0).unwrap().export(units(mib * MIB));
                    container.handle_refresh(*pid);
                },
                Step::Dies(_) => if let Some((_, image)) = page.take() {
                    container.handle_exit(process, image);
                },
                Step::Settles(_) => settle_one(container, *pid, Bytes::ZERO),
            }
            let had: u64 = both.iter().map(|(container, ..)| container.memory.credit().own_charged(0).bytes()).sum();
            prop_assert!(had <= 1 << 30, "{had}");
        }
    }
}
