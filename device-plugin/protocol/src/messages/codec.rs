//! Encodes the fields of messages.

use super::{Account, DecodeError, MAX_LISTED, MAX_NAME, ProcessUsage};
use crate::credit_page::MAX_SLOTS;
use crate::units::Units;

pub(super) fn encode_units(out: &mut Vec<u8>, units: Units) {
    out.extend_from_slice(&units.min(Units::MAX).0.to_le_bytes());
}

pub(crate) fn encode_name(out: &mut Vec<u8>, name: &str) {
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    out.push(end as u8);
    out.extend_from_slice(&name.as_bytes()[..end]);
}

pub(super) fn encode_account(out: &mut Vec<u8>, account: &Account) {
    match account {
        Account::Device(uuid) => {
            out.push(0);
            encode_name(out, uuid);
        }
        Account::Managed => out.push(1),
    }
}

pub(super) fn encode_list<T>(out: &mut Vec<u8>, items: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
    let items = &items[..items.len().min(MAX_SLOTS)];
    out.push(items.len() as u8);
    items.iter().for_each(|item| put(out, item));
}

/// Reads fields from the rest of a payload.
pub(crate) struct Decoder<'a>(pub(crate) &'a [u8]);

impl<'a> Decoder<'a> {
    pub(crate) fn take(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(DecodeError::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(DecodeError::Short)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, DecodeError> {
        self.array().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn i32(&mut self) -> Result<i32, DecodeError> {
        self.array().map(i32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn units(&mut self) -> Result<Units, DecodeError> {
        let units = Units(self.u32()?);
        if units <= Units::MAX {
            Ok(units)
        } else {
            Err(DecodeError::BadValue("units"))
        }
    }

    pub(super) fn account_index(&mut self) -> Result<u8, DecodeError> {
        let index = self.u8()?;
        if usize::from(index) < MAX_SLOTS {
            Ok(index)
        } else {
            Err(DecodeError::BadValue("account"))
        }
    }

    pub(crate) fn name(&mut self) -> Result<String, DecodeError> {
        let length = usize::from(self.u8()?);
        if length > MAX_NAME {
            return Err(DecodeError::TooLong("name"));
        }
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes)
            .map(str::to_owned)
            .map_err(|_| DecodeError::BadValue("name"))
    }

    pub(super) fn account(&mut self) -> Result<Account, DecodeError> {
        match self.u8()? {
            0 => self.name().map(Account::Device),
            1 => Ok(Account::Managed),
            _ => Err(DecodeError::BadValue("account kind")),
        }
    }

    pub(super) fn list<T>(
        &mut self,
        item: impl Fn(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let length = usize::from(self.u8()?);
        if length > MAX_SLOTS {
            return Err(DecodeError::TooLong("list"));
        }
        (0..length).map(|_| item(self)).collect()
    }

    pub(super) fn processes(&mut self) -> Result<Vec<ProcessUsage>, DecodeError> {
        let length = usize::from(self.u16()?);
        if length > MAX_LISTED {
            return Err(DecodeError::TooLong("list of processes"));
        }
        let process = |_| {
            Ok(ProcessUsage {
                pid: self.u32()?,
                bytes: self.u64()?,
            })
        };
        (0..length).map(process).collect()
    }

    pub(crate) fn finish<T>(self, message: T) -> Result<T, DecodeError> {
        match self.0.len() {
            0 => Ok(message),
            left => Err(DecodeError::Trailing(left)),
        }
    }
}
