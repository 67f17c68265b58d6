//! Implements modules (`cuModule*`) with their functions (`cuFunc*`).
//!
//! Any image loads. Every module has the same functions: the kernels of [`crate::kernel`]. A module
//! whose image begins with `managed BYTES` has a variable `managed` of that size in managed memory,
//! and one whose image begins with `device BYTES` a variable `device` in the device's (F26 in
//! docs/internals/facts.md).

use crate::abi::{Code, DriverResult, In, Out, Text};
use crate::context_stack::current_context;
use crate::entry::exports;
use crate::kernel::{KERNELS, Kernel};
use crate::process::{healthy_process, lock};
use crate::tables::address_space::{Allocation, AllocationKind};

const FIRST: u64 = 0x5187_0000_0000;
const STEP: u64 = 0x10;

fn load(module: &Out<u64>, image: Option<&In<u8>>) -> DriverResult {
    let current = current_context()?;
    let variable = image.map_or(Ok(None), create_variable)?;
    let mut modules = lock(&current.process.modules);
    modules.handle_count += 1;
    let handle = FIRST + modules.handle_count * STEP;
    module.set(handle)?;
    modules.loaded.insert(handle, variable);
    Ok(())
}

/// Creates the variable of an image. Returns its address; none if the image has no variable.
pub(crate) fn create_variable(image: &In<u8>) -> Result<Option<u64>, Code> {
    if let Some(len) = variable(image, b"device ") {
        let current = current_context()?;
        let kind = AllocationKind::Variable;
        return current
            .process
            .allocate_whole(&current, len, kind)
            .map(Some);
    }
    let Some(len) = variable(image, b"managed ") else {
        return Ok(None);
    };
    let current = current_context()?;
    let process = current.process;
    let address = process.map_allocation(&current, len, AllocationKind::Managed)?;
    // The real driver has initialised the variable on the device.
    process.populate_managed(current.unit(), address, len);
    Ok(Some(address))
}

/// Frees the variable of an unloaded image.
pub(crate) fn free_variable(variable: Option<u64>) -> DriverResult {
    let process = healthy_process()?;
    if let Some(address) = variable {
        let is_variable = |kind: &AllocationKind| {
            matches!(kind, AllocationKind::Managed | AllocationKind::Variable)
        };
        let removed = process.remove_allocation(address, is_variable)?;
        process.free_allocation(address, removed);
    }
    Ok(())
}

/// Writes the address and the size of an image's variable, if it has this name. One of the outputs
/// may be null.
pub(crate) fn put_variable(
    variable: Option<u64>,
    name: &Text,
    address: &Out<u64>,
    len: &Out<u64>,
) -> DriverResult {
    if address.is_null() && len.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let (at, bytes) = find_variable(variable, name)?;
    address.set_if_not_null(at);
    len.set_if_not_null(bytes);
    Ok(())
}

/// The address and the size of an image's variable, if it has this name.
fn find_variable(variable: Option<u64>, name: &Text) -> Result<(u64, u64), Code> {
    let (address, name) = (variable.ok_or(Code::NOT_FOUND)?, name.get()?);
    let found = lock(&healthy_process()?.space).find_containing(address);
    let has_name = |found: &Allocation| match found.kind {
        AllocationKind::Variable => name == "device",
        _ => name == "managed",
    };
    found
        .filter(|(_, found)| has_name(found))
        .map(|(_, found)| (address, found.len))
        .ok_or(Code::NOT_FOUND)
}

/// The size of an image's variable, if the image begins with this prefix.
fn variable(image: &In<u8>, prefix: &[u8]) -> Option<u64> {
    let byte = |at: usize| image.at(at).ok();
    // Each byte is read only if the ones before it match, since the image may be shorter.
    if !(0..prefix.len()).all(|at| byte(at) == Some(prefix[at])) {
        return None;
    }
    let digits = (prefix.len()..prefix.len() + 20).map_while(byte);
    let digits: Vec<u8> = digits.take_while(u8::is_ascii_digit).collect();
    let len = std::str::from_utf8(&digits).ok()?.parse().ok()?;
    (len > 0).then_some(len)
}

/// A function's handle, which encodes the kernel's index.
fn function_handle(place: usize) -> u64 {
    0x5197_0000_0000 + (place as u64 + 1) * STEP
}

pub(crate) fn find_kernel(handle: u64) -> Result<&'static Kernel, Code> {
    let found = KERNELS
        .iter()
        .enumerate()
        .find(|(place, _)| function_handle(*place) == handle);
    found.map(|(_, kernel)| kernel).ok_or(Code::INVALID_HANDLE)
}

/// The handle of the function with this name.
pub(crate) fn find_function(name: &str) -> Result<u64, Code> {
    let place = KERNELS.iter().position(|kernel| kernel.name == name);
    place.map(function_handle).ok_or(Code::NOT_FOUND)
}

/// The handles of all functions of a module.
pub(crate) fn function_handles() -> impl Iterator<Item = u64> {
    (0..KERNELS.len()).map(function_handle)
}

pub(crate) fn attribute(handle: u64, attribute: i32) -> Result<i32, Code> {
    let kernel = find_kernel(handle)?;
    Ok(match attribute {
        0 => 1024, // threads per block
        3 => i32::try_from(kernel.local_bytes).map_err(|_| Code::UNKNOWN)?,
        4 => 32,        // registers
        5 | 6 => 90,    // PTX, binary version
        8 => 227 << 10, // dynamic shared memory
        1..=14 => 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// Fails when no such module is loaded.
fn check_loaded(module: u64) -> DriverResult {
    let known = lock(&healthy_process()?.modules)
        .loaded
        .contains_key(&module);
    if known {
        Ok(())
    } else {
        Err(Code::INVALID_HANDLE)
    }
}

exports! {
    fn cuModuleLoad(module: Out<u64>, path: Text) = {
        std::fs::metadata(path.get()?).map_err(|_| Code(301))?; // FILE_NOT_FOUND
        load(&module, None)
    };
    fn cuModuleLoadData(module: Out<u64>, image: In<u8>) = {
        image.get()?;
        load(&module, Some(&image))
    };
    fn cuModuleLoadDataEx(module: Out<u64>, image: In<u8>, _count: u32, _options: u64, _values: u64) = {
        image.get()?;
        load(&module, Some(&image))
    };
    fn cuModuleLoadFatBinary(module: Out<u64>, image: In<u8>) = {
        image.get()?;
        load(&module, Some(&image))
    };
    fn cuModuleUnload(module: u64) = {
        let process = healthy_process()?;
        let variable = lock(&process.modules).loaded.remove(&module);
        free_variable(variable.ok_or(Code::INVALID_HANDLE)?)
    };
    fn cuModuleGetFunction(out: Out<u64>, module: u64, name: Text) = {
        check_loaded(module)?;
        out.set(find_function(&name.get()?)?)
    };
    fn cuModuleGetFunctionCount(count: Out<u32>, module: u64) = {
        check_loaded(module)?;
        count.set(u32::try_from(KERNELS.len()).map_err(|_| Code::UNKNOWN)?)
    };
    fn cuModuleEnumerateFunctions(out: Out<u64>, room: u32, module: u64) = {
        check_loaded(module)?;
        out.set_all(function_handles().take(room as usize))
    };
    fn cuModuleGetGlobal_v2(address: Out<u64>, len: Out<u64>, module: u64, name: Text) = {
        let process = healthy_process()?;
        let variable = lock(&process.modules).loaded.get(&module).copied();
        put_variable(variable.ok_or(Code::INVALID_HANDLE)?, &name, &address, &len)
    };
    fn cuFuncGetAttribute(value: Out<i32>, which: i32, function: u64) = {
        healthy_process()?;
        value.set(attribute(function, which)?)
    };
    fn cuFuncSetAttribute(function: u64, which: i32, _value: i32) = {
        healthy_process()?;
        attribute(function, which).map(|_| ())
    };
    fn cuFuncSetCacheConfig(function: u64, _config: i32) = {
        healthy_process()?;
        find_kernel(function).map(|_| ())
    };
}
