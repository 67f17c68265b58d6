//! Converts numbers and times to those of the API: signed integers and whole seconds.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// Converts a count or an amount; [`i32::MAX`] if it is too large.
pub fn to_i32(number: impl TryInto<i32>) -> i32 {
    number.try_into().unwrap_or(i32::MAX)
}

/// Converts a count; [`i64::MAX`] if it is too large.
pub fn to_i64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Truncates `at` to whole seconds, so that the status read back equals the written one.
pub fn truncate_to_seconds(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}
