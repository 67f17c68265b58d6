//! Follows the fd store: restores leases from its records, and writes these records.

use std::collections::BTreeMap;
use std::sync::Arc;

use bursar_host::checkpoint::version::Versioned;
use bursar_ledger::units::{Bytes, GpuUuid, LeaseId};
use bursar_protocol::fdstore::{Blob, KEEP_ALIVE};
use bursar_protocol::messages::retained::RetainedRefusal;
use bursar_sessions::Process;
use serde::Deserialize;
use tracing::warn;

use super::keep_alive::{KeepAlive, parse_gpu};
use super::{State, reply_refused};
use crate::fdstore_client::StoreEvent;
use crate::leases::{LeaseRecord, StoredRecord};

impl State {
    pub(super) fn handle_store_event(&mut self, event: Option<StoreEvent>) {
        match event {
            Some(StoreEvent::Connected {
                connection,
                leases: stored,
                capacity,
            }) => {
                self.connection = Some(connection);
                // The keep-alive takes one place.
                self.leases.set_capacity(capacity.saturating_sub(1));
                self.keep_alive = match stored.get(&LeaseId(KEEP_ALIVE)) {
                    Some(blob) => KeepAlive::Stored(parse_gpu(blob)),
                    None => KeepAlive::None,
                };
                let stored = stored.into_iter();
                let stored = stored.filter(|(lease, _)| lease.0 != KEEP_ALIVE);
                let parsed = |(lease, blob): (LeaseId, Blob)| (lease, parse_record(&blob));
                let stored: BTreeMap<LeaseId, StoredRecord> = stored.map(parsed).collect();
                log_unread(&stored);
                stored
                    .keys()
                    .for_each(|lease| self.service.lease_ids.observe(*lease));
                let membership = Arc::clone(&self.service.membership);
                let is_alive = |process: Process| membership.process(process.pid) == Some(process);
                let effects = self.leases.resync(stored, is_alive);
                self.close_misplaced_keep_alive();
                self.reconcile_charges();
                self.apply_effects(effects);
            }
            Some(StoreEvent::Lost) => {
                self.store_losses += u64::from(self.leases.is_store_connected());
                self.connection = None;
                self.leases.store_disconnected();
                let waiting = std::mem::take(&mut self.discarding).into_values().flatten();
                waiting.for_each(|reply| reply_refused(reply, RetainedRefusal::Unavailable));
            }
            // The client's thread has exited.
            None => {
                self.service.store_events = None;
                self.connection = None;
                self.leases.store_disconnected();
            }
        }
    }
}

/// Parses the blob of a lease. The GPU and the size suffice to charge a lease whose other fields
/// this agent cannot read.
fn parse_record(blob: &Blob) -> StoredRecord {
    #[derive(Deserialize)]
    struct Title {
        gpu: GpuUuid,
    }
    #[derive(Deserialize)]
    struct Extent {
        title: Title,
        bytes: Bytes,
    }
    match serde_json::from_str::<Versioned<LeaseRecord>>(blob.as_str()) {
        Ok(versioned) => StoredRecord::Read(versioned.record),
        Err(error) => {
            let extent: Option<Extent> = serde_json::from_str(blob.as_str()).ok();
            StoredRecord::Unreadable {
                extent: extent.map(|extent| (extent.title.gpu, extent.bytes)),
                why: error.to_string(),
            }
        }
    }
}

/// Logs all unreadable leases in one line.
fn log_unread(stored: &BTreeMap<LeaseId, StoredRecord>) {
    let mut unreadable = stored
        .iter()
        .filter_map(|(lease, stored_record)| match stored_record {
            StoredRecord::Unreadable { why, .. } => Some((lease, why)),
            StoredRecord::Read(_) => None,
        });
    if let Some((lease, why)) = unreadable.next() {
        let others = unreadable.count();
        warn!(%lease, %why, others, "failed to read a lease of another version; it stays until its GPU, or each GPU of the node, is drained");
    }
}

pub(super) fn encode_record(record: &LeaseRecord) -> Option<Blob> {
    serde_json::to_string(&Versioned::from(record))
        .ok()?
        .try_into()
        .ok()
}

#[cfg(test)]
mod tests {
    use bursar_ledger::BootTime;
    use bursar_ledger::units::AllocationId;
    use serde_json::{Value, json};

    use super::*;
    use crate::leases::{Content, LeaseKey, Writer};

    fn parse(record: &Value) -> StoredRecord {
        parse_record(&record.to_string().try_into().unwrap())
    }

    #[test]
    fn golden_leases_are_read() {
        let process = Process {
            pid: 4_711,
            start: 123_456,
        };
        let record = LeaseRecord {
            title: LeaseKey {
                namespace: "team-a".to_owned(),
                name: "weights".to_owned(),
                key: [0x0a; 32],
                gpu: "GPU-a".parse().unwrap(),
            },
            bytes: Bytes(1 << 21),
            gpu_generation: 7,
            owner: AllocationId::from_bits(7),
            pod: "trainer".parse().unwrap(),
            openers: ["trainer", "server"].map(|pod| pod.parse().unwrap()).into(),
            content: Content::Writing(Writer {
                process,
                image: 5,
                token: 11,
                until: BootTime(95_000),
            }),
        };
        let committed = Content::Committed {
            token: 11,
            checksum: 12,
        };
        let contents = [record.content.clone(), committed, Content::Discarded];
        let records = contents.map(|content| LeaseRecord {
            content,
            ..record.clone()
        });
        let today = || {
            let blobs = records.iter().map(|record| encode_record(record).unwrap());
            let lines = blobs.map(|blob| format!("{}\n", blob.as_str()));
            lines.collect::<String>().into_bytes()
        };
        bursar_protocol::testing::for_each_record("leases.jsonl", today, |golden| {
            let lines = std::str::from_utf8(golden).unwrap().lines();
            let read = lines.map(|blob| parse_record(&blob.to_owned().try_into().unwrap()));
            let expected = records.iter().cloned().map(StoredRecord::Read);
            assert!(read.eq(expected));
        });
    }

    #[test]
    fn lease_of_another_version_is_read_as_far_as_it_goes() {
        let known = json!({
            "version": 1, "title": { "namespace": "team", "name": "weights", "key": "0a".repeat(32), "gpu": "GPU-a" },
            "bytes": 4096, "gpu-generation": 1, "owner": "0000000000000001", "pod": "a",
            "openers": ["a"], "content": { "committed": { "token": 1, "checksum": 2 } },
        });
        let StoredRecord::Read(record) = parse(&known) else {
            panic!("{:?}", parse(&known));
        };
        assert_eq!(
            encode_record(&record)
                .unwrap()
                .as_str()
                .parse::<Value>()
                .unwrap(),
            known
        );
        let mut without_version = known.clone();
        without_version.as_object_mut().unwrap().remove("version");
        assert_eq!(parse(&without_version), StoredRecord::Read(record));
        let with = |field: &str, value: Value| {
            let mut other = known.clone();
            other[field] = value;
            parse(&other)
        };
        let charge = Some(("GPU-a".parse().unwrap(), Bytes(4096)));
        for (field, value) in [
            ("content", json!({ "sealed": {} })),
            ("title", json!({ "space": "team", "gpu": "GPU-a" })),
            ("owner", json!({ "pod": "a" })),
            ("version", json!(2)),
        ] {
            let read = with(field, value);
            assert!(
                matches!(&read, StoredRecord::Unreadable { extent, .. } if *extent == charge),
                "{field}: {read:?}"
            );
        }
        let read = with("bytes", json!("4Ki"));
        assert!(
            matches!(read, StoredRecord::Unreadable { extent: None, .. }),
            "{read:?}"
        );
    }
}
