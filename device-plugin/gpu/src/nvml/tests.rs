//! Tests the rounds of the watcher over processes that hang.

use super::protocol::GpuProbe;
use super::slot::SlotProcess;
use super::*;
use crate::Gpu;
use crate::health::{Health, UnhealthyReason};

/// A watcher of two healthy GPUs, each with a process. The processes have the numbers 0 and 1.
fn watcher() -> NvmlWatcher {
    let (report_sender, reports) = mpsc::unbounded_channel();
    let mut watcher = NvmlWatcher {
        locate_library: Arc::new(|| Err("no library".to_owned())),
        hidden: Vec::new(),
        intervals: PollIntervals::default(),
        requests: mpsc::unbounded_channel().1,
        deferred: Vec::new(),
        report_sender,
        reports,
        publish: watch::channel(Inventory::Starting).0,
        xids: watch::channel(RecentXids::default()).0,
        drain: watch::channel(DrainState::default()).1,
        registry: GpuRegistry::new(HealthThresholds::default(), BTreeMap::new()),
        logged_failure: None,
        next_process: 2,
        library: None,
        locating: None,
        driver_slot: ProbeSlot::new(Scope::Driver),
        driver_version: None,
        gpu_count: 2,
        gpu_slots: vec![slot(0), slot(1)],
        exiting: BTreeMap::new(),
        next_round: Instant::now(),
        round_deadline: None,
    };
    watcher.end_round();
    assert_eq!(healths(&watcher), [Health::Healthy; 2]);
    watcher
}

/// The slot of a GPU that has answered.
fn slot(number: u8) -> ProbeSlot {
    let pci = format!("0000:0{number}:00.0").parse().unwrap();
    let gpu = Gpu {
        pci: Some(pci),
        ..Gpu::with_uuid(&format!("GPU-{number}"))
    };
    ProbeSlot {
        uuid: Some(gpu.uuid.clone()),
        process: Some(SlotProcess::hung(number.into())),
        found: Some(GpuProbe::Gpus(vec![gpu], Some(pci))),
        ..ProbeSlot::new(Scope::Address(pci))
    }
}

fn healths(watcher: &NvmlWatcher) -> Vec<Health> {
    let inventory = watcher.registry.inventory();
    inventory.gpus().iter().map(|state| state.health).collect()
}

const NO_ANSWER: Health = Health::Unhealthy(UnhealthyReason::NoAnswer);

#[test]
fn gpu_is_unhealthy_while_its_killed_process_hangs() {
    let mut watcher = watcher();
    watcher.gpu_slots[0].stop_process();
    watcher.end_round();
    assert_eq!(healths(&watcher), [NO_ANSWER, Health::Healthy]);
}

#[test]
fn gpu_is_unhealthy_after_three_rounds_without_a_probe() {
    let mut watcher = watcher();
    watcher.gpu_slots[0].process = None;
    for _ in 0..3 {
        watcher.gpu_slots.iter_mut().for_each(ProbeSlot::probe);
        watcher.end_round();
    }
    assert_eq!(healths(&watcher), [NO_ANSWER; 2], "neither takes a probe");
}

#[test]
fn gpus_keep_their_slots_in_a_reset_while_a_process_hangs() {
    let mut watcher = watcher();
    watcher.handle_report(0, ProcessReport::TimedOut);
    watcher.reset_driver(NoDriver::Failed("an update".to_owned()));
    watcher.handle_report(1, ProcessReport::Exited);
    assert!(watcher.exiting.is_empty());
    let has_process = |slot: &ProbeSlot| slot.process.is_some();
    let slots = watcher.gpu_slots.iter().map(has_process);
    assert_eq!(slots.collect::<Vec<_>>(), [true, false], "one can start");
    assert!(watcher.next_round > Instant::now(), "not at once");
}
