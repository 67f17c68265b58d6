//! Fuzzes the messages between the agent and the fd store.

use bursar_protocol::fdstore::{Blob, FdStoreRequest, FdStoreResponse, Refusal, StoredLease};

use crate::{parses, payloads};

fn blob(bytes: &[u8]) -> Blob {
    Blob::new(bytes.to_vec()).unwrap()
}

/// A request is an error, or the one message that encodes to it.
#[test]
fn fdstore_requests_round_trip() {
    parses::<FdStoreRequest>(&payloads(&[
        FdStoreRequest::Hello { version: 1 },
        FdStoreRequest::Put {
            lease: 7,
            blob: blob(b"{}"),
        },
        FdStoreRequest::Update {
            lease: u64::MAX,
            blob: blob(&[0; 300]),
        },
        FdStoreRequest::Get { lease: 0 },
        FdStoreRequest::Drop { lease: 1 },
        FdStoreRequest::List { from: 2 },
    ]));
}

/// A response is an error, or the one message that encodes to it.
#[test]
fn fdstore_responses_round_trip() {
    let entry = |lease, bytes: &[u8]| StoredLease {
        lease,
        blob: blob(bytes),
    };
    parses::<FdStoreResponse>(&payloads(&[
        FdStoreResponse::Ready {
            version: 1,
            leases: 2,
            room: u32::MAX,
        },
        FdStoreResponse::Stored,
        FdStoreResponse::Lease(entry(1, b"{}")),
        FdStoreResponse::Dropped,
        FdStoreResponse::Listed { leases: vec![] },
        FdStoreResponse::Listed {
            leases: vec![entry(1, b""), entry(2, &[1; 200]), entry(3, b"{}")],
        },
        FdStoreResponse::Refused(Refusal::Full),
        FdStoreResponse::Refused(Refusal::NoHello),
    ]));
}
