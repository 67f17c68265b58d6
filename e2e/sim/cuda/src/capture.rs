//! Stream capture, as far as memory is concerned: what is captured takes nothing before its graph is launched,
//! and calls that the driver takes for unsafe end the captures of a thread that makes them.
//!
//! As on an H200 with driver 580: asking a pool for its sizes and trimming it are such calls, and
//! `cuMemAlloc`; waiting for the context ends every capture in it, whatever the thread's mode. A graph
//! that comes of a capture has the memory nodes of what was allocated and freed in it.

use crate::abi::{Code, DriverResult, Out};
use crate::context::current_context;
use crate::entry::exports;
use crate::graph::Node;
use crate::process::{Process, healthy_process, lock};
use std::cell::Cell;
use std::collections::BTreeMap;

const GLOBAL: i32 = 0;
const RELAXED: i32 = 2;

thread_local! {
    /// Which unsafe calls the thread is kept from.
    static MODE: Cell<i32> = const { Cell::new(GLOBAL) };
}

/// A capture under way.
#[derive(Debug)]
struct Capture {
    mode: i32,
    valid: bool,
    nodes: Vec<Node>,
}

/// The captures of this image, by stream.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    streams: BTreeMap<u64, Capture>,
}

impl Process {
    /// Whether a stream is being captured; an error where its capture has become invalid.
    pub(crate) fn is_captured(&self, stream: u64) -> Result<bool, Code> {
        match lock(&self.captures).streams.get(&stream) {
            None => Ok(false),
            Some(capture) if capture.valid => Ok(true),
            Some(_) => Err(Code::CAPTURE_INVALIDATED),
        }
    }

    /// Adds a node to what a stream captures.
    pub(crate) fn append_captured_node(&self, stream: u64, node: Node) {
        if let Some(capture) = lock(&self.captures).streams.get_mut(&stream) {
            capture.nodes.push(node);
        }
    }

    /// What every unsafe call begins with.
    pub(crate) fn invalidate_unsafe_captures(&self) -> DriverResult {
        if MODE.get() == RELAXED {
            return Ok(());
        }
        self.invalidate_captures(|capture| capture.mode == GLOBAL)
    }

    /// What waiting for a context begins with.
    pub(crate) fn invalidate_all_captures(&self) -> DriverResult {
        self.invalidate_captures(|_| true)
    }

    fn invalidate_captures(&self, of: impl Fn(&Capture) -> bool) -> DriverResult {
        let mut captures = lock(&self.captures);
        let mut found = Ok(());
        for capture in captures.streams.values_mut().filter(|capture| of(capture)) {
            capture.valid = false;
            found = Err(Code::CAPTURE_UNSUPPORTED);
        }
        found
    }
}

exports! {
    fn cuStreamBeginCapture_v2(stream: u64, mode: i32) = {
        let current = current_context()?;
        let stream = current.stream_key(stream)?;
        let begun = Capture { mode, valid: true, nodes: Vec::new() };
        match lock(&current.process.captures).streams.insert(stream, begun) {
            None => Ok(()),
            Some(_) => Err(Code::INVALID_VALUE),
        }
    };
    fn cuStreamEndCapture(stream: u64, graph: Out<u64>) = {
        let current = current_context()?;
        let stream = current.stream_key(stream)?;
        let ended = lock(&current.process.captures).streams.remove(&stream);
        let ended = ended.ok_or(Code::INVALID_VALUE)?;
        if !ended.valid {
            graph.set(0)?;
            return Err(Code::CAPTURE_INVALIDATED);
        }
        graph.set(lock(&current.process.graphs).insert_captured(ended.nodes)?)
    };
    fn cuStreamIsCapturing(stream: u64, status: Out<i32>) = {
        let current = current_context()?;
        let stream = current.stream_key(stream)?;
        let captures = lock(&current.process.captures);
        status.set(captures.streams.get(&stream).map_or(0, |capture| if capture.valid { 1 } else { 2 }))
    };
    fn cuThreadExchangeStreamCaptureMode(mode: Out<i32>) = {
        healthy_process()?;
        let before = MODE.get();
        MODE.set(mode.get()?);
        mode.set(before)
    };
}
