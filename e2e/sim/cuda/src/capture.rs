//! Implements stream capture, as far as memory is concerned.
//!
//! Captured calls allocate nothing before the graph is launched. A captured graph has the memory
//! nodes of the captured allocations and frees.
//!
//! As on an H200 with driver 580, unsafe calls invalidate captures. `cuMemAlloc` and calls that
//! read a pool's sizes or trim it are unsafe, subject to the thread's mode. Synchronizing a context
//! invalidates every capture. A capture ends when its stream or its context is destroyed.

use crate::abi::{Code, DriverResult, Out};
use crate::context_stack::current_context;
use crate::entry::exports;
use crate::process::{Process, healthy_process, lock};
use crate::tables::captures::Capture;
use crate::tables::graphs::Node;
use std::cell::Cell;

const GLOBAL: i32 = 0;
const RELAXED: i32 = 2;

thread_local! {
    /// The thread's `CUstreamCaptureMode`, which decides which captures an unsafe call invalidates.
    static MODE: Cell<i32> = const { Cell::new(GLOBAL) };
}

impl Process {
    /// Whether a stream is being captured.
    ///
    /// # Errors
    /// Its capture has been invalidated.
    pub(crate) fn is_captured(&self, stream: u64) -> Result<bool, Code> {
        match lock(&self.captures).streams.get(&stream) {
            None => Ok(false),
            Some(capture) if capture.valid => Ok(true),
            Some(_) => Err(Code::CAPTURE_INVALIDATED),
        }
    }

    /// Appends a node to a stream's capture.
    pub(crate) fn append_captured_node(&self, stream: u64, node: Node) {
        if let Some(capture) = lock(&self.captures).streams.get_mut(&stream) {
            capture.nodes.push(node);
        }
    }

    /// Invalidates the captures that an unsafe call of this thread affects.
    ///
    /// # Errors
    /// Such a capture exists; the call then fails.
    pub(crate) fn invalidate_unsafe_captures(&self) -> DriverResult {
        if MODE.get() == RELAXED {
            return Ok(());
        }
        self.invalidate_captures(|capture| capture.mode == GLOBAL)
    }

    /// Invalidates all captures, because the call synchronizes a context.
    ///
    /// # Errors
    /// A capture exists; the call then fails.
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
        let capture = Capture { mode, valid: true, nodes: Vec::new() };
        match lock(&current.process.captures).streams.insert(stream, capture) {
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
            graph.set_if_not_null(0);
            return Err(Code::CAPTURE_INVALIDATED);
        }
        // A program that leaves the output out loses the graph.
        graph.set_if_not_null(lock(&current.process.graphs).insert_captured(ended.nodes)?);
        Ok(())
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
