//! Reads and writes the version of a record.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

/// The version of records: 1. Another number is an error of the parser.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Version;

impl Version {
    /// The number in a record that this agent writes.
    pub(super) const NUMBER: u32 = 1;

    /// Parses the text of a number.
    pub(super) fn parse(text: &str) -> Result<Version, String> {
        match text.parse() {
            Ok(Version::NUMBER) => Ok(Version),
            _ => Err(wrong(&format_args!("{text:.16}"))),
        }
    }
}

fn wrong(version: &impl Display) -> String {
    let reads = Version::NUMBER;
    format!("it is of version {version}, and this agent reads version {reads}")
}

impl From<Version> for u32 {
    fn from(Version: Version) -> u32 {
        Version::NUMBER
    }
}

impl TryFrom<u32> for Version {
    type Error = String;

    fn try_from(version: u32) -> Result<Version, String> {
        match version {
            Version::NUMBER => Ok(Version),
            other => Err(wrong(&other)),
        }
    }
}

/// A record with its version, for a record that is no [`Checkpoint`](super::Checkpoint).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Versioned<T> {
    /// The version. Records without one are of version 1.
    #[serde(default)]
    version: Version,
    /// The record, whose fields stand beside the version.
    #[serde(flatten)]
    pub record: T,
}

impl<T> From<T> for Versioned<T> {
    fn from(record: T) -> Versioned<T> {
        Versioned {
            version: Version,
            record,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Record {
        a: u32,
    }

    #[test]
    fn record_of_a_later_version_is_an_error() {
        let parse = |text| serde_json::from_str::<Versioned<Record>>(text);
        let known = serde_json::to_string(&Versioned::from(Record { a: 7 })).unwrap();
        assert_eq!(known, r#"{"version":1,"a":7}"#);
        for text in [&*known, r#"{"a":7}"#, r#"{"version":1,"a":7,"b":8}"#] {
            assert_eq!(parse(text).unwrap().record, Record { a: 7 });
        }
        let error = parse(r#"{"version":2,"a":7}"#).unwrap_err().to_string();
        assert!(error.contains("it is of version 2"), "{error}");
    }
}
