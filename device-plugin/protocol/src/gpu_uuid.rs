//! Defines the UUID of a GPU as the driver has it: 16 bytes, which NVML writes as text.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

/// UUID of a GPU or MIG instance, which stays the same after a reboot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid([u8; 16]);

impl GpuUuid {
    /// Creates a UUID from its bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes.
    pub const fn bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for GpuUuid {
    /// Formats the UUID as NVML does for a GPU, because the driver API does not say which UUID is a
    /// MIG instance's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (place, byte) in self.0.iter().enumerate() {
            if matches!(place, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not the UUID of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed to parse the GPU UUID {0:?}: malformed; pass GPU- or MIG- and 32 hex digits")]
pub struct InvalidUuid(String);

impl FromStr for GpuUuid {
    type Err = InvalidUuid;

    fn from_str(text: &str) -> Result<Self, InvalidUuid> {
        let invalid = || InvalidUuid(text.to_owned());
        let body = text
            .strip_prefix("GPU-")
            .or_else(|| text.strip_prefix("MIG-"))
            .ok_or_else(invalid)?;
        let digits: String = body.split('-').collect();
        // `from_str_radix` accepts a sign.
        if digits.len() != 32 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(invalid());
        }
        let number = u128::from_str_radix(&digits, 16).map_err(|_| invalid())?;
        Ok(Self(number.to_be_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_parses_and_prints_as_in_nvml() {
        let text = "GPU-5e0d2ba4-0123-4567-89ab-cdef01234567";
        let uuid: GpuUuid = text.parse().expect("a UUID");
        assert_eq!(uuid.to_string(), text);
        assert_eq!(text.replace("GPU", "MIG").parse(), Ok(uuid));
    }

    #[test]
    fn uuid_is_refused_when_malformed() {
        for bad in [
            "",
            "GPU-",
            "5e0d2ba4-0123-4567-89ab-cdef01234567",
            "GPU-5e0d2ba4-0123-4567-89ab-cdef0123456",
            "GPU-5e0d2ba4-0123-4567-89ab-cdef0123456x",
            "GPU-+e0d2ba4-0123-4567-89ab-cdef01234567",
            "GPU-5e0d2ba4-0123-4567-89ab-cdef0123456\u{e9}",
            "GPU-5e0d2ba4-0123-4567-89ab-cdef012345678",
        ] {
            assert_eq!(bad.parse::<GpuUuid>(), Err(InvalidUuid(bad.to_owned())));
        }
    }
}
