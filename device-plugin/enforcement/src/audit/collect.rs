//! Asks NVML about every GPU, with a deadline, and identifies the listed processes.
//!
//! The audit reads the accounts between NVML's answer and the identification. So a process that
//! lives at its identification is no session that ended meanwhile. A process that started after the
//! request is not the process that NVML listed, nor is one that started after NVML first listed its
//! pid ([`super::listings`]).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use bursar_gpu::memory_sample::GpuMemorySample;
use bursar_gpu::nvml::QueryError;
use bursar_host::procfs::{self, ProcessOwner, Stat};
use bursar_ledger::units::{Bytes, GpuUuid};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use super::compare::{GpuSample, ListedProcess, LiveProcess};
use super::listings::{AnswerTimes, Listings};

/// An answer of NVML that is pending.
pub(crate) type PendingSample = oneshot::Receiver<Result<GpuMemorySample, QueryError>>;

/// Pending requests, each with its time in clock ticks since boot. A GPU has one at most, so a GPU
/// that hangs accumulates none.
#[derive(Debug, Default)]
pub(crate) struct SampleRequests {
    pending: BTreeMap<GpuUuid, (u64, PendingSample)>,
    /// The processes that each GPU's last answer lists.
    pub(crate) listings: BTreeMap<GpuUuid, Listings>,
}

/// NVML's sample of a GPU.
#[derive(Debug)]
pub(crate) struct SampleAnswer {
    pub(crate) times: AnswerTimes,
    /// The memory and processes that NVML reported.
    pub sample: GpuMemorySample,
}

impl SampleRequests {
    /// Requests a sample of each of `gpus`; those that do not answer by `deadline` are left out.
    pub(crate) async fn collect(
        &mut self,
        gpus: &BTreeSet<GpuUuid>,
        request_sample: impl Fn(&GpuUuid) -> PendingSample,
        deadline: Instant,
    ) -> BTreeMap<GpuUuid, SampleAnswer> {
        self.pending.retain(|gpu, _| gpus.contains(gpu));
        self.listings.retain(|gpu, _| gpus.contains(gpu));
        for gpu in gpus {
            let request = || (procfs::now_ticks(), request_sample(gpu));
            self.pending.entry(gpu.clone()).or_insert_with(request);
        }
        let mut answers = BTreeMap::new();
        let mut unanswered = BTreeMap::new();
        for (gpu, (requested_at, mut pending)) in std::mem::take(&mut self.pending) {
            match timeout_at(deadline, &mut pending).await {
                Ok(Ok(Ok(sample))) => drop(answers.insert(
                    gpu,
                    SampleAnswer {
                        times: AnswerTimes {
                            asked_at: requested_at,
                            answered_at: procfs::now_ticks(),
                        },
                        sample,
                    },
                )),
                Ok(Ok(Err(error))) => debug!(%gpu, %error, "failed to sample the GPU"),
                // The process of the GPU has ended, or the GPU has none at present.
                Ok(Err(_)) => {}
                Err(_) => drop(unanswered.insert(gpu, (requested_at, pending))),
            }
        }
        self.pending = unanswered;
        answers
    }
}

/// Identifies an answer's processes by the host's `/proc` at `proc`, and leaves out the agent's own
/// children. The caller has read the accounts before. Programs of the host may use GPUs if
/// `allowed` has their names.
pub(crate) fn identify(
    gpu: GpuUuid,
    answer: SampleAnswer,
    proc: &Path,
    allowed: &BTreeSet<String>,
    listings: &mut Listings,
) -> GpuSample {
    let SampleAnswer { times, sample } = answer;
    let before = std::mem::take(listings);
    let percents = sample.sm_percents.as_ref();
    let mut listed = |(pid, bytes)| {
        if is_agent_child(proc, pid) {
            return None;
        }
        let find = |started_before| find_live(proc, pid, started_before);
        let (live, is_gone) = listings.add(&before, pid, times, find);
        Some(ListedProcess {
            pid,
            bytes,
            sm_percent: percents.map(|percents| percents.get(&pid).copied().unwrap_or_default()),
            live: live.map(|live| allow(live, proc, pid, allowed)),
            is_gone,
        })
    };
    let mut processes: Vec<ListedProcess> = sample.charges.iter().filter_map(&mut listed).collect();
    // Contextless memory of others stays unattributed, because the driver's own services have some,
    // and that of an exited process has another holder.
    let is_meant = |listed: &ListedProcess| listed.live.as_ref().is_some_and(is_in_pod);
    let mut in_pods = |amounts: &BTreeMap<u32, Bytes>| -> Vec<ListedProcess> {
        let amounts = amounts.iter().map(|(pid, bytes)| (*pid, Some(*bytes)));
        amounts.filter_map(&mut listed).filter(is_meant).collect()
    };
    let contextless = in_pods(&sample.contextless);
    let importers = in_pods(&sample.imported);
    let contextless_bytes = contextless.iter().filter_map(|listed| listed.bytes).sum();
    processes.extend(contextless);
    let unlisted = sample.unattributed().saturating_sub(contextless_bytes);
    GpuSample {
        gpu,
        unattributed_signed: sample.unattributed_signed(),
        unattributed: sample.charges.has_all_amounts().then_some(unlisted),
        unreclaimed_or_retained: Bytes::ZERO,
        processes,
        importers,
        has_all_holders: sample.has_all_holders,
    }
}

/// Whether a process lives in a pod.
pub(super) fn is_in_pod(live: &LiveProcess) -> bool {
    matches!(live.owner, ProcessOwner::Container { .. })
}

/// Whether a process is a runtime of the agent.
pub(super) fn is_agent_child(proc: &Path, pid: u32) -> bool {
    Stat::read(proc, pid).is_some_and(|stat| stat.parent == std::process::id())
}

/// Recognizes an allowed program of the host. The agent allows no process of a pod by its name,
/// because a tenant chooses the name.
fn allow(live: LiveProcess, proc: &Path, pid: u32, allowed: &BTreeSet<String>) -> LiveProcess {
    if allowed.is_empty() || live.owner != ProcessOwner::Host {
        return live;
    }
    let comm = procfs::read_small(&proc.join(pid.to_string()).join("comm"));
    match comm.is_ok_and(|comm| procfs::is_named(&comm, allowed)) {
        true => LiveProcess {
            owner: ProcessOwner::AllowedHost,
            ..live
        },
        false => live,
    }
}

/// The process with a pid, if it lives and started before `requested_at`.
pub(crate) fn find_live(proc: &Path, pid: u32, requested_at: u64) -> Option<LiveProcess> {
    let stat = Stat::read(proc, pid)?;
    // With cgroup v1 an exited thread is shown in no container (cgroup(7), `proc_cgroup_show`).
    let folder = procfs::living_folder(proc, pid, &stat)?;
    let cgroup = procfs::read_small(&folder.join("cgroup")).ok()?;
    live_process(&stat, ProcessOwner::parse(&cgroup), requested_at)
}

/// Whether a process that was observed earlier still runs.
pub fn is_running(proc: &Path, pid: u32, start: u64) -> bool {
    Stat::read(proc, pid).is_some_and(|stat| stat.start_ticks == start && !stat.has_exited())
}

/// None for a process that has ended, and for one that started after the request to the driver at
/// `requested_at` and reuses the pid of the listed process.
pub(super) fn live_process(
    stat: &Stat,
    owner: ProcessOwner,
    requested_at: u64,
) -> Option<LiveProcess> {
    let start = stat.start_ticks;
    (!stat.has_exited() && start < requested_at).then_some(LiveProcess { start, owner })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn gpus() -> BTreeSet<GpuUuid> {
        ["GPU-a", "GPU-b"].map(|gpu| gpu.parse().unwrap()).into()
    }

    fn sample() -> GpuMemorySample {
        GpuMemorySample {
            used: Bytes::gib(1),
            ..GpuMemorySample::default()
        }
    }

    #[tokio::test]
    async fn hanging_gpu_is_asked_once_and_left_out_until_it_answers() {
        let (late_answer, hung) = oneshot::channel();
        let hung = std::cell::RefCell::new(Some(hung));
        let request_count = std::cell::Cell::new(0);
        let request = |gpu: &GpuUuid| {
            request_count.set(request_count.get() + 1);
            match gpu.as_str() {
                "GPU-a" => hung.take().unwrap(),
                _ => {
                    let (answer, answered) = oneshot::channel();
                    answer.send(Ok(sample())).unwrap();
                    answered
                }
            }
        };
        let mut requests = SampleRequests::default();
        for _ in 0..5 {
            let started = Instant::now();
            let deadline = started + Duration::from_millis(20);
            let answers = requests.collect(&gpus(), request, deadline).await;
            assert_eq!(
                answers.keys().map(GpuUuid::as_str).collect::<Vec<_>>(),
                ["GPU-b"]
            );
            assert!(
                started.elapsed() < Duration::from_secs(5),
                "no longer than its deadline"
            );
        }
        assert_eq!(request_count.get(), 1 + 5);
        late_answer.send(Ok(sample())).unwrap();
        let answers = requests.collect(&gpus(), request, Instant::now()).await;
        assert_eq!(
            answers.len(),
            2,
            "what comes late is taken at the next audit"
        );
    }

    /// Writes the files of a process, in this cgroup, to a folder in place of `/proc`.
    fn write_process(proc: &Path, pid: u32, cgroup: &str) {
        let folder = proc.join(pid.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        let stat = std::fs::read_to_string("/proc/1/stat").unwrap();
        std::fs::write(folder.join("stat"), stat).unwrap();
        std::fs::write(folder.join("cgroup"), cgroup).unwrap();
    }

    #[test]
    fn contextless_memory_is_charged_to_processes_of_pods_alone() {
        let proc = tempfile::tempdir().unwrap();
        let uid = "11111111-2222-3333-4444-555555555555";
        write_process(proc.path(), 7, &format!("0::/kubepods/pod{uid}/main\n"));
        write_process(proc.path(), 8, "0::/system.slice/driver.service\n");
        let contextless = [7, 8, 9].map(|pid| (pid, Bytes::gib(1)));
        let answer = SampleAnswer {
            times: AnswerTimes {
                asked_at: u64::MAX,
                answered_at: u64::MAX,
            },
            sample: GpuMemorySample {
                used: Bytes::gib(4),
                contextless: contextless.into(),
                ..GpuMemorySample::default()
            },
        };
        let none = BTreeSet::new();
        let sample = identify(
            "GPU-a".parse().unwrap(),
            answer,
            proc.path(),
            &none,
            &mut Listings::default(),
        );
        let listed = sample.processes.iter().map(|listed| listed.pid);
        assert_eq!(listed.collect::<Vec<_>>(), [7]);
        assert_eq!(sample.unattributed, Some(Bytes::gib(3)));
    }

    #[test]
    fn only_the_hosts_programs_are_allowed_by_name() {
        let proc = tempfile::tempdir().unwrap();
        let uid = "11111111-2222-3333-4444-555555555555";
        let host = "0::/system.slice/display.service\n";
        let processes = [
            (7, host, "nvidia-persiste\n", ProcessOwner::AllowedHost),
            (8, host, "miner\n", ProcessOwner::Host),
        ];
        for (pid, cgroup, comm, _) in &processes {
            write_process(proc.path(), *pid, cgroup);
            std::fs::write(proc.path().join(format!("{pid}/comm")), comm).unwrap();
        }
        write_process(proc.path(), 9, &format!("0::/kubepods/pod{uid}/main\n"));
        std::fs::write(proc.path().join("9/comm"), "nvidia-persiste\n").unwrap();
        let allowed = BTreeSet::from(["nvidia-persistenced".to_owned(), String::new()]);
        let owner = |pid| {
            let live = find_live(proc.path(), pid, u64::MAX).unwrap();
            allow(live, proc.path(), pid, &allowed).owner
        };
        for (pid, .., expected) in processes {
            assert_eq!(owner(pid), expected, "{pid}");
        }
        assert!(matches!(owner(9), ProcessOwner::Container { .. }));
    }

    #[test]
    fn own_process_is_live_and_an_unused_pid_is_not() {
        let proc = Path::new("/proc");
        let own = find_live(proc, std::process::id(), u64::MAX).unwrap();
        assert_eq!(find_live(proc, u32::MAX, u64::MAX), None);
        let before = find_live(proc, std::process::id(), own.start);
        assert_eq!(before, None, "it started after the driver was asked");
    }

    #[test]
    fn zombie_is_not_live() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let proc = Path::new("/proc");
        let stat = proc.join(child.id().to_string()).join("stat");
        while !bursar_host::procfs::read_small(&stat)
            .unwrap()
            .contains(") Z ")
        {
            std::thread::yield_now();
        }
        assert_eq!(find_live(proc, child.id(), u64::MAX), None);
        child.wait().unwrap();
    }

    #[test]
    fn process_is_live_when_its_name_is_not_utf8() {
        let (mut child, _folder) = bursar_host::testing::process_with_non_utf8_name();
        let proc = Path::new("/proc");
        assert!(find_live(proc, child.id(), u64::MAX).is_some());
        assert!(is_agent_child(proc, child.id()));
        let start = find_live(proc, child.id(), u64::MAX).unwrap().start;
        assert!(is_running(proc, child.id(), start));
        assert!(!is_running(proc, child.id(), start + 1));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
