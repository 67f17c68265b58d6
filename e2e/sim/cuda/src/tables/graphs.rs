//! Records CUDA graphs, executable graphs and the graph memory of each device.

use crate::abi::{Code, DriverResult};
use crate::granularity::round_up;
use std::collections::BTreeMap;
use std::time::Instant;

/// Granularity of the memory that a graph pool takes from its GPU.
const STEP: u64 = 32 << 20;

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct AllocNodeParams {
    pub(crate) kind: i32,
    handle_types: i32,
    pub(crate) location_kind: i32,
    pub(crate) location: i32,
    rest: [u64; 9],
    access: u64,
    accesses: u64,
    pub(crate) bytes: u64,
    pub(crate) address: u64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Node {
    Allocation(AllocNodeParams),
    Free,
    Child(u64),
    Empty,
    /// A kernel, which never runs.
    Kernel,
}

impl Node {
    /// The allocation node of a captured allocation.
    pub(crate) fn allocation(device: usize, bytes: u64, address: u64) -> Node {
        Node::Allocation(AllocNodeParams {
            kind: 1,
            location_kind: 1,
            location: i32::try_from(device).unwrap_or(i32::MAX),
            bytes,
            address,
            ..AllocNodeParams::default()
        })
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Executable {
    /// By device: bytes of the large allocations in whole steps, and the sum of the small ones.
    pub(crate) needs: BTreeMap<usize, (u64, u64)>,
    /// The context in which it was instantiated, and what its kernel nodes take there.
    pub(crate) nodes: (u64, u64),
    /// By stream: when the last launch there completes.
    pub(crate) launches: BTreeMap<u64, Option<Instant>>,
}

/// A chain of kernel nodes and each of its nodes take this (F24 in docs/internals/facts.md).
const CHAIN_BYTES: u64 = 110 << 10;
const NODE_BYTES: u64 = 2560;

/// The memory of a context's kernel nodes, which later graphs use again.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NodeMemory {
    pub(crate) used: u64,
    pub(crate) taken: u64,
}

/// The part of a pool that the graphs of a stream hold. They share it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StreamMemory {
    pub(crate) bytes: u64,
    /// When the last graph that uses it completes.
    pub(crate) completes_at: Option<Instant>,
}

/// Bytes of a pool: small allocations share steps, large ones have their own.
pub(crate) fn pool_bytes((large, small): (u64, u64)) -> u64 {
    large + small.next_multiple_of(STEP)
}

/// A device's graph pool.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pool {
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
}

/// All graphs of this image, by handle.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    pub(crate) graphs: BTreeMap<u64, Vec<u64>>,
    /// The nodes of each graph that depend on no other.
    pub(crate) roots: BTreeMap<u64, Vec<u64>>,
    /// By context.
    pub(crate) node_memory: BTreeMap<u64, NodeMemory>,
    pub(crate) nodes: BTreeMap<u64, Node>,
    pub(crate) executables: BTreeMap<u64, Executable>,
    pub(crate) pools: BTreeMap<usize, Pool>,
    /// By device and stream.
    pub(crate) stream_memory: BTreeMap<(usize, u64), StreamMemory>,
    handle_count: u64,
}

impl Graphs {
    pub(crate) fn next_handle(&mut self) -> u64 {
        self.handle_count += 1;
        0x51b7_0000_0000 + self.handle_count * 0x100
    }

    pub(crate) fn add(&mut self, graph: u64, node: Node) -> Result<u64, Code> {
        let handle = self.next_handle();
        self.graphs
            .get_mut(&graph)
            .ok_or(Code::INVALID_VALUE)?
            .push(handle);
        self.nodes.insert(handle, node);
        Ok(handle)
    }

    /// Inserts a graph with the nodes that a stream captured.
    pub(crate) fn insert_captured(&mut self, nodes: Vec<Node>) -> Result<u64, Code> {
        let graph = self.next_handle();
        self.graphs.insert(graph, Vec::new());
        for node in nodes {
            self.add(graph, node)?;
        }
        Ok(graph)
    }

    /// The bytes that the kernel nodes of a graph take, with those of its children.
    pub(crate) fn node_bytes(&self, graph: u64) -> u64 {
        let nodes = self.graphs.get(&graph).into_iter().flatten();
        let kinds: Vec<Node> = nodes
            .filter_map(|node| self.nodes.get(node).copied())
            .collect();
        let kernels = kinds.iter().filter(|node| matches!(node, Node::Kernel));
        let (kernels, chains) = (
            kernels.count() as u64,
            self.roots.get(&graph).map_or(0, Vec::len) as u64,
        );
        let children = kinds.iter().map(|node| match node {
            Node::Child(child) => self.node_bytes(*child),
            _ => 0,
        });
        children.sum::<u64>() + chains.min(kernels) * CHAIN_BYTES + kernels * NODE_BYTES
    }

    pub(crate) fn needs(
        &self,
        graph: u64,
        needs: &mut BTreeMap<usize, (u64, u64)>,
    ) -> DriverResult {
        for node in self.graphs.get(&graph).ok_or(Code::INVALID_VALUE)? {
            match self.nodes.get(node) {
                Some(Node::Allocation(wanted)) => {
                    let (large, small) = needs.entry(wanted.location as usize).or_default();
                    match round_up(wanted.bytes)? {
                        bytes if bytes > STEP / 2 => *large += bytes.next_multiple_of(STEP),
                        bytes => *small += bytes,
                    }
                }
                Some(Node::Child(child)) => self.needs(*child, needs)?,
                _ => {}
            }
        }
        Ok(())
    }
}
