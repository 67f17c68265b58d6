//! Fuzzes the messages between a process and the agent.

use bursar_protocol::messages::retained::{RetainedRefusal, RetainedRequest, RetainedResponse};
use bursar_protocol::messages::token::{
    Generation, Generations, GpuToken, MemoryId, TokenRefusal, TokenRequest, TokenResponse,
};
use bursar_protocol::messages::{
    Account, HEADER, HeldCredit, MAX_PAYLOAD, ProcessUsage, Quota, Recovery, RejectReason, Request,
    Response, payload_length,
};
use bursar_protocol::units::Units;

use crate::mutate::edits;
use crate::{parses, payloads};

fn device() -> Account {
    Account::Device("GPU-5e000000-0000-0000-0000-000000000001".to_owned())
}

fn requests() -> Vec<Vec<u8>> {
    let holdings = [device(), Account::Managed].map(|account| HeldCredit {
        account,
        granted: Units::MAX,
        used: Units(1),
    });
    payloads(&[
        Request::Hello {
            version: 1,
            image: u64::MAX,
            holdings: holdings.to_vec(),
        },
        Request::Credit {
            account: 0,
            units: Units(512),
        },
        Request::Denied {
            account: 1,
            bytes: 4096,
            function: "cuMemAlloc_v2".to_owned(),
        },
        Request::Refresh,
        Request::Query {
            version: 1,
            account: device(),
        },
        Request::Retained(RetainedRequest::Open {
            version: 1,
            image: 7,
            account: device(),
            name: "weights".to_owned().try_into().unwrap(),
            key: [9; 32],
            bytes: 1 << 30,
        }),
        Request::Retained(RetainedRequest::Commit {
            version: 1,
            lease: 1,
            token: 2,
            checksum: 3,
        }),
        Request::Poisoned {
            account: 0,
            code: 700,
            can_reexec: true,
        },
        Request::Token(TokenRequest::Seal {
            version: 3,
            account: device(),
            lease: 1,
            block: 2,
        }),
        Request::Token(TokenRequest::Redeem {
            version: 3,
            token: GpuToken::try_from(vec![1; 99]).unwrap(),
        }),
        Request::ContextMade { account: 1 },
        Request::Retained(RetainedRequest::Discard {
            version: 3,
            lease: 9,
        }),
    ])
}

fn responses() -> Vec<Vec<u8>> {
    let quotas = [device(), Account::Managed].map(|account| Quota {
        account,
        bytes: u64::MAX,
    });
    payloads(&[
        Response::Welcome {
            version: 1,
            generation: None,
            quotas: quotas.to_vec(),
        },
        Response::Welcome {
            version: 2,
            generation: Some(7),
            quotas: quotas.to_vec(),
        },
        Response::Fenced { account: 0 },
        Response::Recovery(Recovery::Reexec),
        Response::Granted {
            account: 0,
            units: Units(512),
        },
        Response::Rejected {
            reason: RejectReason::Busy,
        },
        Response::Usage {
            quota: 1 << 30,
            used: 4096,
            processes: vec![ProcessUsage {
                pid: 7,
                bytes: 4096,
            }],
        },
        Response::Retained(RetainedResponse::Write {
            lease: 1,
            generation: 2,
            bytes: 1 << 30,
            token: 3,
            expires_ms: 60_000,
        }),
        Response::Retained(RetainedResponse::Refused(RetainedRefusal::Quota {
            free: 4096,
        })),
        Response::Token(TokenResponse::Redeemed(memory_id())),
        Response::Token(TokenResponse::Refused(TokenRefusal::Fenced {
            which: Generation::Lease,
            generation: 4,
        })),
        Response::Refreshed,
        Response::Refused {
            account: 0,
            free: Units(3),
        },
        Response::ContextSize {
            account: 0,
            units: Units(9),
        },
    ])
}

fn memory_id() -> MemoryId {
    MemoryId {
        node: "node-a".to_owned(),
        gpu: "GPU-5e000000-0000-0000-0000-000000000001".to_owned(),
        container: 1,
        generations: Generations {
            gpu: 2,
            process: 3,
            lease: 4,
        },
        block: 5,
    }
}

/// A request is an error, or the one message that encodes to it.
#[test]
fn requests_round_trip() {
    parses::<Request>(&requests());
}

/// A response is an error, or the one message that encodes to it.
#[test]
fn responses_round_trip() {
    parses::<Response>(&responses());
}

/// A memory id is an error, or the one id that encodes to it.
#[test]
fn memory_ids_round_trip() {
    let samples = [memory_id().encode()];
    bolero::check!().with_generator(edits()).for_each(|edits| {
        let bytes = edits.apply(&samples);
        if let Ok(id) = MemoryId::decode(&bytes) {
            assert_eq!(id.encode(), bytes, "{id:?}");
        }
    });
}

/// No header announces more than a frame may have, and every valid length is accepted.
#[test]
fn frame_headers_are_bounded() {
    bolero::check!()
        .with_type()
        .for_each(|header: &[u8; HEADER]| {
            let length = usize::from(u16::from_le_bytes(*header));
            let is_allowed = (1..=MAX_PAYLOAD).contains(&length);
            assert_eq!(payload_length(*header).ok(), is_allowed.then_some(length));
        });
}
