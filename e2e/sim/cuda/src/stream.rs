//! Implements streams (`cuStream*`) with their events (`cuEvent*`).
//!
//! Work completes when it is submitted, in the caller's thread; only `spin` takes time. A stream is
//! therefore an instant until which it is busy. An event is the instant at which its stream's work
//! completes.

use crate::abi::{Code, DriverResult, Out};
use crate::context_stack::{CurrentContext, current_context};
use crate::entry::exports;
use crate::process::{Process, healthy_process, lock};
use crate::tables::pools::SyncScope;
use crate::tables::streams::{Event, Stream};
use std::time::{Duration, Instant};

const DISABLE_TIMING: u32 = 2;

/// How often a call that waits for turns of a channel group asks for them.
const WORK_POLL_INTERVAL: Duration = Duration::from_micros(500);

impl Process {
    /// Sleeps until an instant, or until the image is poisoned.
    pub(crate) fn wait_until(&self, end: Option<Instant>) -> DriverResult {
        while let Some(left) = end.and_then(|end| end.checked_duration_since(Instant::now())) {
            self.check_sticky_error()?;
            std::thread::sleep(left.min(Duration::from_millis(5)));
        }
        self.check_sticky_error()
    }

    /// Waits until a context's channel group has done this much work, or the image is poisoned.
    fn wait_for_work(&self, context: u64, work: u64) -> DriverResult {
        while !self.has_done(context, work) {
            self.check_sticky_error()?;
            std::thread::sleep(WORK_POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits for all work of a context.
    pub(crate) fn wait_for_context(&self, context: u64) -> DriverResult {
        let work = lock(&self.streams).work(context);
        self.wait_for_work(context, work)?;
        let end = lock(&self.streams).busy_until(context);
        self.wait_until(end)
    }

    /// Synchronizes a context; pools then release idle memory (F15 in docs/internals/facts.md).
    pub(crate) fn synchronize_context(&self, context: u64) -> DriverResult {
        self.invalidate_all_captures()?;
        self.wait_for_context(context)?;
        self.shrink_pools(SyncScope::All);
        Ok(())
    }
}

impl CurrentContext {
    /// Checks a stream's handle and returns its key. The handles 0, 1 and 2 share a key.
    pub(crate) fn stream_key(&self, stream: u64) -> Result<u64, Code> {
        lock(&self.process.streams).find(self.context, stream)?;
        Ok(if stream <= 2 { self.context } else { stream })
    }

    /// Checks a stream's handle.
    pub(crate) fn check_stream(&self, stream: u64) -> DriverResult {
        self.stream_key(stream).map(|_| ())
    }

    /// Appends work of this duration to a stream.
    pub(crate) fn extend_busy(&self, stream: u64, time: Duration) -> DriverResult {
        let mut streams = lock(&self.process.streams);
        let stream = streams.find(self.context, stream)?;
        let now = Instant::now();
        let start = stream.busy_until.map_or(now, |busy| busy.max(now));
        stream.busy_until = Some(start + time);
        Ok(())
    }

    /// Appends work of the channel group to a stream: all of it up to `work`.
    pub(crate) fn extend_work(&self, stream: u64, work: u64) -> DriverResult {
        let mut streams = lock(&self.process.streams);
        streams.find(self.context, stream)?.work = work;
        Ok(())
    }

    fn work(&self, stream: u64) -> Result<u64, Code> {
        Ok(lock(&self.process.streams).find(self.context, stream)?.work)
    }

    /// The instant until which a stream is busy.
    pub(crate) fn busy_until(&self, stream: u64) -> Result<Option<Instant>, Code> {
        Ok(lock(&self.process.streams)
            .find(self.context, stream)?
            .busy_until)
    }

    fn check_done(&self, work: u64) -> DriverResult {
        if self.process.has_done(self.context, work) {
            Ok(())
        } else {
            Err(Code::NOT_READY)
        }
    }

    fn event(&self, event: u64) -> Result<Event, Code> {
        lock(&self.process.streams)
            .events
            .get(&event)
            .copied()
            .ok_or(Code::INVALID_HANDLE)
    }

    fn record(&self, event: u64, stream: u64) -> DriverResult {
        let key = self.stream_key(stream)?;
        let mut streams = lock(&self.process.streams);
        let now = Instant::now();
        let at = streams
            .find(self.context, stream)?
            .busy_until
            .map_or(now, |busy| busy.max(now));
        let Stream { context, work, .. } = *streams.find(self.context, stream)?;
        let event = streams.events.get_mut(&event).ok_or(Code::INVALID_HANDLE)?;
        if event.context != context {
            return Err(Code::INVALID_HANDLE); // F27 in docs/internals/facts.md
        }
        (event.completes_at, event.stream, event.work) = (Some(at), key, work);
        Ok(())
    }
}

fn create(out: &Out<u64>, flags: u32, priority: i32) -> DriverResult {
    let current = current_context()?;
    let mut streams = lock(&current.process.streams);
    let handle = streams.next_handle();
    out.set(handle)?;
    streams.streams.insert(
        handle,
        Stream {
            context: current.context,
            flags,
            priority,
            busy_until: None,
            work: 0,
        },
    );
    Ok(())
}

fn check_completed(until: Option<Instant>) -> DriverResult {
    if until.is_some_and(|until| until > Instant::now()) {
        Err(Code::NOT_READY)
    } else {
        Ok(())
    }
}

fn elapsed(milliseconds: &Out<f32>, start: u64, end: u64) -> DriverResult {
    let current = current_context()?;
    let (start, end) = (current.event(start)?, current.event(end)?);
    if (start.flags | end.flags) & DISABLE_TIMING != 0 {
        return Err(Code::INVALID_HANDLE);
    }
    let (start, end) = start
        .completes_at
        .zip(end.completes_at)
        .ok_or(Code::INVALID_HANDLE)?;
    check_completed(Some(start.max(end)))?;
    let (forward, back) = (
        end.saturating_duration_since(start),
        start.saturating_duration_since(end),
    );
    milliseconds.set((forward.as_secs_f32() - back.as_secs_f32()) * 1e3)
}

exports! {
    fn cuStreamCreate(stream: Out<u64>, flags: u32) = create(&stream, flags, 0);
    fn cuStreamCreateWithPriority(stream: Out<u64>, flags: u32, priority: i32) = create(&stream, flags, priority);
    fn cuStreamDestroy_v2(stream: u64) = {
        let process = healthy_process()?;
        lock(&process.streams).streams.remove(&stream).ok_or(Code::INVALID_HANDLE)?;
        lock(&process.captures).streams.remove(&stream);
        Ok(())
    };
    fn cuStreamSynchronize(stream: u64) = {
        let current = current_context()?;
        let key = current.stream_key(stream)?;
        current.process.wait_for_work(current.context, current.work(stream)?)?;
        current.process.wait_until(current.busy_until(stream)?)?;
        current.process.shrink_pools(SyncScope::Stream(key));
        Ok(())
    };
    fn cuStreamQuery(stream: u64) = {
        let current = current_context()?;
        current.check_done(current.work(stream)?)?;
        check_completed(current.busy_until(stream)?)
    };
    fn cuStreamGetFlags(stream: u64, flags: Out<u32>) = {
        let current = current_context()?;
        let found = lock(&current.process.streams).find(current.context, stream)?.flags;
        flags.set(found)
    };
    fn cuStreamGetPriority(stream: u64, priority: Out<i32>) = {
        let current = current_context()?;
        let found = lock(&current.process.streams).find(current.context, stream)?.priority;
        priority.set(found)
    };
    fn cuStreamGetId(stream: u64, id: Out<u64>) = id.set(current_context()?.stream_key(stream)?);
    fn cuStreamGetCtx(stream: u64, context: Out<u64>) = {
        let current = current_context()?;
        let found = lock(&current.process.streams).find(current.context, stream)?.context;
        context.set(found)
    };
    fn cuStreamWaitEvent(stream: u64, event: u64, _flags: u32) = {
        let current = current_context()?;
        let event = current.event(event)?;
        let mut streams = lock(&current.process.streams);
        let stream = streams.find(current.context, stream)?;
        stream.busy_until = stream.busy_until.max(event.completes_at);
        // A channel group does not wait for that of another context.
        if stream.context == event.context {
            stream.work = stream.work.max(event.work);
        }
        Ok(())
    };
    fn cuEventCreate(event: Out<u64>, flags: u32) = {
        let current = current_context()?;
        let mut streams = lock(&current.process.streams);
        let handle = streams.next_handle();
        event.set(handle)?;
        streams.events.insert(handle, Event { context: current.context, flags, completes_at: None, work: 0, stream: 0 });
        Ok(())
    };
    fn cuEventDestroy_v2(event: u64) = {
        lock(&healthy_process()?.streams).events.remove(&event).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    };
    fn cuEventRecord(event: u64, stream: u64) = current_context()?.record(event, stream);
    fn cuEventRecordWithFlags(event: u64, stream: u64, _flags: u32) = current_context()?.record(event, stream);
    fn cuEventQuery(event: u64) = {
        let current = current_context()?;
        let event = current.event(event)?;
        current.check_done(event.work)?;
        check_completed(event.completes_at)
    };
    fn cuEventSynchronize(event: u64) = {
        let current = current_context()?;
        let event = current.event(event)?;
        current.process.wait_for_work(event.context, event.work)?;
        current.process.wait_until(event.completes_at)?;
        current.process.shrink_pools(SyncScope::Stream(event.stream));
        Ok(())
    };
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) = elapsed(&milliseconds, start, end);
    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) = elapsed(&milliseconds, start, end);
}
