//! Asks NVML about every GPU, never longer than a deadline, and finds out who the processes are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use super::judge::{Alive, GpuSeen, Listed};
use crate::inventory::nvml::QueryError;
use crate::proc::{self, Owner, Stat};
use crate::sessions::Look;
use crate::units::{Bytes, GpuUuid};

/// An answer of NVML's that is still to come.
pub type Pending = oneshot::Receiver<Result<Look, QueryError>>;

/// The questions that were asked. One GPU has one at most, so a GPU that hangs gathers none.
#[derive(Debug, Default)]
pub struct Questions(BTreeMap<GpuUuid, Pending>);

impl Questions {
    /// What NVML shows of `gpus` until `deadline`; those that do not answer by then are left out.
    pub async fn ask(
        &mut self,
        gpus: &BTreeSet<GpuUuid>,
        ask: impl Fn(&GpuUuid) -> Pending,
        deadline: Instant,
    ) -> BTreeMap<GpuUuid, Look> {
        self.0.retain(|gpu, _| gpus.contains(gpu));
        for gpu in gpus {
            self.0.entry(gpu.clone()).or_insert_with(|| ask(gpu));
        }
        let mut seen = BTreeMap::new();
        let mut open = BTreeMap::new();
        for (gpu, mut pending) in std::mem::take(&mut self.0) {
            match timeout_at(deadline, &mut pending).await {
                Ok(Ok(Ok(look))) => drop(seen.insert(gpu, look)),
                Ok(Ok(Err(error))) => debug!(%gpu, %error, "not audited"),
                // Its thread has ended, with the agent.
                Ok(Err(_)) => {}
                Err(_) => drop(open.insert(gpu, pending)),
            }
        }
        self.0 = open;
        seen
    }
}

/// `look` with who its processes are, by the host's `/proc` at `proc`; without those that the agent itself started, to
/// look at a GPU.
pub fn identified(gpu: GpuUuid, look: Look, proc: &Path) -> GpuSeen {
    let listed = |(pid, bytes)| {
        (!is_our_own(proc, pid)).then(|| Listed {
            pid,
            bytes,
            alive: alive(proc, pid),
        })
    };
    GpuSeen {
        gpu,
        residual: look.residual(),
        unlisted: look.charges.are_told().then(|| look.unlisted()),
        left: Bytes::ZERO,
        processes: look.charges.iter().filter_map(listed).collect(),
    }
}

fn is_our_own(proc: &Path, pid: u32) -> bool {
    let stat = proc::read(&proc.join(pid.to_string()).join("stat"));
    let stat = stat.ok().and_then(|text| Stat::parse(&text));
    stat.is_some_and(|stat| stat.parent == std::process::id())
}

/// None where it is gone. A process whose pid came again in between has another start than the ledger knows.
fn alive(proc: &Path, pid: u32) -> Option<Alive> {
    let folder = proc.join(pid.to_string());
    let cgroup = proc::read(&folder.join("cgroup")).ok()?;
    let stat = proc::read(&folder.join("stat")).ok()?;
    Some(Alive {
        start: Stat::parse(&stat)?.start,
        owner: Owner::parse(&cgroup),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn gpus() -> BTreeSet<GpuUuid> {
        ["GPU-a", "GPU-b"].map(|gpu| gpu.parse().unwrap()).into()
    }

    fn look() -> Look {
        Look {
            used: Bytes::gib(1),
            ..Look::default()
        }
    }

    #[tokio::test]
    async fn a_gpu_that_hangs_is_asked_once_and_left_out_until_it_answers() {
        let (hung, held) = oneshot::channel();
        let held = std::cell::RefCell::new(Some(held));
        let asked = std::cell::Cell::new(0);
        let ask = |gpu: &GpuUuid| {
            asked.set(asked.get() + 1);
            match gpu.as_str() {
                "GPU-a" => held.take().unwrap(),
                _ => {
                    let (answer, answered) = oneshot::channel();
                    answer.send(Ok(look())).unwrap();
                    answered
                }
            }
        };
        let mut questions = Questions::default();
        for _ in 0..5 {
            let begun = Instant::now();
            let deadline = begun + Duration::from_millis(20);
            let seen = questions.ask(&gpus(), ask, deadline).await;
            assert_eq!(
                seen.keys().map(GpuUuid::as_str).collect::<Vec<_>>(),
                ["GPU-b"]
            );
            assert!(
                begun.elapsed() < Duration::from_secs(5),
                "no longer than its deadline"
            );
        }
        assert_eq!(asked.get(), 1 + 5);
        hung.send(Ok(look())).unwrap();
        let seen = questions.ask(&gpus(), ask, Instant::now()).await;
        assert_eq!(seen.len(), 2, "what comes late is taken at the next audit");
    }

    #[test]
    fn this_process_is_alive_and_a_pid_that_nobody_has_is_not() {
        let proc = Path::new("/proc");
        assert!(alive(proc, std::process::id()).is_some());
        assert_eq!(alive(proc, u32::MAX), None);
    }

    #[test]
    fn a_process_whose_name_is_no_text_is_alive_and_known_for_a_child_of_the_agents() {
        let (mut child, _folder) = crate::proc::tests::nameless();
        let proc = Path::new("/proc");
        assert!(alive(proc, child.id()).is_some());
        assert!(is_our_own(proc, child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
