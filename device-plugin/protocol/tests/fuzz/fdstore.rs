//! Fuzzes the messages between the agent and the fd store.

use bursar_protocol::fdstore::{Blob, FdStoreRequest, FdStoreResponse, Refusal, StoredLease};

use crate::{parses_json, payloads};

fn blob(text: &str) -> Blob {
    Blob::try_from(text.to_owned()).unwrap()
}

/// A request is an error, or a message that keeps its meaning.
#[test]
fn fdstore_requests_round_trip() {
    parses_json::<FdStoreRequest>(&payloads(&[
        FdStoreRequest::Hello { version: 2 },
        FdStoreRequest::Put {
            lease: 7,
            blob: blob("{}"),
        },
        FdStoreRequest::Update {
            lease: u64::MAX,
            blob: blob(&"\0".repeat(300)),
        },
        FdStoreRequest::Get { lease: 0 },
        FdStoreRequest::Drop { lease: 1 },
        FdStoreRequest::List { from: 2 },
    ]));
}

/// A response is an error, or a message that keeps its meaning.
#[test]
fn fdstore_responses_round_trip() {
    let entry = |lease, text| StoredLease {
        lease,
        blob: blob(text),
    };
    parses_json::<FdStoreResponse>(&payloads(&[
        FdStoreResponse::Ready {
            version: 2,
            leases: 2,
            room: u32::MAX,
        },
        FdStoreResponse::Stored,
        FdStoreResponse::Lease(entry(1, "{}")),
        FdStoreResponse::Dropped,
        FdStoreResponse::Listed { leases: vec![] },
        FdStoreResponse::Listed {
            leases: vec![entry(1, ""), entry(2, &"ä".repeat(200)), entry(3, "{}")],
        },
        FdStoreResponse::Refused(Refusal::Full),
        FdStoreResponse::Refused(Refusal::NoHello),
    ]));
}
