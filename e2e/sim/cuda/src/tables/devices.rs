//! Enumerates the devices that a process sees, in the order of `CUDA_VISIBLE_DEVICES`.

use bursar_sim_state::Sim;

use std::path::Path;

/// A CUDA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    /// The unit whose memory it uses.
    pub(crate) unit: usize,
}

/// The devices of a process, which are those with an accessible node, in the order of
/// `CUDA_VISIBLE_DEVICES`.
///
/// A GPU in MIG mode is no device, but its instances are. Without the variable, CUDA shows one
/// instance, and only if there is no other device.
pub(crate) fn visible_devices(sim: &Sim, dev: &Path, order: Option<&str>) -> Vec<Device> {
    let units = || {
        sim.units
            .iter()
            .filter(|unit| sim.is_visible(unit.gpu, dev))
    };
    let in_mig_mode = |gpu: usize| !sim.config.gpu[gpu].mig.is_empty();
    let whole = units().filter(|unit| unit.mig.is_none() && !in_mig_mode(unit.gpu));
    let mut numbered: Vec<Device> = whole.map(|unit| Device { unit: unit.index }).collect();
    if numbered.is_empty() {
        numbered.extend(
            units()
                .find(|unit| unit.mig.is_some())
                .map(|unit| Device { unit: unit.index }),
        );
    }
    let Some(order) = order else { return numbered };
    let named = |name: &str| {
        let by_uuid = units().find(|unit| name.contains('-') && sim.uuid(unit).starts_with(name));
        let by_number = || numbered.get(name.parse::<usize>().ok()?).cloned();
        by_uuid
            .map(|unit| Device { unit: unit.index })
            .or_else(by_number)
    };
    // As in CUDA, the first invalid name ends the list.
    order
        .split(',')
        .map_while(|name| named(name.trim()))
        .collect()
}
