//! Where a GPU is on the PCI bus: the name that the kernel's log has for it.

use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Domain, bus and device. Functions are not told apart: a GPU's others are its sound and its USB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
}

/// It is not written as one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no PCI address: {0:?}")]
pub struct InvalidPciAddress(String);

impl FromStr for PciAddress {
    type Err = InvalidPciAddress;

    /// As NVML writes it (`00000000:3B:00.0`), the driver's lines (`PCI:0000:3b:00`), or `lspci -D`.
    fn from_str(text: &str) -> Result<Self, InvalidPciAddress> {
        let parsed = || {
            let mut parts = text.strip_prefix("PCI:").unwrap_or(text).split(':');
            let (domain, bus, rest) = (parts.next()?, parts.next()?, parts.next()?);
            let (device, function) = rest.split_once('.').unwrap_or((rest, "0"));
            parse_hex(function, 1..=1)?;
            let address = Self {
                domain: parse_hex(domain, 4..=8)?,
                bus: parse_hex(bus, 2..=2)?.try_into().ok()?,
                device: parse_hex(device, 2..=2)?.try_into().ok()?,
            };
            parts.next().is_none().then_some(address)
        };
        parsed().ok_or_else(|| InvalidPciAddress(text.to_owned()))
    }
}

/// A number of so many hexadecimal digits, which has no sign.
fn parse_hex(text: &str, digits: RangeInclusive<usize>) -> Option<u32> {
    let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_hex && digits.contains(&text.len())).then_some(())?;
    u32::from_str_radix(text, 16).ok()
}

impl std::fmt::Display for PciAddress {
    /// As NVML writes it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            domain,
            bus,
            device,
        } = self;
        write!(f, "{domain:08X}:{bus:02X}:{device:02X}.0")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_parsed_as_nvml_and_kernel_log_write_it() {
        let nvml: PciAddress = "00000001:3B:0A.0".parse().unwrap();
        assert_eq!("PCI:0001:3b:0a".parse(), Ok(nvml));
        assert_eq!(nvml.to_string(), "00000001:3B:0A.0");
        assert_ne!("PCI:0000:3b:0a".parse(), Ok(nvml));
        for odd in [
            "",
            "PCI:",
            "3b:00",
            "0000:3b",
            "0000:3b:00:1",
            "x:y:z",
            "PCI:PCI:0000:3b:00",
            "0000:+b:00",
            "0:3b:00",
            "0000:3b:00.",
            "0000:3b:00.x",
            "0000:3b:00 ",
        ] {
            assert!(odd.parse::<PciAddress>().is_err(), "{odd}");
        }
    }
}
