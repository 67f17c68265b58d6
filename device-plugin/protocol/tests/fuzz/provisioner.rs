//! Fuzzes the messages between the agent and a provisioner.

use bursar_protocol::provisioner::{ProvisionerRequest, ProvisionerResponse};

use crate::{parses, payloads};

/// A request is an error, or the one message that encodes to it.
#[test]
fn provisioner_requests_round_trip() {
    parses::<ProvisionerRequest>(&payloads(&[
        ProvisionerRequest::Create {
            bytes: 1 << 30,
            lendable: 8 << 30,
        },
        ProvisionerRequest::AwaitScrub { bytes: u64::MAX },
    ]));
}

/// A response is an error, or the one message that encodes to it.
#[test]
fn provisioner_responses_round_trip() {
    parses::<ProvisionerResponse>(&payloads(&[
        ProvisionerResponse::Ready {
            driver: 13_000,
            granularity: 2 << 20,
            total: 80 << 30,
            concurrent_managed_access: true,
        },
        ProvisionerResponse::Created { bytes: 2 << 20 },
        ProvisionerResponse::Scrubbed,
        ProvisionerResponse::Failed {
            code: -1,
            call: "cuMemCreate".to_owned(),
        },
    ]));
}
