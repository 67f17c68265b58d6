//! Names the checks of the area `security/`: a row for each promise, with the tests that show it.

use super::named::Tests;

/// One check of the area.
#[derive(Clone, Copy, Debug)]
pub(super) struct Promise {
    /// `security/` and the check's own word.
    pub(super) name: &'static str,
    /// What its tests show.
    pub(super) shows: &'static str,
    /// The tests.
    pub(super) tests: &'static [Tests],
    /// Whether the tests are those marked `#[ignore]`, which take minutes.
    pub(super) long: bool,
}

/// Every check of the area.
pub(super) const PROMISES: &[Promise] = &[];
