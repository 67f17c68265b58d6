//! Implements event sets, which wait for XIDs.

use crate::abi::{Code, NvmlResult, Out, exports};
use crate::device::{device_handle, present_device};
use crate::library::library;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// `nvmlEventTypeXidCriticalError`, the only event type that occurs.
const XID: u64 = 8;

/// An event set: its GPUs, and the number of XIDs that it has read.
#[derive(Debug, Clone, Default)]
struct EventSet {
    gpus: Vec<usize>,
    read_count: u32,
}

#[derive(Debug)]
struct EventSets {
    sets: BTreeMap<u64, EventSet>,
    handle_count: u64,
}

static SETS: Mutex<EventSets> = Mutex::new(EventSets {
    sets: BTreeMap::new(),
    handle_count: 0,
});

fn sets() -> MutexGuard<'static, EventSets> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `nvmlEventData_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    device: u64,
    kind: u64,
    data: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

fn create(out: &Out<u64>) -> NvmlResult {
    let read_count = library()?.sim.xid_count();
    let mut sets = sets();
    sets.handle_count += 1;
    let handle = 0x4e57_0000_0000 + sets.handle_count * 0x10;
    out.set(handle)?;
    sets.sets.insert(
        handle,
        EventSet {
            gpus: Vec::new(),
            read_count,
        },
    );
    Ok(())
}

fn register(device: u64, kinds: u64, set: u64) -> NvmlResult {
    let device = present_device(device)?;
    if kinds & !XID != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    sets()
        .sets
        .get_mut(&set)
        .ok_or(Code::INVALID_ARGUMENT)?
        .gpus
        .push(device.unit.gpu);
    Ok(())
}

/// Waits for an event without locking the list of sets, so that other sets stay usable.
fn wait(set: u64, event: &Out<Event>, timeout: Duration) -> NvmlResult {
    let library = library()?;
    let end = Instant::now() + timeout;
    let mut own_set = sets()
        .sets
        .get(&set)
        .cloned()
        .ok_or(Code::INVALID_ARGUMENT)?;
    for gpu in &own_set.gpus {
        library.sim.wait_while_hung(Some(*gpu));
    }
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let xid = library.sim.wait_xid(&mut own_set.read_count, left);
        if let Some(set_entry) = sets().sets.get_mut(&set) {
            set_entry.read_count = own_set.read_count;
        }
        let xid = xid.ok_or(Code::TIMEOUT)?;
        let unit = &library.sim.units[xid.unit];
        if own_set.gpus.contains(&unit.gpu) {
            // Like NVML, reports the GPU's handle, and the instance if there is one.
            let gpu = &library.sim.units[library.sim.gpu_unit(unit.gpu)];
            let instance = unit.mig.map_or(u32::MAX, |mig| mig as u32 + 1);
            let compute_instance = if unit.mig.is_some() { 0 } else { u32::MAX };
            let data = u64::from(xid.code);
            return event.set(Event {
                device: device_handle(gpu),
                kind: XID,
                data,
                gpu_instance: instance,
                compute_instance,
            });
        }
    }
}

exports! {
    fn nvmlEventSetCreate(set: Out<u64>) = create(&set);
    fn nvmlEventSetFree(set: u64) = sets().sets.remove(&set).map(|_| ()).ok_or(Code::INVALID_ARGUMENT);
    fn nvmlEventSetWait(set: u64, event: Out<Event>, milliseconds: u32) = wait(set, &event, Duration::from_millis(milliseconds.into()));
    fn nvmlEventSetWait_v2(set: u64, event: Out<Event>, milliseconds: u32) = wait(set, &event, Duration::from_millis(milliseconds.into()));
    fn nvmlDeviceRegisterEvents(device: u64, kinds: u64, set: u64) = register(device, kinds, set);
    fn nvmlDeviceGetSupportedEventTypes(device: u64, kinds: Out<u64>) = {
        present_device(device)?;
        kinds.set(XID)
    };
}
