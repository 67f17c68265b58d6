//! Sends requests for retained memory to the agent.

use std::os::fd::OwnedFd;

use bursar_protocol::VERSION;
use bursar_protocol::messages::retained::{Key, LeaseName, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::{RejectReason, Request, Response};

use super::LeaseError;
use super::process_image::process_image_id;
use crate::agent_client::{AgentClient, with_gpu_or_mig_account};
use crate::driver::GpuUuid;

/// Requests a lease of a GPU.
pub(super) fn open(
    agent: &AgentClient,
    gpu: GpuUuid,
    name: &LeaseName,
    key: &Key,
    bytes: u64,
) -> Result<(RetainedResponse, Option<OwnedFd>), LeaseError> {
    let open = |account| {
        let open = RetainedRequest::Open {
            version: VERSION,
            image: process_image_id(),
            account,
            name: name.clone(),
            key: *key,
            bytes,
        };
        request(agent, open)
    };
    with_gpu_or_mig_account(gpu, open, |error| {
        matches!(error, LeaseError::Rejected(RejectReason::Account))
    })
}

/// Sends a request and returns its response.
pub(super) fn request(
    agent: &AgentClient,
    question: RetainedRequest,
) -> Result<(RetainedResponse, Option<OwnedFd>), LeaseError> {
    match agent.request(&Request::Retained(question))? {
        (Response::Retained(result), fd) => Ok((result, fd)),
        _ => Err(LeaseError::UnexpectedResponse),
    }
}
