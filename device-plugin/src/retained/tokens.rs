//! Tokens of memory: who may have one, and whether what one names is still there. Pure.
//!
//! ```text
//! tenant --Seal--> which of its own memory it means
//!                    the agent adds: node, container, G (node), P (its session), L (the lease's number) --key--> token
//!        ...any channel...
//! tenant --Redeem--> seal, node --> its container is of the asker's namespace --> G, P, L are the present ones
//! ```
//!
//! Nothing is on record: a token has all that it takes, and is compared with what the agent knows
//! by then. So an answer is true of the moment at which it is given, and memory that is to be used
//! is asked for again.
//!
//! * [`seal`] is the node's key, and what it seals
//! * [`key`] is the file of that key

pub mod key;
pub mod seal;

use bursar_protocol::fdstore::KEEP_ALIVE;
use bursar_protocol::messages::token::{Generation, Generations, GpuToken, MemoryId, TokenRefusal};

use crate::retained::leases::{Caller, LeaseTable};
use crate::sessions::ProcessImage;
use crate::units::{AllocationId, GpuUuid, LeaseId};
use seal::NodeKey;

/// What tokens are judged by.
pub struct TokenAuthority<'a, I> {
    /// The node's key.
    pub key: &'a NodeKey,
    /// The node as it stands, and its leases.
    pub leases: &'a LeaseTable,
    /// The process images of a container that are not fenced; none where it is not served.
    pub images: I,
}

impl<I: Fn(&AllocationId) -> Option<Vec<ProcessImage>>> TokenAuthority<'_, I> {
    /// A token for memory of a GPU that the asker's container has: a block of the lease, or of the
    /// process's own memory where that is [`NO_LEASE`].
    ///
    /// # Errors
    /// What the tenant is answered.
    pub fn seal(
        &self,
        asker: Caller,
        gpu: &GpuUuid,
        lease: LeaseId,
        block: u64,
    ) -> Result<GpuToken, TokenRefusal> {
        // After an exec this is the image before until the next says hello: then its token ends
        // before it is used.
        let image = self.find_image(&asker.allocation, |image| image.process == asker.process)?;
        let image = image.ok_or(TokenRefusal::NoSession)?;
        if !self.has_open(asker, lease, gpu)? {
            return Err(TokenRefusal::NoLease);
        }
        Ok(self.key.seal(
            gpu,
            asker.allocation,
            Generations {
                gpu: self.generation(gpu)?,
                process: image.generation,
                lease: lease.0,
            },
            block,
        ))
    }

    /// What a token names, where that is still there and is of the asker's namespace.
    ///
    /// # Errors
    /// What the tenant is answered.
    pub fn redeem(&self, asker: Caller, token: &GpuToken) -> Result<MemoryId, TokenRefusal> {
        let id = self.key.unseal(token)?;
        let gpu: GpuUuid = id.gpu.parse().map_err(|_| TokenRefusal::Malformed)?;
        let allocation = AllocationId::from_bits(id.container);
        let asks = self.namespace(&asker.allocation)?;
        // Another namespace's memory is not told apart from none.
        if !self.leases.is_bound(&allocation) || self.namespace(&allocation)? != asks {
            return Err(TokenRefusal::Unknown);
        }
        let fenced = |which, generation| Err(TokenRefusal::Fenced { which, generation });
        let said = id.generations;
        if self.generation(&gpu)? != said.gpu {
            return fenced(Generation::Gpu, said.gpu);
        }
        let image = self.find_image(&allocation, |image| image.generation == said.process)?;
        let Some(ProcessImage { process, .. }) = image else {
            return fenced(Generation::Process, said.process);
        };
        let issuer = Caller {
            allocation,
            process,
        };
        if !self.has_open(issuer, LeaseId(said.lease), &gpu)? {
            return fenced(Generation::Lease, said.lease);
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

    fn has_open(&self, who: Caller, lease: LeaseId, gpu: &GpuUuid) -> Result<bool, TokenRefusal> {
        match lease {
            NO_LEASE => Ok(true),
            // Of a vault that is away nothing is known.
            _ if !self.leases.is_store_connected() => Err(TokenRefusal::Unavailable),
            _ => Ok(self.leases.is_open(who, lease, gpu)),
        }
    }
}

/// What memory that is no lease's has for a lease.
pub const NO_LEASE: LeaseId = LeaseId(KEEP_ALIVE);

#[cfg(test)]
mod tests;
