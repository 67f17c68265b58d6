//! Where questions about kept memory and tokens are handed in: by the conversations with tenants, and by the node.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::token::{TokenRefusal, TokenRequest, TokenResponse};
use tokio::sync::{mpsc, oneshot};

use super::leases::{LedgerUpdate, NodeView};
use crate::sessions::Process;
use crate::units::{Bytes, GpuUuid, LeaseId};

pub use super::leases::Caller;

/// How long an answer may take: longer than what a worker and the vault may.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(25);

/// Questions of tenants that wait for the desk, and notes of the node.
const QUEUE_CAPACITY: usize = 256;

/// What the vault keeps of each GPU, by lease.
pub type LiveLeases = BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>>;

/// An answer, with the lease's descriptor where one goes with it.
#[derive(Debug)]
pub struct Reply {
    /// The answer.
    pub response: RetainedResponse,
    /// The descriptor.
    pub fd: Option<OwnedFd>,
}

impl Reply {
    /// A refusal.
    pub fn refused(why: RetainedRefusal) -> Reply {
        Reply {
            response: RetainedResponse::Refused(why),
            fd: None,
        }
    }
}

/// The memory of a lease that the vault does not have yet.
#[derive(Debug)]
pub struct CreatedMemory {
    /// How large it is.
    pub bytes: Bytes,
    /// Its descriptor.
    pub fd: OwnedFd,
}

/// What is handed in.
#[derive(Debug)]
pub enum Command {
    /// A tenant asks.
    Request {
        /// Who.
        asker: Caller,
        /// What.
        question: RetainedRequest,
        /// Where the descriptor of a lease that is made goes before the answer: then none goes with that.
        made: Option<oneshot::Sender<CreatedMemory>>,
        /// Where the answer goes.
        reply: oneshot::Sender<Reply>,
    },
    /// A tenant asks about a token.
    Token {
        /// Who.
        asker: Caller,
        /// What.
        question: TokenRequest,
        /// Where the answer goes.
        reply: oneshot::Sender<TokenResponse>,
    },
    /// A process image ended, by its death or an exec.
    ProcessEnded(Process),
    /// The node stands like this.
    Reconcile {
        /// The node.
        node: NodeView,
        /// What its ledger is told.
        reply: oneshot::Sender<LedgerUpdate>,
    },
    /// The node's ledger has on record what it was told that leases left.
    Recorded(Vec<LeaseId>),
}

/// The desk.
#[derive(Clone, Debug)]
pub struct LeaseHandle {
    tenants: mpsc::Sender<Command>,
    node: mpsc::Sender<Command>,
}

/// What is handed in at the desk.
#[derive(Debug)]
pub struct Commands {
    tenants: mpsc::Receiver<Command>,
    node: mpsc::Receiver<Command>,
}

impl Commands {
    /// The next note; none once nobody can hand one in. The node's come first: its pods start no sooner, however much
    /// tenants ask.
    pub async fn recv(&mut self) -> Option<Command> {
        tokio::select! {
            biased;
            note = self.node.recv() => note,
            note = self.tenants.recv() => note,
        }
    }
}

impl LeaseHandle {
    /// A desk, and what is handed in there.
    pub fn channel() -> (LeaseHandle, Commands) {
        let (tenants, asked) = mpsc::channel(QUEUE_CAPACITY);
        let (node, told) = mpsc::channel(QUEUE_CAPACITY);
        let notes = Commands {
            tenants: asked,
            node: told,
        };
        (LeaseHandle { tenants, node }, notes)
    }

    /// The answer to a tenant's question, in bounded time; where a lease is made, `made` is told first.
    pub async fn request(
        &self,
        asker: Caller,
        question: RetainedRequest,
        made: Option<oneshot::Sender<CreatedMemory>>,
    ) -> Reply {
        let asked = |reply| Command::Request {
            asker,
            question,
            made,
            reply,
        };
        let unavailable = || Reply::refused(RetainedRefusal::Unavailable);
        self.send(asked).await.unwrap_or_else(unavailable)
    }

    /// The answer to a tenant's question about a token, in bounded time.
    pub async fn request_token(&self, asker: Caller, question: TokenRequest) -> TokenResponse {
        let asked = |reply| Command::Token {
            asker,
            question,
            reply,
        };
        let unavailable = || TokenResponse::Refused(TokenRefusal::Unavailable);
        self.send(asked).await.unwrap_or_else(unavailable)
    }

    async fn send<T>(&self, note: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let answer = async {
            self.tenants.send(note(reply)).await.ok()?;
            answer.await.ok()
        };
        tokio::time::timeout(REQUEST_TIMEOUT, answer)
            .await
            .ok()
            .flatten()
    }

    /// A process image ended; what it asked before comes first.
    pub async fn process_ended(&self, process: Process) {
        let _ = self.tenants.send(Command::ProcessEnded(process)).await;
    }

    /// The node stands like this; what its ledger is told. Nothing where nobody keeps any more: the agent is ending.
    pub async fn reconcile(&self, node: NodeView) -> LedgerUpdate {
        let (reply, turn) = oneshot::channel();
        let _ = self.node.send(Command::Reconcile { node, reply }).await;
        turn.await.unwrap_or_default()
    }

    /// What leases left is on record in the node's ledger.
    pub async fn confirm_recorded(&self, leases: Vec<LeaseId>) {
        let _ = self.node.send(Command::Recorded(leases)).await;
    }
}

#[cfg(test)]
mod tests {
    use bursar_protocol::VERSION;

    use super::*;
    use crate::units::AllocationId;

    const NOTES: usize = 20;

    #[tokio::test]
    async fn node_is_heard_before_all_questions_of_tenants() {
        let (desk, mut notes) = LeaseHandle::channel();
        let asker = Caller {
            allocation: AllocationId::from_bits(7),
            process: Process { pid: 1, start: 1 },
        };
        let question = RetainedRequest::Discard {
            version: VERSION,
            lease: 1,
        };
        let mut tenants = tokio::task::JoinSet::new();
        for _ in 0..2 * QUEUE_CAPACITY {
            let (desk, question) = (desk.clone(), question.clone());
            tenants.spawn(async move { desk.request(asker, question, None).await });
        }
        while desk.tenants.capacity() > 0 {
            tokio::task::yield_now().await;
        }
        // As many as chance would not let pass before a question.
        for _ in 0..NOTES {
            desk.node.try_send(Command::Recorded(Vec::new())).unwrap();
        }
        for number in 0..NOTES {
            let note = notes.recv().await;
            assert!(
                matches!(note, Some(Command::Recorded(_))),
                "{number}: {note:?}"
            );
        }
        assert!(matches!(notes.recv().await, Some(Command::Request { .. })));
    }
}
