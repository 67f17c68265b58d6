//! Writes of the record, and what waits for them.

use super::super::recording::{AT_ONCE, LONGEST};
use super::*;

/// A container of many processes whose writes are not paid for.
fn indebted(fixture: &Fixture, processes: u32) -> Container {
    let mut container = fixture.start();
    for pid in 0..processes {
        hello(&mut container, pid, 1).unwrap();
    }
    container.changes.pace.charge(2 * AT_ONCE, Instant::now());
    container
}

#[test]
fn requests_share_a_write_when_writes_are_late() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = indebted(&fixture, 50);
    let path = fixture.folder.path().join("record.json");
    let before = std::fs::read(&path).unwrap();
    let ask = |pid| container.ask(pid, 0, Units(1));
    let mut answers: Vec<_> = (0..50).map(ask).collect();
    let last = container.changes.last;
    assert!(container.recorded(last, Instant::now()).is_some());
    assert!(
        answers
            .iter_mut()
            .all(|(_, answer)| answer.try_recv().is_err())
    );
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(container.credit.granted(0), Units::ZERO, "nor in the books");
    assert_eq!(
        container.recorded(answers[0].0, Instant::now() + 3 * AT_ONCE),
        None
    );
    for (change, answer) in &mut answers {
        assert!(is_granted(&answer.try_recv().unwrap()));
        assert_eq!(container.recorded(*change, Instant::now()), None);
    }
    let (after, _) = fixture.restart();
    assert_eq!(after.credit.granted(0), container.credit.granted(0));
}

#[test]
fn record_is_written_20_times_a_second_at_most() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = indebted(&fixture, 1);
    let begun = Instant::now();
    let (mut now, mut writes) = (begun, 0);
    while now < begun + Duration::from_secs(100) {
        let last = container.changes.last;
        let change = container.changed();
        assert!(change > last);
        if let Some(wait) = container.recorded(change, now) {
            now += wait;
            continue;
        }
        writes += 1;
        // One that costs more than any.
        container.changes.pace.charge(LONGEST, now);
    }
    assert!((1_000..=2_000).contains(&writes), "{writes} in 100 s");
}

#[test]
fn request_is_refused_when_the_record_is_not_written() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = indebted(&fixture, 1);
    let (_, mut answer) = container.ask(0, 0, Units(5));
    std::fs::remove_dir_all(fixture.folder.path()).unwrap();
    container.record_all(Instant::now() + 3 * AT_ONCE);
    let refused = Response::Refused {
        account: 0,
        free: Units::ZERO,
    };
    assert_eq!(answer.try_recv(), Ok(refused));
    assert_eq!(container.credit.granted(0), Units::ZERO);
}

#[test]
fn hello_waits_for_the_record_when_writes_are_late() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = indebted(&fixture, 1);
    let process = Process { pid: 9, start: 1 };
    let admitted = container.hello(process, 1, VERSION, &[], &Host);
    let Admitted { change, .. } = admitted.unwrap();
    assert!(container.recorded(change, Instant::now()).is_some());
    assert_eq!(
        container.recorded(change, Instant::now() + 3 * AT_ONCE),
        None
    );
    let (_, known) = fixture.restart();
    assert!(known.iter().any(|known| known.process == process));
}

#[test]
fn image_gets_nothing_more_when_its_page_took_no_grant() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let (page, other) = (
        hello(&mut container, 1, 7).unwrap(),
        hello(&mut container, 2, 7),
    );
    // As many units as a word can hold: it takes none of the agent's.
    page.slot(0).unwrap().set(CreditWord {
        granted: u32::MAX - 1,
        used: 0,
    });
    assert!(!is_granted(&container.request(1, 0, units(MIB))));
    assert_eq!(container.credit.granted(0), Units::ZERO);
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
