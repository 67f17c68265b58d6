//! Fuzzes credit pages that a tenant process overwrites.

use std::panic::AssertUnwindSafe;

use bolero::TypeGenerator;
use bursar_protocol::credit_page::{CreditPage, MAX_SLOTS, PAGE_BYTES};
use bursar_protocol::units::Units;

/// A step on a page with one account.
#[derive(Clone, Debug, TypeGenerator)]
enum Step {
    /// The process writes eight bytes.
    Write(u16, u64),
    Grant(u32),
    TakeBack(u32),
    SetOthers(u32, u32),
    Charge(u32),
    Discharge(u32),
    Export(u32),
    Unexport(u32),
    Freeze,
}

/// No step panics or loops without end, and no value exceeds what a word counts. Reclaimed credit
/// was idle, and at most the requested amount. Another process opens the page or gets an error.
#[test]
fn pages_with_any_content_stay_bounded() {
    let (page, descriptor) = CreditPage::create(1).unwrap();
    let shared = AssertUnwindSafe((page, descriptor));
    bolero::check!().with_type().for_each(|steps: &Vec<Step>| {
        let (page, descriptor) = &*shared;
        for step in steps {
            if let Step::Write(place, word) = step {
                let place = u64::from(*place) % (PAGE_BYTES as u64 - 7);
                rustix::io::pwrite(descriptor, &word.to_ne_bytes(), place).unwrap();
            }
            for index in 0..=MAX_SLOTS {
                let Some(slot) = page.slot(index) else {
                    continue;
                };
                for units in [slot.quota(), slot.others(), slot.context(), slot.exported()] {
                    assert!(units <= Units::MAX);
                }
                let before = slot.word();
                match *step {
                    Step::Write(..) => {}
                    Step::Grant(units) => {
                        let is_granted = slot.grant(Units(units));
                        let more = if is_granted { units } else { 0 };
                        assert_eq!(slot.word().granted, before.granted + more);
                    }
                    Step::TakeBack(units) => {
                        let taken = slot.reclaim(Units(units));
                        assert!(taken.0 <= units.min(before.idle()));
                        assert_eq!(slot.word().granted, before.granted - taken.0);
                    }
                    Step::SetOthers(units, many) => slot.set_others(Units(units), many),
                    Step::Charge(units) => {
                        let is_charged = slot.charge(Units(units)).is_ok();
                        assert!(!is_charged || slot.word().used <= before.granted);
                    }
                    Step::Discharge(units) => {
                        slot.discharge(Units(units));
                        assert!(slot.word().used <= before.used);
                    }
                    Step::Export(units) => slot.export(Units(units)),
                    Step::Unexport(units) => slot.unexport(Units(units)),
                    Step::Freeze => {
                        assert_eq!(slot.freeze(), before);
                        assert!(slot.word().is_frozen());
                    }
                }
            }
        }
        // Another process may open a page that this one has written to.
        let _ = CreditPage::open(descriptor);
    });
}
