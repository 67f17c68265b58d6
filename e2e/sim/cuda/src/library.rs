//! Implements context-independent loading of modules (`cuLibrary*`, `cuKernel*`).
//!
//! A kernel's handle equals its function's.

use crate::abi::{Code, DriverResult, In, Out, Text};
use crate::context_stack::current_context;
use crate::entry::exports;
use crate::kernel::KERNELS;
use crate::module;
use crate::process::{healthy_process, lock};

const FIRST: u64 = 0x5117_0000_0000;
const STEP: u64 = 0x10;

/// Fails when no such library is loaded.
fn check_loaded(library: u64) -> Result<(), Code> {
    loaded_variable(library).map(drop)
}

/// The address of a loaded library's variable.
fn loaded_variable(library: u64) -> Result<Option<u64>, Code> {
    let libraries = lock(&healthy_process()?.libraries);
    let loaded = libraries.loaded.get(&library).copied();
    loaded.ok_or(Code::INVALID_HANDLE)
}

/// Looks up a library's variable.
fn look_up(address: &Out<u64>, len: &Out<u64>, library: u64, name: &Text) -> DriverResult {
    module::put_variable(loaded_variable(library)?, name, address, len)
}

exports! {
    fn cuLibraryLoadData(
        library: Out<u64>, image: In<u8>, _jit: u64, _jit_values: u64, _jit_count: u32, _options: u64, _values: u64,
        _count: u32,
    ) = {
        image.get()?;
        let variable = module::create_variable(&image)?;
        let mut libraries = lock(&healthy_process()?.libraries);
        libraries.handle_count += 1;
        let handle = FIRST + libraries.handle_count * STEP;
        library.set(handle)?;
        libraries.loaded.insert(handle, variable);
        Ok(())
    };
    fn cuLibraryUnload(library: u64) = {
        let variable = lock(&healthy_process()?.libraries).loaded.remove(&library);
        module::free_variable(variable.ok_or(Code::INVALID_HANDLE)?)
    };
    fn cuLibraryGetGlobal(address: Out<u64>, len: Out<u64>, library: u64, name: Text) = {
        look_up(&address, &len, library, &name)
    };
    fn cuLibraryGetManaged(address: Out<u64>, len: Out<u64>, library: u64, name: Text) = {
        look_up(&address, &len, library, &name)
    };
    fn cuLibraryGetKernel(out: Out<u64>, library: u64, name: Text) = {
        check_loaded(library)?;
        out.set(module::find_function(&name.get()?)?)
    };
    fn cuLibraryGetKernelCount(count: Out<u32>, library: u64) = {
        check_loaded(library)?;
        count.set(u32::try_from(KERNELS.len()).map_err(|_| Code::UNKNOWN)?)
    };
    fn cuLibraryEnumerateKernels(out: Out<u64>, room: u32, library: u64) = {
        check_loaded(library)?;
        out.set_all(module::function_handles().take(room as usize))
    };
    fn cuKernelGetFunction(out: Out<u64>, kernel: u64) = {
        current_context()?;
        module::find_kernel(kernel)?;
        out.set(kernel)
    };
    fn cuKernelGetAttribute(value: Out<i32>, which: i32, kernel: u64, device: i32) = {
        healthy_process()?.device(device)?;
        value.set(module::attribute(kernel, which)?)
    };
}
