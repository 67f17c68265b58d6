//! Where a GPU is on the PCI bus: the name that the kernel's log has for it.

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
pub struct NoPciAddress(String);

impl FromStr for PciAddress {
    type Err = NoPciAddress;

    /// As NVML writes it (`00000000:3B:00.0`), the driver's lines (`PCI:0000:3b:00`), or `lspci -D`.
    fn from_str(text: &str) -> Result<Self, NoPciAddress> {
        let parsed = || {
            let mut parts = text.trim_start_matches("PCI:").split(':');
            let (domain, bus, rest) = (parts.next()?, parts.next()?, parts.next()?);
            let device = rest.split('.').next()?;
            let address = Self {
                domain: u32::from_str_radix(domain, 16).ok()?,
                bus: u8::from_str_radix(bus, 16).ok()?,
                device: u8::from_str_radix(device, 16).ok()?,
            };
            parts.next().is_none().then_some(address)
        };
        parsed().ok_or_else(|| NoPciAddress(text.to_owned()))
    }
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
    fn nvml_and_the_kernels_log_write_the_same_address_in_two_ways() {
        let nvml: PciAddress = "00000001:3B:0A.0".parse().unwrap();
        assert_eq!("PCI:0001:3b:0a".parse(), Ok(nvml));
        assert_eq!(nvml.to_string(), "00000001:3B:0A.0");
        assert_ne!("PCI:0000:3b:0a".parse(), Ok(nvml));
        for odd in ["", "PCI:", "3b:00", "0000:3b", "0000:3b:00:1", "x:y:z"] {
            assert!(odd.parse::<PciAddress>().is_err(), "{odd}");
        }
    }
}
