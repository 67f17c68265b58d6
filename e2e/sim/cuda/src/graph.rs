//! Implements CUDA graphs (`cuGraph*`), as far as memory is concerned: memory allocation nodes,
//! memory free nodes, child graph nodes and kernel nodes.
//!
//! As measured on an H200, instantiating a graph takes memory for its kernel nodes, which never run
//! here, and which alone can be roots (F24 in docs/internals/facts.md). Its upload or first launch
//! takes its allocations from the device's graph pool in steps of 32 MiB; small allocations share
//! steps. The pool keeps the memory until it is trimmed, even after the graph is destroyed.
//!
//! The graphs of a stream share memory. A graph with memory nodes that is running in one stream
//! blocks its launch into another. Here each stream has memory of its own, which others never
//! reuse. A launch allocates and frees at once; all other nodes have no effect.

use bursar_sim_state::Charge;

use crate::abi::{Code, DriverResult, In, Out};
use crate::context_stack::{CurrentContext, current_context};
use crate::entry::exports;
use crate::granularity::CHUNK;
use crate::process::{Process, healthy_process, lock};
use crate::tables::graphs::{AllocNodeParams, Executable, Node, pool_bytes};
use std::collections::BTreeMap;
use std::time::Instant;

/// Node types (`CUgraphNodeType`).
const KERNEL: i32 = 0;
const CHILD: i32 = 4;
const EMPTY: i32 = 5;
const ALLOCATION: i32 = 10;
const RELEASE: i32 = 11;

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct InstantiateParams {
    flags: u64,
    stream: u64,
    failed_node: u64,
    result: i32,
}

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
const UPLOAD: u64 = 2;

impl Process {
    fn instantiate(&self, current: &CurrentContext, graph: u64) -> Result<u64, Code> {
        let mut graphs = lock(&self.graphs);
        let mut needs = BTreeMap::new();
        graphs.needs(graph, &mut needs)?;
        let handle = graphs.next_handle();
        let bytes = graphs.node_bytes(graph);
        if bytes > 0 {
            let unit = self.devices[current.device].unit;
            let memory = graphs.node_memory.entry(current.context).or_default();
            let growth = (memory.used + bytes)
                .next_multiple_of(CHUNK)
                .saturating_sub(memory.taken);
            self.image.charge(unit, Charge::Memory, growth)?;
            (memory.used, memory.taken) = (memory.used + bytes, memory.taken + growth);
        }
        let executable = Executable {
            needs,
            nodes: (current.context, bytes),
            launches: BTreeMap::new(),
        };
        graphs.executables.insert(handle, executable);
        Ok(handle)
    }

    /// Releases what kernel nodes took in a destroyed context.
    pub(crate) fn free_graph_nodes(&self, context: u64, device: usize) {
        let memory = lock(&self.graphs).node_memory.remove(&context);
        self.release_memory(self.devices[device].unit, memory.unwrap_or_default().taken);
    }

    /// Releases a device's graph memory, except that of running graphs. Later launches take it
    /// again.
    pub(crate) fn trim_graphs(&self, device: usize) {
        let (mut graphs, now) = (lock(&self.graphs), Instant::now());
        graphs.stream_memory.retain(|(on, _), memory| {
            *on != device || memory.completes_at.is_some_and(|done| done > now)
        });
        let left = graphs.stream_memory.range((device, 0)..=(device, u64::MAX));
        let still_used = left.map(|(_, memory)| memory.bytes).sum();
        let pool = graphs.pools.entry(device).or_default();
        let before = std::mem::replace(&mut pool.reserved, still_used);
        // `ImageCollected` means that the collector has released the bytes already.
        let _ = self.image.release(
            self.devices[device].unit,
            Charge::Memory,
            before.saturating_sub(still_used),
        );
    }
}

impl CurrentContext {
    /// Takes the memory of an executable graph from the graph pools, for an upload or a launch.
    fn upload_graph(&self, executable: u64, stream: u64) -> DriverResult {
        let (done, stream) = (self.busy_until(stream)?, self.stream_key(stream)?);
        let mut graphs = lock(&self.process.graphs);
        let found = graphs.executables.get_mut(&executable);
        let found = found.ok_or(Code::INVALID_VALUE)?;
        found.launches.insert(stream, done);
        for (device, need) in found.needs.clone() {
            let memory = graphs.stream_memory.entry((device, stream)).or_default();
            let growth = pool_bytes(need).saturating_sub(memory.bytes);
            let unit = self.process.devices[device].unit;
            self.process.image.charge(unit, Charge::Memory, growth)?;
            memory.bytes += growth;
            memory.completes_at = memory.completes_at.max(done);
            let pool = graphs.pools.entry(device).or_default();
            pool.reserved += growth;
            pool.reserved_high = pool.reserved_high.max(pool.reserved);
        }
        Ok(())
    }

    /// Launches an executable graph. With memory nodes, waits for its launches in other streams.
    fn launch_graph(&self, executable: u64, stream: u64) -> DriverResult {
        let key = self.stream_key(stream)?;
        let last_in_other_streams = {
            let graphs = lock(&self.process.graphs);
            let found = graphs.executables.get(&executable);
            let found = found.filter(|found| !found.needs.is_empty());
            let launches = found.into_iter().flat_map(|found| &found.launches);
            launches
                .filter_map(|(other, done)| done.filter(|_| *other != key))
                .max()
        };
        self.process.wait_until(last_in_other_streams)?;
        self.upload_graph(executable, stream)
    }
}

fn add(out: &Out<u64>, graph: u64, node: Node) -> DriverResult {
    let handle = lock(&healthy_process()?.graphs).add(graph, node)?;
    out.set(handle)
}

fn node(handle: u64) -> Result<Node, Code> {
    let found = lock(&healthy_process()?.graphs).nodes.get(&handle).copied();
    found.ok_or(Code::INVALID_VALUE)
}

exports! {
    fn cuGraphCreate(out: Out<u64>, _flags: u32) = {
        let mut graphs = lock(&healthy_process()?.graphs);
        let handle = graphs.next_handle();
        graphs.graphs.insert(handle, Vec::new());
        out.set(handle)
    };
    fn cuGraphDestroy(graph: u64) = {
        let removed = lock(&healthy_process()?.graphs).graphs.remove(&graph);
        removed.map(|_| ()).ok_or(Code::INVALID_VALUE)
    };
    fn cuGraphAddKernelNode(out: Out<u64>, graph: u64, _before: In<u64>, count: u64, _wanted: In<u64>) = {
        let handle = lock(&healthy_process()?.graphs).add(graph, Node::Kernel)?;
        if count == 0 {
            lock(&healthy_process()?.graphs).roots.entry(graph).or_default().push(handle);
        }
        out.set(handle)
    };
    fn cuGraphGetRootNodes(graph: u64, out: Out<u64>, count: Out<u64>) = {
        let graphs = lock(&healthy_process()?.graphs);
        let roots = graphs.roots.get(&graph).map_or(&[][..], Vec::as_slice);
        if !out.is_null() {
            out.set_all(roots.iter().copied().take(count.get()? as usize))?;
        }
        count.set(roots.len() as u64)
    };
    fn cuGraphAddEmptyNode(out: Out<u64>, graph: u64, _before: In<u64>, _count: u64) = add(&out, graph, Node::Empty);
    fn cuGraphAddMemAllocNode(out: Out<u64>, graph: u64, _before: In<u64>, _count: u64, wanted: Out<AllocNodeParams>) = {
        let (process, mut found) = (healthy_process()?, wanted.get()?);
        // The only supported kind is pinned memory on a device.
        if (found.kind, found.location_kind) != (1, 1) || found.bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        process.device(found.location)?;
        // The address is never used, because a launch allocates and frees at once.
        found.address = 0x7600_0000_0000;
        wanted.set(found)?;
        add(&out, graph, Node::Allocation(found))
    };
    fn cuGraphAddMemFreeNode(out: Out<u64>, graph: u64, _before: In<u64>, _count: u64, _address: u64) = {
        add(&out, graph, Node::Free)
    };
    fn cuGraphAddChildGraphNode(out: Out<u64>, graph: u64, _before: In<u64>, _count: u64, child: u64) = {
        add(&out, graph, Node::Child(child))
    };
    fn cuGraphGetNodes(graph: u64, out: Out<u64>, count: Out<u64>) = {
        let found = lock(&healthy_process()?.graphs).graphs.get(&graph).cloned();
        let found = found.ok_or(Code::INVALID_VALUE)?;
        if !out.is_null() {
            out.set_all(found.iter().copied().take(count.get()? as usize))?;
        }
        count.set(found.len() as u64)
    };
    fn cuGraphNodeGetType(handle: u64, out: Out<i32>) = {
        out.set(match node(handle)? {
            Node::Allocation(_) => ALLOCATION,
            Node::Free => RELEASE,
            Node::Child(_) => CHILD,
            Node::Empty => EMPTY,
            Node::Kernel => KERNEL,
        })
    };
    fn cuGraphMemAllocNodeGetParams(handle: u64, out: Out<AllocNodeParams>) = match node(handle)? {
        Node::Allocation(found) => out.set(found),
        _ => Err(Code::INVALID_VALUE),
    };
    fn cuGraphChildGraphNodeGetGraph(handle: u64, out: Out<u64>) = match node(handle)? {
        Node::Child(child) => out.set(child),
        _ => Err(Code::INVALID_VALUE),
    };
    fn cuGraphInstantiateWithFlags(out: Out<u64>, graph: u64, _flags: u64) = {
        let current = current_context()?;
        out.set(current.process.instantiate(&current, graph)?)
    };
    fn cuGraphInstantiateWithParams(out: Out<u64>, graph: u64, parameters: In<InstantiateParams>) = {
        let (current, parameters) = (current_context()?, parameters.get()?);
        let handle = current.process.instantiate(&current, graph)?;
        if parameters.flags & UPLOAD != 0 {
            current.upload_graph(handle, parameters.stream)?;
        }
        out.set(handle)
    };
    fn cuGraphExecDestroy(executable: u64) = {
        let mut graphs = lock(&healthy_process()?.graphs);
        let removed = graphs.executables.remove(&executable);
        let (context, bytes) = removed.ok_or(Code::INVALID_VALUE)?.nodes;
        if let Some(memory) = graphs.node_memory.get_mut(&context) {
            memory.used -= bytes;
        }
        Ok(())
    };
    fn cuGraphUpload(executable: u64, stream: u64) = current_context()?.upload_graph(executable, stream);
    fn cuGraphLaunch(executable: u64, stream: u64) = current_context()?.launch_graph(executable, stream);
    fn cuDeviceGetGraphMemAttribute(device: i32, attribute: i32, value: Out<u64>) = {
        let process = healthy_process()?;
        let device = process.device(device)?;
        let pool = lock(&process.graphs).pools.get(&device).copied().unwrap_or_default();
        match attribute {
            0 | 1 => value.set(0),
            2 => value.set(pool.reserved),
            3 => value.set(pool.reserved_high),
            _ => Err(Code::INVALID_VALUE),
        }
    };
    fn cuDeviceGraphMemTrim(device: i32) = {
        let process = healthy_process()?;
        process.trim_graphs(process.device(device)?);
        Ok(())
    };
}
