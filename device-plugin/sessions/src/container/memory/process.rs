//! Holds what the agent knows of one process of a container.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use bursar_protocol::credit_page::{AccountSlot, CreditPage};
use bursar_protocol::units::Units;
use tokio_util::sync::CancellationToken;

use crate::{ImageMemory, Process, ProcessImage};

/// A process that has said hello, or that the checkpoint lists.
pub(super) struct ProcessState {
    pub(super) process: Process,
    pub(super) image: u64,
    /// The image's memory. `None` until the process says hello to a restarted agent.
    pub(super) image_memory: Option<ImageMemory>,
    /// The process generation of the image.
    pub(super) generation: u64,
    /// The protocol version that the process speaks; 1 while the agent does not know.
    pub(super) protocol_version: u16,
    /// The pid in each pid namespace around the process, which the kernel fixes at the start.
    pub(super) namespace_pids: Vec<u32>,
    /// `None` until the process says hello to a restarted agent.
    pub(super) page: Option<CreditPage>,
    /// The descriptors of that page, of the former one and of the last adopted one, for reuse.
    /// Threads of the process may still use each of them.
    pub(super) page_fds: Vec<Arc<OwnedFd>>,
    /// Whether the process has sent a message after its hello, and so uses the page that it
    /// received. A process that was stopped, or stopped waiting, goes on with its former page.
    pub(super) has_adopted_page: bool,
    /// The most that the process has reported as exported, by account.
    pub(super) exported: Vec<Units>,
    /// Whether the page did not accept a grant, which never happens to a process that charges by
    /// the rules. Such a process is fenced.
    pub(super) has_broken_page: bool,
    /// Cancels the task of the process when another connection takes over.
    pub(super) superseded: CancellationToken,
}

impl ProcessState {
    /// A process before its hello to this agent.
    pub(super) fn new(process: Process, image: u64, generation: u64) -> ProcessState {
        ProcessState {
            process,
            image,
            image_memory: None,
            generation,
            protocol_version: 1,
            namespace_pids: Vec::new(),
            page: None,
            page_fds: Vec::new(),
            has_adopted_page: false,
            exported: Vec::new(),
            has_broken_page: false,
            superseded: CancellationToken::new(),
        }
    }

    /// The image that the process runs.
    pub(super) fn process_image(&self) -> ProcessImage {
        ProcessImage {
            process: self.process,
            generation: self.generation,
        }
    }

    /// Whether the kernel shows that the process runs the image of its hello.
    pub(super) fn keeps_image(&self) -> bool {
        let memory = self.image_memory.as_ref();
        memory.is_some_and(|memory| !memory.is_replaced())
    }

    /// The slot of an account in the page that the agent gave to the process last.
    pub(super) fn slot(&self, account: usize) -> Option<&AccountSlot> {
        self.page.as_ref()?.slot(account)
    }

    /// The slot of an account that the process charges to, as far as the agent can see.
    pub(super) fn adopted_slot(&self, account: usize) -> Option<&AccountSlot> {
        self.adopted_page()?.slot(account)
    }

    /// The page that the process charges to, as far as the agent can see.
    fn adopted_page(&self) -> Option<&CreditPage> {
        self.page.as_ref().filter(|_| self.has_adopted_page)
    }

    /// The bytes that the process has exported, by GPU; empty where it never did. Managed memory,
    /// the last account, ends with its process, whatever the page says. The figure never falls: a
    /// tenant process may lower its page while others hold its exports.
    pub(super) fn current_exports(&self) -> Vec<Units> {
        let Some(page) = self.adopted_page() else {
            return self.exported.clone();
        };
        let on_record = |index| self.exported.get(index).copied().unwrap_or(Units::ZERO);
        let mut exported: Vec<_> = (0..)
            .map_while(|index| Some(page.slot(index)?.exported().max(on_record(index))))
            .collect();
        exported.pop();
        if exported.iter().all(|units| *units == Units::ZERO) {
            return Vec::new();
        }
        exported
    }
}
