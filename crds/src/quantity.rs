//! Reads and writes Kubernetes quantities as bytes.
//!
//! Source: `k8s.io/apimachinery/pkg/api/resource/quantity.go`. A quantity is a signed decimal
//! number. It may have a binary suffix (`Ki` to `Ei`), a decimal one (`k` to `E`, and `m`, `u`,
//! `n`), or an exponent (`1e9`). Amounts of memory are whole and not negative, so anything else is
//! an error here, never rounded.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The reason why a text is no amount of memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// The text does not follow the grammar.
    #[error("`{0}` is not a quantity: write a number with a unit such as 512Mi, 16Gi or 1.5Ti")]
    Syntax(String),
    /// The amount is negative.
    #[error("`{0}` is negative: an amount of memory is zero or more")]
    Negative(String),
    /// The amount is no whole number of bytes.
    #[error("`{0}` is not a whole number of bytes")]
    Fraction(String),
    /// The amount does not fit 63 bits, the range of Kubernetes' own arithmetic.
    #[error("`{0}` is more than 8Ei - 1")]
    TooLarge(String),
}

/// The suffixes that a quantity may have, with their factor as 2^x or 10^x.
const BINARY: &[(&str, u32)] = &[
    ("Ki", 10),
    ("Mi", 20),
    ("Gi", 30),
    ("Ti", 40),
    ("Pi", 50),
    ("Ei", 60),
];
const DECIMAL: &[(&str, i32)] = &[
    ("n", -9),
    ("u", -6),
    ("m", -3),
    ("", 0),
    ("k", 3),
    ("M", 6),
    ("G", 9),
    ("T", 12),
    ("P", 15),
    ("E", 18),
];

/// The bytes that `text` stands for.
pub fn parse_bytes(text: &str) -> Result<u64, QuantityError> {
    parse(text, 0)
}

/// The number of a resource that `text` stands for; zero for a text that is none. The API server
/// admits whole numbers of any size, so the number may be a maximum.
pub fn parse_count(text: &str) -> u64 {
    match parse_bytes(text) {
        Ok(count) => count,
        Err(QuantityError::TooLarge(_)) => i64::MAX.unsigned_abs(),
        Err(_) => 0,
    }
}

/// The thousandths that `text` stands for, in which processors are counted.
pub fn parse_thousandths(text: &str) -> Result<u64, QuantityError> {
    parse(text, 3)
}

/// `text` times 10^`more`.
fn parse(text: &str, more: i32) -> Result<u64, QuantityError> {
    let syntax = || QuantityError::Syntax(text.to_owned());
    let (negative, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let split = unsigned
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(split);
    let (digits, places) = decimal(number).ok_or_else(syntax)?;
    let mantissa = digits
        .parse::<u128>()
        .map_err(|_| QuantityError::TooLarge(text.to_owned()))?;
    let bytes = match BINARY.iter().find(|(name, _)| *name == suffix) {
        Some((_, power)) => mantissa
            .checked_mul(1 << power)
            .map(|scaled| (scaled, more - places)),
        None => Some((
            mantissa,
            exponent(suffix).ok_or_else(syntax)? + more - places,
        )),
    };
    let (scaled, power) = bytes.ok_or_else(|| QuantityError::TooLarge(text.to_owned()))?;
    let value = shift(scaled, power).map_err(|fault| match fault {
        Fault::Overflow => QuantityError::TooLarge(text.to_owned()),
        Fault::Fraction => QuantityError::Fraction(text.to_owned()),
    })?;
    match (negative, value) {
        (true, 1..) => Err(QuantityError::Negative(text.to_owned())),
        (_, value) => u64::try_from(value)
            .ok()
            .filter(|bytes| i64::try_from(*bytes).is_ok())
            .ok_or_else(|| QuantityError::TooLarge(text.to_owned())),
    }
}

/// The shortest quantity with a binary suffix that stands for exactly `bytes`.
pub fn format_bytes(bytes: u64) -> Quantity {
    let unit = BINARY
        .iter()
        .rev()
        .find(|(_, power)| bytes != 0 && bytes.is_multiple_of(1 << power));
    Quantity(match unit {
        Some((suffix, power)) => format!("{}{suffix}", bytes >> power),
        None => bytes.to_string(),
    })
}

/// `12.50` as its digits without the point and how many of them stood behind it (`1250`, 2).
fn decimal(number: &str) -> Option<(String, i32)> {
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{whole}{part}");
    let sound = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    sound.then(|| {
        i32::try_from(part.len())
            .ok()
            .map(|places| (digits, places))
    })?
}

/// The power of ten that a decimal suffix or an exponent (`e9`, `E-3`) stands for.
fn exponent(suffix: &str) -> Option<i32> {
    if let Some((_, power)) = DECIMAL.iter().find(|(name, _)| *name == suffix) {
        return Some(*power);
    }
    let digits = suffix.strip_prefix(['e', 'E'])?;
    digits
        .parse::<i32>()
        .ok()
        .filter(|power| (-1_000..=1_000).contains(power))
}

enum Fault {
    Overflow,
    Fraction,
}

/// `value` times 10^`power`, exactly.
fn shift(value: u128, power: i32) -> Result<u128, Fault> {
    if value == 0 {
        return Ok(0);
    }
    let factor = 10u128.checked_pow(power.unsigned_abs());
    match (power >= 0, factor) {
        (true, factor) => factor
            .and_then(|factor| value.checked_mul(factor))
            .ok_or(Fault::Overflow),
        (false, Some(factor)) if value.is_multiple_of(factor) => Ok(value / factor),
        (false, _) => Err(Fault::Fraction),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_of_any_size_is_a_number() {
        for text in ["9223372036854775807", "999999999999999999999", "9Ei"] {
            assert_eq!(parse_count(text), i64::MAX.unsigned_abs(), "{text}");
        }
        assert_eq!(parse_count("1k"), 1000);
        assert_eq!(
            parse_count("-1") + parse_count("some") + parse_count("0.5"),
            0
        );
    }

    #[test]
    fn binary_and_decimal_suffixes_and_exponents_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("-0", 0),
            ("1Ki", 1 << 10),
            ("512Mi", 512 << 20),
            ("16Gi", 16 << 30),
            ("1.5Gi", 3 << 29),
            (".5Ki", 512),
            ("1.", 1),
            ("7Ei", 7 << 60),
            ("2k", 2_000),
            ("1.5G", 1_500_000_000),
            ("3E", 3_000_000_000_000_000_000),
            ("1e9", 1_000_000_000),
            ("12E2", 1_200),
            ("4000m", 4),
            ("+1Mi", 1 << 20),
            ("9223372036854775807", i64::MAX as u64),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn processors_are_read_in_thousandths() {
        for (text, thousandths) in [
            ("2", 2_000),
            ("250m", 250),
            ("1.5", 1_500),
            ("1Ki", 1_024_000),
        ] {
            assert_eq!(parse_thousandths(text), Ok(thousandths), "{text}");
        }
        let finer = parse_thousandths("100u");
        assert!(matches!(finer, Err(QuantityError::Fraction(_))));
    }

    #[test]
    fn invalid_quantity_is_a_syntax_error() {
        for text in [
            "", ".", "Gi", "1Gb", "1GiB", "1 Gi", "1,5Gi", "0x10", "1.2.3", "--1", "1Ki2", "1e",
            "e9", "16gi", "١Gi",
        ] {
            assert_eq!(
                parse_bytes(text),
                Err(QuantityError::Syntax(text.to_owned())),
                "{text}"
            );
        }
    }

    #[test]
    fn negative_broken_and_huge_amounts_are_named_as_such() {
        assert!(matches!(
            parse_bytes("-1Gi"),
            Err(QuantityError::Negative(_))
        ));
        assert!(matches!(
            parse_bytes("100m"),
            Err(QuantityError::Fraction(_))
        ));
        assert!(matches!(
            parse_bytes("0.3Ki"),
            Err(QuantityError::Fraction(_))
        ));
        assert!(matches!(
            parse_bytes("8Ei"),
            Err(QuantityError::TooLarge(_))
        ));
        assert!(matches!(
            parse_bytes("1e400"),
            Err(QuantityError::TooLarge(_))
        ));
        assert!(matches!(
            parse_bytes(&"9".repeat(60)),
            Err(QuantityError::TooLarge(_))
        ));
    }

    #[test]
    fn quantity_is_short_and_parses_to_the_same_value() {
        for bytes in [
            0,
            1,
            1023,
            1 << 10,
            3 << 29,
            16 << 30,
            (1 << 40) + 1,
            7 << 60,
        ] {
            assert_eq!(parse_bytes(&format_bytes(bytes).0), Ok(bytes));
        }
        assert_eq!(format_bytes(16 << 30).0, "16Gi");
        assert_eq!(format_bytes(3 << 29).0, "1536Mi");
    }
}
