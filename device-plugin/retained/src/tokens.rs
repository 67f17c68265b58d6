//! Seals and redeems memory tokens. Pure.
//!
//! ```text
//! tenant --Seal--> names memory of its own process
//!                  the agent adds the node, the container and the generations of GPU, process
//!                  and lease, and seals all of it with the node's key
//!    ...any channel...
//! tenant --Redeem--> the agent checks the seal, the node, the namespace and the generations
//! ```
//!
//! Any program can verify the seal with the node's public key, `status.tokenKey` of its `GpuNode`,
//! and compare the GPU generation with the node's. The agent alone knows the processes and leases.
//!
//! The agent records nothing: a token carries all that it needs, and the agent compares it with the
//! current state. An answer holds for the moment at which it is given, so a tenant redeems a token
//! again before each use.
//!
//! * [`seal`] seals with the node's key
//! * [`key`] stores the key

pub mod key;
pub mod seal;

pub use bursar_protocol::messages::signed_token::NodePublicKey;

use bursar_ledger::units::{AllocationId, GpuUuid, LeaseId};
use bursar_sessions::ProcessImage;
use bursar_sessions::lease_handle::Caller;

use bursar_protocol::fdstore::KEEP_ALIVE;
use bursar_protocol::messages::token::{Generation, Generations, GpuToken, MemoryId, TokenRefusal};

use crate::leases::LeaseTable;
use seal::NodeKey;

/// The state by which tokens are sealed and redeemed.
pub(crate) struct TokenAuthority<'a, I> {
    /// The node's key.
    pub key: &'a NodeKey,
    /// The node's leases and bound containers.
    pub leases: &'a LeaseTable,
    /// The process images of a container that are not fenced; none for a container without a
    /// session.
    pub images: I,
}

impl<I: Fn(&AllocationId) -> Option<Vec<ProcessImage>>> TokenAuthority<'_, I> {
    /// Seals a token for memory of a GPU that the caller's container has. The memory is a block of
    /// the lease, or of the process's own memory for [`NO_LEASE`].
    ///
    /// # Errors
    /// The refusal for the tenant.
    pub(crate) fn seal(
        &self,
        caller: Caller,
        gpu: &GpuUuid,
        lease: LeaseId,
        block: u64,
    ) -> Result<GpuToken, TokenRefusal> {
        // Between an exec and the next hello the token names the previous image, which is fenced
        // before the token is used.
        let image = self.find_image(&caller.allocation, |image| image.process == caller.process)?;
        let image = image.ok_or(TokenRefusal::NoSession)?;
        if !self.has_open(caller, lease, gpu)? {
            return Err(TokenRefusal::NoLease);
        }
        Ok(self.key.seal(
            gpu,
            caller.allocation,
            Generations {
                gpu: self.generation(gpu)?,
                process: image.generation,
                lease: lease.0,
            },
            block,
        ))
    }

    /// Unseals a token, if its memory still exists and belongs to the caller's namespace.
    ///
    /// # Errors
    /// The refusal for the tenant.
    pub(crate) fn redeem(
        &self,
        caller: Caller,
        token: &GpuToken,
    ) -> Result<MemoryId, TokenRefusal> {
        let id = self.key.unseal(token)?;
        let gpu: GpuUuid = id.gpu.parse().map_err(|_| TokenRefusal::Malformed)?;
        let allocation = AllocationId::from_bits(id.container);
        let namespace = self.namespace(&caller.allocation)?;
        // The answer does not reveal whether another namespace has such memory.
        if !self.leases.is_bound(&allocation) || self.namespace(&allocation)? != namespace {
            return Err(TokenRefusal::Unknown);
        }
        let fenced = |which, generation| Err(TokenRefusal::Fenced { which, generation });
        let generations = id.generations;
        if self.generation(&gpu)? != generations.gpu {
            return fenced(Generation::Gpu, generations.gpu);
        }
        let image =
            self.find_image(&allocation, |image| image.generation == generations.process)?;
        let Some(ProcessImage { process, .. }) = image else {
            return fenced(Generation::Process, generations.process);
        };
        let issuer = Caller {
            allocation,
            process,
        };
        if !self.has_open(issuer, LeaseId(generations.lease), &gpu)? {
            return fenced(Generation::Lease, generations.lease);
        }
        Ok(id)
    }

    fn namespace(&self, allocation: &AllocationId) -> Result<&str, TokenRefusal> {
        let namespace = self.leases.namespace(allocation);
        namespace.ok_or(TokenRefusal::Unavailable)
    }

    fn generation(&self, gpu: &GpuUuid) -> Result<u64, TokenRefusal> {
        let generation = self.leases.generation(gpu);
        generation.ok_or(TokenRefusal::Unavailable)
    }

    fn find_image(
        &self,
        allocation: &AllocationId,
        is_meant: impl Fn(&ProcessImage) -> bool,
    ) -> Result<Option<ProcessImage>, TokenRefusal> {
        let images = (self.images)(allocation).ok_or(TokenRefusal::Unavailable)?;
        Ok(images.into_iter().find(is_meant))
    }

    fn has_open(
        &self,
        caller: Caller,
        lease: LeaseId,
        gpu: &GpuUuid,
    ) -> Result<bool, TokenRefusal> {
        match lease {
            NO_LEASE => Ok(true),
            // While the fd store is away the agent does not know which leases exist.
            _ if !self.leases.is_store_connected() => Err(TokenRefusal::Unavailable),
            _ => Ok(self.leases.is_open(caller, lease, gpu)),
        }
    }
}

/// The lease number in tokens for memory that is no lease.
pub(crate) const NO_LEASE: LeaseId = LeaseId(KEEP_ALIVE);

#[cfg(test)]
mod tests;
