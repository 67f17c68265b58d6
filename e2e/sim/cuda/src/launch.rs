//! Implements kernel launches (`cuLaunchKernel*`).
//!
//! A launch runs the kernel once, whatever the grid, before it returns. As on a GPU, a faulting
//! launch succeeds, and every later call returns the error.

use crate::abi::{Code, DriverResult, In};
use crate::context_stack::{CurrentContext, current_context};
use crate::entry::exports;
use crate::kernel::Arguments;
use crate::module::find_kernel;

impl CurrentContext {
    fn launch(&self, function: u64, stream: u64, arguments: In<u64>) -> DriverResult {
        let kernel = find_kernel(function)?;
        self.check_stream(stream)?;
        self.process
            .ensure_stack(self.context, kernel.local_bytes)?;
        (kernel.run)(self, &Arguments(arguments), stream)
    }
}

/// `CUlaunchConfig`, up to the last field that is read.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaunchConfig {
    sizes: [u32; 7],
    stream: u64,
}

fn launch_sized(sizes: &[u32], function: u64, stream: u64, arguments: In<u64>) -> DriverResult {
    if sizes.contains(&0) {
        return Err(Code::INVALID_VALUE);
    }
    current_context()?.launch(function, stream, arguments)
}

exports! {
    fn cuLaunchKernel(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        _shared: u32, stream: u64, arguments: In<u64>, _extra: u64,
    ) = launch_sized(&[grid_x, grid_y, grid_z, block_x, block_y, block_z], function, stream, arguments);
    fn cuLaunchCooperativeKernel(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        _shared: u32, stream: u64, arguments: In<u64>,
    ) = launch_sized(&[grid_x, grid_y, grid_z, block_x, block_y, block_z], function, stream, arguments);
    fn cuLaunchKernelEx(config: In<LaunchConfig>, function: u64, arguments: In<u64>, _extra: u64) = {
        let config = config.get()?;
        launch_sized(&config.sizes[..6], function, config.stream, arguments)
    };
}
