//! Fuzzes the messages between the agent and a provisioner.

use bursar_protocol::provisioner::{ProvisionerRequest, ProvisionerResponse};

use crate::{parses_json, payloads};

/// A request is an error, or a message that keeps its meaning.
#[test]
fn provisioner_requests_round_trip() {
    parses_json::<ProvisionerRequest>(&payloads(&[
        ProvisionerRequest::Create {
            bytes: 1 << 30,
            lendable: 8 << 30,
        },
        ProvisionerRequest::AwaitScrub { bytes: u64::MAX },
    ]));
}

/// A response is an error, or a message that keeps its meaning.
#[test]
fn provisioner_responses_round_trip() {
    parses_json::<ProvisionerResponse>(&payloads(&[
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
