//! Tests the bound of what one probe reads.

use bursar_host::testing::stat;

use super::*;
use crate::attestation::GapReason;
use crate::attestation::mounts::MountTable;

/// An attestor over a `/proc` of plain files, in which each process has one page mapped.
fn attestor(pids: &[u32]) -> (PodAttestor, tempfile::TempDir) {
    let proc = tempfile::tempdir().unwrap();
    for pid in pids {
        let folder = proc.path().join(pid.to_string());
        std::fs::create_dir(&folder).unwrap();
        let line = "7f0000000000-7f0000001000 r--p 00000000 00:00 0 /lib/a\n";
        std::fs::write(folder.join("maps"), line).unwrap();
    }
    let config = Config::parse(Path::new("agent.toml"), "").unwrap();
    let mut attestor = PodAttestor::new(&config);
    attestor.paths.proc = proc.path().to_owned();
    (attestor, proc)
}

fn host_view() -> HostView {
    HostView {
        now: Instant::now(),
        uptime: Duration::ZERO,
        own_mounts: MountTable::default(),
        shim: None,
        user_namespace: None,
        gpu_nodes: BTreeMap::new(),
    }
}

/// The processes that a probe with this bound has read, and why the container is not attested.
fn probe(
    attestor: &mut PodAttestor,
    pids: &[u32],
    now: Instant,
    mut room: u64,
) -> (Vec<u32>, Option<GapReason>) {
    let host = HostView { now, ..host_view() };
    let stats: Vec<_> = pids.iter().map(|pid| (*pid, stat(1, false))).collect();
    let (running, gap) = attestor.probe_processes(&stats, None, &host, &mut room);
    let read = running.into_keys().collect();
    (read, gap.map(|gap| gap.reason))
}

#[test]
fn container_is_not_attested_when_a_process_waits_for_60_s() {
    let (mut attestor, _proc) = attestor(&[1, 2]);
    let (start, pids) = (Instant::now(), [1, 2]);
    let minute = Duration::from_secs(60);
    let mut probe = |after, room| probe(&mut attestor, &pids, start + after, room);
    assert_eq!(probe(Duration::ZERO, 0), (vec![], None));
    assert_eq!(probe(minute - Duration::from_millis(1), 0), (vec![], None));
    // One of both processes is read, and the other still waits.
    let (read, reason) = probe(minute, 1);
    assert_eq!((read.len(), reason), (1, Some(GapReason::NotAttested)));
    assert_eq!(probe(minute, MAPS_BYTES_PER_PROBE), (vec![1, 2], None));
}

#[test]
fn process_that_waited_longest_is_read_first() {
    let (mut attestor, _proc) = attestor(&[1, 2]);
    let start = Instant::now();
    let later = start + Duration::from_secs(1);
    assert_eq!(probe(&mut attestor, &[2], start, 0), (vec![], None));
    assert_eq!(probe(&mut attestor, &[1, 2], later, 1), (vec![2], None));
}

/// Writes a process whose mount table has these lines.
fn write_process(proc: &Path, pid: u32, flags: u32, threads: u32, mounts: &str) {
    let folder = proc.join(pid.to_string());
    std::fs::create_dir_all(folder.join("ns")).unwrap();
    let namespace = folder.join("ns/mnt");
    let _ = std::os::unix::fs::symlink("mnt:[1]", namespace);
    let field = |number| match number {
        9 => flags.to_string(),
        20 => threads.to_string(),
        22 => (u64::from(pid) * 10).to_string(),
        _ => "0".to_owned(),
    };
    let fields: Vec<String> = (4..=52).map(field).collect();
    let stat = format!("{pid} (a) S {}\n", fields.join(" "));
    std::fs::write(folder.join("stat"), stat).unwrap();
    std::fs::write(folder.join("mountinfo"), mounts).unwrap();
    std::fs::write(folder.join("maps"), "").unwrap();
}

/// The allocations of a pod whose container has these processes, each with whether it is not
/// attested.
fn attest(
    attestor: &mut PodAttestor,
    cgroup: &Path,
    now: Instant,
) -> Vec<(AllocationId, Option<GapReason>)> {
    let target = AttestationTarget {
        pod: "p".parse().unwrap(),
        cgroup: cgroup.to_owned(),
        allocations: [AllocationId::from_bits(7)].into(),
    };
    let found = attestor.probe(&target, &HostView { now, ..host_view() });
    let reason = |found: &AttestedContainer| found.gap.as_ref().map(|gap| gap.reason);
    found
        .iter()
        .map(|found| (found.allocation, reason(found)))
        .collect()
}

const ROOT: &str = "1 0 8:1 / / rw - ext4 /dev/a rw\n";
const EXITING: u32 = 4;

/// A pod's cgroup with one container of these processes.
fn cgroup_of(pids: &[u32]) -> tempfile::TempDir {
    let pod = tempfile::tempdir().unwrap();
    let folder = pod.path().join("main");
    std::fs::create_dir(&folder).unwrap();
    let pids: String = pids.iter().map(|pid| format!("{pid}\n")).collect();
    std::fs::write(folder.join("cgroup.procs"), pids).unwrap();
    pod
}

/// Lets an earlier probe know the allocation of the container `main`.
fn know_allocation(attestor: &mut PodAttestor, cgroup: &Path, now: Instant) {
    let record = ContainerRecord {
        first_process: (1, stat(10, false)),
        allocation: Some(AllocationId::from_bits(7)),
        rights: RightsRecord::default(),
        is_final: true,
        read_at: now,
    };
    attestor.containers.insert(cgroup.join("main"), record);
}

#[test]
fn container_keeps_its_allocation_when_its_first_process_hides_mounts() {
    let (mut attestor, proc) = attestor(&[]);
    let (pod, start) = (cgroup_of(&[1]), Instant::now());
    know_allocation(&mut attestor, pod.path(), start);
    let own = AllocationId::from_bits(7);
    let hidden = [(own, Some(GapReason::NotAttested))];
    write_process(proc.path(), 1, 0, 1, "");
    assert_eq!(attest(&mut attestor, pod.path(), start), hidden, "chroot");
    // The first thread has ended, and no other one shows the mounts: it may be ending too.
    write_process(proc.path(), 1, EXITING, 2, "");
    let mut attest = |seconds| {
        attest(
            &mut attestor,
            pod.path(),
            start + Duration::from_secs(seconds),
        )
    };
    assert_eq!(attest(1), [(own, None)]);
    assert_eq!(attest(5), hidden);
    write_process(proc.path(), 1, EXITING, 1, "");
    assert_eq!(attest(6), [], "it has ended");
}

#[test]
fn hidden_container_is_not_attested_after_5_s_when_it_was_never_seen() {
    let (mut attestor, proc) = attestor(&[]);
    let (pod, start) = (cgroup_of(&[1]), Instant::now());
    write_process(proc.path(), 1, 0, 1, "");
    let mut attest = |seconds| {
        attest(
            &mut attestor,
            pod.path(),
            start + Duration::from_secs(seconds),
        )
    };
    assert_eq!(attest(0), []);
    let hidden = (AllocationId::from_bits(7), Some(GapReason::NotAttested));
    assert_eq!(attest(5), [hidden]);
}

#[test]
fn mounts_are_read_by_the_next_process_or_thread_with_the_root() {
    let (attestor, proc) = attestor(&[]);
    write_process(proc.path(), 1, 0, 1, "");
    write_process(proc.path(), 2, 0, 1, ROOT);
    let of = |pids: &[u32]| {
        let (processes, _) = attestor.processes_of(&cgroup_of(pids).path().join("main"));
        attestor.read_view(&processes).map(|view| view.folder)
    };
    assert_eq!(of(&[1]), None);
    assert_eq!(of(&[1, 2]), Some(proc.path().join("2")));
    // Its root is another folder than the namespace's.
    let thread = proc.path().join("2/task/2");
    std::fs::create_dir_all(&thread).unwrap();
    std::os::unix::fs::symlink("/volume", thread.join("root")).unwrap();
    assert_eq!(of(&[1, 2]), None);
    write_process(proc.path(), 3, EXITING, 2, "");
    write_process(&proc.path().join("3/task"), 4, 0, 2, ROOT);
    assert_eq!(of(&[3]), Some(proc.path().join("3/task/4")));
    let elsewhere = proc.path().join("4");
    write_process(proc.path(), 4, 0, 1, ROOT);
    std::fs::remove_file(elsewhere.join("ns/mnt")).unwrap();
    std::os::unix::fs::symlink("mnt:[2]", elsewhere.join("ns/mnt")).unwrap();
    assert_eq!(of(&[1, 4]), None, "of another mount namespace");
}
