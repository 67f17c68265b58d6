//! Implements MIG mode and instances. Each GPU instance has one compute instance, number 0.

use crate::abi::{Code, Out, exports};
use crate::device::{Device, device_handle, present_device};

/// `nvmlDeviceAttributes_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Attributes {
    multiprocessors: u32,
    copy_engines: u32,
    decoders: u32,
    encoders: u32,
    jpeg: u32,
    ofa: u32,
    gpu_slices: u32,
    compute_slices: u32,
    memory_mb: u64,
}

fn instance(device: u64) -> Result<(Device, u32), Code> {
    let device = present_device(device)?;
    let number = device.unit.mig.ok_or(Code::NOT_SUPPORTED)? as u32 + 1;
    Ok((device, number))
}

/// The number of slices, which begins the profile's name: `3g.71gb` has 3.
fn slices(device: &Device) -> u32 {
    let profile = device
        .unit
        .mig
        .map_or("", |mig| device.gpu_config().mig[mig].profile.as_str());
    profile
        .split('g')
        .next()
        .and_then(|digits| digits.parse().ok())
        .unwrap_or(0)
}

exports! {
    fn nvmlDeviceGetMigMode(device: u64, current: Out<u32>, pending: Out<u32>) = {
        let device = present_device(device)?;
        let mode = u32::from(!device.gpu_config().mig.is_empty());
        current.set(mode)?;
        pending.set(mode)
    };
    fn nvmlDeviceGetMaxMigDeviceCount(device: u64, count: Out<u32>) = {
        present_device(device)?;
        count.set(7)
    };
    fn nvmlDeviceGetMigDeviceHandleByIndex(device: u64, index: u32, instance: Out<u64>) = {
        let device = present_device(device)?;
        let units = &device.library.sim.units;
        let found = units.iter().find(|unit| unit.gpu == device.unit.gpu && unit.mig == Some(index as usize));
        instance.set(device_handle(found.ok_or(Code::NOT_FOUND)?))
    };
    fn nvmlDeviceIsMigDeviceHandle(device: u64, is: Out<u32>) = is.set(u32::from(present_device(device)?.unit.mig.is_some()));
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device: u64, gpu: Out<u64>) = {
        let (device, _) = instance(device)?;
        let units = &device.library.sim.units;
        let found = units.iter().find(|unit| unit.gpu == device.unit.gpu && unit.mig.is_none());
        gpu.set(device_handle(found.ok_or(Code::UNKNOWN)?))
    };
    fn nvmlDeviceGetGpuInstanceId(device: u64, id: Out<u32>) = id.set(instance(device)?.1);
    fn nvmlDeviceGetComputeInstanceId(device: u64, id: Out<u32>) = {
        instance(device)?;
        id.set(0)
    };
    fn nvmlDeviceGetAttributes_v2(device: u64, attributes: Out<Attributes>) = {
        let (device, _) = instance(device)?;
        let slices = slices(&device);
        attributes.set(Attributes {
            multiprocessors: device.gpu_config().multiprocessors * slices / 7,
            copy_engines: slices,
            gpu_slices: slices,
            compute_slices: slices,
            memory_mb: device.unit.total >> 20,
            ..Attributes::default()
        })
    };
}
