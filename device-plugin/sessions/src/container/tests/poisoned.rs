//! Shows the generations of images, their fences, and the effect of poison on the accounts.

use bursar_host::clock::ClockReading;

use crate::{CgroupResolver, ImageMemory};

use bursar_crds::context_policy::ContextAction;
use bursar_protocol::messages::Recovery;

use super::super::super::recovery::{KillTarget, RecoveryAction, RecoveryPolicy};
use super::super::NotAuthorized;
use super::*;

fn now() -> ClockReading {
    ClockReading {
        moment: BootTime(3_600_000),
        wall: jiff::Timestamp::UNIX_EPOCH,
    }
}

fn report(container: &mut Container, pid: u32, code: i32) -> Response {
    let root = Some(Process { pid, start: 1 });
    container.handle_poisoned(pid, 0, code, true, root, now()).0
}

fn set_in_place_policy(container: &mut Container) {
    container.set_policy(RecoveryPolicy::new(ContextAction::InPlace, 100, 600, 0));
}

fn kill_targets(container: &Container, now: BootTime) -> Vec<KillTarget> {
    container.faults.log().kill_targets(now).collect()
}

/// The container's GPU.
pub(super) fn own_gpu() -> [GpuUuid; 1] {
    ["GPU-aaaa".parse().unwrap()]
}

/// Lets an XID 31 of one of the GPUs `on` name a process. Returns whether the process belongs to
/// the container.
pub(super) fn xid(container: &mut Container, pid: u32, on: &[GpuUuid]) -> bool {
    let suspect = container.find_xid_target(pid, on, BootTime(u64::MAX));
    let named = suspect.inspect(|suspect| container.record_xid(suspect, 31, now()));
    named.is_some()
}

/// The process generation of an image, as its welcome reports it.
fn hello_generation(container: &mut Container, pid: u32, image: u64, version: u16) -> Option<u64> {
    let process = Process { pid, start: 1 };
    let admitted = container
        .handle_hello(process, image, version, &[], &FakeHost)
        .unwrap();
    match admitted.welcome {
        Response::Welcome {
            version: spoken,
            generation,
            ..
        } => {
            assert_eq!(spoken, version.min(VERSION));
            generation
        }
        other => panic!("{other:?}"),
    }
}

const REEXEC: Response = Response::Recovery(Recovery::Reexec);
const CONTINUE: Response = Response::Recovery(Recovery::Continue);
const END: Response = Response::Recovery(Recovery::End { seconds: 0 });

/// Resolves each pid to this process, which makes no exec.
struct SameImage;

impl ContainerResolver for SameImage {
    fn process(&self, pid: u32) -> Option<Process> {
        FakeHost.process(pid)
    }

    fn container(&self, pid: u32, pod: &PodUid) -> Option<String> {
        FakeHost.container(pid, pod)
    }

    fn image_memory(&self, _pid: u32) -> Option<ImageMemory> {
        CgroupResolver::new("/proc".into()).image_memory(std::process::id())
    }
}

#[test]
fn new_image_number_without_an_exec_ends_no_fault() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    set_in_place_policy(&mut container);
    let hello = |container: &mut Container, image| {
        let process = Process { pid: 1, start: 1 };
        let admitted = container.handle_hello(process, image, VERSION, &[], &SameImage);
        CreditPage::open(admitted.unwrap().process.page).unwrap()
    };
    assert_eq!(hello(&mut container, 7).fence(), 0);
    assert_eq!(report(&mut container, 1, 700), REEXEC);
    assert_ne!(hello(&mut container, 8).fence(), 0);
}

#[test]
fn image_keeps_its_generation_over_reconnects_and_agents() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    assert_eq!(hello_generation(&mut container, 1, 7, VERSION), Some(1));
    assert_eq!(hello_generation(&mut container, 2, 8, VERSION), Some(2));
    assert_eq!(hello_generation(&mut container, 1, 7, VERSION), Some(1));
    assert_eq!(
        hello_generation(&mut container, 1, 9, VERSION),
        Some(3),
        "an exec"
    );
    let mut again = fixture.start();
    assert_eq!(hello_generation(&mut again, 1, 9, VERSION), Some(3));
    assert_eq!(hello_generation(&mut again, 3, 1, VERSION), Some(4));
}

#[test]
fn no_restart_is_ordered_when_the_checkpoint_fails() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    container.set_policy(RecoveryPolicy::new(ContextAction::InPlace, 1, 600, 0));
    hello(&mut container, 1, 7).unwrap();
    let away = fixture.folder.path().with_extension("away");
    std::fs::rename(fixture.folder.path(), &away).unwrap();
    assert_eq!(report(&mut container, 1, 700), CONTINUE);
    let fenced = Response::Fenced { account: 0 };
    assert_eq!(container.request(1, 0, units(1)), fenced);
    let late = ClockReading {
        moment: now().moment + Duration::from_secs(60),
        ..now()
    };
    container.tick_faults(Duration::ZERO, late);
    assert_eq!(kill_targets(&container, late.moment), []);
    std::fs::rename(&away, fixture.folder.path()).unwrap();
    assert_eq!(report(&mut container, 1, 700), REEXEC);
    // The next agent counts the restart.
    let mut again = fixture.start();
    hello(&mut again, 1, 8).unwrap();
    assert_eq!(report(&mut again, 1, 700), END);
    assert_eq!(
        again.faults.log().faults()[0].decision(),
        Some(RecoveryAction::RestartContainer { over_limit: true })
    );
}

#[test]
fn generation_is_unique_when_the_checkpoint_is_lost() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let before = (1..100).map(|image| hello_generation(&mut container, 1, image, VERSION));
    let most = before.max().flatten().unwrap();
    let (mut fixture, mut after) = restart_with_checkpoint(None);
    let first = hello_generation(&mut after, 1, 7, VERSION).unwrap();
    assert!(first > most);
    // The checkpoint is lost again a moment later.
    std::fs::remove_file(fixture.folder.path().join("record.json")).unwrap();
    fixture.now = fixture.now + Duration::from_millis(1);
    let most = (1..100).map(|image| hello_generation(&mut after, 1, image, VERSION));
    let most = most.max().flatten().unwrap();
    std::fs::remove_file(fixture.folder.path().join("record.json")).unwrap();
    let mut last = fixture.start();
    assert!(hello_generation(&mut last, 1, 7, VERSION).unwrap() > most);
}

#[test]
fn version_1_shim_gets_no_generation_and_no_fence() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    assert_eq!(hello_generation(&mut container, 1, 7, 1), None);
    assert!(xid(&mut container, 1, &own_gpu()));
    let refused = Response::Refused {
        account: 0,
        free: Units::ZERO,
    };
    assert_eq!(container.request(1, 0, units(1)), refused);
    // A shim with a later version gets the agent's version.
    assert_eq!(hello_generation(&mut container, 2, 7, VERSION + 9), Some(2));
}

#[test]
fn poisoned_image_is_fenced_and_its_siblings_are_not() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    set_in_place_policy(&mut container);
    hello(&mut container, 1, 7).unwrap();
    hello(&mut container, 2, 8).unwrap();
    assert_eq!(report(&mut container, 1, 700), REEXEC);
    let fenced = Response::Fenced { account: 0 };
    assert_eq!(container.request(1, 0, units(1)), fenced);
    assert!(is_granted(&container.request(2, 0, units(1))));
    // An image keeps its generation, also with the next agent.
    hello(&mut container, 1, 7).unwrap();
    assert_eq!(container.request(1, 0, units(1)), fenced);
    let mut again = fixture.start();
    hello(&mut again, 1, 7).unwrap();
    assert_eq!(again.request(1, 0, units(1)), fenced);
    hello(&mut again, 1, 9).unwrap();
    assert!(is_granted(&again.request(1, 0, units(1))));
    assert!(again.faults.log().faults().is_empty());
}

#[test]
fn poisoned_image_is_marked_exited_once_by_its_exec() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    set_in_place_policy(&mut container);
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, 512 * MIB);
    report(&mut container, 1, 719);
    let granted = container.container_usage().accounts[0].granted;
    for image in [8, 8, 8] {
        hello(&mut container, 1, image).unwrap();
        let usage = &container.container_usage().accounts[0];
        assert_eq!((usage.granted, usage.exited), (Bytes::ZERO, granted));
    }
    // The pidfd of the former image is that of the new one, so this exit ends nothing of it.
    container.handle_exit(Process { pid: 1, start: 1 }, 7);
    assert_eq!(container.container_usage().accounts[0].exited, granted);
    settle_one(&mut container, 1, Bytes::ZERO);
    assert_eq!(container.container_usage().accounts[0].exited, Bytes::ZERO);
    assert!(is_granted(&container.request(1, 0, units(1 << 30))));
}

#[test]
fn request_waits_for_the_bytes_of_an_image_that_just_ended() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let page = hello(&mut container, 1, 7).unwrap();
    charge_all(&mut container, &page, 1, 512 * MIB);
    let received = Instant::now();
    assert!(
        !container.is_reclaim_pending(1, 0, units(1 << 30), received, now().moment),
        "it lives"
    );
    hello(&mut container, 1, 8).unwrap();
    assert!(container.is_reclaim_pending(1, 0, units(1 << 30), received, now().moment));
    assert!(
        !container.is_reclaim_pending(
            1,
            0,
            units(1 << 30),
            received - RECLAIM_WINDOW,
            now().moment
        ),
        "it waited long enough for others"
    );
    assert!(
        !container.is_reclaim_pending(1, 0, units(256 * MIB), received, now().moment),
        "there is room"
    );
    assert!(
        !container.is_reclaim_pending(1, 0, units(2 << 30), received, now().moment),
        "there never will be"
    );
    settle_one(&mut container, 1, Bytes::ZERO);
    assert!(!container.is_reclaim_pending(1, 0, units(1 << 30), received, now().moment));
    hello(&mut container, 1, 9).unwrap();
    let before = Instant::now() - RECLAIM_WINDOW;
    container.memory.claim_mut().record_exit(before);
    assert!(
        !container.is_reclaim_pending(1, 0, units(1 << 30), received, now().moment),
        "another process holds the bytes"
    );
}

#[test]
fn error_is_no_fault_when_it_is_not_sticky() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    set_in_place_policy(&mut container);
    hello(&mut container, 1, 7).unwrap();
    for code in [0, 1, 2, 4, 201, 500, 600, 801] {
        assert_eq!(report(&mut container, 1, code), CONTINUE, "{code}");
    }
    assert!(container.faults.log().faults().is_empty());
    assert!(is_granted(&container.request(1, 0, units(1))));
    assert_eq!(report(&mut container, 1, 999), REEXEC, "it was probed");
}

#[test]
fn xid_of_another_process_is_ignored() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    hello(&mut container, 1, 7).unwrap();
    let on = own_gpu();
    assert!(!xid(&mut container, 2, &on));
    assert!(container.faults.log().faults().is_empty());
    assert!(xid(&mut container, 1, &on));
    assert_eq!(container.faults.take_unreported().len(), 1);
    assert!(xid(&mut container, 1, &on));
    assert!(
        container.faults.take_unreported().is_empty(),
        "it is the same fault"
    );
}

#[test]
fn xid_is_ignored_when_it_predates_the_process() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    // In clock ticks: the process started 10 ms after the boot.
    hello(&mut container, 1, 7).unwrap();
    let on = own_gpu();
    assert_eq!(container.find_xid_target(1, &on, BootTime(9)), None);
    assert!(container.find_xid_target(1, &on, BootTime(10)).is_some());
}

#[test]
fn xid_of_an_image_is_ignored_by_its_successor() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    hello(&mut container, 1, 7).unwrap();
    let before = container.find_xid_target(1, &own_gpu(), BootTime(u64::MAX));
    hello(&mut container, 1, 8).unwrap();
    container.record_xid(&before.unwrap(), 31, now());
    assert!(container.faults.log().faults().is_empty());
}

#[test]
fn xid_names_the_gpu_of_a_container_with_several() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second, foreign]: [GpuUuid; 3] =
        ["GPU-a", "GPU-b", "GPU-c"].map(|gpu| gpu.parse().unwrap());
    let served = SessionSpec {
        allocation: "00000000000000aa".parse().unwrap(),
        pod: "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap(),
        gpus: vec![
            (first.clone(), Bytes::gib(1)),
            (second.clone(), Bytes::gib(1)),
        ],
        managed: Bytes::ZERO,
        device_ids: None,
    };
    let record = SessionCheckpoint::open(folder.path().join("record.json")).unwrap();
    let (mut container, _) =
        Container::restore(served, record, false, &FakeHost, BootTime::default());
    for (pid, gpu) in [(1, &second), (2, &first)] {
        hello(&mut container, pid, 7).unwrap();
        assert!(xid(&mut container, pid, &[foreign.clone(), gpu.clone()]));
        assert_eq!(&container.faults.take_unreported()[0].gpu, gpu);
    }
    hello(&mut container, 3, 7).unwrap();
    assert!(!xid(&mut container, 3, &[foreign]), "it has no such GPU");
    assert!(!xid(&mut container, 3, &[]));
}

#[test]
fn faults_and_restart_counts_outlive_the_agent() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    container.set_policy(RecoveryPolicy::new(ContextAction::InPlace, 1, 600, 0));
    hello(&mut container, 1, 7).unwrap();
    assert_eq!(report(&mut container, 1, 700), REEXEC);
    let mut again = fixture.start();
    assert_eq!(again.faults.log().faults(), container.faults.log().faults());
    hello(&mut again, 1, 8).unwrap();
    assert_eq!(report(&mut again, 1, 700), END, "one is the maximum");
    let process = Process { pid: 1, start: 1 };
    let target = KillTarget::RootOf(process);
    assert_eq!(kill_targets(&again, now().moment), [target]);
    // The process exits while no agent runs, and its over-limit fault stays open.
    let path = fixture.folder.path().join("record.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"pid\":1,", "\"pid\":666,")).unwrap();
    let after = fixture.start();
    assert_eq!(
        (
            after.faults.log().faults().len(),
            kill_targets(&after, now().moment)
        ),
        (1, Vec::new())
    );
}

#[test]
fn main_process_is_the_init_of_a_nested_pid_namespace() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    for pid in [1, 100, 101, 102] {
        hello(&mut container, pid, 7).unwrap();
    }
    let main: Vec<_> = [1, 100, 101, 102, 103]
        .into_iter()
        .filter(|pid| container.memory.pid_namespace_init(*pid).is_some())
        .collect();
    // The pids below are those of the tests' namespaces; process 1 is the machine's own init.
    assert_eq!(main, [1, 101]);
}

#[test]
fn poisoned_image_is_not_authorized_and_its_successor_is() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    let images = |container: &Container| -> Vec<u64> {
        let images = container.process_images().into_iter();
        images.map(|image| image.generation).collect()
    };
    hello_generation(&mut container, 1, 7, VERSION);
    assert!(container.authorize(1, None, &FakeHost).is_ok());
    assert_eq!(images(&container), [1]);
    report(&mut container, 1, 700);
    assert_eq!(
        container.authorize(1, None, &FakeHost),
        Err(NotAuthorized::Fenced)
    );
    assert!(images(&container).is_empty());
    hello_generation(&mut container, 1, 8, VERSION);
    assert!(container.authorize(1, None, &FakeHost).is_ok());
    assert_eq!(images(&container), [2]);
}

#[test]
fn newest_faults_are_kept_when_too_many_are_unreported() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    for image in 1..=100 {
        hello_generation(&mut container, 1, image, VERSION);
        report(&mut container, 1, 700);
    }
    let news = container.faults.take_unreported();
    let last = news.last().map(|fault| fault.image.generation);
    assert!(news.len() < 100 && last == Some(100), "{news:?}");
}

#[test]
fn fault_is_logged_once_a_minute_when_images_fail_in_a_loop() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    for image in 1..=3 {
        hello(&mut container, 1, image).unwrap();
        report(&mut container, 1, 700);
    }
    let later = Instant::now() + Duration::from_secs(60);
    assert_eq!(container.log_limiter.due("poisoned", later), Some(2));
    assert_eq!(container.faults.take_unreported().len(), 3);
}

#[test]
fn container_is_restarted_when_a_child_holds_ended_memory() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    container.set_policy(RecoveryPolicy::new(ContextAction::Process, 5, 600, 0));
    let page = hello(&mut container, 2, 7).unwrap();
    charge_all(&mut container, &page, 2, 512 * MIB);
    let (process, root) = (Process { pid: 2, start: 1 }, Process { pid: 1, start: 1 });
    container.handle_poisoned(2, 0, 700, false, Some(root), now());
    let alone = KillTarget::Process(process);
    assert_eq!(kill_targets(&container, now().moment), [alone]);
    container.handle_exit(process, 7);
    // The driver lists the process while a forked child shares its files.
    let listed: ProcessMemory = [(2, Some(Bytes::mib(512)))].into_iter().collect();
    let sample = |container: &mut Container, listed: &ProcessMemory, after: u64| {
        let query = container.reclaim_query().unwrap_or_default();
        let at = now().moment + Duration::from_millis(after);
        container.apply_samples(&query, std::slice::from_ref(listed), &FakeHost, at);
    };
    container.faults.take_unreported();
    sample(&mut container, &listed, 0);
    sample(&mut container, &listed, 1_999);
    assert_eq!(kill_targets(&container, now().moment), []);
    assert!(container.faults.take_unreported().is_empty());
    sample(&mut container, &listed, 2_000);
    assert_eq!(
        kill_targets(&container, now().moment),
        [KillTarget::Root(root)]
    );
    let [held] = &container.faults.take_unreported()[..] else {
        panic!()
    };
    assert!(held.is_memory_held());
    assert!(container.container_usage().accounts[0].exited >= Bytes::mib(512));
    sample(&mut container, &ProcessMemory::default(), 2_100);
    assert!(container.faults.log().faults().is_empty());
    assert_eq!(container.container_usage().accounts[0].exited, Bytes::ZERO);
}

#[test]
fn replacement_of_an_ended_process_gets_its_memory() {
    let fixture = Fixture::with_quota(Bytes::gib(1));
    let mut container = fixture.start();
    container.set_policy(RecoveryPolicy::new(ContextAction::Process, 5, 600, 0));
    let page = hello(&mut container, 2, 7).unwrap();
    hello(&mut container, 4, 7).unwrap();
    charge_all(&mut container, &page, 2, 1024 * MIB);
    let root = Some(Process { pid: 1, start: 1 });
    hello(&mut container, 3, 8).unwrap();
    let waits = |container: &mut Container| {
        container.is_reclaim_pending(3, 0, units(1 << 30), Instant::now(), now().moment)
    };
    assert!(!waits(&mut container), "it lives");
    container.handle_poisoned(2, 0, 700, false, root, now());
    assert!(waits(&mut container), "its kill is due");
    container.handle_exit(Process { pid: 2, start: 1 }, 7);
    assert!(container.is_reclaim_pending(3, 0, units(1 << 30), Instant::now(), now().moment));
    settle_one(&mut container, 2, Bytes::ZERO);
    assert!(
        container.faults.log().faults().is_empty(),
        "its memory is free"
    );
    assert!(is_granted(&container.request(3, 0, units(512 * MIB))));
    assert!(
        is_granted(&container.request(4, 0, units(512 * MIB))),
        "a sibling"
    );
}

#[test]
fn process_gets_the_time_to_its_end_when_its_shim_reads_it() {
    for (version, answer) in [
        (2, CONTINUE),
        (3, Response::Recovery(Recovery::End { seconds: 7 })),
    ] {
        let fixture = Fixture::with_quota(Bytes::gib(1));
        let mut container = fixture.start();
        container.set_policy(RecoveryPolicy::new(ContextAction::Process, 5, 600, 7));
        hello_generation(&mut container, 1, 7, version);
        assert_eq!(report(&mut container, 1, 700), answer, "version {version}");
        container.set_policy(RecoveryPolicy::new(ContextAction::Report, 5, 600, 7));
        hello_generation(&mut container, 2, 7, version);
        assert_eq!(report(&mut container, 2, 700), CONTINUE);
    }
}
