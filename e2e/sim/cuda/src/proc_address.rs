//! Resolves functions by name and version, for statically linked CUDA runtimes.

use crate::abi::{Code, DriverResult, Out, Text};
use crate::entry::{Export, exports};
use std::ffi::c_void;

fn all_exports() -> impl Iterator<Item = &'static Export> {
    let lists = [
        crate::init::EXPORTS,
        crate::device::EXPORTS,
        crate::context::EXPORTS,
        crate::memory::EXPORTS,
        crate::array::EXPORTS,
        crate::pool::EXPORTS,
        crate::vmm::EXPORTS,
        crate::multicast::EXPORTS,
        crate::host::EXPORTS,
        crate::pointer::EXPORTS,
        crate::ipc::EXPORTS,
        crate::copy::EXPORTS,
        crate::stream::EXPORTS,
        crate::capture::EXPORTS,
        crate::checkpoint::EXPORTS,
        crate::module::EXPORTS,
        crate::library::EXPORTS,
        crate::graph::EXPORTS,
        crate::launch::EXPORTS,
        crate::export_table::EXPORTS,
        EXPORTS,
        crate::unsupported::EXPORTS,
    ];
    lists.into_iter().flatten()
}

/// Functions whose newest form has other parameters: name, first CUDA version with the new form,
/// old form, new form.
const VERSIONED_SYMBOLS: &[(&str, i32, &str, &str)] = &[
    ("cuCtxCreate", 13_000, "cuCtxCreate_v2", "cuCtxCreate_v4"),
    ("cuMemAdvise", 13_000, "cuMemAdvise", "cuMemAdvise_v2"),
    (
        "cuMemPrefetchAsync",
        13_000,
        "cuMemPrefetchAsync",
        "cuMemPrefetchAsync_v2",
    ),
    (
        "cuGetProcAddress",
        12_000,
        "cuGetProcAddress",
        "cuGetProcAddress_v2",
    ),
    (
        "cuDeviceGetUuid",
        11_040,
        "cuDeviceGetUuid",
        "cuDeviceGetUuid_v2",
    ),
];

/// Resolves a name without a suffix, for a program built for a CUDA version.
///
/// The result is the newest form; functions outside [`VERSIONED_SYMBOLS`] have the same parameters
/// in all forms.
fn resolve_symbol(name: &str, version: i32) -> Option<&'static Export> {
    let exact = |name: &str| all_exports().find(|export| export.name == name);
    if let Some((_, since, old, new)) = VERSIONED_SYMBOLS.iter().find(|(base, ..)| *base == name) {
        return exact(if version < *since { old } else { new });
    }
    let newest = ["_v4", "_v3", "_v2", ""]
        .iter()
        .find_map(|suffix| exact(&format!("{name}{suffix}")));
    newest.filter(|_| name.starts_with("cu"))
}

fn put_address(name: &Text, version: i32, address: &Out<*const c_void>) -> Result<bool, Code> {
    let found = resolve_symbol(&name.get()?, version);
    address.set(found.map_or(std::ptr::null(), |export| export.address))?;
    Ok(found.is_some())
}

/// `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`.
const SYMBOL_NOT_FOUND: i32 = 1;

fn with_status(
    name: &Text,
    version: i32,
    address: &Out<*const c_void>,
    status: &Out<i32>,
) -> DriverResult {
    let found = put_address(name, version, address)?;
    status.set_if_not_null(if found { 0 } else { SYMBOL_NOT_FOUND });
    if found { Ok(()) } else { Err(Code::NOT_FOUND) }
}

exports! {
    fn cuGetProcAddress(name: Text, address: Out<*const c_void>, version: i32, _flags: u64) = {
        if put_address(&name, version, &address)? { Ok(()) } else { Err(Code::NOT_FOUND) }
    };
    fn cuGetProcAddress_v2(name: Text, address: Out<*const c_void>, version: i32, _flags: u64, status: Out<i32>) = {
        with_status(&name, version, &address, &status)
    };
}
