//! Decides the requests of tenants that open leases.

use std::collections::BTreeSet;

use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, Bytes, LeaseId, PodUid};
use bursar_protocol::messages::retained::RetainedRefusal;
use bursar_sessions::lease_handle::Caller;

use super::record::{Content, LeaseKey, LeaseRecord, Writer};
use super::{
    Effect, Lease, LeaseTable, MAX_OPENERS, MAX_OWNED, OpenRequest, Opened, Stage,
    WRITE_TOKEN_LIFETIME,
};

impl Lease {
    /// Lets a pod read a committed lease. Returns whether the pod is a new opener.
    ///
    /// `shareable` bounds the bytes of leases that pods besides their owners open.
    fn add_opener(&mut self, pod: PodUid, shareable: Bytes) -> Result<bool, RetainedRefusal> {
        let record = &mut self.record;
        if record.openers.contains(&pod) {
            return Ok(false);
        }
        if record.openers.len() >= MAX_OPENERS {
            return Err(RetainedRefusal::TooMany);
        }
        if !record.is_shared() && record.pod != pod && record.bytes > shareable {
            let Bytes(free) = shareable;
            return Err(RetainedRefusal::Quota { free });
        }
        Ok(record.openers.insert(pod))
    }

    /// Renews the write token of a lease if its writer opens it again. Returns false if the lease
    /// must give way to a new one.
    fn renew_token(
        &mut self,
        owner: AllocationId,
        writer: Writer,
        bytes: Bytes,
        now: BootTime,
    ) -> Result<bool, RetainedRefusal> {
        let Content::Writing(current) = &mut self.record.content else {
            return Ok(false);
        };
        // An open with size zero does not take the write token from another thread of the process.
        let is_again = (current.process, current.image) == (writer.process, writer.image)
            && self.stage == Stage::Live
            && self.record.owner == owner
            && bytes != Bytes::ZERO;
        if is_again && bytes <= self.record.bytes {
            *current = writer;
            return Ok(true);
        }
        if !is_again && (now < current.until || self.stage == Stage::Creating) {
            return Err(RetainedRefusal::Writing);
        }
        Ok(false)
    }
}

impl LeaseTable {
    /// Opens a lease for `caller`.
    ///
    /// # Errors
    /// The refusal for the tenant.
    pub(crate) fn open(
        &mut self,
        caller: Caller,
        open: OpenRequest,
        now: BootTime,
    ) -> (Result<Opened, RetainedRefusal>, Vec<Effect>) {
        let mut effects = Vec::new();
        let opened = self.open_with_effects(caller, open, now, &mut effects);
        (opened, effects)
    }

    fn open_with_effects(
        &mut self,
        caller: Caller,
        open: OpenRequest,
        now: BootTime,
        effects: &mut Vec<Effect>,
    ) -> Result<Opened, RetainedRefusal> {
        let (pod, namespace) = self
            .pod_and_namespace(caller)
            .filter(|_| self.store_connected)
            .ok_or(RetainedRefusal::Unavailable)?;
        let title = LeaseKey {
            namespace,
            name: open.name,
            key: open.key,
            gpu: open.gpu,
        };
        let writer = Writer {
            process: caller.process,
            image: open.image,
            token: open.token,
            until: now + WRITE_TOKEN_LIFETIME,
        };
        self.release_writers(
            |other| other.process == writer.process && other.image != writer.image,
            effects,
        );
        let shareable = self.shareable_bytes(&title);
        if let Some((id, found)) = self.find(&title) {
            match &found.record.content {
                Content::Committed { .. } => {
                    if found.add_opener(pod, shareable)? {
                        effects.push(Effect::Update(id, Box::new(found.record.clone())));
                    }
                    return Ok(Opened::Read(id));
                }
                Content::Writing(_) => {
                    if found.renew_token(caller.allocation, writer, open.bytes, now)? {
                        effects.push(Effect::Update(id, Box::new(found.record.clone())));
                        return Ok(Opened::Write(id));
                    }
                    self.release(id, effects);
                }
                // `find` returns no discarded lease.
                Content::Discarded => {}
            }
        }
        if open.bytes == Bytes::ZERO {
            return Err(RetainedRefusal::Missing);
        }
        let gpu_generation = self.generation_for_new(caller, &title)?;
        let record = LeaseRecord {
            gpu_generation,
            title,
            bytes: open.bytes,
            owner: caller.allocation,
            openers: BTreeSet::from([pod.clone()]),
            pod,
            content: Content::Writing(writer),
        };
        Ok(Opened::Create(Box::new(record)))
    }

    /// Checks that a caller may create one more lease. Returns the generation of the lease's GPU.
    fn generation_for_new(&self, caller: Caller, title: &LeaseKey) -> Result<u64, RetainedRefusal> {
        let owned = self.leases.values().filter(|lease| {
            lease.record.owner == caller.allocation
                && matches!(lease.stage, Stage::Creating | Stage::Live)
        });
        if owned.count() >= MAX_OWNED || !self.is_within_share(&title.namespace) {
            return Err(RetainedRefusal::TooMany);
        }
        // Without the GPU's generation the agent could not tell later whether the memory was lost.
        self.generation(&title.gpu)
            .filter(|_| !self.drained.contains(&title.gpu))
            .ok_or(RetainedRefusal::Unavailable)
    }

    /// How many bytes of the namespace's leases further pods that do not own them may open. After
    /// its owner's end such a lease counts against no pod's quota; the namespace's quotas therefore
    /// bound the sum of these leases.
    fn shareable_bytes(&self, title: &LeaseKey) -> Bytes {
        let quotas = self.node.quotas.get(&title.namespace);
        let quota = quotas.and_then(|quotas| quotas.get(&title.gpu));
        let shared = self.leases.values().filter(|lease| {
            let its = &lease.record.title;
            lease.stage == Stage::Live
                && lease.record.is_shared()
                && (&its.namespace, &its.gpu) == (&title.namespace, &title.gpu)
        });
        let shared = shared.fold(0_u64, |sum, lease| sum.saturating_add(lease.record.bytes.0));
        Bytes(quota.map_or(0, |quota| quota.0.saturating_sub(shared)))
    }

    /// Whether a namespace may have one more lease: a namespace leaves as many free places as it
    /// occupies. Leases on their way out count, because the fd store still has them.
    fn is_within_share(&self, namespace: &str) -> bool {
        let Some(most) = self.capacity else {
            return true;
        };
        let leases = self.leases.values();
        let its = leases.filter(|lease| lease.record.title.namespace == namespace);
        its.count() < most.saturating_sub(self.leases.len())
    }

    fn find(&mut self, title: &LeaseKey) -> Option<(LeaseId, &mut Lease)> {
        let mut leases = self.leases.iter_mut();
        let found = leases.find(|(_, lease)| {
            lease.record.title == *title
                && matches!(lease.stage, Stage::Creating | Stage::Live)
                && lease.record.content != Content::Discarded
        });
        found.map(|(id, lease)| (*id, lease))
    }
}
