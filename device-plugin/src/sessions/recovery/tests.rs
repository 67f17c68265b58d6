use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn at(second: u64) -> Present {
    Present {
        moment: Moment(1_000_000 + 1_000 * second),
        // Each test passes whatever the wall clock says: here it goes back.
        wall: Timestamp::from_second(1_800_000_000 - 3_600 * i64::try_from(second).unwrap())
            .unwrap(),
    }
}

fn image(generation: u64) -> Image {
    let process = Process { pid: 7, start: 70 };
    Image {
        process,
        generation,
    }
}

fn gpu() -> GpuUuid {
    "GPU-a".parse().unwrap()
}

fn under(action: ContextAction) -> Poisonings {
    let mut book = Poisonings::default();
    book.set_policy(Policy::new(action, 2, 60));
    book
}

const REPORT: Cause = Cause::Cuda {
    code: 700,
    able: true,
};

impl Poisonings {
    fn report(&mut self, generation: u64, second: u64) -> Option<Decision> {
        self.strike(image(generation), &gpu(), REPORT, at(second)).0
    }

    fn xid(&mut self, generation: u64, second: u64) -> Option<Decision> {
        let cause = Cause::Xid(31);
        self.strike(image(generation), &gpu(), cause, at(second)).0
    }

    fn end(&mut self, generation: u64) {
        let Image {
            process,
            generation,
        } = image(generation);
        self.ended(process, generation);
    }

    fn fences(&self, generation: u64) -> bool {
        self.of(image(generation).process, generation).is_some()
    }
}

const RESTART: Option<Decision> = Some(Decision::Kill { beyond: false });
const TOO_MANY: Option<Decision> = Some(Decision::Kill { beyond: true });

#[test]
fn without_an_order_the_container_is_restarted_at_most_five_times_in_ten_minutes() {
    let mut book = Poisonings::default();
    let decisions: Vec<_> = (1..=6).map(|image| book.report(image, image)).collect();
    assert_eq!(decisions[..5], [RESTART; 5]);
    assert_eq!(decisions[5], TOO_MANY);
}

#[test]
fn in_place_is_for_who_can_and_others_are_restarted() {
    let mut book = under(ContextAction::InPlace);
    assert_eq!(book.report(1, 0), Some(Decision::Execute));
    assert_eq!(book.condemned().count(), 0);
    let cause = Cause::Cuda {
        code: 719,
        able: false,
    };
    let (decision, _) = book.strike(image(2), &gpu(), cause, at(1));
    assert_eq!(decision, RESTART);
    assert_eq!(book.condemned().collect::<Vec<_>>(), [&image(2)]);
}

#[test]
fn both_kinds_of_restart_count_and_the_window_moves_on() {
    let mut book = under(ContextAction::InPlace);
    assert_eq!(book.report(1, 0), Some(Decision::Execute));
    book.end(1);
    assert_eq!(book.report(2, 30), Some(Decision::Execute));
    book.end(2);
    assert_eq!(book.report(3, 59), TOO_MANY);
    book.end(3);
    assert_eq!(book.report(4, 60), Some(Decision::Execute));
    book.end(4);
    assert_eq!(book.report(5, 89), TOO_MANY);
}

#[test]
fn an_image_is_fenced_from_its_first_fault_and_its_successor_is_not() {
    let mut book = under(ContextAction::Restart);
    assert!(!book.fences(1));
    book.xid(1, 0);
    assert!(book.fences(1));
    book.report(1, 1);
    assert!(book.fences(1) && !book.fences(2));
    book.end(1);
    assert!(!book.fences(2));
}

#[test]
fn a_second_telling_of_a_fault_is_no_second_fault() {
    let mut book = under(ContextAction::InPlace);
    let (_, first) = book.strike(image(1), &gpu(), Cause::Xid(31), at(0));
    assert_eq!(first.unwrap().decided, None);
    let (decision, second) = book.strike(image(1), &gpu(), REPORT, at(1));
    assert_eq!((decision, second), (Some(Decision::Execute), None));
    book.report(1, 2);
    book.xid(1, 2);
    let [fault] = book.faults() else { panic!() };
    assert_eq!((fault.xid, fault.cuda_error), (Some(31), Some(700)));
    assert_eq!(book.restarts.len(), 1);
}

#[test]
fn an_xid_alone_restarts_the_container_only_of_an_image_that_lives_on() {
    let mut book = under(ContextAction::InPlace);
    assert_eq!(book.xid(1, 0), None);
    assert!(!book.overdue(Duration::ZERO, at(4)));
    assert!(book.overdue(Duration::ZERO, at(5)));
    assert_eq!(book.faults()[0].decision(), RESTART);
    let mut dying = under(ContextAction::InPlace);
    dying.xid(1, 0);
    dying.end(1);
    assert!(!dying.overdue(Duration::ZERO, at(100)));
    assert!(dying.faults().is_empty() && dying.restarts.is_empty());
}

#[test]
fn who_does_not_execute_itself_in_time_is_killed_and_that_counts_once() {
    let mut book = under(ContextAction::InPlace);
    book.report(1, 0);
    assert!(!book.overdue(Duration::ZERO, at(4)));
    assert!(book.overdue(Duration::ZERO, at(5)));
    assert_eq!(book.condemned().count(), 1);
    assert_eq!(book.restarts.len(), 1);
    assert!(!book.overdue(Duration::ZERO, at(50)));
}

#[test]
fn a_fault_closes_with_its_image_unless_somebody_else_has_to_deal_with_it() {
    for (action, open) in [
        (ContextAction::InPlace, 0),
        (ContextAction::Restart, 0),
        (ContextAction::Report, 0),
        (ContextAction::Evict, 1),
    ] {
        let mut book = under(action);
        book.report(1, 0);
        assert_eq!(book.faults().len(), 1);
        book.end(1);
        assert_eq!(book.faults().len(), open, "{action:?}");
        assert_eq!(book.condemned().count(), 0);
    }
}

#[test]
fn of_restarts_that_were_too_many_the_last_stays_open() {
    let mut book = under(ContextAction::Restart);
    for generation in 1..=9 {
        book.report(generation, generation);
        book.end(generation);
    }
    let open: Vec<_> = book.faults().iter().map(|fault| &fault.image).collect();
    assert_eq!(open, [&image(9)]);
}

#[test]
fn what_is_decided_stands_whatever_the_policy_becomes() {
    let mut book = under(ContextAction::Report);
    book.report(1, 0);
    book.set_policy(Policy::new(ContextAction::Restart, 5, 600));
    assert_eq!(book.report(1, 1), Some(Decision::Leave { open: false }));
    assert_eq!(book.condemned().count(), 0);
}

#[test]
fn who_waits_for_an_eviction_is_restarted_once_nobody_has_been_reached_for_long() {
    let mut book = under(ContextAction::Evict);
    book.report(1, 0);
    assert!(!book.overdue(Duration::ZERO, at(100)), "somebody will come");
    assert!(!book.overdue(ALONE, at(29)));
    assert!(!book.overdue(ALONE / 2, at(100)));
    assert!(book.overdue(ALONE, at(100)));
    assert_eq!(book.condemned().collect::<Vec<_>>(), [&image(1)]);
    book.end(1);
    assert!(
        book.faults().is_empty(),
        "who comes later finds nothing to do"
    );
    // Beyond the maximum it is killed all the same, and stays open for who comes.
    for generation in 2..=3 {
        book.report(generation, 101);
        book.overdue(ALONE, at(131));
        book.end(generation);
    }
    let [fault] = book.faults() else { panic!() };
    assert_eq!((&fault.image, fault.decision()), (&image(3), TOO_MANY));
    let mut only_told = under(ContextAction::Report);
    only_told.report(1, 0);
    assert!(!only_told.overdue(ALONE, at(100)));
}

#[test]
fn an_ordered_restart_ends_what_was_left_below_its_number_and_a_second_one_changes_nothing() {
    for action in [ContextAction::Report, ContextAction::Evict] {
        let mut book = under(action);
        book.report(1, 0);
        assert!(!book.reach(1, at(1)), "that number is reached");
        assert!(book.reach(2, at(1)));
        assert_eq!(book.faults()[0].decision(), RESTART);
        assert!(!book.reach(2, at(2)));
        assert_eq!((book.restarts.len(), book.restarted), (1, 1));
        book.end(1);
        book.report(2, 3);
        assert!(!book.reach(2, at(4)), "the next fault is another one");
        assert_eq!(book.condemned().count(), 0);
    }
}

#[test]
fn an_ordered_restart_closes_a_fault_whose_image_has_ended() {
    let mut book = under(ContextAction::Evict);
    book.report(1, 0);
    book.end(1);
    assert!(book.reach(2, at(1)));
    assert!(book.faults().is_empty());
    assert_eq!(book.restarted, 0);
}

#[derive(Clone, Debug)]
enum Step {
    Report(u64, bool),
    Xid(u64),
    End(u64),
    Wait(u64),
    Reach(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1..5_u64, any::<bool>()).prop_map(|(image, able)| Step::Report(image, able)),
        (1..5_u64).prop_map(Step::Xid),
        (1..5_u64).prop_map(Step::End),
        (0..40_u64).prop_map(Step::Wait),
        (1..6_u64).prop_map(Step::Reach),
    ]
}

proptest! {
    /// And a book that went through its record is the same book.
    #[test]
    fn no_window_has_more_restarts_than_the_maximum(steps in vec(step(), 0..60), action in 0..4_usize) {
        let actions = [
            ContextAction::InPlace, ContextAction::Restart, ContextAction::Evict, ContextAction::Report,
        ];
        let action = actions[action];
        let mut book = under(action);
        let (mut now, mut restarts) = (0, Vec::new());
        for step in steps {
            let before = book.restarts.len();
            match step {
                Step::Report(generation, able) => {
                    let cause = Cause::Cuda { code: 700, able };
                    book.strike(image(generation), &gpu(), cause, at(now));
                }
                Step::Xid(generation) => drop(book.xid(generation, now)),
                Step::End(generation) => book.end(generation),
                Step::Wait(seconds) => {
                    now += seconds;
                    book.overdue(ALONE, at(now));
                }
                Step::Reach(generation) => drop(book.reach(generation, at(now))),
            }
            let new = book.restarts.iter().filter(|Since(then)| *then == at(now).moment).count();
            let known = restarts.iter().filter(|then| **then == now).count();
            restarts.extend(std::iter::repeat_n(now, new.saturating_sub(known)));
            let recent = restarts.iter().filter(|then| now - **then < 60).count();
            prop_assert!(recent <= 2, "{recent} restarts, {before} before");
            let text = serde_json::to_string(&book).unwrap();
            book = serde_json::from_str(&text).unwrap();
        }
    }
}

#[test]
fn an_image_that_executed_its_program_again_may_take_its_time_and_stays_fenced() {
    let mut book = under(ContextAction::InPlace);
    assert_eq!(book.report(1, 0), Some(Decision::Execute));
    book.hung_up(image(1).process, 1);
    book.overdue(Duration::ZERO, at(3600));
    assert_eq!(book.condemned().next(), None);
    assert!(book.fences(1));
    book.end(1);
    assert!(book.faults().is_empty());
}

#[test]
fn who_hangs_up_without_an_order_to_execute_gains_nothing() {
    let mut book = under(ContextAction::InPlace);
    book.hung_up(image(1).process, 1);
    book.xid(1, 0);
    book.hung_up(image(1).process, 1);
    book.overdue(Duration::ZERO, at(10));
    assert_eq!(book.condemned().next(), Some(&image(1)));
}

#[test]
fn record_of_an_older_agent_is_read_and_its_times_are_long_ago() {
    let mut book = under(ContextAction::InPlace);
    book.report(1, 0);
    book.xid(2, 0);
    let mut record = serde_json::to_value(&book).unwrap();
    let wall = serde_json::json!("2026-11-23T12:00:00Z");
    record["restarts"][0] = wall.clone();
    record["faults"][0]["decided"][1] = wall;
    record["faults"][1].as_object_mut().unwrap().remove("since");
    let mut book: Poisonings = serde_json::from_value(record).unwrap();
    assert!(book.overdue(Duration::ZERO, at(1)));
    // The first did not execute its program in time, of the second there was no report.
    assert_eq!(book.condemned().count(), 2);
}

#[test]
fn deadlines_hold_when_the_wall_clock_goes_back() {
    let earlier = |second: u64| Present {
        wall: Timestamp::from_second(0).unwrap(),
        ..at(second)
    };
    let mut book = under(ContextAction::InPlace);
    book.xid(1, 0);
    assert!(book.overdue(Duration::ZERO, earlier(5)));
    assert_eq!(book.faults()[0].decision(), RESTART);
    book.end(1);
    book.report(2, 1);
    assert!(
        book.overdue(Duration::ZERO, earlier(6)),
        "it did not execute"
    );
    book.end(2);
    assert_eq!(book.report(3, 7), TOO_MANY);
    book.end(3);
    let (decision, _) = book.strike(image(4), &gpu(), REPORT, earlier(66));
    assert_eq!(decision, Some(Decision::Execute), "the window is over");
}
