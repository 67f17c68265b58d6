//! Generations of images, their fences, and how poison and the books go together.

use bursar_crds::budget::ContextAction;
use bursar_protocol::messages::Recovery;

use super::super::super::recovery::{Decision, Policy};
use super::super::leases::NotAsked;
use super::*;
use crate::clock::Present;

fn now() -> Present {
    Present {
        moment: Moment(3_600_000),
        wall: jiff::Timestamp::UNIX_EPOCH,
    }
}

fn report(container: &mut Container, pid: u32, code: i32) -> Response {
    container.poisoned(pid, 0, code, true, now())
}

fn in_place(container: &mut Container) {
    container.set_policy(Policy::new(ContextAction::InPlace, 100, 600));
}

/// The container's GPU.
pub(super) fn own() -> [GpuUuid; 1] {
    ["GPU-aaaa".parse().unwrap()]
}

/// An XID 31 of one of the GPUs `on` names a process; whether that is one of this container's.
pub(super) fn xid(container: &mut Container, pid: u32, on: &[GpuUuid]) -> bool {
    let suspect = container.suspect(pid, on, Moment(u64::MAX));
    let named = suspect.inspect(|suspect| container.xid(suspect, 31, now()));
    named.is_some()
}

/// P of an image, as its welcome says it.
fn generation(container: &mut Container, pid: u32, image: u64, version: u16) -> Option<u64> {
    let process = Process { pid, start: 1 };
    let admitted = container
        .hello(process, image, version, &[], &Host)
        .unwrap();
    match admitted.welcome {
        Response::Welcome {
            version: spoken,
            generation,
            ..
        } => {
            assert_eq!(spoken, version.min(VERSION));
            generation
        }
        other => panic!("{other:?}"),
    }
}

const EXECUTE: Response = Response::Recovery(Recovery::Reexec);
const GO_ON: Response = Response::Recovery(Recovery::Continue);

#[test]
fn each_image_gets_the_next_number_and_keeps_it_over_reconnects_and_agents() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    assert_eq!(generation(&mut container, 1, 7, VERSION), Some(1));
    assert_eq!(generation(&mut container, 2, 8, VERSION), Some(2));
    assert_eq!(generation(&mut container, 1, 7, VERSION), Some(1));
    assert_eq!(
        generation(&mut container, 1, 9, VERSION),
        Some(3),
        "an exec"
    );
    let mut again = fixture.start();
    assert_eq!(generation(&mut again, 1, 9, VERSION), Some(3));
    assert_eq!(generation(&mut again, 3, 1, VERSION), Some(4));
}

#[test]
fn no_restart_is_ordered_when_its_count_is_not_on_record() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    container.set_policy(Policy::new(ContextAction::InPlace, 1, 600));
    hello(&mut container, 1, 7).unwrap();
    let away = fixture.folder.path().with_extension("away");
    std::fs::rename(fixture.folder.path(), &away).unwrap();
    assert_eq!(report(&mut container, 1, 700), GO_ON);
    let fenced = Response::Fenced { account: 0 };
    assert_eq!(container.request(1, 0, units(1)), fenced);
    let late = Present {
        moment: now().moment + Duration::from_secs(60),
        ..now()
    };
    container.overdue(Duration::ZERO, late);
    assert_eq!(container.condemned(), None);
    std::fs::rename(&away, fixture.folder.path()).unwrap();
    assert_eq!(report(&mut container, 1, 700), EXECUTE);
    // The next agent counts it.
    let mut again = fixture.start();
    hello(&mut again, 1, 8).unwrap();
    assert_eq!(report(&mut again, 1, 700), GO_ON);
    assert_eq!(
        again.faults()[0].decision(),
        Some(Decision::Kill { beyond: true })
    );
}

#[test]
fn a_lost_record_issues_no_number_twice() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let before = (1..100).map(|image| generation(&mut container, 1, image, VERSION));
    let most = before.max().flatten().unwrap();
    let (mut fixture, mut after) = restart_over(None);
    let first = generation(&mut after, 1, 7, VERSION).unwrap();
    assert!(first > most);
    // Another record is lost a moment later.
    std::fs::remove_file(fixture.folder.path().join("record.json")).unwrap();
    fixture.now = fixture.now + Duration::from_millis(1);
    let most = (1..100).map(|image| generation(&mut after, 1, image, VERSION));
    let most = most.max().flatten().unwrap();
    std::fs::remove_file(fixture.folder.path().join("record.json")).unwrap();
    let mut last = fixture.start();
    assert!(generation(&mut last, 1, 7, VERSION).unwrap() > most);
}

#[test]
fn a_shim_of_version_1_is_told_no_number_and_its_fence_in_words_that_it_knows() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    assert_eq!(generation(&mut container, 1, 7, 1), None);
    assert!(xid(&mut container, 1, &own()));
    let refused = Response::Refused {
        account: 0,
        free: Units::ZERO,
    };
    assert_eq!(container.request(1, 0, units(1)), refused);
    // A version that is not made yet speaks this one.
    assert_eq!(generation(&mut container, 2, 7, VERSION + 9), Some(2));
}

#[test]
fn a_poisoned_image_gets_nothing_more_and_its_siblings_and_successor_do() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    in_place(&mut container);
    hello(&mut container, 1, 7).unwrap();
    hello(&mut container, 2, 8).unwrap();
    assert_eq!(report(&mut container, 1, 700), EXECUTE);
    let fenced = Response::Fenced { account: 0 };
    assert_eq!(container.request(1, 0, units(1)), fenced);
    assert!(is_granted(&container.request(2, 0, units(1))));
    // The same image, to this agent and the next.
    hello(&mut container, 1, 7).unwrap();
    assert_eq!(container.request(1, 0, units(1)), fenced);
    let mut again = fixture.start();
    hello(&mut again, 1, 7).unwrap();
    assert_eq!(again.request(1, 0, units(1)), fenced);
    hello(&mut again, 1, 9).unwrap();
    assert!(is_granted(&again.request(1, 0, units(1))));
    assert!(again.faults().is_empty());
}

#[test]
fn the_bytes_of_a_poisoned_image_are_retired_by_its_exec_once_and_once_only() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    in_place(&mut container);
    let page = hello(&mut container, 1, 7).unwrap();
    use_all(&mut container, &page, 1, 512 * MIB);
    report(&mut container, 1, 719);
    let granted = container.usage()[0].granted;
    for image in [8, 8, 8] {
        hello(&mut container, 1, image).unwrap();
        let usage = &container.usage()[0];
        assert_eq!((usage.granted, usage.retired), (Bytes::ZERO, granted));
    }
    // The old image's pidfd is the new one's: nothing of it ends.
    container.died(Process { pid: 1, start: 1 }, 7);
    assert_eq!(container.usage()[0].retired, granted);
    settle(&mut container, 1, Bytes::ZERO);
    assert_eq!(container.usage()[0].retired, Bytes::ZERO);
    assert!(is_granted(&container.request(1, 0, units(1 << 30))));
}

#[test]
fn who_asks_for_what_an_image_had_that_just_ended_waits_for_it_and_nobody_else_does() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    use_all(&mut container, &page, 1, 512 * MIB);
    let heard = Instant::now();
    assert!(
        !container.is_settling(1, 0, units(1 << 30), heard),
        "it lives"
    );
    hello(&mut container, 1, 8).unwrap();
    assert!(container.is_settling(1, 0, units(1 << 30), heard));
    assert!(
        !container.is_settling(1, 0, units(1 << 30), heard - SETTLING),
        "it waited long enough for others"
    );
    assert!(
        !container.is_settling(1, 0, units(256 * MIB), heard),
        "there is room"
    );
    assert!(
        !container.is_settling(1, 0, units(2 << 30), heard),
        "there never will be"
    );
    settle(&mut container, 1, Bytes::ZERO);
    assert!(!container.is_settling(1, 0, units(1 << 30), heard));
    hello(&mut container, 1, 9).unwrap();
    container.retired_at = container.retired_at.map(|at| at - SETTLING);
    assert!(
        !container.is_settling(1, 0, units(1 << 30), heard),
        "somebody else holds it"
    );
}

#[test]
fn errors_that_poison_nothing_are_no_faults_whoever_reports_them() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    in_place(&mut container);
    hello(&mut container, 1, 7).unwrap();
    for code in [0, 1, 2, 4, 201, 500, 600, 801] {
        assert_eq!(report(&mut container, 1, code), GO_ON, "{code}");
    }
    assert!(container.faults().is_empty());
    assert!(is_granted(&container.request(1, 0, units(1))));
    assert_eq!(report(&mut container, 1, 999), EXECUTE, "it was probed");
}

#[test]
fn an_xid_of_another_process_is_not_this_containers() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    hello(&mut container, 1, 7).unwrap();
    let on = own();
    assert!(!xid(&mut container, 2, &on));
    assert!(container.faults().is_empty());
    assert!(xid(&mut container, 1, &on));
    assert_eq!(container.take_news().len(), 1);
    assert!(xid(&mut container, 1, &on));
    assert!(container.take_news().is_empty(), "it is the same fault");
}

#[test]
fn xid_from_before_a_process_started_is_not_its_own() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    // Clock ticks: it started 10 ms after the boot.
    hello(&mut container, 1, 7).unwrap();
    let on = own();
    assert_eq!(container.suspect(1, &on, Moment(9)), None);
    assert!(container.suspect(1, &on, Moment(10)).is_some());
}

#[test]
fn xid_of_an_image_is_not_its_successors() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    hello(&mut container, 1, 7).unwrap();
    let before = container.suspect(1, &own(), Moment(u64::MAX));
    hello(&mut container, 1, 8).unwrap();
    container.xid(&before.unwrap(), 31, now());
    assert!(container.faults().is_empty());
}

#[test]
fn an_xid_says_which_of_the_containers_gpus_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second, foreign]: [GpuUuid; 3] =
        ["GPU-a", "GPU-b", "GPU-c"].map(|gpu| gpu.parse().unwrap());
    let served = Served {
        allocation: "00000000000000aa".parse().unwrap(),
        pod: "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap(),
        gpus: vec![
            (first.clone(), Bytes::gib(1)),
            (second.clone(), Bytes::gib(1)),
        ],
        managed: Bytes::ZERO,
        tokens: None,
    };
    let record = Record::at(folder.path().join("record.json")).unwrap();
    let (mut container, _) = Container::restore(served, record, false, &Host, Moment::default());
    for (pid, gpu) in [(1, &second), (2, &first)] {
        hello(&mut container, pid, 7).unwrap();
        assert!(xid(&mut container, pid, &[foreign.clone(), gpu.clone()]));
        assert_eq!(&container.take_news()[0].gpu, gpu);
    }
    hello(&mut container, 3, 7).unwrap();
    assert!(!xid(&mut container, 3, &[foreign]), "it has no such GPU");
    assert!(!xid(&mut container, 3, &[]));
}

#[test]
fn a_fault_and_the_count_of_restarts_outlive_the_agent_and_end_with_the_process() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    container.set_policy(Policy::new(ContextAction::InPlace, 1, 600));
    hello(&mut container, 1, 7).unwrap();
    assert_eq!(report(&mut container, 1, 700), EXECUTE);
    let mut again = fixture.start();
    assert_eq!(again.faults(), container.faults());
    hello(&mut again, 1, 8).unwrap();
    assert_eq!(report(&mut again, 1, 700), GO_ON, "one is the maximum");
    assert_eq!(again.condemned(), Some(Process { pid: 1, start: 1 }));
    // Its process dies while there is no agent: one too many stays open.
    let path = fixture.folder.path().join("record.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"pid\":1,", "\"pid\":666,")).unwrap();
    let after = fixture.start();
    assert_eq!((after.faults().len(), after.condemned()), (1, None));
}

#[test]
fn the_main_process_is_the_first_of_a_namespace_below_the_hosts() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    for pid in [1, 100, 101, 102] {
        hello(&mut container, pid, 7).unwrap();
    }
    let main: Vec<_> = [1, 100, 101, 102, 103]
        .into_iter()
        .filter(|pid| container.first_of_namespace(*pid).is_some())
        .collect();
    // By their pids in the tests' namespaces; the process 1 is the machine's own first.
    assert_eq!(main, [1, 101]);
}

#[test]
fn a_poisoned_image_may_ask_for_nothing_and_has_no_tokens_and_its_successor_may() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let images = |container: &Container| -> Vec<u64> {
        let images = container.images().into_iter();
        images.map(|image| image.generation).collect()
    };
    generation(&mut container, 1, 7, VERSION);
    assert!(container.may_ask(1, None, &Host).is_ok());
    assert_eq!(images(&container), [1]);
    report(&mut container, 1, 700);
    assert_eq!(container.may_ask(1, None, &Host), Err(NotAsked::Fenced));
    assert!(images(&container).is_empty());
    generation(&mut container, 1, 8, VERSION);
    assert!(container.may_ask(1, None, &Host).is_ok());
    assert_eq!(images(&container), [2]);
}

#[test]
fn of_more_news_than_are_kept_the_newest_are() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    for image in 1..=100 {
        generation(&mut container, 1, image, VERSION);
        report(&mut container, 1, 700);
    }
    let news = container.take_news();
    let last = news.last().map(|fault| fault.image.generation);
    assert!(news.len() < 100 && last == Some(100), "{news:?}");
}
