//! What the agent and a worker say to each other.

use bursar_protocol::worker::{FromWorker, ToWorker};

use crate::{parses, payloads};

/// What the agent says is an error, or the one message that encodes to it.
#[test]
fn to_worker_frames_round_trip() {
    parses::<ToWorker>(&payloads(&[
        ToWorker::Create { bytes: 1 << 30 },
        ToWorker::Sweep { bytes: u64::MAX },
    ]));
}

/// What a worker says is an error, or the one message that encodes to it.
#[test]
fn from_worker_frames_round_trip() {
    parses::<FromWorker>(&payloads(&[
        FromWorker::Ready {
            driver: 13_000,
            granularity: 2 << 20,
            total: 80 << 30,
        },
        FromWorker::Created { bytes: 2 << 20 },
        FromWorker::Swept,
        FromWorker::Failed {
            code: -1,
            call: "cuMemCreate".to_owned(),
        },
    ]));
}
