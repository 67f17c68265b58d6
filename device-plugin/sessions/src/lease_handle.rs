//! Passes requests of tenants and state of the node to the lease service.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::time::Duration;

use bursar_ledger::units::{AllocationId, Bytes, GpuUuid, LeaseId, PodUid};
use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::token::{TokenRefusal, TokenRequest, TokenResponse};
use tokio::sync::{mpsc, oneshot};

use super::Process;

/// How long a tenant waits for an answer: longer than a running provisioner and the fd store may
/// take together.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(25);

/// The requests of tenants, and the commands of the node, that may wait for the service.
const QUEUE_CAPACITY: usize = 256;

/// The leases of each GPU that the fd store has and an account is charged for.
pub type LiveLeases = BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>>;

/// The container and process that send a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The container.
    pub allocation: AllocationId,
    /// The process.
    pub process: Process,
}

/// A bound container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerBinding {
    /// The pod.
    pub pod: PodUid,
    /// The pod's namespace, once the agent knows it.
    pub namespace: Option<String>,
    /// The GPUs that the container has memory of.
    pub gpus: BTreeSet<GpuUuid>,
}

/// The leases that each container is charged for, with GPU and size.
pub type ChargedLeases = BTreeMap<AllocationId, BTreeMap<LeaseId, (GpuUuid, Bytes)>>;

/// The state of the node that decisions about leases depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// The bound containers.
    pub containers: BTreeMap<AllocationId, ContainerBinding>,
    /// How much of each GPU the pods of each namespace may use.
    pub quotas: BTreeMap<String, BTreeMap<GpuUuid, Bytes>>,
    /// The generation of each GPU.
    pub generations: BTreeMap<GpuUuid, u64>,
    /// How much of each GPU is bound to no pod.
    pub free: BTreeMap<GpuUuid, Bytes>,
}

/// Changes for the node's ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerUpdate {
    /// The live leases whose owner has ended; none while the fd store is away. The ledger turns
    /// leases that are no longer listed into unreclaimed bytes.
    pub orphaned: Option<BTreeMap<GpuUuid, BTreeMap<LeaseId, Bytes>>>,
    /// The leases that have ended, each reported once. The ledger counts their bytes as
    /// unreclaimed from now on; then `LeaseHandle::confirm_recorded`.
    pub ended: Vec<(LeaseId, GpuUuid, Bytes)>,
}

/// An answer to a tenant, with the lease's descriptor if the tenant gets one.
#[derive(Debug)]
pub struct Reply {
    /// The message.
    pub response: RetainedResponse,
    /// The lease's descriptor.
    pub fd: Option<OwnedFd>,
}

impl Reply {
    /// A reply that refuses the request.
    pub fn refused(why: RetainedRefusal) -> Reply {
        Reply {
            response: RetainedResponse::Refused(why),
            fd: None,
        }
    }
}

/// A command for the lease service.
#[derive(Debug)]
pub enum Command {
    /// A tenant's request for a lease.
    Request {
        /// The container and process that ask.
        caller: Caller,
        /// The request.
        request: RetainedRequest,
        /// Gets the answer.
        reply: oneshot::Sender<Reply>,
    },
    /// A tenant's request for a memory token.
    Token {
        /// The container and process that ask.
        caller: Caller,
        /// The request.
        request: TokenRequest,
        /// Gets the answer.
        reply: oneshot::Sender<TokenResponse>,
    },
    /// A process image ended, by exit or by `execve`.
    ProcessEnded(Process),
    /// The node's containers, quotas or GPUs have changed, or a tick has passed.
    Reconcile {
        /// The node's state.
        node: NodeView,
        /// Gets the changes for the node's ledger.
        reply: oneshot::Sender<LedgerUpdate>,
    },
    /// The node's ledger has recorded the bytes of these leases as unreclaimed.
    Recorded(Vec<LeaseId>),
}

/// Sends commands to the lease service. Clones send to the same service.
#[derive(Clone, Debug)]
pub struct LeaseHandle {
    tenants: mpsc::Sender<Command>,
    node: mpsc::Sender<Command>,
}

/// The commands that the lease service receives.
#[derive(Debug)]
pub struct Commands {
    tenants: mpsc::Receiver<Command>,
    node: mpsc::Receiver<Command>,
}

impl Commands {
    /// Returns the next command; none once every handle is dropped. Commands of the node come
    /// first, so that tenants cannot delay the start of pods.
    pub async fn recv(&mut self) -> Option<Command> {
        tokio::select! {
            biased;
            command = self.node.recv() => command,
            command = self.tenants.recv() => command,
        }
    }
}

impl LeaseHandle {
    /// Creates a handle and the receiver of its commands.
    pub fn channel() -> (LeaseHandle, Commands) {
        let (tenants, asked) = mpsc::channel(QUEUE_CAPACITY);
        let (node, node_commands) = mpsc::channel(QUEUE_CAPACITY);
        let commands = Commands {
            tenants: asked,
            node: node_commands,
        };
        (LeaseHandle { tenants, node }, commands)
    }

    /// Sends a tenant's request and waits for the reply, at most for a fixed time.
    pub async fn request(&self, caller: Caller, request: RetainedRequest) -> Reply {
        let asked = |reply| Command::Request {
            caller,
            request,
            reply,
        };
        let unavailable = || Reply::refused(RetainedRefusal::Unavailable);
        self.send(asked).await.unwrap_or_else(unavailable)
    }

    /// Sends a tenant's token request and waits for the reply, at most for a fixed time.
    pub async fn request_token(&self, caller: Caller, request: TokenRequest) -> TokenResponse {
        let asked = |reply| Command::Token {
            caller,
            request,
            reply,
        };
        let unavailable = || TokenResponse::Refused(TokenRefusal::Unavailable);
        self.send(asked).await.unwrap_or_else(unavailable)
    }

    async fn send<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let answer = async {
            self.tenants.send(command(reply)).await.ok()?;
            answer.await.ok()
        };
        tokio::time::timeout(REQUEST_TIMEOUT, answer)
            .await
            .ok()
            .flatten()
    }

    /// Reports that a process image ended, after the requests that it sent.
    pub async fn process_ended(&self, process: Process) {
        let _ = self.tenants.send(Command::ProcessEnded(process)).await;
    }

    /// Reports the node's state; returns the changes for its ledger. They are empty when the
    /// service has exited.
    pub async fn reconcile(&self, node: NodeView) -> LedgerUpdate {
        let (reply, update) = oneshot::channel();
        let _ = self.node.send(Command::Reconcile { node, reply }).await;
        update.await.unwrap_or_default()
    }

    /// Reports that the node's ledger has recorded the bytes of these leases.
    pub async fn confirm_recorded(&self, leases: Vec<LeaseId>) {
        let _ = self.node.send(Command::Recorded(leases)).await;
    }
}

#[cfg(test)]
mod tests {
    use bursar_protocol::VERSION;

    use super::*;

    const NOTES: usize = 20;

    #[tokio::test]
    async fn node_is_heard_before_all_questions_of_tenants() {
        let (handle, mut commands) = LeaseHandle::channel();
        let caller = Caller {
            allocation: AllocationId::from_bits(7),
            process: Process { pid: 1, start: 1 },
        };
        let request = RetainedRequest::Discard {
            version: VERSION,
            lease: 1,
        };
        let mut tenants = tokio::task::JoinSet::new();
        for _ in 0..2 * QUEUE_CAPACITY {
            let (handle, request) = (handle.clone(), request.clone());
            tenants.spawn(async move { handle.request(caller, request).await });
        }
        while handle.tenants.capacity() > 0 {
            tokio::task::yield_now().await;
        }
        // An unbiased `select` would let all these commands pass before a request with negligible
        // probability.
        for _ in 0..NOTES {
            handle.node.try_send(Command::Recorded(Vec::new())).unwrap();
        }
        for number in 0..NOTES {
            let command = commands.recv().await;
            assert!(
                matches!(command, Some(Command::Recorded(_))),
                "{number}: {command:?}"
            );
        }
        assert!(matches!(
            commands.recv().await,
            Some(Command::Request { .. })
        ));
    }
}
