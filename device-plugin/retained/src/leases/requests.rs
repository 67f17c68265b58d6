//! Decides the requests of tenants that create, commit and discard leases.

use bursar_ledger::BootTime;
use bursar_ledger::units::{AllocationId, LeaseId, PodUid};
use bursar_protocol::messages::retained::RetainedRefusal;
use bursar_sessions::lease_handle::{Caller, ContainerBinding};

use super::record::{Content, LeaseRecord};
use super::{Effect, Lease, LeaseTable, Stage};

impl LeaseTable {
    /// Records that a lease is being created; its owner is charged for it.
    pub(crate) fn begin_create(&mut self, id: LeaseId, record: LeaseRecord) {
        let lease = Lease {
            record,
            stage: Stage::Creating,
            is_charged: true,
        };
        self.leases.insert(id, lease);
    }

    /// Records that a new lease is on its way to the fd store; returns its description if the
    /// writer still gets it.
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
    pub(super) fn pod_and_namespace(&self, caller: Caller) -> Option<(PodUid, String)> {
        let ContainerBinding { pod, namespace, .. } =
            self.node.containers.get(&caller.allocation)?;
        Some((pod.clone(), namespace.clone()?))
    }
}
