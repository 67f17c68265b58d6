//! What the agent and the vault say to each other.

use bursar_protocol::vault::{Blob, Entry, FromVault, Refusal, ToVault};

use crate::{parses, payloads};

fn blob(bytes: &[u8]) -> Blob {
    Blob::new(bytes.to_vec()).unwrap()
}

/// What the agent says is an error, or the one message that encodes to it.
#[test]
fn to_vault_frames_round_trip() {
    parses::<ToVault>(&payloads(&[
        ToVault::Hello { version: 1 },
        ToVault::Put {
            lease: 7,
            blob: blob(b"{}"),
        },
        ToVault::Update {
            lease: u64::MAX,
            blob: blob(&[0; 300]),
        },
        ToVault::Get { lease: 0 },
        ToVault::Drop { lease: 1 },
        ToVault::List { from: 2 },
    ]));
}

/// What the vault says is an error, or the one message that encodes to it.
#[test]
fn from_vault_frames_round_trip() {
    let entry = |lease, bytes: &[u8]| Entry {
        lease,
        blob: blob(bytes),
    };
    parses::<FromVault>(&payloads(&[
        FromVault::Ready {
            version: 1,
            leases: 2,
            room: u32::MAX,
        },
        FromVault::Held,
        FromVault::Lease(entry(1, b"{}")),
        FromVault::Dropped,
        FromVault::Listed { leases: vec![] },
        FromVault::Listed {
            leases: vec![entry(1, b""), entry(2, &[1; 200]), entry(3, b"{}")],
        },
        FromVault::Refused(Refusal::Full),
        FromVault::Refused(Refusal::NoHello),
    ]));
}
