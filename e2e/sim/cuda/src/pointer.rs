//! Implements pointer attributes.

use crate::abi::{Code, DriverResult, Out};
use crate::entry::exports;
use crate::process::{healthy_process, lock};
use crate::tables::address_space::AllocationKind;

fn attribute(data: &Out<u64>, attribute: i32, address: u64) -> DriverResult {
    let process = healthy_process()?;
    let around = lock(&process.space).find_containing(address);
    let (base, found) = around.ok_or(Code::INVALID_VALUE)?;
    let on_host = matches!(
        found.kind,
        AllocationKind::Host | AllocationKind::HostRegistered
    );
    let managed = found.kind == AllocationKind::Managed;
    let device = || {
        process
            .devices
            .iter()
            .position(|device| device.unit == found.unit)
    };
    match attribute {
        1 => data.set(found.context),
        2 => data.cast::<u32>().set(if on_host { 1 } else { 2 }),
        3 => data.set(address),
        4 if on_host || managed => data.set(address),
        7 => data.set(base),
        8 => data.cast::<u32>().set(u32::from(managed)),
        9 => data.cast::<i32>().set(
            device()
                .and_then(|device| i32::try_from(device).ok())
                .ok_or(Code::UNKNOWN)?,
        ),
        11 => data.set(base),
        12 => data.set(found.len),
        13 => data.cast::<u8>().set(u8::from(found.readable)),
        17 => data.set(if let AllocationKind::Pool(pool) = found.kind {
            pool
        } else {
            0
        }),
        _ => Err(Code::INVALID_VALUE),
    }
}

exports! {
    fn cuPointerGetAttribute(data: Out<u64>, which: i32, address: u64) = attribute(&data, which, address);
    fn cuPointerSetAttribute(_value: u64, _which: i32, address: u64) = {
        let known = lock(&healthy_process()?.space).find_containing(address).is_some();
        if known { Ok(()) } else { Err(Code::INVALID_VALUE) }
    };
}
