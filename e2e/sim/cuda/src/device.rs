//! Implements device management (`cuDeviceGet*`).

use bursar_sim_state::config::uuid_bytes;

use crate::abi::{Code, DriverResult, Out, Text, put_text};
use crate::entry::exports;
use crate::process::{Process, process};

impl Process {
    /// Checks a device's ordinal.
    pub(crate) fn device(&self, ordinal: i32) -> Result<usize, Code> {
        usize::try_from(ordinal)
            .ok()
            .filter(|device| *device < self.devices.len())
            .ok_or(Code::INVALID_DEVICE)
    }

    pub(crate) fn gpu_config(&self, device: usize) -> &bursar_sim_state::config::Gpu {
        &self.sim.config.gpu[self.sim.units[self.devices[device].unit].gpu]
    }

    pub(crate) fn total(&self, device: usize) -> u64 {
        self.sim.units[self.devices[device].unit].total
    }

    fn name(&self, device: usize) -> String {
        let (gpu_config, unit) = (
            self.gpu_config(device),
            &self.sim.units[self.devices[device].unit],
        );
        unit.mig.map_or_else(
            || gpu_config.name.clone(),
            |mig| format!("{} MIG {}", gpu_config.name, gpu_config.mig[mig].profile),
        )
    }

    /// The UUID of the GPU, also for a MIG instance.
    fn gpu_uuid(&self, device: usize) -> Result<[u8; 16], Code> {
        uuid_bytes(&self.gpu_config(device).uuid, "GPU-").ok_or(Code::UNKNOWN)
    }

    /// The UUID of the MIG instance, or of the GPU.
    fn own_uuid(&self, device: usize) -> Result<[u8; 16], Code> {
        let uuid = self.sim.uuid(&self.sim.units[self.devices[device].unit]);
        uuid_bytes(uuid, "GPU-")
            .or_else(|| uuid_bytes(uuid, "MIG-"))
            .ok_or(Code::UNKNOWN)
    }

    fn bus_id(&self, device: usize) -> String {
        self.gpu_config(device)
            .bus_id(self.sim.units[self.devices[device].unit].gpu)
    }

    /// The attributes that programs commonly read; 0 for features that the device lacks.
    fn attribute(&self, device: usize, attribute: i32) -> Result<i32, Code> {
        let gpu_config = self.gpu_config(device);
        let bus = |from: usize, to: usize| {
            let text = self.bus_id(device);
            text.get(from..to)
                .and_then(|digits| i32::from_str_radix(digits, 16).ok())
                .unwrap_or(0)
        };
        Ok(match attribute {
            1..=3 => 1024,       // threads per block; block x, y
            4 => 64,             // block z
            5 => i32::MAX,       // grid x
            6 | 7 => 65_535,     // grid y, z
            8 => 48 << 10,       // shared memory per block
            9 => 64 << 10,       // constant memory
            10 => 32,            // warp
            11 => i32::MAX,      // pitch
            12 | 82 => 64 << 10, // registers per block, per multiprocessor
            13 => 1_980_000,     // clock, kHz
            14 => 512,           // texture alignment
            16 => i32::try_from(gpu_config.multiprocessors).unwrap_or(i32::MAX),
            19 | 31 | 32 | 41 => 1, // map host memory, concurrent kernels, ECC, unified addressing
            33 => bus(9, 11),       // PCI bus
            34 => bus(12, 14),      // PCI device
            50 => bus(0, 8),        // PCI domain
            36 => 3_201_000,        // memory clock, kHz
            37 => 6144,             // bus width, bits
            38 => 60 << 20,         // L2
            39 => 2048,             // threads per multiprocessor
            40 => 3,                // copy engines
            75 => gpu_config.compute_capability.major,
            76 => gpu_config.compute_capability.minor,
            88 | 100 => i32::from(self.sim.config.pageable_memory), // access to all host memory
            89 => i32::from(gpu_config.concurrent_managed_access),
            78 | 83 | 90 | 95 => 1, // priorities, managed, preemption, cooperative
            81 => 228 << 10,        // shared memory per multiprocessor
            97 => 227 << 10,        // shared memory per block, opted in
            102 | 103 => 1,         // VMM, its handles as descriptors
            106 => 32,              // blocks per multiprocessor
            111 => 1 << 10,         // shared memory that the driver keeps
            115 => 1,               // pools
            15..=160 => 0,
            _ => return Err(Code::INVALID_VALUE),
        })
    }
}

fn text(
    ordinal: i32,
    buffer: &Out<u8>,
    len: i32,
    what: impl FnOnce(&Process, usize) -> String,
) -> DriverResult {
    let process = process()?;
    put_text(buffer, len, &what(process, process.device(ordinal)?))
}

exports! {
    fn cuDeviceGetCount(count: Out<i32>) = count.set(i32::try_from(process()?.devices.len()).unwrap_or(i32::MAX));
    fn cuDeviceGet(device: Out<i32>, ordinal: i32) = {
        process()?.device(ordinal)?;
        device.set(ordinal)
    };
    fn cuDeviceGetName(name: Out<u8>, len: i32, device: i32) = text(device, &name, len, |process, device| process.name(device));
    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: i32) = {
        let process = process()?;
        uuid.set(process.gpu_uuid(process.device(device)?)?)
    };
    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) = {
        let process = process()?;
        uuid.set(process.own_uuid(process.device(device)?)?)
    };
    fn cuDeviceTotalMem_v2(bytes: Out<u64>, device: i32) = {
        let process = process()?;
        bytes.set(process.total(process.device(device)?))
    };
    fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: i32) = {
        let process = process()?;
        value.set(process.attribute(process.device(device)?, attribute)?)
    };
    fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, device: i32) = {
        let process = process()?;
        let capability = process.gpu_config(process.device(device)?).compute_capability;
        major.set(capability.major)?;
        minor.set(capability.minor)
    };
    fn cuDeviceGetPCIBusId(text_out: Out<u8>, len: i32, device: i32) = {
        text(device, &text_out, len, |process, device| process.bus_id(device)[4..].to_owned())
    };
    fn cuDeviceGetByPCIBusId(device: Out<i32>, bus_id: Text) = {
        let (process, wanted) = (process()?, bus_id.get()?.to_uppercase());
        let found = (0..process.devices.len()).find(|device| process.bus_id(*device).to_uppercase().ends_with(&wanted));
        device.set(found.and_then(|found| i32::try_from(found).ok()).ok_or(Code::INVALID_DEVICE)?)
    };
    fn cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) = {
        let process = process()?;
        can.set(i32::from(process.device(device)? != process.device(peer)?))
    };
}
