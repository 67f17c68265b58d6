//! Decides the requests of tenants: open, create, commit and discard.

use std::collections::BTreeSet;

use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, Bytes, LeaseId, PodUid};
use bursar_protocol::messages::retained::RetainedRefusal;
use bursar_sessions::lease_handle::{Caller, ContainerBinding};

use super::record::{Content, LeaseKey, LeaseRecord, Writer};
use super::{
    Effect, Lease, LeaseTable, MAX_OPENERS, MAX_OWNED, OpenRequest, Opened, Stage,
    WRITE_TOKEN_LIFETIME,
};

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
        let Some((pod, namespace)) = self
            .pod_and_namespace(caller)
            .filter(|_| self.store_connected)
        else {
            return (Err(RetainedRefusal::Unavailable), effects);
        };
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
            &mut effects,
        );
        let shareable = self.shareable_bytes(&title);
        if let Some((id, found)) = self.find(&title) {
            match &mut found.record.content {
                Content::Committed { .. } => {
                    if !found.record.openers.contains(&pod) {
                        if found.record.openers.len() >= MAX_OPENERS {
                            return (Err(RetainedRefusal::TooMany), effects);
                        }
                        if !found.record.is_shared()
                            && found.record.pod != pod
                            && found.record.bytes > shareable
                        {
                            let Bytes(free) = shareable;
                            return (Err(RetainedRefusal::Quota { free }), effects);
                        }
                        found.record.openers.insert(pod);
                        effects.push(Effect::Update(id, Box::new(found.record.clone())));
                    }
                    return (Ok(Opened::Read(id)), effects);
                }
                Content::Writing(current) => {
                    // An open with size zero does not take the write token from another thread of
                    // the process.
                    let is_again = (current.process, current.image)
                        == (writer.process, writer.image)
                        && found.stage == Stage::Live
                        && found.record.owner == caller.allocation
                        && open.bytes != Bytes::ZERO;
                    if is_again && open.bytes <= found.record.bytes {
                        *current = writer;
                        effects.push(Effect::Update(id, Box::new(found.record.clone())));
                        return (Ok(Opened::Write(id)), effects);
                    }
                    if !is_again && (now < current.until || found.stage == Stage::Creating) {
                        return (Err(RetainedRefusal::Writing), effects);
                    }
                    self.release(id, &mut effects);
                }
                // `find` returns no discarded lease.
                Content::Discarded => {}
            }
        }
        if open.bytes == Bytes::ZERO {
            return (Err(RetainedRefusal::Missing), effects);
        }
        let owned = self.leases.values().filter(|lease| {
            lease.record.owner == caller.allocation
                && matches!(lease.stage, Stage::Creating | Stage::Live)
        });
        if owned.count() >= MAX_OWNED || !self.is_within_share(&title.namespace) {
            return (Err(RetainedRefusal::TooMany), effects);
        }
        // Without the GPU's generation the agent could not tell later whether the memory was lost.
        let generations = &self.node.generations;
        let generation = generations.get(&title.gpu);
        let Some(generation) = generation.filter(|_| !self.drained.contains(&title.gpu)) else {
            return (Err(RetainedRefusal::Unavailable), effects);
        };
        let record = LeaseRecord {
            gpu_generation: *generation,
            title,
            bytes: open.bytes,
            owner: caller.allocation,
            openers: BTreeSet::from([pod.clone()]),
            pod,
            content: Content::Writing(writer),
        };
        (Ok(Opened::Create(Box::new(record))), effects)
    }

    /// Records that a lease is being created; its owner is charged for it.
    pub(crate) fn begin_create(&mut self, id: LeaseId, record: LeaseRecord) {
        let lease = Lease {
            record,
            stage: Stage::Creating,
            is_charged: true,
            is_orphaned: false,
        };
        self.leases.insert(id, lease);
    }

    /// Records that the fd store has a new lease; returns its description if the writer still gets
    /// it.
    pub(crate) fn finish_create(&mut self, id: LeaseId) -> (Option<&LeaseRecord>, Vec<Effect>) {
        let mut effects = Vec::new();
        match self.leases.get_mut(&id) {
            Some(lease) if lease.stage == Stage::Creating => lease.stage = Stage::Live,
            _ => {}
        }
        // The writer may have ended during the creation.
        let ended = self.get(id).is_some_and(|record| {
            !matches!(record.content, Content::Writing(_)) || record.openers.is_empty()
        });
        if ended {
            self.release(id, &mut effects);
        }
        (self.get(id), effects)
    }

    /// Forgets a lease whose memory does not exist; returns the owner, whose charge ends.
    pub(crate) fn abort_create(&mut self, id: LeaseId) -> Option<AllocationId> {
        self.leases.remove(&id).map(|lease| lease.record.owner)
    }

    /// Commits a lease. The service answers the tenant after the fd store has acknowledged the
    /// effect.
    ///
    /// # Errors
    /// The refusal for the tenant.
    pub(crate) fn commit(
        &mut self,
        caller: Caller,
        id: LeaseId,
        token: u64,
        checksum: u64,
        now: BootTime,
    ) -> Result<Vec<Effect>, RetainedRefusal> {
        let (_, namespace) = self
            .pod_and_namespace(caller)
            .ok_or(RetainedRefusal::Unavailable)?;
        if !self.store_connected {
            return Err(RetainedRefusal::Unavailable);
        }
        let lease = self.leases.get_mut(&id);
        let lease = lease.filter(|lease| lease.record.title.namespace == namespace);
        let record = match lease {
            Some(lease) if lease.stage == Stage::Live => &mut lease.record,
            _ => return Err(RetainedRefusal::Missing),
        };
        let after = Content::Committed { token, checksum };
        match &record.content {
            same if *same == after => {}
            Content::Writing(writer)
                if (writer.process, writer.token) == (caller.process, token)
                    && now < writer.until => {}
            _ => return Err(RetainedRefusal::Fenced),
        }
        record.content = after;
        // A repeated commit also waits until the fd store has acknowledged the record.
        Ok(vec![Effect::Update(id, Box::new(record.clone()))])
    }

    /// Discards a lease for the pod of `caller`. Before the commit only the writer may do so.
    ///
    /// # Errors
    /// The refusal for the tenant.
    pub(crate) fn discard(
        &mut self,
        caller: Caller,
        id: LeaseId,
    ) -> Result<Vec<Effect>, RetainedRefusal> {
        let (pod, _) = self
            .pod_and_namespace(caller)
            .ok_or(RetainedRefusal::Unavailable)?;
        if !self.store_connected {
            return Err(RetainedRefusal::Unavailable);
        }
        let lease = self.leases.get_mut(&id);
        let lease = lease
            .filter(|lease| lease.stage == Stage::Live && lease.record.openers.contains(&pod))
            .ok_or(RetainedRefusal::Missing)?;
        if let Content::Writing(writer) = &lease.record.content
            && writer.process != caller.process
        {
            return Err(RetainedRefusal::Fenced);
        }
        let mut effects = Vec::new();
        if lease.record.openers.iter().any(|opener| *opener != pod) {
            lease.record.content = Content::Discarded;
            lease.record.openers.remove(&pod);
            effects.push(Effect::Update(id, Box::new(lease.record.clone())));
        } else {
            self.release(id, &mut effects);
        }
        Ok(effects)
    }

    /// The pod and the namespace of a caller whose container is bound.
    fn pod_and_namespace(&self, caller: Caller) -> Option<(PodUid, String)> {
        let ContainerBinding { pod, namespace, .. } =
            self.node.containers.get(&caller.allocation)?;
        Some((pod.clone(), namespace.clone()?))
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
