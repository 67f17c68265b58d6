//! Tests the bound of what one probe reads.

use bursar_host::testing::stat;

use super::*;
use crate::attestation::GapReason;

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
    let first = (&None, &MountTable::default());
    let (running, gap) = attestor.probe_processes(&stats, first, &host, &mut room);
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
