//! Writes amounts of memory and durations for tables.

use k8s_openapi::jiff::Timestamp;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// An amount with its unit: `0`, `518 MiB`, `38.1 GiB`, `40 GiB`.
pub fn memory(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        1..MIB => "1 MiB".to_owned(),
        MIB..GIB => format!("{} MiB", bytes / MIB),
        _ => format!("{} GiB", gib(bytes)),
    }
}

/// A part of an amount with one unit: `64/79 GiB`.
pub fn part(bytes: u64, all: u64, word: &str) -> String {
    if bytes.is_multiple_of(GIB) && all.is_multiple_of(GIB) || all >= GIB {
        format!("{}{word}{} GiB", gib(bytes), gib(all))
    } else {
        format!("{}{word}{} MiB", bytes / MIB, all / MIB)
    }
}

/// Gibibytes with at most one decimal.
fn gib(bytes: u64) -> String {
    // A tenth of a GiB is no whole number of bytes, so the sum is rounded in wider integers.
    let tenths = (u128::from(bytes) * 10 + u128::from(GIB / 2)) / u128::from(GIB);
    match tenths % 10 {
        0 => (tenths / 10).to_string(),
        tenth => format!("{}.{tenth}", tenths / 10),
    }
}

/// The time between two points in its largest unit: `42s`, `12m`, `3h`, `9d`.
pub fn since(then: Timestamp, now: Timestamp) -> String {
    seconds(now.as_second().saturating_sub(then.as_second()).max(0))
}

/// A duration in its largest unit, as `kubectl get` writes ages.
pub fn seconds(seconds: i64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        7_200..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// A count with its noun: `1 pod`, `3 pods`.
pub fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Parses a duration such as `90s`, `15m`, `1h`, `2d`.
///
/// # Errors
/// When the text is no number with one of these units.
pub fn parse_duration(text: &str) -> Result<i64, String> {
    let wrong = || format!("`{text}` is no duration: write 90s, 15m, 1h or 2d");
    let (number, unit) = text
        .split_at_checked(text.len().saturating_sub(1))
        .ok_or_else(wrong)?;
    let factor = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return Err(wrong()),
    };
    let number: i64 = number.parse().map_err(|_| wrong())?;
    number
        .checked_mul(factor)
        .filter(|seconds| *seconds >= 0)
        .ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_its_unit_and_one_decimal_at_most() {
        let of = |gib: f64| memory((gib * GIB as f64) as u64);
        assert_eq!(
            [of(0.0), of(40.0), of(38.1), of(0.506)],
            ["0", "40 GiB", "38.1 GiB", "518 MiB"]
        );
        assert_eq!(memory(1), "1 MiB");
        assert_eq!(part(64 * GIB, 79 * GIB, "/"), "64/79 GiB");
        assert_eq!(part(0, 0, "/"), "0/0 GiB");
        assert_eq!(part(256 * MIB, 512 * MIB, " of "), "256 of 512 MiB");
    }

    #[test]
    fn durations_are_read_and_written_in_one_unit() {
        assert_eq!(
            [seconds(42), seconds(720), seconds(7_200), seconds(172_800)],
            ["42s", "12m", "2h", "2d"]
        );
        assert_eq!(parse_duration("15m"), Ok(900));
        for bad in ["", "m", "5", "-1s", "5w", "é", "99999999999999999d"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }
}
