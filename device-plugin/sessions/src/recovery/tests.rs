use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn at(second: u64) -> ClockReading {
    ClockReading {
        moment: BootTime(1_000_000 + 1_000 * second),
        // The wall clock goes back here, so that each test passes whatever it shows.
        wall: Timestamp::from_second(1_800_000_000 - 3_600 * i64::try_from(second).unwrap())
            .unwrap(),
    }
}

fn image(generation: u64) -> ProcessImage {
    let process = Process { pid: 7, start: 70 };
    ProcessImage {
        process,
        generation,
    }
}

fn gpu() -> GpuUuid {
    "GPU-a".parse().unwrap()
}

fn log_with_policy(action: ContextAction) -> FaultLog {
    let mut book = FaultLog::default();
    book.set_policy(RecoveryPolicy::new(action, 2, 60, 0));
    book
}

/// The root process of the container, from which the images' process descends.
const ROOT: Process = Process { pid: 1, start: 10 };

const REPORT: FaultSource = FaultSource::Cuda {
    code: 700,
    can_reexec: true,
};

/// A process that cannot execute its program again: it is not the main one.
const UNABLE: FaultSource = FaultSource::Cuda {
    code: 700,
    can_reexec: false,
};

impl FaultLog {
    /// Records a report of the root process.
    fn report(&mut self, generation: u64, second: u64) -> Option<RecoveryAction> {
        let root = Some(image(generation).process);
        self.record(image(generation), &gpu(), REPORT, root, at(second))
            .0
    }

    /// Records a report of a process below the root process.
    fn report_child(&mut self, generation: u64, second: u64) -> Option<RecoveryAction> {
        let (image, now) = (image(generation), at(second));
        self.record(image, &gpu(), UNABLE, Some(ROOT), now).0
    }

    fn xid(&mut self, generation: u64, second: u64) -> Option<RecoveryAction> {
        let (cause, image) = (FaultSource::Xid(31), image(generation));
        let root = Some(image.process);
        self.record(image, &gpu(), cause, root, at(second)).0
    }

    fn targets(&self, second: u64) -> Vec<KillTarget> {
        self.kill_targets(at(second).moment).collect()
    }

    fn end(&mut self, generation: u64) {
        self.record_exit(&image(generation));
    }

    fn fences(&self, generation: u64) -> bool {
        self.fault_of(&image(generation)).is_some()
    }
}

const RESTART_CONTAINER: Option<RecoveryAction> =
    Some(RecoveryAction::RestartContainer { over_limit: false });
const OVER_LIMIT: Option<RecoveryAction> =
    Some(RecoveryAction::RestartContainer { over_limit: true });

#[test]
fn default_policy_allows_five_restarts_in_ten_minutes() {
    let mut book = FaultLog::default();
    let decisions: Vec<_> = (1..=6).map(|image| book.report(image, image)).collect();
    assert_eq!(decisions[..5], [RESTART_CONTAINER; 5]);
    assert_eq!(decisions[5], OVER_LIMIT);
}

#[test]
fn last_fault_outlives_the_end_of_its_image() {
    let mut book = log_with_policy(ContextAction::Restart);
    assert_eq!(book.last_fault(), None);
    book.report(1, 0);
    book.xid(2, 5);
    book.end(2);
    book.end(1);
    assert!(book.faults().is_empty());
    let written = serde_json::to_string(&book).unwrap();
    let read: FaultLog = serde_json::from_str(&written).unwrap();
    let last = read.last_fault().unwrap();
    assert_eq!((last.image.generation, last.xid), (2, Some(31)));
    let mut read = read;
    read.report(3, 9);
    assert_eq!(read.last_fault().unwrap().image.generation, 3);
}

#[test]
fn restarts_in_place_are_counted_if_the_image_followed() {
    let mut book = log_with_policy(ContextAction::InPlace);
    book.report(1, 0);
    assert_eq!((book.restarted, book.restarted_in_place), (1, 1));
    book.record_disconnect(&image(1));
    book.end(1);
    let before = book.clone();
    book.report(2, 10);
    assert_eq!((book.restarted, book.restarted_in_place), (2, 2));
    // The image did not execute its program again: its container is restarted instead.
    let mut late = book.clone();
    late.tick(Duration::ZERO, at(20));
    assert_eq!((late.restarted, late.restarted_in_place), (2, 1));
    book.roll_back(&before);
    assert_eq!((book.restarted, book.restarted_in_place), (1, 1));
}

#[test]
fn sixth_ended_process_restarts_its_container_by_default() {
    let mut book = FaultLog::default();
    let faults = (1..=11_u64).map(|image| {
        let decision = book.report_child(image, image);
        book.end(image);
        book.close_released(|_| false);
        decision
    });
    let faults: Vec<_> = faults.collect();
    assert_eq!(faults[..5], [Some(RecoveryAction::EndProcess); 5]);
    assert_eq!(faults[5..10], [RESTART_CONTAINER; 5]);
    assert_eq!(faults[10], OVER_LIMIT, "its pod goes");
    assert_eq!((book.restarted, book.poisoned), (5, 11));
    // The window has room for processes again.
    assert_eq!(book.report_child(12, 700), Some(RecoveryAction::EndProcess));
}

#[test]
fn policy_names_the_unit_that_ends() {
    let alone = Some(RecoveryAction::EndProcess);
    for (action, of_child, of_root) in [
        (ContextAction::Process, alone, RESTART_CONTAINER),
        (
            ContextAction::InPlace,
            alone,
            Some(RecoveryAction::ReexecInPlace),
        ),
        (ContextAction::Restart, RESTART_CONTAINER, RESTART_CONTAINER),
        (ContextAction::Unknown, RESTART_CONTAINER, RESTART_CONTAINER),
    ] {
        assert_eq!(log_with_policy(action).report_child(1, 0), of_child);
        assert_eq!(log_with_policy(action).report(1, 0), of_root, "{action:?}");
    }
}

#[test]
fn process_is_killed_after_the_grace() {
    for (action, target) in [
        (
            ContextAction::Process,
            KillTarget::Process(image(1).process),
        ),
        (ContextAction::Restart, KillTarget::RootOf(image(1).process)),
    ] {
        let mut book = FaultLog::default();
        book.set_policy(RecoveryPolicy::new(action, 5, 600, 10));
        book.report_child(1, 0);
        assert!(book.fences(1));
        assert_eq!(book.targets(9), []);
        assert_eq!(book.targets(10), [target]);
        // An agent that starts between the decision and the kill does the same.
        let text = serde_json::to_string(&book).unwrap();
        let again: FaultLog = serde_json::from_str(&text).unwrap();
        assert_eq!(again, book);
        assert_eq!(again.targets(10), [target]);
        book.end(1);
        assert_eq!(book.targets(10), []);
    }
}

#[test]
fn program_that_ends_in_its_grace_counts_once() {
    let mut book = log_with_policy(ContextAction::Process);
    book.set_policy(RecoveryPolicy::new(ContextAction::Process, 2, 60, 10));
    book.report_child(1, 0);
    book.end(1);
    book.close_released(|_| false);
    assert!(book.faults().is_empty() && book.targets(100).is_empty());
    assert_eq!((book.process_ends.len(), book.restarts.len()), (1, 0));
}

#[test]
fn container_is_restarted_when_a_child_holds_the_memory() {
    let mut book = log_with_policy(ContextAction::Process);
    book.report_child(1, 0);
    book.end(1);
    let pid = image(1).process.pid;
    let listed = |listed: u32| listed == pid;
    book.close_released(listed);
    assert!(!book.require_generation(9, at(0)), "nothing is to be done");
    assert_eq!(book.faults().len(), 1, "its memory is not free yet");
    assert_eq!(book.record_held(listed, at(1).moment), []);
    assert_eq!(book.record_held(|_| false, at(2).moment), [], "not listed");
    assert_eq!(book.record_held(listed, at(3).moment), []);
    assert_eq!(book.targets(4), []);
    let [held] = &book.record_held(listed, at(5).moment)[..] else {
        panic!()
    };
    assert!(held.is_memory_held());
    assert_eq!(held.decision(), RESTART_CONTAINER);
    assert_eq!(book.record_held(listed, at(6).moment), [], "told once");
    assert_eq!(book.targets(6), [KillTarget::Root(ROOT)]);
    // A later fault does not hide it, and the next agent knows it.
    book.report_child(2, 6);
    let text = serde_json::to_string(&book).unwrap();
    let mut book: FaultLog = serde_json::from_str(&text).unwrap();
    assert_eq!(book.targets(6)[0], KillTarget::Root(ROOT));
    book.close_released(|_| false);
    assert_eq!(book.faults().len(), 1);
    assert_eq!((book.restarts.len(), book.process_ends.len()), (1, 2));
}

#[test]
fn forked_children_have_the_grace_of_a_process_that_ended() {
    let mut book = FaultLog::default();
    book.set_policy(RecoveryPolicy::new(ContextAction::Process, 5, 600, 10));
    book.report_child(1, 0);
    book.end(1);
    for second in 1..10 {
        assert_eq!(book.record_held(|_| true, at(second).moment), []);
    }
    assert_eq!(book.record_held(|_| true, at(10).moment).len(), 1);
    assert_eq!(book.targets(10), [KillTarget::Root(ROOT)]);
}

#[test]
fn ended_images_that_await_release_are_bounded() {
    let mut book = FaultLog::default();
    book.set_policy(RecoveryPolicy::new(ContextAction::Process, 1_000, 60, 0));
    for generation in 1..=200 {
        book.report_child(generation, 0);
        book.end(generation);
    }
    assert_eq!(book.faults().len(), MAX_AWAITING_RELEASE);
    assert!(book.fences(200));
}

#[test]
fn ordered_restart_ends_the_unit_of_the_policy() {
    let mut book = log_with_policy(ContextAction::Report);
    book.report_child(1, 0);
    book.set_policy(RecoveryPolicy::new(ContextAction::Process, 2, 60, 10));
    assert!(book.require_generation(2, at(20)));
    assert_eq!(
        book.targets(20),
        [KillTarget::Process(image(1).process)],
        "its error was long ago"
    );
}

#[test]
fn earlier_agent_reads_an_ended_process_as_a_restart() {
    /// The action as an earlier agent reads it.
    #[derive(Debug, PartialEq, serde::Deserialize)]
    enum Earlier {
        RestartContainer { over_limit: bool },
    }
    let text = serde_json::to_string(&RecoveryAction::EndProcess).unwrap();
    let earlier: Earlier = serde_json::from_str(&text).unwrap();
    assert_eq!(earlier, Earlier::RestartContainer { over_limit: false });
    let text = r#"{"RestartContainer":{"over_limit":true}}"#;
    let read: RecoveryAction = serde_json::from_str(text).unwrap();
    assert_eq!(Some(read), OVER_LIMIT);
    let policy = r#"{"action":"Restart","max_restarts":5,"window":{"secs":600,"nanos":0}}"#;
    let read: RecoveryPolicy = serde_json::from_str(policy).unwrap();
    assert_eq!(read, RecoveryPolicy::with_action(ContextAction::Restart));
}

#[test]
fn container_is_restarted_when_the_image_cannot_reexec() {
    let mut book = log_with_policy(ContextAction::InPlace);
    assert_eq!(book.report(1, 0), Some(RecoveryAction::ReexecInPlace));
    assert_eq!(book.targets(100).len(), 0);
    let cause = FaultSource::Cuda {
        code: 719,
        can_reexec: false,
    };
    let root = Some(image(2).process);
    let (decision, _) = book.record(image(2), &gpu(), cause, root, at(1));
    assert_eq!(decision, RESTART_CONTAINER);
    assert_eq!(book.targets(100), [KillTarget::RootOf(image(2).process)]);
}

#[test]
fn window_counts_both_kinds_of_restart() {
    let mut book = log_with_policy(ContextAction::InPlace);
    assert_eq!(book.report(1, 0), Some(RecoveryAction::ReexecInPlace));
    book.end(1);
    assert_eq!(book.report(2, 30), Some(RecoveryAction::ReexecInPlace));
    book.end(2);
    assert_eq!(book.report(3, 59), OVER_LIMIT);
    book.end(3);
    assert_eq!(book.report(4, 60), Some(RecoveryAction::ReexecInPlace));
    book.end(4);
    assert_eq!(book.report(5, 89), OVER_LIMIT);
}

#[test]
fn image_is_fenced_from_its_first_fault() {
    let mut book = log_with_policy(ContextAction::Restart);
    assert!(!book.fences(1));
    book.xid(1, 0);
    assert!(book.fences(1));
    book.report(1, 1);
    assert!(book.fences(1) && !book.fences(2));
    book.end(1);
    assert!(!book.fences(2));
}

#[test]
fn fault_is_recorded_once_when_it_is_reported_twice() {
    let mut book = log_with_policy(ContextAction::InPlace);
    let root = Some(image(1).process);
    let (_, first) = book.record(image(1), &gpu(), FaultSource::Xid(31), root, at(0));
    assert_eq!(first.unwrap().decided, None);
    let (decision, second) = book.record(image(1), &gpu(), REPORT, root, at(1));
    assert_eq!(
        (decision, second),
        (Some(RecoveryAction::ReexecInPlace), None)
    );
    book.report(1, 2);
    book.xid(1, 2);
    let [fault] = book.faults() else { panic!() };
    assert_eq!((fault.xid, fault.cuda_error), (Some(31), Some(700)));
    assert_eq!(book.restarts.len(), 1);
}

#[test]
fn xid_alone_restarts_the_container_of_a_live_image() {
    let mut book = log_with_policy(ContextAction::InPlace);
    assert_eq!(book.xid(1, 0), None);
    assert!(!book.tick(Duration::ZERO, at(4)));
    assert!(book.tick(Duration::ZERO, at(5)));
    assert_eq!(book.faults()[0].decision(), RESTART_CONTAINER);
    let mut dying = log_with_policy(ContextAction::InPlace);
    dying.xid(1, 0);
    dying.end(1);
    assert!(!dying.tick(Duration::ZERO, at(100)));
    assert!(dying.faults().is_empty() && dying.restarts.is_empty());
}

#[test]
fn image_is_killed_when_it_does_not_reexec_in_time() {
    let mut book = log_with_policy(ContextAction::InPlace);
    book.report(1, 0);
    assert!(!book.tick(Duration::ZERO, at(4)));
    assert!(book.tick(Duration::ZERO, at(5)));
    assert_eq!(book.targets(100).len(), 1);
    assert_eq!(book.restarts.len(), 1);
    assert!(!book.tick(Duration::ZERO, at(50)));
}

#[test]
fn fault_closes_with_its_image_unless_it_awaits_eviction() {
    for (action, open) in [
        (ContextAction::InPlace, 0),
        (ContextAction::Restart, 0),
        (ContextAction::Report, 0),
        (ContextAction::Evict, 1),
    ] {
        let mut book = log_with_policy(action);
        book.report(1, 0);
        assert_eq!(book.faults().len(), 1);
        book.end(1);
        assert_eq!(book.faults().len(), open, "{action:?}");
        assert_eq!(book.targets(100).len(), 0);
    }
}

#[test]
fn newest_over_limit_fault_stays_open() {
    let mut book = log_with_policy(ContextAction::Restart);
    for generation in 1..=9 {
        book.report(generation, generation);
        book.end(generation);
    }
    let open: Vec<_> = book.faults().iter().map(|fault| &fault.image).collect();
    assert_eq!(open, [&image(9)]);
}

#[test]
fn decision_is_unchanged_when_the_policy_changes() {
    let mut book = log_with_policy(ContextAction::Report);
    book.report(1, 0);
    book.set_policy(RecoveryPolicy::new(ContextAction::Restart, 5, 600, 0));
    assert_eq!(
        book.report(1, 1),
        Some(RecoveryAction::NoAction {
            await_eviction: false
        })
    );
    assert_eq!(book.targets(100).len(), 0);
}

#[test]
fn container_is_restarted_when_its_eviction_times_out() {
    let mut book = log_with_policy(ContextAction::Evict);
    book.report(1, 0);
    assert!(
        !book.tick(Duration::ZERO, at(100)),
        "the API server can be reached"
    );
    assert!(!book.tick(EVICTION_TIMEOUT, at(29)));
    assert!(!book.tick(EVICTION_TIMEOUT / 2, at(100)));
    assert!(book.tick(EVICTION_TIMEOUT, at(100)));
    assert_eq!(book.targets(100), [KillTarget::RootOf(image(1).process)]);
    book.end(1);
    assert!(
        book.faults().is_empty(),
        "the operator has nothing left to do"
    );
    // A container over the limit is killed as well, and its fault stays open for the operator.
    for generation in 2..=3 {
        book.report(generation, 101);
        book.tick(EVICTION_TIMEOUT, at(131));
        book.end(generation);
    }
    let [fault] = book.faults() else { panic!() };
    assert_eq!((&fault.image, fault.decision()), (&image(3), OVER_LIMIT));
    let mut report_only = log_with_policy(ContextAction::Report);
    report_only.report(1, 0);
    assert!(!report_only.tick(EVICTION_TIMEOUT, at(100)));
}

#[test]
fn required_generation_restarts_each_fault_below_it_once() {
    for action in [ContextAction::Report, ContextAction::Evict] {
        let mut book = log_with_policy(action);
        book.report(1, 0);
        assert!(!book.require_generation(1, at(1)), "that number is reached");
        assert!(book.require_generation(2, at(1)));
        assert_eq!(book.faults()[0].decision(), RESTART_CONTAINER);
        assert!(!book.require_generation(2, at(2)));
        assert_eq!((book.restarts.len(), book.restarted), (1, 1));
        book.end(1);
        book.report(2, 3);
        assert!(
            !book.require_generation(2, at(4)),
            "the next fault is another one"
        );
        assert_eq!(book.targets(100).len(), 0);
    }
}

#[test]
fn required_generation_closes_a_fault_of_an_ended_image() {
    let mut book = log_with_policy(ContextAction::Evict);
    book.report(1, 0);
    book.end(1);
    assert!(book.require_generation(2, at(1)));
    assert!(book.faults().is_empty());
    assert_eq!(book.restarted, 0);
}

#[derive(Clone, Debug)]
enum Step {
    Report(u64, bool),
    Child(u64),
    Held(bool),
    Xid(u64),
    End(u64),
    Wait(u64),
    Reach(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1..5_u64, any::<bool>()).prop_map(|(image, able)| Step::Report(image, able)),
        (1..5_u64).prop_map(Step::Child),
        any::<bool>().prop_map(Step::Held),
        (1..5_u64).prop_map(Step::Xid),
        (1..5_u64).prop_map(Step::End),
        (0..40_u64).prop_map(Step::Wait),
        (1..6_u64).prop_map(Step::Reach),
    ]
}

proptest! {
    /// The limit holds for every window, and a log that went through its checkpoint is equal.
    #[test]
    fn restarts_in_a_window_never_exceed_the_maximum(steps in vec(step(), 0..60), action in 0..5_usize) {
        let action = ContextAction::ALL[action];
        let mut book = log_with_policy(action);
        let (mut now, mut restarts) = (0, Vec::new());
        for step in steps {
            let before = book.restarts.len();
            match step {
                Step::Child(generation) => drop(book.report_child(generation, now)),
                Step::Held(true) => drop(book.record_held(|_| true, at(now).moment)),
                Step::Held(false) => book.close_released(|_| false),
                Step::Report(generation, can_reexec) => {
                    let cause = FaultSource::Cuda { code: 700, can_reexec };
                    let root = Some(image(generation).process);
                    book.record(image(generation), &gpu(), cause, root, at(now));
                }
                Step::Xid(generation) => drop(book.xid(generation, now)),
                Step::End(generation) => book.end(generation),
                Step::Wait(seconds) => {
                    now += seconds;
                    book.tick(EVICTION_TIMEOUT, at(now));
                }
                Step::Reach(generation) => drop(book.require_generation(generation, at(now))),
            }
            let new = book.restarts.iter().filter(|RecordedMoment(then)| *then == at(now).moment).count();
            let known = restarts.iter().filter(|then| **then == now).count();
            restarts.extend(std::iter::repeat_n(now, new.saturating_sub(known)));
            let recent = restarts.iter().filter(|then| now - **then < 60).count();
            prop_assert!(recent <= 2, "{recent} restarts, {before} before");
            let ends = book.process_ends.iter();
            let recent = ends.filter(|RecordedMoment(then)| at(now).moment.since(*then).as_secs() < 60);
            prop_assert!(recent.count() <= 2);
            // A live image has a decision about its own unit, and an ended one of its root.
            for target in book.targets(now) {
                let ends_alone = matches!(target, KillTarget::Process(_) | KillTarget::Root(_));
                let ends_processes = matches!(action, ContextAction::Process | ContextAction::InPlace);
                prop_assert!(ends_processes || !ends_alone, "{action:?}: {target:?}");
            }
            let text = serde_json::to_string(&book).unwrap();
            book = serde_json::from_str(&text).unwrap();
        }
    }
}

#[test]
fn reexecuted_image_has_no_deadline_and_stays_fenced() {
    let mut book = log_with_policy(ContextAction::InPlace);
    assert_eq!(book.report(1, 0), Some(RecoveryAction::ReexecInPlace));
    book.record_disconnect(&image(1));
    book.tick(Duration::ZERO, at(3600));
    assert_eq!(book.targets(10_000), []);
    assert!(book.fences(1));
    book.end(1);
    assert!(book.faults().is_empty());
}

#[test]
fn disconnect_without_a_reexec_changes_nothing() {
    let mut book = log_with_policy(ContextAction::InPlace);
    book.record_disconnect(&image(1));
    book.xid(1, 0);
    book.record_disconnect(&image(1));
    book.tick(Duration::ZERO, at(10));
    assert_eq!(book.targets(100), [KillTarget::RootOf(image(1).process)]);
}

#[test]
fn checkpoint_with_wall_clock_times_is_read() {
    let mut book = log_with_policy(ContextAction::InPlace);
    book.report(1, 0);
    book.xid(2, 0);
    let mut record = serde_json::to_value(&book).unwrap();
    let wall = serde_json::json!("2026-11-23T12:00:00Z");
    record["restarts"][0] = wall.clone();
    record["faults"][0]["decided"][1] = wall;
    record["faults"][1].as_object_mut().unwrap().remove("since");
    let mut book: FaultLog = serde_json::from_value(record).unwrap();
    assert!(book.tick(Duration::ZERO, at(1)));
    // The first image did not re-exec in time, and the second sent no report.
    assert_eq!(book.targets(100).len(), 2);
}

#[test]
fn deadlines_hold_when_the_wall_clock_goes_back() {
    let earlier = |second: u64| ClockReading {
        wall: Timestamp::from_second(0).unwrap(),
        ..at(second)
    };
    let mut book = log_with_policy(ContextAction::InPlace);
    book.xid(1, 0);
    assert!(book.tick(Duration::ZERO, earlier(5)));
    assert_eq!(book.faults()[0].decision(), RESTART_CONTAINER);
    book.end(1);
    book.report(2, 1);
    assert!(book.tick(Duration::ZERO, earlier(6)), "it did not execute");
    book.end(2);
    assert_eq!(book.report(3, 7), OVER_LIMIT);
    book.end(3);
    let (decision, _) = book.record(image(4), &gpu(), REPORT, None, earlier(66));
    assert_eq!(
        decision,
        Some(RecoveryAction::ReexecInPlace),
        "the window is over"
    );
}
