//! Sends requests for retained memory to the agent.

use std::os::fd::OwnedFd;

use bursar_protocol::VERSION;
use bursar_protocol::messages::retained::{Key, LeaseName, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::{RejectReason, Request, Response};

use super::LeaseError;
use super::process_image::process_image_id;
use crate::agent_client::{AgentClient, ClientError, with_gpu_or_mig_account};
use crate::driver::GpuUuid;

/// Requests a lease of a GPU, and runs `meanwhile` until the response arrives.
pub(super) fn open(
    agent: &AgentClient,
    gpu: GpuUuid,
    name: &LeaseName,
    key: &Key,
    bytes: u64,
    mut meanwhile: impl FnMut(),
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
        response(agent.request_while(&Request::Retained(open), &mut meanwhile))
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
    response(agent.request(&Request::Retained(question)))
}

fn response(
    received: Result<(Response, Option<OwnedFd>), ClientError>,
) -> Result<(RetainedResponse, Option<OwnedFd>), LeaseError> {
    match received? {
        (Response::Retained(result), fd) => Ok((result, fd)),
        _ => Err(LeaseError::UnexpectedResponse),
    }
}
