//! Sends requests for retained memory to the agent.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use bursar_protocol::VERSION;
use bursar_protocol::messages::retained::{Key, LeaseName, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::{RejectReason, Request, Response};

use super::LeaseError;
use super::process_image::process_image_id;
use crate::agent_client::{AgentClient, with_gpu_or_mig_account};
use crate::driver::GpuUuid;

/// Requests a lease of a GPU.
///
/// `map` gets the memory of a new lease while the agent still stores the lease. The caller may use
/// the result of `map` only together with the agent's final response.
pub(super) fn open<M>(
    agent: &AgentClient,
    gpu: GpuUuid,
    name: &LeaseName,
    key: &Key,
    bytes: u64,
    map: impl Fn(OwnedFd, u64) -> M,
) -> Result<(RetainedResponse, Option<OwnedFd>, Option<M>), LeaseError> {
    let open = |account| {
        let stream = agent.send(&Request::Retained(RetainedRequest::Open {
            version: VERSION,
            image: process_image_id(),
            account,
            name: name.clone(),
            key: *key,
            bytes,
        }))?;
        match hear(agent, &stream)? {
            (RetainedResponse::Created { bytes }, Some(fd)) => {
                let mapped = map(fd, bytes);
                let (result, fd) = hear(agent, &stream)?;
                Ok((result, fd, Some(mapped)))
            }
            (result, fd) => Ok((result, fd, None)),
        }
    };
    with_gpu_or_mig_account(gpu, open, |error| {
        matches!(error, LeaseError::Rejected(RejectReason::Account))
    })
}

/// Sends a request that has one response without a file descriptor.
pub(super) fn request(
    agent: &AgentClient,
    question: RetainedRequest,
) -> Result<RetainedResponse, LeaseError> {
    let stream = agent.send(&Request::Retained(question))?;
    Ok(hear(agent, &stream)?.0)
}

fn hear(
    agent: &AgentClient,
    stream: &UnixStream,
) -> Result<(RetainedResponse, Option<OwnedFd>), LeaseError> {
    match agent.recv(stream)? {
        (Response::Retained(result), fd) => Ok((result, fd)),
        _ => Err(LeaseError::UnexpectedResponse),
    }
}
