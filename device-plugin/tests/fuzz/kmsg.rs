//! Fuzzes records of the kernel log.

use bursar_enforcement::faults::kmsg::{XidLine, parse};

use crate::search_text;

/// Only a record of the kernel that begins with the driver's words names a process. Text after the
/// pid does not matter.
#[test]
fn kernel_log_record_is_classified_by_its_start() {
    search_text("kmsg", |text| {
        let Some((named, micros)) = parse(text) else {
            return;
        };
        let (header, message) = text.split_once(';').unwrap();
        let fields: Vec<&str> = header.split(',').collect();
        assert!(fields[0].parse::<u64>().unwrap() < 8, "a program's: {text}");
        assert_eq!(fields[2].parse(), Ok(micros), "{text}");
        let (address, rest) = message
            .strip_prefix("NVRM: Xid (PCI:")
            .and_then(|rest| rest.split_once("): "))
            .unwrap_or_else(|| panic!("not the driver's: {text}"));
        let is_of_address = |letter: char| letter.is_ascii_hexdigit() || ":.".contains(letter);
        assert!(address.chars().all(is_of_address), "{text}");
        let (code, rest) = rest.split_once(", pid=").unwrap();
        assert_eq!(code.parse(), Ok(named.xid), "{text}");
        let digits = rest.find(|letter: char| !letter.is_ascii_digit());
        let pid = &rest[..digits.unwrap_or(rest.len())];
        assert_eq!(pid.parse(), Ok(named.pid), "{text}");
        let XidLine { gpu, xid, pid } = named;
        let alone = format!("{header};NVRM: Xid (PCI:{gpu}): {xid}, pid={pid}, name=x");
        assert_eq!(parse(&alone), Some((named, micros)));
        for before in ["x", " ", "6,1,1,-;", "NVRM: Xid (PCI:[6895]: segfault in "] {
            assert_eq!(
                parse(&format!("{header};{before}{message}")),
                None,
                "{before}{message}"
            );
        }
    });
}
