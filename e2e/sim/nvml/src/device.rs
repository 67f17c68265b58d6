//! Implements device handles, and the identity and attributes of devices.

use bursar_sim_state::Unit;

use crate::abi::{Code, NvmlResult, Out, Text, exports, put_text};
use crate::library::{Library, library};
use std::sync::Arc;

/// Handles look like pointers; the distance from the first one is the unit.
const FIRST: u64 = 0x4e56_0000_0100;
const STEP: u64 = 0x100;

pub(crate) fn device_handle(unit: &Unit) -> u64 {
    FIRST + unit.index as u64 * STEP
}

/// The device of a handle.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) library: Arc<Library>,
    pub(crate) unit: Unit,
}

/// Finds the device of a handle, even if the GPU is lost.
pub(crate) fn find_device(device: u64) -> Result<Device, Code> {
    let library = library()?;
    let unit = library
        .sim
        .units
        .iter()
        .find(|unit| device_handle(unit) == device)
        .cloned()
        .ok_or(Code::INVALID_ARGUMENT)?;
    Ok(Device { library, unit })
}

/// Finds the device of a handle, if the GPU is not lost.
pub(crate) fn present_device(device: u64) -> Result<Device, Code> {
    let device = find_device(device)?;
    device.library.sim.wait_while_hung(Some(device.unit.gpu));
    if device.library.sim.is_lost(device.unit.index) {
        Err(Code::GPU_IS_LOST)
    } else {
        Ok(device)
    }
}

impl Device {
    pub(crate) fn gpu_config(&self) -> &bursar_sim_state::config::Gpu {
        &self.library.sim.config.gpu[self.unit.gpu]
    }

    fn name(&self) -> String {
        let gpu_config = self.gpu_config();
        self.unit.mig.map_or_else(
            || gpu_config.name.clone(),
            |mig| format!("{} MIG {}", gpu_config.name, gpu_config.mig[mig].profile),
        )
    }

    fn bus_id(&self) -> String {
        self.gpu_config().bus_id(self.unit.gpu)
    }
}

fn by_index(index: u32, out: &Out<u64>) -> NvmlResult {
    let library = library()?;
    let gpus = library.gpus();
    let unit = gpus.get(index as usize).ok_or(Code::INVALID_ARGUMENT)?;
    library.open_device_node(unit);
    out.set(device_handle(unit))
}

/// Like NVML, opens every GPU until the UUID matches.
fn by_uuid(text: &Text, out: &Out<u64>) -> NvmlResult {
    let (library, wanted) = (library()?, text.get()?);
    let mut units = library.units();
    let found = units.find(|unit| {
        library.open_device_node(unit);
        library.sim.uuid(unit) == wanted
    });
    out.set(device_handle(found.ok_or(Code::NOT_FOUND)?))
}

fn by_bus_id(text: &Text, out: &Out<u64>) -> NvmlResult {
    let (library, wanted) = (library()?, text.get()?.to_uppercase());
    // Callers write the domain with 4 digits, 8 digits, or not at all.
    let wanted = wanted.trim_start_matches('0').trim_start_matches(':');
    let bus_id = |unit: &Unit| {
        library.sim.config.gpu[unit.gpu]
            .bus_id(unit.gpu)
            .to_uppercase()
    };
    let found = library
        .gpus()
        .into_iter()
        .find(|unit| bus_id(unit).trim_start_matches('0').trim_start_matches(':') == wanted);
    let unit = found.ok_or(Code::NOT_FOUND)?;
    library.open_device_node(unit);
    out.set(device_handle(unit))
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PciInfo {
    bus_id_legacy: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    device_id: u32,
    subsystem_id: u32,
    bus_id: [u8; 32],
}

fn to_fixed_bytes<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    for (place, byte) in bytes.iter_mut().take(N - 1).zip(text.bytes()) {
        *place = byte;
    }
    bytes
}

fn pci_info(device: &Device) -> PciInfo {
    let id = device.bus_id();
    let part = |from: usize, to: usize| {
        id.get(from..to)
            .and_then(|part| u32::from_str_radix(part, 16).ok())
            .unwrap_or(0)
    };
    PciInfo {
        bus_id_legacy: to_fixed_bytes(id.get(4..).unwrap_or_default()),
        domain: part(0, 8),
        bus: part(9, 11),
        device: part(12, 14),
        device_id: 0x2335_10de,
        subsystem_id: 0x18be_10de,
        bus_id: to_fixed_bytes(&id),
    }
}

exports! {
    fn nvmlDeviceGetCount(count: Out<u32>) = count.set(library()?.gpus().len() as u32);
    fn nvmlDeviceGetCount_v2(count: Out<u32>) = count.set(library()?.gpus().len() as u32);
    fn nvmlDeviceGetHandleByIndex(index: u32, device: Out<u64>) = by_index(index, &device);
    fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: Out<u64>) = by_index(index, &device);
    fn nvmlDeviceGetHandleByUUID(uuid: Text, device: Out<u64>) = by_uuid(&uuid, &device);
    fn nvmlDeviceGetHandleByPciBusId(bus_id: Text, device: Out<u64>) = by_bus_id(&bus_id, &device);
    fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: Text, device: Out<u64>) = by_bus_id(&bus_id, &device);
    fn nvmlDeviceGetName(device: u64, text: Out<u8>, len: u32) = put_text(&text, len, &present_device(device)?.name());
    fn nvmlDeviceGetUUID(device: u64, text: Out<u8>, len: u32) = {
        let device = present_device(device)?;
        put_text(&text, len, device.library.sim.uuid(&device.unit))
    };
    fn nvmlDeviceGetIndex(device: u64, index: Out<u32>) = {
        let device = present_device(device)?;
        let place = device.library.gpus().iter().position(|unit| unit.index == device.unit.index);
        index.set(place.ok_or(Code::INVALID_ARGUMENT)? as u32)
    };
    fn nvmlDeviceGetMinorNumber(device: u64, minor: Out<u32>) = minor.set(present_device(device)?.gpu_config().minor);
    fn nvmlDeviceGetPciInfo(device: u64, info: Out<PciInfo>) = info.set(pci_info(&present_device(device)?));
    fn nvmlDeviceGetPciInfo_v2(device: u64, info: Out<PciInfo>) = info.set(pci_info(&present_device(device)?));
    fn nvmlDeviceGetPciInfo_v3(device: u64, info: Out<PciInfo>) = info.set(pci_info(&present_device(device)?));
    fn nvmlDeviceGetCudaComputeCapability(device: u64, major: Out<i32>, minor: Out<i32>) = {
        let capability = present_device(device)?.gpu_config().compute_capability;
        major.set(capability.major)?;
        minor.set(capability.minor)
    };
    fn nvmlDeviceGetBrand(device: u64, brand: Out<u32>) = {
        present_device(device)?;
        brand.set(14) // NVML_BRAND_NVIDIA
    };
    fn nvmlDeviceGetArchitecture(device: u64, architecture: Out<u32>) = {
        let capability = present_device(device)?.gpu_config().compute_capability;
        architecture.set(match (capability.major, capability.minor) {
            (7, 0 | 2) => 5, // Volta
            (7, _) => 6,     // Turing
            (8, 9) => 8,     // Ada
            (8, _) => 7,     // Ampere
            (9, _) => 9,     // Hopper
            (10 | 12, _) => 10, // Blackwell
            _ => return Err(Code::NOT_SUPPORTED),
        })
    };
    fn nvmlDeviceGetPersistenceMode(device: u64, mode: Out<u32>) = {
        present_device(device)?;
        mode.set(1)
    };
    fn nvmlDeviceGetComputeMode(device: u64, mode: Out<u32>) = {
        present_device(device)?;
        mode.set(0)
    };
}
