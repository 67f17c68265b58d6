//! Describes GPUs and MIG instances.

use std::path::Path;

use bursar_ledger::units::{Bytes, GpuUuid};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::GpuError;
use crate::Gpu;
use crate::mig::{CAPABILITIES_DIR, MigInstance};
use crate::pci::PciAddress;

/// Describes the GPU itself, or its MIG instances if it is partitioned.
pub(super) fn describe_instances(
    nvml: &Nvml,
    device: &Device<'_>,
    uuid: &GpuUuid,
) -> Result<Vec<Gpu>, GpuError> {
    let minor = device.minor_number()?;
    // NVML answers NotSupported for GPUs without MIG, and FunctionNotFound with old drivers.
    let cut = device.mig_mode().is_ok_and(|mode| mode.current == 1);
    if !cut {
        return Ok(vec![describe_gpu(device, uuid.clone(), minor)?]);
    }
    let mut instances = Vec::new();
    for index in 0..device.mig_device_count()? {
        match device.mig_device_by_index(index) {
            Ok(instance) => {
                let name = instance.uuid()?.parse()?;
                let numbers = MigInstance::query(nvml, &instance);
                let capabilities = numbers
                    .map(|numbers| numbers.capability_minors(Path::new(CAPABILITIES_DIR), minor))
                    .unwrap_or_default();
                instances.push(Gpu {
                    pci: pci_address(device),
                    mig_parent: Some(uuid.clone()),
                    capabilities,
                    ..describe_gpu(&instance, name, minor)?
                });
            }
            // NVML's count is the largest number of instances, not the present one.
            Err(NvmlError::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(instances)
}

fn describe_gpu(device: &Device<'_>, uuid: GpuUuid, minor: u32) -> Result<Gpu, NvmlError> {
    let memory = device.memory_info()?;
    Ok(Gpu {
        uuid,
        minor,
        model: device.name()?,
        memory: Bytes(memory.total.saturating_sub(memory.reserved)),
        pci: pci_address(device),
        mig_parent: None,
        capabilities: Vec::new(),
    })
}

pub(super) fn pci_address(device: &Device<'_>) -> Option<PciAddress> {
    device.pci_info().ok()?.bus_id.parse().ok()
}

/// The MIG instance of that UUID.
pub(super) fn find_instance<'nvml>(
    physical: &Device<'nvml>,
    gpu: &GpuUuid,
) -> Result<Device<'nvml>, NvmlError> {
    for index in 0..physical.mig_device_count()? {
        match physical.mig_device_by_index(index) {
            Ok(instance) if instance.uuid()? == gpu.as_str() => return Ok(instance),
            Ok(_) | Err(NvmlError::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    Err(NvmlError::NotFound)
}
