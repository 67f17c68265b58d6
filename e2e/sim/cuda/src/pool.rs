//! Stream-ordered memory: pools that grow in steps and shrink at a synchronise (F15).

use crate::abi::{Answer, Code, In, Out};
use crate::context::{Current, current};
use crate::entry::exports;
use crate::memory::{Kind, rounded};
use crate::process::{Process, healthy, lock};
use bursar_sim_state::Charge;
use std::collections::BTreeMap;

/// A pool takes memory of its GPU in multiples of this.
const STEP: u64 = 32 << 20;

/// The sizes of a pool. Where in its memory an allocation lies is not modelled: it never fragments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sizes {
    /// Bytes in use.
    used: u64,
    used_high: u64,
    /// Bytes taken of the GPU.
    reserved: u64,
    reserved_high: u64,
    /// Bytes that a synchronise leaves in the pool.
    threshold: u64,
}

impl Sizes {
    /// Bytes to take of the GPU before `len` more can be used.
    fn growth(&self, len: u64) -> u64 {
        (self.used + len)
            .next_multiple_of(STEP)
            .saturating_sub(self.reserved)
    }

    fn grow(&mut self, len: u64, growth: u64) {
        self.used += len;
        self.reserved += growth;
        self.used_high = self.used_high.max(self.used);
        self.reserved_high = self.reserved_high.max(self.reserved);
    }

    /// Bytes that go back to the GPU when `keep` may stay, in whole steps.
    fn surplus(&self, keep: u64) -> u64 {
        let keep = keep.min(self.reserved) / STEP * STEP;
        self.reserved
            - keep
                .max(self.used.next_multiple_of(STEP))
                .min(self.reserved)
    }
}

#[derive(Debug, Clone, Copy)]
struct Pool {
    device: usize,
    sizes: Sizes,
    /// The REUSE attributes, 1 to 3: remembered, no more.
    reuse: [i32; 3],
    /// Destroyed by the program; its sizes are kept until its last allocation is freed.
    destroyed: bool,
}

/// All pools of this image. The first handles are the devices' default pools.
#[derive(Debug)]
pub(crate) struct Pools {
    pools: BTreeMap<u64, Pool>,
    /// The pool that each device allocates from.
    present: Vec<u64>,
    made: u64,
}

fn default_pool(device: usize) -> u64 {
    0x5167_0000_0000 + (device as u64 + 1) * 0x100
}

impl Pools {
    pub(crate) fn new(devices: usize) -> Pools {
        let pools = (0..devices)
            .map(|device| (default_pool(device), Pool::new(device)))
            .collect();
        Pools {
            pools,
            present: (0..devices).map(default_pool).collect(),
            made: devices as u64,
        }
    }

    fn live(&mut self, pool: u64) -> Result<&mut Pool, Code> {
        self.pools
            .get_mut(&pool)
            .filter(|pool| !pool.destroyed)
            .ok_or(Code::INVALID_VALUE)
    }
}

impl Pool {
    fn new(device: usize) -> Pool {
        Pool {
            device,
            sizes: Sizes::default(),
            reuse: [1; 3],
            destroyed: false,
        }
    }
}

impl Process {
    fn allocate_from(&self, current: &Current, pool: u64, len: u64) -> Result<u64, Code> {
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let len = rounded(len)?;
        // Held throughout, so that the charge and the sizes agree.
        let mut pools = lock(&self.pools);
        let found = pools.live(pool)?;
        let unit = self.devices[found.device].unit;
        let growth = found.sizes.growth(len);
        self.image.charge(unit, Charge::Memory, growth)?;
        found.sizes.grow(len, growth);
        drop(pools);
        self.make(current, len, Kind::Pool(pool))
            .inspect_err(|_| self.return_to_pool(pool, len))
    }

    /// Gives an allocation back to its pool, which keeps its memory.
    pub(crate) fn return_to_pool(&self, pool: u64, len: u64) {
        let mut pools = lock(&self.pools);
        let Some(found) = pools.pools.get_mut(&pool) else {
            return;
        };
        found.sizes.used = found.sizes.used.saturating_sub(len);
        if found.destroyed && found.sizes.used == 0 {
            self.trim(found, 0);
            pools.pools.remove(&pool);
        }
    }

    fn trim(&self, pool: &mut Pool, keep: u64) {
        let surplus = pool.sizes.surplus(keep);
        pool.sizes.reserved -= surplus;
        // Collected means: given back already.
        let _ = self
            .image
            .release(self.devices[pool.device].unit, Charge::Memory, surplus);
    }

    /// What every synchronise does.
    pub(crate) fn shrink_pools(&self) {
        for pool in lock(&self.pools).pools.values_mut() {
            self.trim(pool, pool.sizes.threshold);
        }
    }

    /// A pool with allocations goes when the last of them is freed.
    fn destroy_pool(&self, pool: u64) -> Answer {
        let mut pools = lock(&self.pools);
        let found = pools.live(pool)?;
        let device = found.device;
        if pool == default_pool(device) {
            return Err(Code::INVALID_VALUE);
        }
        found.destroyed = true;
        if found.sizes.used == 0 {
            self.trim(found, 0);
            pools.pools.remove(&pool);
        }
        if pools.present[device] == pool {
            pools.present[device] = default_pool(device);
        }
        Ok(())
    }
}

/// `CUmemLocation` and `CUmemPoolProps`, up to what is read.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolProperties {
    kind: i32,
    handle_types: i32,
    location_kind: i32,
    location: i32,
}

fn get_attribute(pool: &Pool, attribute: i32, value: &Out<u64>) -> Answer {
    let sizes = pool.sizes;
    match attribute {
        1..=3 => value.cast::<i32>().set(pool.reuse[attribute as usize - 1]),
        4 => value.set(sizes.threshold),
        5 => value.set(sizes.reserved),
        6 => value.set(sizes.reserved_high),
        7 => value.set(sizes.used),
        8 => value.set(sizes.used_high),
        _ => Err(Code::INVALID_VALUE),
    }
}

fn set_attribute(pool: &mut Pool, attribute: i32, value: &Out<u64>) -> Answer {
    match attribute {
        1..=3 => pool.reuse[attribute as usize - 1] = value.cast::<i32>().get()?,
        4 => pool.sizes.threshold = value.get()?,
        // The high-water marks can be set back, to 0 only.
        6 | 8 if value.get()? != 0 => return Err(Code::INVALID_VALUE),
        6 => pool.sizes.reserved_high = pool.sizes.reserved,
        8 => pool.sizes.used_high = pool.sizes.used,
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(())
}

fn allocate(address: &Out<u64>, len: u64, pool: Option<u64>, stream: u64) -> Answer {
    let current = current()?;
    if address.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    current.check_stream(stream)?;
    let pool = pool.unwrap_or_else(|| lock(&current.process.pools).present[current.device]);
    address.set(current.process.allocate_from(&current, pool, len)?)
}

exports! {
    fn cuMemAllocAsync(address: Out<u64>, len: u64, stream: u64) = allocate(&address, len, None, stream);
    fn cuMemAllocFromPoolAsync(address: Out<u64>, len: u64, pool: u64, stream: u64) = allocate(&address, len, Some(pool), stream);
    fn cuMemFreeAsync(address: u64, stream: u64) = {
        let current = current()?;
        current.check_stream(stream)?;
        let gone = current.process.take(address, |kind| matches!(kind, Kind::Pool(_) | Kind::Linear))?;
        current.process.end(address, gone);
        Ok(())
    };
    fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: i32) = {
        let process = healthy()?;
        pool.set(default_pool(process.device(device)?))
    };
    fn cuDeviceGetMemPool(pool: Out<u64>, device: i32) = {
        let process = healthy()?;
        let device = process.device(device)?;
        let present = lock(&process.pools).present[device];
        pool.set(present)
    };
    fn cuDeviceSetMemPool(device: i32, pool: u64) = {
        let process = healthy()?;
        let device = process.device(device)?;
        let mut pools = lock(&process.pools);
        if pools.live(pool)?.device != device {
            return Err(Code::INVALID_VALUE);
        }
        pools.present[device] = pool;
        Ok(())
    };
    fn cuMemPoolCreate(pool: Out<u64>, properties: In<PoolProperties>) = {
        let (process, wanted) = (healthy()?, properties.get()?);
        // Pinned memory on a device, not to be exported: the only kind there is here.
        if (wanted.kind, wanted.handle_types, wanted.location_kind) != (1, 0, 1) {
            return Err(Code::NOT_SUPPORTED);
        }
        let device = process.device(wanted.location)?;
        let mut pools = lock(&process.pools);
        pools.made += 1;
        let handle = default_pool(pools.made as usize);
        pool.set(handle)?;
        pools.pools.insert(handle, Pool::new(device));
        Ok(())
    };
    fn cuMemPoolDestroy(pool: u64) = healthy()?.destroy_pool(pool);
    fn cuMemPoolGetAttribute(pool: u64, attribute: i32, value: Out<u64>) = {
        get_attribute(lock(&healthy()?.pools).live(pool)?, attribute, &value)
    };
    fn cuMemPoolSetAttribute(pool: u64, attribute: i32, value: Out<u64>) = {
        set_attribute(lock(&healthy()?.pools).live(pool)?, attribute, &value)
    };
    fn cuMemPoolTrimTo(pool: u64, keep: u64) = {
        let process = healthy()?;
        let mut pools = lock(&process.pools);
        process.trim(pools.live(pool)?, keep);
        Ok(())
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(requests: &[u64]) -> u64 {
        let mut sizes = Sizes::default();
        for len in requests {
            sizes.grow(*len, sizes.growth(*len));
        }
        sizes.reserved
    }

    #[test]
    fn a_pool_grows_in_steps_of_32_mib() {
        assert_eq!(taken(&[1]), 32 << 20);
        assert_eq!(taken(&[33 << 20]), 64 << 20);
        assert_eq!(taken(&[32 << 20]), 32 << 20);
        assert_eq!(taken(&[1 << 20, 1 << 20]), 32 << 20);
    }

    #[test]
    fn what_is_used_is_never_surplus() {
        let sizes = Sizes {
            used: 33 << 20,
            reserved: 128 << 20,
            ..Sizes::default()
        };
        assert_eq!(sizes.surplus(0), 64 << 20);
        assert_eq!(sizes.surplus(96 << 20), 32 << 20);
        assert_eq!(sizes.surplus(u64::MAX), 0);
    }
}
