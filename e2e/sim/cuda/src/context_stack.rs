//! Holds each thread's context stack (`cuCtxPushCurrent`), whose top is the current context.

use crate::abi::Code;
use crate::process::{Process, healthy_process, lock, process};
use crate::tables::contexts::Context;
use std::cell::RefCell;

thread_local! {
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Pushes a context, which becomes the current context.
pub(crate) fn push_handle(context: u64) {
    STACK.with_borrow_mut(|stack| stack.push(context));
}

/// Removes the current context from the stack; `None` if the stack is empty.
pub(crate) fn pop_handle() -> Option<u64> {
    STACK.with_borrow_mut(Vec::pop)
}

pub(crate) fn current_handle() -> Option<u64> {
    STACK.with_borrow(|stack| stack.last().copied())
}

pub(crate) fn set_current_handle(context: u64) {
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
}

/// The calling thread's context in a process image without a sticky error.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CurrentContext {
    pub(crate) process: &'static Process,
    pub(crate) context: u64,
    pub(crate) device: usize,
}

/// The calling thread's context.
///
/// # Errors
/// The image has a sticky error, no context is current, or the device is lost.
pub(crate) fn current_context() -> Result<CurrentContext, Code> {
    let process = healthy_process()?;
    let context = current_handle().ok_or(Code::INVALID_CONTEXT)?;
    let device = process.context(context)?.device;
    process.check_present(device)?;
    Ok(CurrentContext {
        process,
        context,
        device,
    })
}

impl CurrentContext {
    pub(crate) fn unit(&self) -> usize {
        self.process.devices[self.device].unit
    }
}

/// The current context and its device, even if the image has a sticky error.
pub(crate) fn current_device() -> Result<(&'static Process, u64, usize), Code> {
    let process = process()?;
    let context = current_handle().ok_or(Code::INVALID_CONTEXT)?;
    Ok((process, context, process.context(context)?.device))
}

impl Process {
    pub(crate) fn context(&self, context: u64) -> Result<Context, Code> {
        lock(&self.contexts)
            .live
            .get(&context)
            .cloned()
            .ok_or(Code::INVALID_CONTEXT)
    }
}
