//! Tests the rounds of the watcher over processes that hang.

use std::collections::BTreeSet;

use super::protocol::{GpuProbe, Response};
use super::slot::SlotProcess;
use super::*;
use crate::Gpu;
use crate::health::{Health, PersistedHealth, UnhealthyReason};

/// A watcher of two healthy GPUs, each with a process. The processes have the numbers 0 and 1.
fn watcher() -> NvmlWatcher {
    let watcher = watcher_of(vec![slot(0), slot(1)]);
    assert_eq!(healths(&watcher), [Health::Healthy; 2]);
    watcher
}

/// A watcher of two GPUs after a round with these slots.
fn watcher_of(gpu_slots: Vec<ProbeSlot>) -> NvmlWatcher {
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
        known_count: 2,
        gpu_slots,
        exiting: BTreeMap::new(),
        next_round: Instant::now(),
        round_deadline: None,
    };
    watcher.end_round();
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

#[tokio::test]
async fn unknown_gpu_is_probed_on_while_another_is_drained() {
    let unanswered = ProbeSlot {
        process: Some(SlotProcess::hung(0)),
        ..ProbeSlot::new(Scope::Index(0))
    };
    let mut watcher = watcher_of(vec![unanswered, slot(1)]);
    assert_eq!(healths(&watcher), [Health::Healthy], "one did not answer");
    let drained = BTreeSet::from(["GPU-1".parse().unwrap()]);
    let drain = DrainState {
        requested: drained.clone(),
        released: drained,
        ..DrainState::default()
    };
    watcher.drain = watch::channel(drain).1;
    watcher.apply_drain();
    assert_eq!(watcher.registry.drained_count(), 0, "its process holds it");
    watcher.handle_report(1, ProcessReport::Exited);
    watcher.apply_drain();
    assert_eq!(watcher.registry.drained_count(), 1);
    (watcher.library, watcher.driver_slot.process) =
        (Some(PathBuf::new()), Some(SlotProcess::hung(2)));
    watcher.begin_round().await;
    assert_eq!(scopes(&watcher), [Scope::Index(0)]);
}

/// A watcher that starts while GPU-1 is drained, after a round in which GPU-0 has not answered.
/// The record of the previous agent has both.
fn watcher_beside_a_drained_gpu() -> NvmlWatcher {
    let unanswered = ProbeSlot {
        process: Some(SlotProcess::hung(0)),
        ..ProbeSlot::new(Scope::Index(0))
    };
    let mut watcher = watcher_of(Vec::new());
    let recorded = [slot(0), slot(1)].map(|slot| {
        let Some(GpuProbe::Gpus(gpus, _)) = slot.found else {
            panic!("it has answered");
        };
        let (gpu, health) = (gpus[0].clone(), PersistedHealth::default());
        let gpu = Some(gpu);
        (slot.uuid.unwrap(), PersistedGpu { gpu, health })
    });
    watcher.registry = GpuRegistry::new(HealthThresholds::default(), recorded.into());
    let drained = BTreeSet::from(["GPU-1".parse().unwrap()]);
    watcher
        .registry
        .set_drained(drained.clone(), Instant::now());
    watcher.drain = watch::channel(DrainState {
        requested: drained.clone(),
        released: drained,
        ..DrainState::default()
    })
    .1;
    watcher.gpu_slots = vec![unanswered, slot(1)];
    watcher.gpu_slots[0].process.as_mut().unwrap().is_probing = true;
    watcher.library = Some(PathBuf::new());
    watcher.driver_slot.process = Some(SlotProcess::hung(2));
    watcher.end_round();
    watcher
}

fn scopes(watcher: &NvmlWatcher) -> Vec<Scope> {
    watcher.gpu_slots.iter().map(|slot| slot.scope).collect()
}

#[tokio::test]
async fn first_answer_is_awaited_while_another_gpu_is_drained() {
    let mut watcher = watcher_beside_a_drained_gpu();
    watcher.begin_round().await;
    assert_eq!(scopes(&watcher), [Scope::Index(0)]);
    assert!(watcher.gpu_slots[0].is_starting(), "its process runs on");
    // The process is killed for its silence: another one asks by the recorded address.
    watcher.handle_report(0, ProcessReport::TimedOut);
    watcher.begin_round().await;
    watcher.handle_report(0, ProcessReport::Exited);
    watcher.handle_report(1, ProcessReport::Exited);
    watcher.begin_round().await;
    assert_eq!(scopes(&watcher), [slot(0).scope]);
}

#[tokio::test]
async fn driver_is_asked_on_while_a_gpu_is_unknown_beside_a_drained_one() {
    let mut watcher = watcher_of(vec![slot(1)]);
    let drained = BTreeSet::from(["GPU-1".parse().unwrap()]);
    watcher.registry.set_drained(drained, Instant::now());
    watcher.reset_driver(NoDriver::Failed("an update".to_owned()));
    watcher.handle_report(1, ProcessReport::Exited);
    (watcher.library, watcher.driver_slot.process) =
        (Some(PathBuf::new()), Some(SlotProcess::hung(2)));
    watcher.begin_round().await;
    assert!(watcher.round_deadline.is_some(), "a round has begun");
    let (gpus, version) = (2, None);
    watcher.handle_report(2, ProcessReport::Probed(Response::Driver { gpus, version }));
    watcher.enumerate_gpus();
    assert_eq!(scopes(&watcher), [Scope::Index(0), Scope::Index(1)]);
}
