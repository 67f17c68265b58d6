//! Implements contexts (`cuCtx*`, `cuDevicePrimaryCtx*`, `cuGreenCtx*`), with the GPU memory that
//! they and their limits cost.

use bursar_sim_state::Charge;

use crate::abi::{Code, DriverResult, Out};
use crate::context_stack::{
    current_context, current_device, current_handle, pop_handle, push_handle, set_current_handle,
};
use crate::entry::exports;
use crate::process::{Process, lock, process};
use crate::tables::contexts::DEFAULT_STACK_BYTES;

/// Threads that can be resident on a multiprocessor.
const MAX_RESIDENT_THREADS: u64 = 2048;

const STACK_SIZE: i32 = 0;

/// GPU memory of a green context, in bytes.
const GREEN_CONTEXT_BYTES: u64 = 6 << 20;

/// `CU_LIMIT_MALLOC_HEAP_SIZE`.
const MALLOC_HEAP: i32 = 2;

/// The use of device-side malloc takes this beside the heap (F25 in docs/internals/facts.md). On a
/// GPU the load of its module takes most of it; here the first launch takes all.
const BESIDE_HEAP: u64 = 140 << 20;

impl Process {
    fn create_context(&self, device: usize, flags: u32) -> Result<u64, Code> {
        self.check_sticky_error()?;
        self.check_present(device)?;
        let unit = self.devices[device].unit;
        self.image
            .charge(unit, Charge::Context, self.sim.config.context)?;
        // A context's bytes include the overhead of a process without a context.
        let client = self.image.charged(unit, Charge::Client);
        self.image.release(unit, Charge::Client, client)?;
        let groups = self.create_groups(device)?;
        Ok(lock(&self.contexts).insert(device, flags, groups))
    }

    fn destroy_context(&self, id: u64) -> DriverResult {
        let context = lock(&self.contexts)
            .live
            .remove(&id)
            .ok_or(Code::INVALID_CONTEXT)?;
        let _ = self.wait_for_context(id);
        self.destroy_groups(context.groups.as_ref());
        self.free_context_memory(id);
        self.free_context_arrays(id);
        self.trim_graphs(context.device);
        self.free_graph_nodes(id, context.device);
        let ended = lock(&self.streams).remove_context(id);
        lock(&self.captures)
            .streams
            .retain(|stream, _| *stream != id && !ended.contains(stream));
        let bytes = self.sim.config.context
            + self.stack_bytes(context.device, context.stack_per_thread)
            + context.heap;
        Ok(self
            .image
            .release(self.devices[context.device].unit, Charge::Context, bytes)?)
    }

    /// Destroys the context with its last user. Users of a primary context do not count (as on an
    /// H200).
    fn detach(&self, id: u64) -> DriverResult {
        if current_handle() != Some(id) {
            return Err(Code::INVALID_CONTEXT);
        }
        {
            let mut contexts = lock(&self.contexts);
            let mut primaries = contexts.primaries.iter();
            if primaries.any(|primary| primary.context == Some(id)) {
                return Ok(());
            }
            let context = contexts.live.get_mut(&id).ok_or(Code::INVALID_CONTEXT)?;
            context.users -= 1;
            if context.users > 0 {
                return Ok(());
            }
        }
        self.destroy_context(id)?;
        set_current_handle(0);
        Ok(())
    }

    fn retain_primary(&self, device: usize) -> Result<u64, Code> {
        self.check_sticky_error()?;
        let flags = {
            let primary = &mut lock(&self.contexts).primaries[device];
            if let Some(id) = primary.context {
                primary.users += 1;
                return Ok(id);
            }
            primary.flags
        };
        let id = self.create_context(device, flags)?;
        let first = {
            let primary = &mut lock(&self.contexts).primaries[device];
            primary.users += 1;
            *primary.context.get_or_insert(id)
        };
        if first != id {
            // Another thread has retained the primary context meanwhile.
            self.destroy_context(id)?;
        }
        Ok(first)
    }

    fn release_primary(&self, device: usize) -> DriverResult {
        let last = {
            let mut contexts = lock(&self.contexts);
            let primary = &mut contexts.primaries[device];
            primary.users = primary.users.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
            (primary.users == 0)
                .then(|| primary.context.take())
                .flatten()
        };
        last.map_or(Ok(()), |id| self.destroy_context(id))
    }

    /// Resets the primary context. The call succeeds but clears no sticky error (F1 in
    /// docs/internals/facts.md).
    fn reset_primary(&self, device: usize) -> DriverResult {
        let context = {
            let mut contexts = lock(&self.contexts);
            contexts.primaries[device].users = 0;
            contexts.primaries[device].context.take()
        };
        context.map_or(Ok(()), |id| self.destroy_context(id))
    }

    /// Creates a green context, which retains the device's primary context.
    fn create_green(&self, device: usize) -> Result<u64, Code> {
        self.retain_primary(device)?;
        let unit = self.devices[device].unit;
        if let Err(error) = self
            .image
            .charge(unit, Charge::Context, GREEN_CONTEXT_BYTES)
        {
            self.release_primary(device)?;
            return Err(error.into());
        }
        let mut contexts = lock(&self.contexts);
        contexts.handle_count += 1;
        let handle = 0x5157_0000_0000 + contexts.handle_count * 0x100;
        contexts.green.insert(handle, device);
        Ok(handle)
    }

    fn destroy_green(&self, handle: u64) -> DriverResult {
        let known = lock(&self.contexts).green.remove(&handle);
        let device = known.ok_or(Code::INVALID_CONTEXT)?;
        let unit = self.devices[device].unit;
        self.image
            .release(unit, Charge::Context, GREEN_CONTEXT_BYTES)?;
        self.release_primary(device)
    }

    fn stack_bytes(&self, device: usize, per_thread: u64) -> u64 {
        let threads = u64::from(self.gpu_config(device).multiprocessors) * MAX_RESIDENT_THREADS;
        threads.saturating_mul(per_thread.saturating_sub(DEFAULT_STACK_BYTES))
    }

    /// Charges or releases memory for this much stack in every thread that can be resident (F14 in
    /// docs/internals/facts.md).
    fn resize_stack(&self, id: u64, wanted: u64) -> DriverResult {
        let context = self.context(id)?;
        let wanted = wanted.max(DEFAULT_STACK_BYTES);
        let unit = self.devices[context.device].unit;
        let (now, then) = (
            self.stack_bytes(context.device, context.stack_per_thread),
            self.stack_bytes(context.device, wanted),
        );
        if then > now {
            self.image.charge(unit, Charge::Context, then - now)?;
        } else {
            self.image.release(unit, Charge::Context, now - then)?;
        }
        if let Some(context) = lock(&self.contexts).live.get_mut(&id) {
            context.stack_per_thread = wanted;
        }
        Ok(())
    }

    /// Grows the stack for a kernel's local memory. The memory stays charged afterwards (F14 in
    /// docs/internals/facts.md).
    pub(crate) fn ensure_stack(&self, id: u64, wanted: u64) -> DriverResult {
        if self.context(id)?.stack_per_thread >= wanted {
            Ok(())
        } else {
            self.resize_stack(id, wanted)
        }
    }

    /// Takes the heap of device-side malloc, unless the context has it (F25 in
    /// docs/internals/facts.md).
    pub(crate) fn ensure_heap(&self, id: u64) -> DriverResult {
        let (context, heap) = (self.context(id)?, self.limit(id, MALLOC_HEAP)?);
        let bytes = heap.saturating_add(BESIDE_HEAP);
        if context.heap == 0 {
            let unit = self.devices[context.device].unit;
            self.image.charge(unit, Charge::Context, bytes)?;
            if let Some(context) = lock(&self.contexts).live.get_mut(&id) {
                context.heap = bytes;
            }
        }
        Ok(())
    }

    fn set_limit(&self, id: u64, limit: i32, value: u64) -> DriverResult {
        if limit == STACK_SIZE {
            self.resize_stack(id, value)?;
        }
        let mut contexts = lock(&self.contexts);
        let context = contexts.live.get_mut(&id).ok_or(Code::INVALID_CONTEXT)?;
        match limit {
            STACK_SIZE => context.stack_limit = value,
            MALLOC_HEAP if context.heap > 0 => return Err(Code::INVALID_VALUE),
            1..=6 => drop(context.limits.insert(limit, value)),
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }

    fn limit(&self, id: u64, limit: i32) -> Result<u64, Code> {
        let context = self.context(id)?;
        let usual = match limit {
            STACK_SIZE => return Ok(context.stack_limit),
            1 => 1 << 20, // printf
            MALLOC_HEAP => 8 << 20,
            3 => 2,    // depth of device-side synchronise
            4 => 2048, // device-side launches
            5 => 128,  // L2 fetch
            6 => 0,    // persisting L2
            _ => return Err(Code::INVALID_VALUE),
        };
        Ok(context.limits.get(&limit).copied().unwrap_or(usual))
    }
}

fn create(out: &Out<u64>, flags: u32, device: i32) -> DriverResult {
    if out.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let process = process()?;
    let context = process.create_context(process.device(device)?, flags)?;
    push_handle(context);
    out.set(context)
}

exports! {
    fn cuCtxCreate_v2(context: Out<u64>, flags: u32, device: i32) = create(&context, flags, device);
    fn cuCtxCreate_v3(context: Out<u64>, _affinity: u64, _count: i32, flags: u32, device: i32) = create(&context, flags, device);
    fn cuCtxCreate_v4(context: Out<u64>, _parameters: u64, flags: u32, device: i32) = create(&context, flags, device);
    fn cuGreenCtxCreate(green: Out<u64>, _resources: u64, device: i32, _flags: u32) = {
        if green.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let process = process()?;
        green.set(process.create_green(process.device(device)?)?)
    };
    fn cuGreenCtxDestroy(green: u64) = process()?.destroy_green(green);
    fn cuCtxDestroy_v2(context: u64) = {
        process()?.destroy_context(context)?;
        if current_handle() == Some(context) {
            pop_handle();
        }
        Ok(())
    };
    fn cuCtxAttach(context: Out<u64>, flags: u32) = {
        let (process, attached, _) = current_device()?;
        if flags != 0 || context.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        if let Some(found) = lock(&process.contexts).live.get_mut(&attached) {
            found.users += 1;
        }
        context.set(attached)
    };
    fn cuCtxDetach(context: u64) = process()?.detach(context);
    fn cuCtxGetCurrent(context: Out<u64>) = {
        process()?;
        context.set(current_handle().unwrap_or(0))
    };
    fn cuCtxSetCurrent(context: u64) = {
        if context != 0 {
            process()?.context(context)?;
        }
        set_current_handle(context);
        Ok(())
    };
    fn cuCtxPushCurrent_v2(context: u64) = {
        process()?.context(context)?;
        push_handle(context);
        Ok(())
    };
    fn cuCtxPopCurrent_v2(context: Out<u64>) = {
        process()?;
        let popped = pop_handle().ok_or(Code::INVALID_CONTEXT)?;
        context.set_if_not_null(popped);
        Ok(())
    };
    fn cuCtxGetDevice(device: Out<i32>) = device.set(i32::try_from(current_device()?.2).map_err(|_| Code::UNKNOWN)?);
    fn cuCtxGetId(context: u64, id: Out<u64>) = {
        let context = if context == 0 { current_handle().ok_or(Code::INVALID_CONTEXT)? } else { context };
        process()?.context(context)?;
        id.set(context)
    };
    fn cuCtxGetFlags(flags: Out<u32>) = {
        let (process, context, _) = current_device()?;
        flags.set(process.context(context)?.flags)
    };
    fn cuCtxSetFlags(flags: u32) = {
        let (process, context, _) = current_device()?;
        if let Some(context) = lock(&process.contexts).live.get_mut(&context) {
            context.flags = flags;
        }
        Ok(())
    };
    fn cuCtxGetApiVersion(context: u64, version: Out<u32>) = {
        process()?.context(if context == 0 { current_handle().ok_or(Code::INVALID_CONTEXT)? } else { context })?;
        version.set(3020)
    };
    fn cuCtxSynchronize() = {
        let current = current_context()?;
        current.process.synchronize_context(current.context)
    };
    fn cuCtxSetLimit(limit: i32, value: u64) = {
        let current = current_context()?;
        current.process.set_limit(current.context, limit, value)
    };
    fn cuCtxGetLimit(value: Out<u64>, limit: i32) = {
        let current = current_context()?;
        value.set(current.process.limit(current.context, limit)?)
    };
    fn cuCtxGetCacheConfig(config: Out<i32>) = {
        current_context()?;
        config.set(0)
    };
    fn cuCtxSetCacheConfig(_config: i32) = current_context().map(|_| ());
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) = {
        current_context()?;
        least.set_if_not_null(0);
        greatest.set_if_not_null(-5);
        Ok(())
    };
    fn cuCtxEnablePeerAccess(peer: u64, _flags: u32) = current_context()?.process.context(peer).map(|_| ());
    fn cuCtxDisablePeerAccess(peer: u64) = current_context()?.process.context(peer).map(|_| ());
    fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: i32) = {
        if context.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let process = process()?;
        context.set(process.retain_primary(process.device(device)?)?)
    };
    fn cuDevicePrimaryCtxRelease_v2(device: i32) = {
        let process = process()?;
        process.release_primary(process.device(device)?)
    };
    fn cuDevicePrimaryCtxReset_v2(device: i32) = {
        let process = process()?;
        process.reset_primary(process.device(device)?)
    };
    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) = {
        let process = process()?;
        let device = process.device(device)?;
        let contexts = lock(&process.contexts);
        flags.set_if_not_null(contexts.primaries[device].flags);
        active.set_if_not_null(i32::from(contexts.primaries[device].context.is_some()));
        Ok(())
    };
    fn cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) = {
        let process = process()?;
        let device = process.device(device)?;
        lock(&process.contexts).primaries[device].flags = flags;
        Ok(())
    };
}
