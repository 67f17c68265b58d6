//! Libraries: modules that belong to no context. A kernel's handle is its function's.

use crate::abi::{Code, In, Out, Text};
use crate::context::current;
use crate::entry::exports;
use crate::kernel::KERNELS;
use crate::module;
use crate::process::{healthy, lock};
use std::collections::BTreeSet;

/// The libraries of this image.
#[derive(Debug, Default)]
pub(crate) struct Libraries {
    loaded: BTreeSet<u64>,
    made: u64,
}

const FIRST: u64 = 0x5117_0000_0000;
const STEP: u64 = 0x10;

/// Fails when no such library is loaded.
fn check(library: u64) -> Result<(), Code> {
    let known = lock(&healthy()?.libraries).loaded.contains(&library);
    if known {
        Ok(())
    } else {
        Err(Code::INVALID_HANDLE)
    }
}

exports! {
    fn cuLibraryLoadData(
        library: Out<u64>, image: In<u8>, _jit: u64, _jit_values: u64, _jit_count: u32, _options: u64, _values: u64,
        _count: u32,
    ) = {
        image.get()?;
        let mut libraries = lock(&healthy()?.libraries);
        libraries.made += 1;
        let handle = FIRST + libraries.made * STEP;
        library.set(handle)?;
        libraries.loaded.insert(handle);
        Ok(())
    };
    fn cuLibraryUnload(library: u64) = {
        let known = lock(&healthy()?.libraries).loaded.remove(&library);
        if known { Ok(()) } else { Err(Code::INVALID_HANDLE) }
    };
    fn cuLibraryGetKernel(out: Out<u64>, library: u64, name: Text) = {
        check(library)?;
        out.set(module::named(&name.get()?)?)
    };
    fn cuLibraryGetKernelCount(count: Out<u32>, library: u64) = {
        check(library)?;
        count.set(u32::try_from(KERNELS.len()).map_err(|_| Code::UNKNOWN)?)
    };
    fn cuLibraryEnumerateKernels(out: Out<u64>, room: u32, library: u64) = {
        check(library)?;
        out.set_all(module::functions().take(room as usize))
    };
    fn cuKernelGetFunction(out: Out<u64>, kernel: u64) = {
        current()?;
        module::kernel(kernel)?;
        out.set(kernel)
    };
    fn cuKernelGetAttribute(value: Out<i32>, which: i32, kernel: u64, device: i32) = {
        healthy()?.device(device)?;
        value.set(module::attribute(kernel, which)?)
    };
}
