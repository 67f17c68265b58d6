//! Implements the stream-ordered memory allocator (`cuMemAllocAsync`, `cuMemPool*`).
//!
//! Its pools grow in steps, and shrink when the host synchronizes (F15 in docs/internals/facts.md).
//!
//! As on an H200 with driver 580:
//!
//! - An allocation grows the pool by at most its size, rounded up to the step.
//! - Memory that a stream freed cannot be trimmed before the host has synchronized. Another stream
//!   uses it only if there is no other memory.
//! - `cuMemFree` frees at once.
//! - `cuMemFreeAsync` accepts linear memory, which is freed when the host next synchronizes.
//! - Pools and their allocations outlive contexts.

use bursar_sim_state::Charge;

use crate::abi::{Code, DriverResult, In, Location, Out};
use crate::context_stack::{CurrentContext, current_context};
use crate::entry::exports;
use crate::granularity::{is_piece, round_up, whole_chunks};
use crate::process::{Process, healthy_process, lock};
use crate::tables::address_space::AllocationKind;
use crate::tables::graphs::Node;
use crate::tables::pools::{DeferredFree, Pool, PoolLocation, SyncScope, default_pool};
use std::fs::File;
use std::os::fd::{IntoRawFd, OwnedFd};

impl Process {
    fn allocate_from(
        &self,
        current: &CurrentContext,
        pool: u64,
        len: u64,
        stream: u64,
    ) -> Result<u64, Code> {
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let len = round_up(len)?;
        // Locked throughout, so that the charge and the sizes agree.
        let mut pools = lock(&self.pools);
        let found = pools.live(pool)?;
        let mut growth = found.sizes.growth(len, stream, false);
        if self.charge_location(found.place, growth).is_err() {
            growth = found.sizes.growth(len, stream, true);
            self.charge_location(found.place, growth)?;
        }
        found.sizes.grow(len, stream, growth);
        drop(pools);
        self.map_allocation(current, len, AllocationKind::Pool(pool))
            .inspect_err(|_| self.return_to_pool(pool, len, None))
    }

    fn charge_location(&self, place: PoolLocation, bytes: u64) -> DriverResult {
        match place {
            PoolLocation::Device(device) => {
                let unit = self.devices[device].unit;
                Ok(self.image.charge(unit, Charge::Memory, bytes)?)
            }
            PoolLocation::Host => Ok(()),
        }
    }

    /// Returns an allocation to its pool, in the order of a stream.
    ///
    /// Without a stream no work is left that could use the memory, so the pool shrinks at once.
    pub(crate) fn return_to_pool(&self, pool: u64, len: u64, stream: Option<u64>) {
        let mut pools = lock(&self.pools);
        let Some(found) = pools.pools.get_mut(&pool) else {
            return;
        };
        found.sizes.used = found.sizes.used.saturating_sub(len);
        match stream {
            Some(stream) => *found.sizes.freed_in_stream.entry(stream).or_default() += len,
            None => self.trim(found, found.sizes.threshold),
        }
        if found.destroyed && found.sizes.used == 0 {
            found.sizes.freed_in_stream.clear();
            self.trim(found, 0);
            pools.pools.remove(&pool);
        }
    }

    fn trim(&self, pool: &mut Pool, keep: u64) {
        let surplus = pool.sizes.surplus(keep);
        pool.sizes.reserved -= surplus;
        if let PoolLocation::Device(device) = pool.place {
            self.release_memory(self.devices[device].unit, surplus);
        }
    }

    /// Shrinks the pools and completes deferred frees after a synchronization.
    pub(crate) fn shrink_pools(&self, scope: SyncScope) {
        let mut pools = lock(&self.pools);
        for pool in pools.pools.values_mut() {
            pool.sizes
                .freed_in_stream
                .retain(|stream, _| !scope.covers(*stream));
            self.trim(pool, pool.sizes.threshold);
        }
        pools.deferred_frees.retain(|deferred| {
            let is_done = scope.covers(deferred.stream);
            match is_done {
                true if is_piece(deferred.len) => {
                    self.release_piece(deferred.address, deferred.unit)
                }
                true => self.release_memory(deferred.unit, whole_chunks(deferred.len)),
                false => {}
            }
            !is_done
        });
    }

    /// Frees linear memory in the order of a stream.
    pub(crate) fn defer_free(&self, unit: usize, len: u64, address: u64, stream: u64) {
        let deferred = DeferredFree {
            stream,
            unit,
            len,
            address,
        };
        lock(&self.pools).deferred_frees.push(deferred);
    }

    /// Destroys a pool; its memory is released with its last allocation.
    fn destroy_pool(&self, pool: u64) -> DriverResult {
        let mut pools = lock(&self.pools);
        let found = pools.live(pool)?;
        if found.default {
            return Err(Code::INVALID_VALUE);
        }
        let place = found.place;
        found.destroyed = true;
        if found.sizes.used == 0 {
            found.sizes.freed_in_stream.clear();
            self.trim(found, 0);
            pools.pools.remove(&pool);
        }
        if let PoolLocation::Device(device) = place
            && pools.current_pools[device] == pool
        {
            pools.current_pools[device] = default_pool(device);
        }
        Ok(())
    }

    fn pool_location(&self, kind: i32, location: Location) -> Result<PoolLocation, Code> {
        match (kind, location.kind) {
            (PINNED, ON_DEVICE) => Ok(PoolLocation::Device(self.device(location.id)?)),
            (PINNED, ON_HOST | ON_NUMA_NODE) | (MANAGED, 0..=ON_NUMA_NODE) => {
                Ok(PoolLocation::Host)
            }
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// The default pool of a location and an allocation type (CUDA 13).
    fn default_pool_of(&self, kind: i32, location: Location) -> Result<u64, Code> {
        let place = self.pool_location(kind, location)?;
        if let PoolLocation::Device(device) = place {
            return Ok(default_pool(device));
        }
        let mut pools = lock(&self.pools);
        let name = (kind, location.kind, location.id);
        if let Some(known) = pools.host_defaults.get(&name) {
            return Ok(*known);
        }
        let handle = pools.insert(Pool {
            default: true,
            ..Pool::new(place)
        });
        pools.host_defaults.insert(name, handle);
        Ok(handle)
    }

    fn set_current_pool(&self, device: usize, pool: u64) -> DriverResult {
        let mut pools = lock(&self.pools);
        if pools.live(pool)?.place != PoolLocation::Device(device) {
            return Err(Code::INVALID_VALUE);
        }
        pools.current_pools[device] = pool;
        Ok(())
    }
}

const PINNED: i32 = 1;
const MANAGED: i32 = 2;
const ON_DEVICE: i32 = 1;
const ON_HOST: i32 = 2;
const ON_NUMA_NODE: i32 = 3;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: i32 = 1;

/// `CUmemPoolProps`, up to the last field that is read.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolProperties {
    kind: i32,
    handle_types: i32,
    location: Location,
}

fn get_attribute(pool: &Pool, attribute: i32, value: &Out<u64>) -> DriverResult {
    let sizes = &pool.sizes;
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

fn set_attribute(pool: &mut Pool, attribute: i32, value: &Out<u64>) -> DriverResult {
    match attribute {
        1..=3 => pool.reuse[attribute as usize - 1] = value.cast::<i32>().get()?,
        4 => pool.sizes.threshold = value.get()?,
        // A high-water mark can only be reset, with the value 0.
        6 | 8 if value.get()? != 0 => return Err(Code::INVALID_VALUE),
        6 => pool.sizes.reserved_high = pool.sizes.reserved,
        8 => pool.sizes.used_high = pool.sizes.used,
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(())
}

fn allocate(address: &Out<u64>, len: u64, pool: Option<u64>, stream: u64) -> DriverResult {
    let current = current_context()?;
    if address.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let stream = current.stream_key(stream)?;
    if current.process.is_captured(stream)? {
        let allocated =
            current
                .process
                .map_allocation(&current, round_up(len)?, AllocationKind::Captured)?;
        let node = Node::allocation(current.device, len, allocated);
        current.process.append_captured_node(stream, node);
        return address.set(allocated);
    }
    let pool = pool.unwrap_or_else(|| lock(&current.process.pools).current_pools[current.device]);
    address.set(current.process.allocate_from(&current, pool, len, stream)?)
}

fn free(address: u64, stream: u64) -> DriverResult {
    let current = current_context()?;
    let stream = current.stream_key(stream)?;
    let process = current.process;
    let around = lock(&process.space).find_containing(address);
    if around.is_some_and(|(_, found)| found.kind == AllocationKind::Managed) {
        return Err(Code::NOT_SUPPORTED);
    }
    let captured = process.is_captured(stream)?;
    let removed = process.remove_allocation(address, |kind| match kind {
        AllocationKind::Captured => captured,
        kind => !captured && matches!(kind, AllocationKind::Pool(_) | AllocationKind::Linear),
    })?;
    if captured {
        process.append_captured_node(stream, Node::Free);
    }
    process.free_allocation_in_stream(address, removed, Some(stream));
    Ok(())
}

exports! {
    fn cuMemAllocAsync(address: Out<u64>, len: u64, stream: u64) = allocate(&address, len, None, stream);
    fn cuMemAllocAsync_ptsz(address: Out<u64>, len: u64, stream: u64) = allocate(&address, len, None, stream);
    fn cuMemAllocFromPoolAsync(address: Out<u64>, len: u64, pool: u64, stream: u64) = allocate(&address, len, Some(pool), stream);
    fn cuMemAllocFromPoolAsync_ptsz(address: Out<u64>, len: u64, pool: u64, stream: u64) = allocate(&address, len, Some(pool), stream);
    fn cuMemFreeAsync(address: u64, stream: u64) = free(address, stream);
    fn cuMemFreeAsync_ptsz(address: u64, stream: u64) = free(address, stream);
    fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: i32) = {
        let process = healthy_process()?;
        pool.set(default_pool(process.device(device)?))
    };
    fn cuDeviceGetMemPool(pool: Out<u64>, device: i32) = {
        let process = healthy_process()?;
        let device = process.device(device)?;
        let present = lock(&process.pools).current_pools[device];
        pool.set(present)
    };
    fn cuDeviceSetMemPool(device: i32, pool: u64) = {
        let process = healthy_process()?;
        process.set_current_pool(process.device(device)?, pool)
    };
    fn cuMemGetDefaultMemPool(pool: Out<u64>, location: In<Location>, kind: i32) = {
        pool.set(healthy_process()?.default_pool_of(kind, location.get()?)?)
    };
    fn cuMemGetMemPool(pool: Out<u64>, location: In<Location>, kind: i32) = {
        let (process, location) = (healthy_process()?, location.get()?);
        match process.pool_location(kind, location)? {
            PoolLocation::Device(device) => {
                let present = lock(&process.pools).current_pools[device];
                pool.set(present)
            }
            PoolLocation::Host => pool.set(process.default_pool_of(kind, location)?),
        }
    };
    fn cuMemSetMemPool(location: In<Location>, kind: i32, pool: u64) = {
        let process = healthy_process()?;
        match process.pool_location(kind, location.get()?)? {
            PoolLocation::Device(device) => process.set_current_pool(device, pool),
            PoolLocation::Host => Err(Code::NOT_SUPPORTED),
        }
    };
    fn cuMemPoolCreate(pool: Out<u64>, properties: In<PoolProperties>) = {
        let (process, wanted) = (healthy_process()?, properties.get()?);
        if wanted.handle_types & !DESCRIPTOR != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        if pool.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let created = Pool {
            exportable: wanted.handle_types != 0,
            ..Pool::new(process.pool_location(wanted.kind, wanted.location)?)
        };
        let handle = lock(&process.pools).insert(created);
        pool.set(handle)
    };
    fn cuMemPoolDestroy(pool: u64) = healthy_process()?.destroy_pool(pool);
    fn cuMemPoolGetAttribute(pool: u64, attribute: i32, value: Out<u64>) = {
        let process = healthy_process()?;
        process.invalidate_unsafe_captures()?;
        get_attribute(lock(&process.pools).live(pool)?, attribute, &value)
    };
    fn cuMemPoolSetAttribute(pool: u64, attribute: i32, value: Out<u64>) = {
        set_attribute(lock(&healthy_process()?.pools).live(pool)?, attribute, &value)
    };
    fn cuMemPoolTrimTo(pool: u64, keep: u64) = {
        let process = healthy_process()?;
        process.invalidate_unsafe_captures()?;
        let mut pools = lock(&process.pools);
        process.trim(pools.live(pool)?, keep);
        Ok(())
    };
    fn cuMemPoolExportToShareableHandle(shared: Out<i32>, pool: u64, kind: i32, flags: u64) = {
        let process = healthy_process()?;
        let exportable = lock(&process.pools).live(pool)?.exportable;
        if shared.is_null() || !exportable || kind != DESCRIPTOR || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        // A file without contents: importing a pool is not supported.
        let file = File::open("/dev/null").map_err(|_| Code::UNKNOWN)?;
        shared.set(OwnedFd::from(file).into_raw_fd())
    };
}
