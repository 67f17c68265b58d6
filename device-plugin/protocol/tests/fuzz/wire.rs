//! What a process and the agent say to each other.

use bursar_protocol::units::Units;
use bursar_protocol::wire::kept::{KeptAnswer, KeptQuestion, KeptRefusal};
use bursar_protocol::wire::token::{
    Generation, Generations, GpuToken, MemoryId, TokenAnswer, TokenQuestion, TokenRefusal,
};
use bursar_protocol::wire::{
    Account, HEADER, Holding, Listed, MAX_PAYLOAD, Quota, Reason, ToAgent, ToShim, Verdict,
    payload_length,
};

use crate::mutate::edits;
use crate::{parses, payloads};

fn device() -> Account {
    Account::Device("GPU-5e000000-0000-0000-0000-000000000001".to_owned())
}

fn to_agent() -> Vec<Vec<u8>> {
    let holdings = [device(), Account::Managed].map(|account| Holding {
        account,
        granted: Units::MAX,
        used: Units(1),
    });
    payloads(&[
        ToAgent::Hello {
            version: 1,
            image: u64::MAX,
            holdings: holdings.to_vec(),
        },
        ToAgent::Request {
            account: 0,
            units: Units(512),
        },
        ToAgent::Denied {
            account: 1,
            bytes: 4096,
            function: "cuMemAlloc_v2".to_owned(),
        },
        ToAgent::Refresh,
        ToAgent::Query {
            version: 1,
            account: device(),
        },
        ToAgent::Kept(KeptQuestion::Open {
            version: 1,
            image: 7,
            account: device(),
            name: "weights".to_owned().try_into().unwrap(),
            key: [9; 32],
            bytes: 1 << 30,
        }),
        ToAgent::Kept(KeptQuestion::Commit {
            version: 1,
            lease: 1,
            token: 2,
            checksum: 3,
        }),
        ToAgent::Poisoned {
            account: 0,
            code: 700,
            able: true,
        },
        ToAgent::Token(TokenQuestion::Seal {
            version: 3,
            account: device(),
            lease: 1,
            block: 2,
        }),
        ToAgent::Token(TokenQuestion::Redeem {
            version: 3,
            token: GpuToken::try_from(vec![1; 99]).unwrap(),
        }),
        ToAgent::ContextMade { account: 1 },
        ToAgent::Kept(KeptQuestion::Discard {
            version: 3,
            lease: 9,
        }),
    ])
}

fn to_shim() -> Vec<Vec<u8>> {
    let quotas = [device(), Account::Managed].map(|account| Quota {
        account,
        bytes: u64::MAX,
    });
    payloads(&[
        ToShim::Welcome {
            version: 1,
            generation: None,
            quotas: quotas.to_vec(),
        },
        ToShim::Welcome {
            version: 2,
            generation: Some(7),
            quotas: quotas.to_vec(),
        },
        ToShim::Fenced { account: 0 },
        ToShim::Verdict(Verdict::Execute),
        ToShim::Granted {
            account: 0,
            units: Units(512),
        },
        ToShim::Goodbye {
            reason: Reason::Busy,
        },
        ToShim::Usage {
            quota: 1 << 30,
            used: 4096,
            processes: vec![Listed {
                pid: 7,
                bytes: 4096,
            }],
        },
        ToShim::Kept(KeptAnswer::Write {
            lease: 1,
            generation: 2,
            bytes: 1 << 30,
            token: 3,
            expires_ms: 60_000,
        }),
        ToShim::Kept(KeptAnswer::Refused(KeptRefusal::Quota { free: 4096 })),
        ToShim::Token(TokenAnswer::Redeemed(memory_id())),
        ToShim::Token(TokenAnswer::Refused(TokenRefusal::Fenced {
            which: Generation::Lease,
            generation: 4,
        })),
        ToShim::Refreshed,
        ToShim::Refused {
            account: 0,
            free: Units(3),
        },
        ToShim::ContextSize {
            account: 0,
            units: Units(9),
        },
        ToShim::Kept(KeptAnswer::Made { bytes: 1 << 21 }),
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

/// What a process says is an error, or the one message that encodes to it.
#[test]
fn to_agent_frames_round_trip() {
    parses::<ToAgent>(&to_agent());
}

/// What the agent says is an error, or the one message that encodes to it.
#[test]
fn to_shim_frames_round_trip() {
    parses::<ToShim>(&to_shim());
}

/// What names memory is an error, or the one name that encodes to it.
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

/// No header announces more than a frame may have, and none that a message has is refused.
#[test]
fn frame_headers_are_bounded() {
    bolero::check!()
        .with_type()
        .for_each(|header: &[u8; HEADER]| {
            let said = usize::from(u16::from_le_bytes(*header));
            let is_allowed = (1..=MAX_PAYLOAD).contains(&said);
            assert_eq!(payload_length(*header).ok(), is_allowed.then_some(said));
        });
}
