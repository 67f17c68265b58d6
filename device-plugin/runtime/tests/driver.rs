//! Tests the driver module over the simulated driver.
#![allow(unsafe_code, reason = "launches kernels")]
#![allow(
    clippy::unwrap_used,
    reason = "a failed `unwrap` is a failed test, with its place"
)]

use std::os::fd::AsFd as _;
use std::process::Command;
use std::sync::Arc;

use bursar_runtime::driver::{Access, Context, Driver, DriverError, Grid};
use bursar_runtime::{CudaError, DeviceRuntime, ErrorClass};
use bursar_sim_lab::{ONE_GPU, SimMachine, TWO_GPUS, run_in_subprocess};

const MIB: u64 = 1 << 20;

/// Runs one test of this program in a child whose loader finds only that file as `libcuda.so.1`.
fn run_with_library(test: &str, contents: Option<&[u8]>) {
    let folder = tempfile::tempdir().unwrap();
    if let Some(contents) = contents {
        std::fs::write(folder.path().join("libcuda.so.1"), contents).unwrap();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("BURSAR_TEST_AGAIN", "1")
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{stdout}"
    );
}

fn context(ordinal: u32) -> Context {
    let device = Driver::get().unwrap().device(ordinal).unwrap();
    device.primary_context().unwrap()
}

/// The thread's current context, as the driver says; 0 for none.
fn current_context() -> usize {
    let mut current = std::ptr::null_mut();
    // SAFETY: the pointer is valid for the call.
    let code = unsafe { cudarc::driver::sys::cuCtxGetCurrent(&raw mut current) };
    assert_eq!(code as i32, 0);
    current as usize
}

/// Asserts the error of every entry point without a driver.
fn assert_no_driver() {
    let error = Driver::get().unwrap_err();
    assert!(matches!(error, DriverError::NoDriver(_)), "{error}");
    assert_eq!(Driver::get().unwrap_err(), error);
    assert_eq!(DeviceRuntime::for_ordinal(0).unwrap_err(), error);
    let uuid = "GPU-00000000-0000-0000-0000-000000000001".parse().unwrap();
    assert_eq!(DeviceRuntime::for_gpu(uuid).unwrap_err(), error);
    let error = CudaError {
        call: "cuInit",
        code: 3,
    };
    assert_eq!(error.to_string(), "cuInit: CUDA error 3");
}

#[test]
fn missing_driver_is_an_error_at_every_entry_point() {
    if std::env::var_os("BURSAR_TEST_AGAIN").is_some() {
        return assert_no_driver();
    }
    let test = "missing_driver_is_an_error_at_every_entry_point";
    run_with_library(test, Some(b"not a library"));
    // A library without any function of the driver.
    let lab = SimMachine::new(ONE_GPU).unwrap();
    let other = std::fs::read(lab.library("libnvidia-ml.so.1")).unwrap();
    run_with_library(test, Some(&other));
    // The loader's cache has the library, whatever the search path is.
    if Driver::get().is_ok() {
        return eprintln!("skipped: this host has a driver, so it cannot be missing");
    }
    run_with_library(test, None);
}

#[test]
fn device_is_found_by_ordinal_and_uuid() {
    run_in_subprocess(TWO_GPUS, |_| {
        let driver = Driver::get().unwrap();
        assert_eq!(driver.device_count(), Ok(2));
        let second = driver.device(1).unwrap();
        let uuid = "GPU-00000000-0000-0000-0000-000000000002".parse().unwrap();
        assert_eq!(second.uuid(), Ok(uuid));
        assert_eq!(driver.device_by_uuid(uuid).unwrap().ordinal(), 1);
        assert_eq!(second.name().unwrap(), "NVIDIA H200");
        let missing = driver.device(2).unwrap_err();
        assert_eq!(
            missing,
            DriverError::NoSuchDevice {
                ordinal: 2,
                count: 2
            }
        );
    });
}

#[test]
fn enter_restores_the_previous_current_context() {
    run_in_subprocess(TWO_GPUS, |_| {
        let [first, second] = [0, 1].map(context);
        assert_eq!(current_context(), 0);
        let outer = first.enter().unwrap();
        let current = current_context();
        assert_ne!(current, 0);
        // Each call enters its own context.
        assert_eq!(second.memory_info().unwrap().1, 16 << 30);
        drop(second.stream().unwrap());
        assert_eq!(current_context(), current);
        let inner = second.enter().unwrap();
        assert_ne!(current_context(), current);
        drop(inner);
        assert_eq!(current_context(), current);
        drop(outer);
        assert_eq!(current_context(), 0);
    });
}

#[test]
fn exported_memory_keeps_its_bytes_when_imported() {
    run_in_subprocess(ONE_GPU, |machine| {
        let driver = Driver::get().unwrap();
        let device = driver.device(0).unwrap();
        let context = device.primary_context().unwrap();
        let bytes = 2 * device.granularity().unwrap();
        let before = machine.used(0);
        let handle = device.create(bytes).unwrap();
        let descriptor = handle.export().unwrap();
        let imported = driver.import(descriptor.as_fd(), bytes).unwrap();
        let room = Arc::new(driver.reserve(2 * bytes).unwrap());
        let written = room.map(0, &handle, Access::ReadWrite, &context).unwrap();
        let read = room.map(bytes, &imported, Access::Read, &context).unwrap();
        written.write(&context, 7, b"bursar").unwrap();
        let mut back = [0; 6];
        read.read(&context, 7, &mut back).unwrap();
        assert_eq!(&back, b"bursar");
        assert!(
            read.write(&context, 0, b"no").is_err(),
            "it is mapped for reading"
        );
        assert_eq!(imported.export().unwrap_err().code, 1);
        assert_eq!(machine.used(0), before + bytes);
        drop((written, read, imported, handle));
        assert_eq!(machine.used(0), before + bytes, "the descriptor keeps it");
        drop(descriptor);
        assert_eq!(machine.used(0), before);
    });
}

#[test]
fn failed_mapping_leaves_the_existing_one() {
    run_in_subprocess(ONE_GPU, |_| {
        let driver = Driver::get().unwrap();
        let device = driver.device(0).unwrap();
        let context = device.primary_context().unwrap();
        let [first, second] = [(); 2].map(|()| device.create(2 * MIB).unwrap());
        let room = Arc::new(driver.reserve(2 * MIB).unwrap());
        let mapping = room.map(0, &first, Access::ReadWrite, &context).unwrap();
        assert!(room.map(0, &second, Access::ReadWrite, &context).is_err());
        mapping.write(&context, 0, b"still here").unwrap();
    });
}

#[test]
fn event_is_done_when_the_work_before_it_is() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let (stream, event) = (context.stream().unwrap(), context.event().unwrap());
        assert!(event.is_done().unwrap(), "it was never recorded");
        let spin = context.load(c"").unwrap().function(c"spin").unwrap();
        let mut time = 200_000_000_u64;
        let mut arguments = [(&raw mut time).cast()];
        // SAFETY: spin(uint64_t nanoseconds)
        unsafe { spin.launch(&stream, Grid::linear(1, 1), &mut arguments) }.unwrap();
        event.record(&stream).unwrap();
        assert!(!event.is_done().unwrap());
        assert!(!stream.is_idle().unwrap());
        event.synchronize().unwrap();
        assert!(stream.is_idle().unwrap());
    });
}

#[test]
fn kernel_fault_is_the_sticky_error_of_a_later_call() {
    run_in_subprocess(ONE_GPU, |_| {
        let context = context(0);
        let stream = context.stream().unwrap();
        let fault = context.load(c"").unwrap().function(c"fault").unwrap();
        // SAFETY: fault() has no arguments.
        unsafe { fault.launch(&stream, Grid::linear(1, 1), &mut []) }.unwrap();
        let error = stream.synchronize().unwrap_err();
        assert_eq!(error.code, 700);
        assert_eq!(error.class(), ErrorClass::StickyProcess);
        assert_eq!(
            error.to_string(),
            "cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
        );
    });
}
