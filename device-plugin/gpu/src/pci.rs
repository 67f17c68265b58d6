//! Parses a GPU's address on the PCI bus, by which the kernel's log names the GPU.

use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Domain, bus and device. The function is left out: a GPU's other functions are audio and USB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
}

/// The text is no PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("failed to parse {0:?}: not a PCI address")]
pub struct InvalidPciAddress(String);

impl FromStr for PciAddress {
    type Err = InvalidPciAddress;

    /// Accepts NVML's form (`00000000:3B:00.0`), the driver's log (`PCI:0000:3b:00`) and `lspci
    /// -D`.
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

/// Parses a hexadecimal number of so many digits, without a sign.
fn parse_hex(text: &str, digits: RangeInclusive<usize>) -> Option<u32> {
    let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_hex && digits.contains(&text.len())).then_some(())?;
    u32::from_str_radix(text, 16).ok()
}

impl std::fmt::Display for PciAddress {
    /// Writes NVML's form.
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
