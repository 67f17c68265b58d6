//! Shows the writes of the checkpoint, and the answers that wait for them.

use bursar_host::clock::ClockReading;

use super::super::recorder::{MAX_WRITE_DELAY, WRITE_BURST};
use super::*;

/// A container of many processes whose next write the rate limit delays.
fn start_with_delayed_writes(fixture: &Fixture, processes: u32) -> Container {
    let mut container = fixture.start();
    for pid in 0..processes {
        hello(&mut container, pid, 1).unwrap();
    }
    container
        .recorder
        .rate_limiter_mut()
        .charge(2 * WRITE_BURST, Instant::now());
    container
}

#[test]
fn requests_share_a_write_when_writes_are_late() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = start_with_delayed_writes(&fixture, 50);
    let path = fixture.folder.path().join("record.json");
    let before = std::fs::read(&path).unwrap();
    let request = |pid| container.request_credit(pid, 0, Units(1));
    let mut answers: Vec<_> = (0..50).map(request).collect();
    let last = container.recorder.last();
    assert!(container.poll_recorded(last, Instant::now()).is_some());
    assert!(
        answers
            .iter_mut()
            .all(|(_, answer)| answer.try_recv().is_err())
    );
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(
        container.memory.credit().granted(0),
        Units::ZERO,
        "the accounts are unchanged"
    );
    assert_eq!(
        container.poll_recorded(answers[0].0, Instant::now() + 3 * WRITE_BURST),
        None
    );
    for (change, answer) in &mut answers {
        assert!(is_granted(&answer.try_recv().unwrap()));
        assert_eq!(container.poll_recorded(*change, Instant::now()), None);
    }
    let (after, _) = fixture.restart();
    assert_eq!(
        after.memory.credit().granted(0),
        container.memory.credit().granted(0)
    );
}

#[test]
fn checkpoint_is_written_at_most_20_times_a_second() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = start_with_delayed_writes(&fixture, 1);
    let start = Instant::now();
    let (mut now, mut writes) = (start, 0);
    while now < start + Duration::from_secs(100) {
        let last = container.recorder.last();
        let change = container.note_change();
        assert!(change > last);
        if let Some(wait) = container.poll_recorded(change, now) {
            now += wait;
            continue;
        }
        writes += 1;
        // A write that costs more than any real one.
        container
            .recorder
            .rate_limiter_mut()
            .charge(MAX_WRITE_DELAY, now);
    }
    assert!((1_000..=2_000).contains(&writes), "{writes} in 100 s");
}

#[test]
fn write_is_delayed_little_however_many_came_before() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let limiter = container.recorder.rate_limiter_mut();
    limiter.charge_at_most(2 * WRITE_BURST, MAX_WRITE_DELAY, Instant::now());
    for _ in 0..100 {
        container.write_checkpoint();
    }
    let change = container.note_change();
    let wait = container.poll_recorded(change, Instant::now());
    assert!(wait <= Some(MAX_WRITE_DELAY), "{wait:?}");
}

#[test]
fn exports_wait_for_the_checkpoint_when_writes_are_late() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = start_with_delayed_writes(&fixture, 1);
    let page = hello(&mut container, 0, 1).unwrap();
    let record = || std::fs::read(fixture.folder.path().join("record.json")).unwrap();
    let before = record();
    let now = ClockReading {
        moment: fixture.now,
        wall: jiff::Timestamp::UNIX_EPOCH,
    };
    for message in 0..2 {
        page.slot(0).unwrap().export(Units(1));
        let change = match message {
            0 => container.handle_context_made(0, 0).1,
            _ => container.handle_poisoned(0, 0, 0, false, None, now).1,
        };
        let wait = container.poll_recorded(change.unwrap(), Instant::now());
        assert!(wait.is_some() && record() == before, "message {message}");
    }
    container.flush_changes(Instant::now() + 3 * WRITE_BURST);
    assert_ne!(record(), before);
    assert_eq!(container.handle_context_made(0, 0).1, None);
}

#[test]
fn exited_process_gets_no_account_when_its_request_is_late() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = start_with_delayed_writes(&fixture, 2);
    let (_, mut answer) = container.request_credit(1, 0, Units(5));
    container.handle_exit(Process { pid: 1, start: 1 }, 1);
    container.flush_changes(Instant::now() + 3 * WRITE_BURST);
    assert!(answer.try_recv().is_err());
    assert!(!container.memory.credit().grants().contains_key(&1));
}

#[test]
fn late_request_is_dropped_when_its_process_says_hello_again() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = start_with_delayed_writes(&fixture, 1);
    let (_, mut answer) = container.request_credit(0, 0, Units(5));
    hello(&mut container, 0, 1).unwrap();
    container.flush_changes(Instant::now() + 3 * WRITE_BURST);
    assert!(answer.try_recv().is_err());
    assert!(!container.memory.has_adopted_page(0));
}

#[test]
fn request_is_refused_when_the_checkpoint_is_not_written() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = start_with_delayed_writes(&fixture, 1);
    let (_, mut answer) = container.request_credit(0, 0, Units(5));
    std::fs::remove_dir_all(fixture.folder.path()).unwrap();
    container.flush_changes(Instant::now() + 3 * WRITE_BURST);
    let refused = Response::Refused {
        account: 0,
        free: Units::ZERO,
    };
    assert_eq!(answer.try_recv(), Ok(refused));
    assert_eq!(container.memory.credit().granted(0), Units::ZERO);
}

#[test]
fn released_lease_stays_charged_when_the_checkpoint_is_not_written() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    std::fs::remove_dir_all(fixture.folder.path()).unwrap();
    let gpu = "GPU-aaaa".parse().unwrap();
    let half = Bytes::mib(512);
    assert!(!container.release_lease(&gpu, LeaseId(7), half));
    let credit = container.memory.credit();
    let charged = (credit.leased(0), credit.orphaned(0));
    assert_eq!(charged, (units(half.0), Units::ZERO));
}

#[test]
fn hello_waits_for_the_checkpoint_when_writes_are_late() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = start_with_delayed_writes(&fixture, 1);
    let process = Process { pid: 9, start: 1 };
    let admitted = container.handle_hello(process, 1, VERSION, &[], &FakeHost);
    let Admission { change, .. } = admitted.unwrap();
    assert!(container.poll_recorded(change, Instant::now()).is_some());
    assert_eq!(
        container.poll_recorded(change, Instant::now() + 3 * WRITE_BURST),
        None
    );
    let (_, known) = fixture.restart();
    assert!(known.iter().any(|known| known.process == process));
}

#[test]
fn image_is_fenced_when_its_page_takes_no_grant() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let (page, other) = (
        hello(&mut container, 1, 7).unwrap(),
        hello(&mut container, 2, 7),
    );
    // The word holds as many units as possible, so that it accepts no further grant.
    page.slot(0).unwrap().set(CreditWord {
        granted: u32::MAX - 1,
        used: 0,
    });
    assert!(!is_granted(&container.request(1, 0, units(MIB))));
    assert_eq!(container.memory.credit().granted(0), Units::ZERO);
    for image in [7, 7] {
        assert_eq!(
            container.request(1, 0, units(MIB)),
            Response::Fenced { account: 0 }
        );
        let again = hello(&mut container, 1, image).unwrap();
        assert_eq!(again.slot(0).unwrap().word().granted, 0);
    }
    assert!(other.is_ok() && is_granted(&container.request(2, 0, units(MIB))));
    hello(&mut container, 1, 8).unwrap();
    assert!(
        is_granted(&container.request(1, 0, units(MIB))),
        "another image"
    );
}
