//! The container's poisoned process images: told of, fenced, and decided about.

use std::time::Duration;

use bursar_protocol::error_class::ErrorClass;
use bursar_protocol::fence::Fence;
use bursar_protocol::messages::{Recovery, Response};

use super::super::recovery::{Cause, Decision, Fault, Image, Poisonings, Policy, Suspect};
use super::super::{Account, Process};
use super::{Container, Member};
use crate::clock::Present;
use crate::ledger::Moment;
use crate::units::{GpuUuid, PodUid};

/// News that are kept for who tells them. Older ones are dropped: they were of the same container.
const MOST_NEWS: usize = 64;

impl Container {
    /// What is done about faults from now on. It outlives the agent.
    pub(in super::super) fn set_policy(&mut self, policy: Policy) {
        let before = self.poisonings.clone();
        self.poisonings.set_policy(policy);
        if before != self.poisonings {
            self.write_record();
        }
    }

    /// A process says that its context is poisoned; what it is to do. A code that poisons nothing is no fault.
    pub(in super::super) fn poisoned(
        &mut self,
        pid: u32,
        account: u8,
        code: i32,
        able: bool,
        now: Present,
    ) -> Response {
        self.heard(pid);
        let class = ErrorClass::of(code);
        let is_fault = code != 0 && (class.poisons() || class == ErrorClass::Unknown);
        let cause = Cause::Cuda { code, able };
        let gpu = match self.accounts.get(usize::from(account)) {
            Some(Account::Gpu(gpu)) => Some(gpu.clone()),
            _ => None,
        };
        let decision = is_fault.then(|| self.strike(pid, gpu, cause, now));
        Response::Recovery(match decision.flatten() {
            Some(Decision::Execute) => Recovery::Reexec,
            _ => Recovery::Continue,
        })
    }

    /// A process, where it is the first of its pid namespace: then it is the container's main one if it was begun from
    /// outside of the container. What `kubectl exec` begins is the first of none, and who is the first of a namespace
    /// that the container made was begun inside.
    pub(in super::super) fn first_of_namespace(&self, pid: u32) -> Option<Process> {
        let member = self.members.get(&pid)?;
        (member.pids.last() == Some(&1)).then_some(member.process)
    }

    /// A process's socket ended, after it took what it was told last.
    pub(in super::super) fn hung_up(&mut self, process: Process, image: u64) {
        let member = self.members.get(&process.pid);
        let same = member.filter(|member| (member.process, member.image) == (process, image));
        let Some(generation) = same.map(|member| member.generation) else {
            return;
        };
        let before = self.poisonings.clone();
        self.poisonings.hung_up(process, generation);
        if before != self.poisonings {
            self.write_record();
        }
    }

    pub(in super::super) fn pod(&self) -> &PodUid {
        &self.served.pod
    }

    /// The image that a process is, if one of the GPUs `on` is this container's and it had started `by` then.
    pub(in super::super) fn suspect(
        &self,
        pid: u32,
        on: &[GpuUuid],
        by: Moment,
    ) -> Option<Suspect> {
        let member = self.members.get(&pid)?;
        let mut gpus = self.served.gpus.iter().map(|(gpu, _)| gpu);
        let gpu = gpus.find(|gpu| on.contains(gpu))?.clone();
        (member.process.started() <= by).then_some(Suspect {
            allocation: self.served.allocation,
            image: Image {
                process: member.process,
                generation: member.generation,
            },
            gpu,
        })
    }

    /// An image's context is lost by this XID.
    pub(in super::super) fn xid(&mut self, suspect: &Suspect, code: u32, now: Present) {
        let Image {
            process,
            generation,
        } = suspect.image;
        let member = self.members.get(&process.pid);
        if member.is_some_and(|it| (it.process, it.generation) == (process, generation)) {
            self.strike(
                process.pid,
                Some(suspect.gpu.clone()),
                Cause::Xid(code),
                now,
            );
        }
    }

    /// Decides what waited long enough; nobody has been reached for `alone`.
    pub(in super::super) fn overdue(&mut self, alone: Duration, now: Present) {
        let before = self.poisonings.clone();
        if self.poisonings.overdue(alone, now) {
            self.decide_on_record(&before);
        }
    }

    /// Ends what is poisoned and has a number below `generation`, as was ordered.
    pub(in super::super) fn reach(&mut self, generation: u64, now: Present) {
        let before = self.poisonings.clone();
        if self.poisonings.reach(generation, now) && self.decide_on_record(&before) {
            tracing::info!(allocation = %self.served.allocation, generation, "restart ordered");
        }
    }

    /// A process whose container is to be killed for its fault.
    pub(in super::super) fn condemned(&self) -> Option<Process> {
        let mut images = self.poisonings.condemned();
        images.next().map(|image| image.process)
    }

    /// The faults that are open.
    pub(in super::super) fn faults(&self) -> &[Fault] {
        self.poisonings.faults()
    }

    /// The faults that were opened since this was last asked.
    pub(in super::super) fn take_news(&mut self) -> Vec<Fault> {
        std::mem::take(&mut self.news)
    }

    /// The images that live and are not fenced.
    pub(in super::super) fn images(&self) -> Vec<Image> {
        let members = self.members.values();
        members
            .filter(|member| self.fence(member).is_none())
            .map(|member| Image {
                process: member.process,
                generation: member.generation,
            })
            .collect()
    }

    /// Whether a process's image gets nothing more.
    pub(super) fn is_fenced(&self, pid: u32) -> bool {
        let member = self.members.get(&pid);
        self.drained || member.is_some_and(|member| member.spoiled || self.fence(member).is_some())
    }

    /// Tells every process in its page whether it gets nothing more, and why.
    pub(super) fn tell_fences(&self) {
        for member in self.members.values() {
            if let Some(page) = &member.page {
                page.set_fence(self.fence(member));
            }
        }
    }

    fn fence(
        &self,
        Member {
            process,
            generation,
            ..
        }: &Member,
    ) -> Option<Fence> {
        let fault = self.poisonings.of(*process, *generation);
        let poisoned = fault.map(|fault| Fence::Poisoned(fault.cuda_error.unwrap_or_default()));
        poisoned.or(self.drained.then_some(Fence::Drained))
    }

    /// `gpu`: the container's first where it is not known.
    fn strike(
        &mut self,
        pid: u32,
        gpu: Option<GpuUuid>,
        cause: Cause,
        now: Present,
    ) -> Option<Decision> {
        let member = self.members.get(&pid)?;
        let image = Image {
            process: member.process,
            generation: member.generation,
        };
        let first = || self.served.gpus.first().map(|(gpu, _)| gpu.clone());
        let gpu = gpu.or_else(first)?;
        let before = self.poisonings.clone();
        let (decision, opened) = self.poisonings.strike(image, &gpu, cause, now);
        if let Some(fault) = opened {
            tracing::warn!(allocation = %self.served.allocation, pid, ?fault, "context poisoned");
            if self.news.len() >= MOST_NEWS {
                self.news.remove(0);
            }
            self.news.push(fault);
        }
        if before != self.poisonings {
            self.tell_fences();
            if !self.decide_on_record(&before) {
                return None;
            }
        }
        decision
    }

    /// Records the decisions since `before`, or takes them back where no record can be written: the
    /// maximum of restarts holds over restarts of the agent.
    fn decide_on_record(&mut self, before: &Poisonings) -> bool {
        let written = self.write_record();
        if !written {
            self.poisonings.take_back(before);
        }
        written
    }
}
