//! Hooks the instantiation, upload, launch and destruction of graphs.
#![allow(non_snake_case)]

use std::ffi::{c_char, c_int};

use super::hooks;
use crate::curesult::{self, CuResult};
use crate::driver_calls::streams::per_thread;
use crate::driver_calls::{context_ids, current_device, driver};
use crate::graph_nodes::{self, NodeCounts};
use crate::graphs::{self, Needs};

/// `CU_GRAPH_NODE_TYPE_KERNEL`, and the last of those that compute or copy.
const NODE_TYPE_KERNEL: c_int = 0;
const NODE_TYPE_HOST: c_int = 3;
/// `CU_GRAPH_NODE_TYPE_GRAPH`.
const NODE_TYPE_GRAPH: c_int = 4;
/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
const NODE_TYPE_MEM_ALLOC: c_int = 10;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_TYPE_DEVICE: c_int = 1;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
const INSTANTIATE_UPLOAD: u64 = 2;

/// Child graphs are searched to this depth: more than programs nest.
const MAX_DEPTH: usize = 16;

/// Allocations are placed at multiples of this.
const ALIGNMENT: u64 = 512;

/// `CUDA_MEM_ALLOC_NODE_PARAMS`: pool properties, access list, size, address.
#[repr(C)]
#[derive(Default)]
struct MemAllocNodeParams {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    rest: [u64; 9],
    access: u64,
    accesses: usize,
    bytes: usize,
    address: u64,
}

const _: () = assert!(size_of::<MemAllocNodeParams>() == 120);

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
pub(crate) struct InstantiateParams {
    flags: u64,
    stream: u64,
    failed_node: u64,
    result: c_int,
}

/// The memory that an executable graph takes.
#[derive(Default)]
struct Takes {
    /// The bytes that its memory nodes allocate on each device.
    needs: Needs,
    counts: NodeCounts,
}

/// Adds what a graph takes, with its child graphs down to a depth.
fn add_nodes(graph: u64, depth: usize, takes: &mut Takes) {
    takes.counts.roots += roots(graph);
    for node in nodes(graph) {
        let mut kind = 0;
        if driver!(cuGraphNodeGetType(node => u64, &raw mut kind => *mut c_int))
            != curesult::SUCCESS
        {
            continue;
        }
        match kind {
            NODE_TYPE_KERNEL..=NODE_TYPE_HOST => takes.counts.nodes += 1,
            NODE_TYPE_MEM_ALLOC => {
                let mut found = MemAllocNodeParams::default();
                let code = driver!(cuGraphMemAllocNodeGetParams(
                    node => u64, &raw mut found => *mut MemAllocNodeParams,
                ));
                if code == curesult::SUCCESS && found.location_kind == LOCATION_TYPE_DEVICE {
                    let bytes = (found.bytes as u64).checked_next_multiple_of(ALIGNMENT);
                    let need = takes.needs.entry(found.location).or_default();
                    need.add(bytes.unwrap_or(u64::MAX));
                }
            }
            NODE_TYPE_GRAPH if depth > 0 => {
                let mut child = 0;
                let code = driver!(cuGraphChildGraphNodeGetGraph(
                    node => u64, &raw mut child => *mut u64,
                ));
                if code == curesult::SUCCESS {
                    add_nodes(child, depth - 1, takes);
                }
            }
            _ => {}
        }
    }
}

/// Returns how many nodes of a graph depend on no other.
fn roots(graph: u64) -> u64 {
    let (none, mut count) = (std::ptr::null_mut::<u64>(), 0_usize);
    let code = driver!(cuGraphGetRootNodes(
        graph => u64, none => *mut u64, &raw mut count => *mut usize,
    ));
    if code == curesult::SUCCESS {
        count as u64
    } else {
        1
    }
}

fn nodes(graph: u64) -> Vec<u64> {
    let mut count = 0_usize;
    let none = std::ptr::null_mut::<u64>();
    let code = driver!(cuGraphGetNodes(
        graph => u64, none => *mut u64, &raw mut count => *mut usize,
    ));
    if code != curesult::SUCCESS || count == 0 {
        return Vec::new();
    }
    let mut nodes = vec![0; count];
    let code = driver!(cuGraphGetNodes(
        graph => u64, nodes.as_mut_ptr() => *mut u64, &raw mut count => *mut usize,
    ));
    if code != curesult::SUCCESS {
        return Vec::new();
    }
    nodes.truncate(count);
    nodes
}

/// Instantiates a graph by `call`, and charges what its nodes take. Its memory nodes take theirs
/// later, or at once where the graph is uploaded too.
fn instantiate(
    out: *mut u64,
    graph: u64,
    uploads: bool,
    function: &str,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    if out.is_null() {
        return call();
    }
    let mut takes = Takes::default();
    add_nodes(graph, MAX_DEPTH, &mut takes);
    let Takes { needs, counts } = takes;
    // SAFETY: not null, and read only where the driver has written it.
    let executable = || unsafe { out.read() };
    let call = || match uploads && !needs.is_empty() {
        true => graphs::charge_upload(&needs, function, call),
        false => call(),
    };
    let place = (current_device().unwrap_or(0), context_ids::current_id());
    let answer = graph_nodes::instantiate(counts, place, function, call, executable);
    if answer == curesult::SUCCESS {
        graphs::instantiated(executable(), needs);
    }
    answer
}

/// Returns whether parameters let the instantiation upload the graph too.
fn uploads(parameters: *const InstantiateParams) -> bool {
    // SAFETY: by the prototype the pointer is null or points to parameters.
    !parameters.is_null() && unsafe { (*parameters).flags } & INSTANTIATE_UPLOAD != 0
}

/// Launches or uploads a graph.
fn launch(
    executable: u64,
    stream: u64,
    function: &str,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    if graphs::may_have_memory() {
        graphs::charge_launch(executable, stream, function, call)
    } else {
        call()
    }
}

hooks! {
    /// `cuGraphInstantiate` (CUDA 10.0).
    fn cuGraphInstantiate(out: *mut u64, graph: u64, node: *mut u64, log: *mut c_char, len: usize) = |driver_call| {
        instantiate(out, graph, false, "cuGraphInstantiate", || driver_call(out, graph, node, log, len))
    };
    /// `cuGraphInstantiate` (CUDA 11.0).
    fn cuGraphInstantiate_v2(out: *mut u64, graph: u64, node: *mut u64, log: *mut c_char, len: usize) = |driver_call| {
        instantiate(out, graph, false, "cuGraphInstantiate_v2", || driver_call(out, graph, node, log, len))
    };
    /// `cuGraphInstantiateWithFlags` (CUDA 11.4), since 12.0 `cuGraphInstantiate`.
    fn cuGraphInstantiateWithFlags(out: *mut u64, graph: u64, flags: u64) = |driver_call| {
        instantiate(out, graph, false, "cuGraphInstantiateWithFlags", || driver_call(out, graph, flags))
    };
    /// `cuGraphInstantiateWithParams` (CUDA 12.0).
    fn cuGraphInstantiateWithParams(out: *mut u64, graph: u64, parameters: *mut InstantiateParams) = |driver_call| {
        let call = || driver_call(out, graph, parameters);
        instantiate(out, graph, uploads(parameters), "cuGraphInstantiateWithParams", call)
    };
    /// `cuGraphInstantiateWithParams` for the per-thread default stream.
    fn cuGraphInstantiateWithParams_ptsz(out: *mut u64, graph: u64, parameters: *mut InstantiateParams) = |driver_call| {
        let call = || driver_call(out, graph, parameters);
        instantiate(out, graph, uploads(parameters), "cuGraphInstantiateWithParams", call)
    };
    /// `cuGraphUpload` (CUDA 11.1).
    fn cuGraphUpload(graph: u64, stream: u64) = |driver_call| {
        launch(graph, stream, "cuGraphUpload", || driver_call(graph, stream))
    };
    /// `cuGraphUpload` for the per-thread default stream.
    fn cuGraphUpload_ptsz(graph: u64, stream: u64) = |driver_call| {
        launch(graph, per_thread(stream), "cuGraphUpload", || driver_call(graph, stream))
    };
    /// `cuGraphLaunch` (CUDA 10.0).
    fn cuGraphLaunch(graph: u64, stream: u64) = |driver_call| {
        launch(graph, stream, "cuGraphLaunch", || driver_call(graph, stream))
    };
    /// `cuGraphLaunch` for the per-thread default stream.
    fn cuGraphLaunch_ptsz(graph: u64, stream: u64) = |driver_call| {
        launch(graph, per_thread(stream), "cuGraphLaunch", || driver_call(graph, stream))
    };
    /// `cuGraphExecDestroy` (CUDA 10.0). Its memory stays in the graph pool.
    fn cuGraphExecDestroy(graph: u64) = |driver_call| {
        // Forgotten before the call: another thread may get the same handle after it.
        graph_nodes::destroyed(graph);
        if graphs::may_have_memory() {
            graphs::destroyed(graph);
        }
        driver_call(graph)
    };
    /// `cuDeviceGraphMemTrim` (CUDA 11.4).
    fn cuDeviceGraphMemTrim(device: c_int) = |driver_call| graphs::with_trim(|| driver_call(device));
}
