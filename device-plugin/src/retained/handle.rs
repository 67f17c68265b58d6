//! Where questions about kept memory and tokens are handed in: by the conversations with tenants, and by the node.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::token::{TokenRefusal, TokenRequest, TokenResponse};
use tokio::sync::{mpsc, oneshot};

use super::leases::{Node, Turn};
use crate::sessions::Process;
use crate::units::{Bytes, GpuUuid, LeaseId};

pub use super::leases::Asker;

/// How long an answer may take: longer than what a worker and the vault may.
const PATIENCE: Duration = Duration::from_secs(25);

/// Questions of tenants that wait for the desk, and notes of the node.
const QUEUE: usize = 256;

/// What the vault keeps of each GPU, by lease.
pub type Living = BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>>;

/// An answer, with the lease's descriptor where one goes with it.
#[derive(Debug)]
pub struct Reply {
    /// The answer.
    pub answer: RetainedResponse,
    /// The descriptor.
    pub fd: Option<OwnedFd>,
}

impl Reply {
    /// A refusal.
    pub fn refused(why: RetainedRefusal) -> Reply {
        Reply {
            answer: RetainedResponse::Refused(why),
            fd: None,
        }
    }
}

/// The memory of a lease that the vault does not have yet.
#[derive(Debug)]
pub struct Made {
    /// How large it is.
    pub bytes: Bytes,
    /// Its descriptor.
    pub fd: OwnedFd,
}

/// What is handed in.
#[derive(Debug)]
pub enum Note {
    /// A tenant asks.
    Asked {
        /// Who.
        asker: Asker,
        /// What.
        question: RetainedRequest,
        /// Where the descriptor of a lease that is made goes before the answer: then none goes with that.
        made: Option<oneshot::Sender<Made>>,
        /// Where the answer goes.
        reply: oneshot::Sender<Reply>,
    },
    /// A tenant asks about a token.
    Token {
        /// Who.
        asker: Asker,
        /// What.
        question: TokenRequest,
        /// Where the answer goes.
        reply: oneshot::Sender<TokenResponse>,
    },
    /// A process image ended, by its death or an exec.
    Ended(Process),
    /// The node stands like this.
    Stands {
        /// The node.
        node: Node,
        /// What its ledger is told.
        reply: oneshot::Sender<Turn>,
    },
    /// The node's ledger has on record what it was told that leases left.
    Recorded(Vec<LeaseId>),
}

/// The desk.
#[derive(Clone, Debug)]
pub struct Desk {
    tenants: mpsc::Sender<Note>,
    node: mpsc::Sender<Note>,
}

/// What is handed in at the desk.
#[derive(Debug)]
pub struct Notes {
    tenants: mpsc::Receiver<Note>,
    node: mpsc::Receiver<Note>,
}

impl Notes {
    /// The next note; none once nobody can hand one in. The node's come first: its pods start no sooner, however much
    /// tenants ask.
    pub async fn recv(&mut self) -> Option<Note> {
        tokio::select! {
            biased;
            note = self.node.recv() => note,
            note = self.tenants.recv() => note,
        }
    }
}

impl Desk {
    /// A desk, and what is handed in there.
    pub fn open() -> (Desk, Notes) {
        let (tenants, asked) = mpsc::channel(QUEUE);
        let (node, told) = mpsc::channel(QUEUE);
        let notes = Notes {
            tenants: asked,
            node: told,
        };
        (Desk { tenants, node }, notes)
    }

    /// The answer to a tenant's question, in bounded time; where a lease is made, `made` is told first.
    pub async fn ask(
        &self,
        asker: Asker,
        question: RetainedRequest,
        made: Option<oneshot::Sender<Made>>,
    ) -> Reply {
        let asked = |reply| Note::Asked {
            asker,
            question,
            made,
            reply,
        };
        let unavailable = || Reply::refused(RetainedRefusal::Unavailable);
        self.answer(asked).await.unwrap_or_else(unavailable)
    }

    /// The answer to a tenant's question about a token, in bounded time.
    pub async fn ask_token(&self, asker: Asker, question: TokenRequest) -> TokenResponse {
        let asked = |reply| Note::Token {
            asker,
            question,
            reply,
        };
        let unavailable = || TokenResponse::Refused(TokenRefusal::Unavailable);
        self.answer(asked).await.unwrap_or_else(unavailable)
    }

    async fn answer<T>(&self, note: impl FnOnce(oneshot::Sender<T>) -> Note) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let answer = async {
            self.tenants.send(note(reply)).await.ok()?;
            answer.await.ok()
        };
        tokio::time::timeout(PATIENCE, answer).await.ok().flatten()
    }

    /// A process image ended; what it asked before comes first.
    pub async fn ended(&self, process: Process) {
        let _ = self.tenants.send(Note::Ended(process)).await;
    }

    /// The node stands like this; what its ledger is told. Nothing where nobody keeps any more: the agent is ending.
    pub async fn stands(&self, node: Node) -> Turn {
        let (reply, turn) = oneshot::channel();
        let _ = self.node.send(Note::Stands { node, reply }).await;
        turn.await.unwrap_or_default()
    }

    /// What leases left is on record in the node's ledger.
    pub async fn recorded(&self, leases: Vec<LeaseId>) {
        let _ = self.node.send(Note::Recorded(leases)).await;
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
        let (desk, mut notes) = Desk::open();
        let asker = Asker {
            allocation: AllocationId::from_bits(7),
            process: Process { pid: 1, start: 1 },
        };
        let question = RetainedRequest::Discard {
            version: VERSION,
            lease: 1,
        };
        let mut tenants = tokio::task::JoinSet::new();
        for _ in 0..2 * QUEUE {
            let (desk, question) = (desk.clone(), question.clone());
            tenants.spawn(async move { desk.ask(asker, question, None).await });
        }
        while desk.tenants.capacity() > 0 {
            tokio::task::yield_now().await;
        }
        // As many as chance would not let pass before a question.
        for _ in 0..NOTES {
            desk.node.try_send(Note::Recorded(Vec::new())).unwrap();
        }
        for number in 0..NOTES {
            let note = notes.recv().await;
            assert!(
                matches!(note, Some(Note::Recorded(_))),
                "{number}: {note:?}"
            );
        }
        assert!(matches!(notes.recv().await, Some(Note::Asked { .. })));
    }
}
