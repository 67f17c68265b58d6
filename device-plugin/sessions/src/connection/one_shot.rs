//! Answers connections without a session.

use bursar_ledger::units::AllocationId;
use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::token::{TokenRefusal, TokenRequest, TokenResponse};
use bursar_protocol::messages::{self, Message, RejectReason, Request, Response};

use super::super::container::NotAuthorized;
use super::super::stream::PeerStream;
use super::super::{Process, lock};
use super::{
    ANSWER_TIMEOUT, Connection, ConnectionError, OLDEST_VERSION, reject, send_with_descriptor,
};
use crate::lease_handle::Caller;

impl Connection {
    /// Answers the only request of a connection.
    pub(super) async fn answer_once(
        &self,
        stream: &mut PeerStream,
        process: Process,
        request: Request,
    ) -> Result<(), ConnectionError> {
        match request {
            Request::Query { version, account } => {
                self.answer_query(stream, process.pid, version, &account)
                    .await
            }
            Request::Retained(request) => self.answer_lease_request(stream, process, request).await,
            Request::Token(request) => self.answer_token_request(stream, process, request).await,
            _ => Err(ConnectionError::OutOfOrder),
        }
    }

    /// Answers a query for the container's usage.
    async fn answer_query(
        &self,
        stream: &mut PeerStream,
        pid: u32,
        version: u16,
        account: &messages::Account,
    ) -> Result<(), ConnectionError> {
        if version < OLDEST_VERSION {
            return reject(stream, RejectReason::Version).await;
        }
        self.wait_turn().await;
        let resolver = self.resolver.as_ref();
        let outcome =
            self.run_charged(|| lock(&self.container).query_usage(pid, account, resolver));
        match outcome {
            Ok(usage) => {
                let frame = usage.frame();
                let _ = tokio::time::timeout(ANSWER_TIMEOUT, stream.write_all(&frame)).await;
                Ok(())
            }
            Err(reason) => reject(stream, reason).await,
        }
    }

    /// Passes a request about retained memory to the lease service, and returns the answer.
    async fn answer_lease_request(
        &self,
        stream: &mut PeerStream,
        process: Process,
        request: RetainedRequest,
    ) -> Result<(), ConnectionError> {
        let outcome = self.authorize(process, request.version(), request.account());
        let (answer, fd) = match (outcome.await, &self.lease_service) {
            (Ok(allocation), Some(lease_service)) => {
                let caller = Caller {
                    allocation,
                    process,
                };
                // The lease service charges the container before it creates memory.
                let reply = lease_service.request(caller, request).await;
                (Response::Retained(reply.response), reply.fd)
            }
            (Ok(_), None) => {
                let refusal = RetainedRefusal::Unavailable;
                (Response::Retained(RetainedResponse::Refused(refusal)), None)
            }
            (Err(NotAuthorized::Fenced), _) => {
                let refusal = RetainedRefusal::Fenced;
                (Response::Retained(RetainedResponse::Refused(refusal)), None)
            }
            (Err(NotAuthorized::Rejected(reason)), _) => return reject(stream, reason).await,
        };
        let sent = async {
            match fd {
                Some(fd) => send_with_descriptor(stream, &answer, fd).await,
                None => stream.write_all(&answer.frame()).await,
            }
        };
        let _ = tokio::time::timeout(ANSWER_TIMEOUT, sent).await;
        Ok(())
    }

    /// Passes a request about a memory token to the lease service, and returns the answer.
    async fn answer_token_request(
        &self,
        stream: &mut PeerStream,
        process: Process,
        request: TokenRequest,
    ) -> Result<(), ConnectionError> {
        let outcome = self.authorize(process, request.version(), request.account());
        let answer = match (outcome.await, &self.lease_service) {
            (Ok(allocation), Some(lease_service)) => {
                let caller = Caller {
                    allocation,
                    process,
                };
                lease_service.request_token(caller, request).await
            }
            (Ok(_), None) => TokenResponse::Refused(TokenRefusal::Unavailable),
            (Err(NotAuthorized::Fenced), _) => TokenResponse::Refused(TokenRefusal::AskerFenced),
            (Err(NotAuthorized::Rejected(reason)), _) => return reject(stream, reason).await,
        };
        let frame = Response::Token(answer).frame();
        let _ = tokio::time::timeout(ANSWER_TIMEOUT, stream.write_all(&frame)).await;
        Ok(())
    }

    /// The allocation for which a process may send requests to the lease service. The container's
    /// rate limit applies.
    async fn authorize(
        &self,
        process: Process,
        version: u16,
        gpu: Option<&messages::Account>,
    ) -> Result<AllocationId, NotAuthorized> {
        if version < OLDEST_VERSION {
            return Err(NotAuthorized::Rejected(RejectReason::Version));
        }
        self.wait_turn().await;
        let resolver = self.resolver.as_ref();
        self.run_charged(|| lock(&self.container).authorize(process.pid, gpu, resolver))
    }
}
