//! Events, and that they are used again: an engine's thread records several for every layer, and the driver takes its time to make one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys as cu;

use super::{CAPTURE_IMPLICIT, CAPTURE_UNSUPPORTED, Context, NOT_READY, RawStream, check};
use crate::device::Event;
use crate::error::DeviceError;

/// Events that keep no time. No thread of ours waits inside the driver for one, so none asks to be woken by an interrupt.
const EVENT_FLAGS: u32 = 2;
/// Events that are kept; what is recorded beyond that is made, and destroyed when it is let go of.
const KEPT_MAX: usize = 4096;
/// Events that are looked at before one is made: those that a caller holds for long stand among those that are free.
const LOOKS: usize = 8;

/// An event.
#[derive(Debug)]
pub(in super::super) struct RawEvent {
    context: Context,
    raw: cu::CUevent,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

impl Drop for RawEvent {
    fn drop(&mut self) {
        if let Ok(_inside) = self.context.enter() {
            // SAFETY: made by `record`; the driver keeps what a pending wait needs.
            let _ = unsafe { (self.context.calls().event_destroy)(self.raw) };
        }
    }
}

impl Context {
    fn record(&self, stream: &RawStream) -> Result<RawEvent, DeviceError> {
        let _inside = self.enter()?;
        self.outside_graphs(stream)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed in `RawEvent::drop`.
        check("cuEventCreate", unsafe { (self.calls().event_create)(&raw mut raw, EVENT_FLAGS) })?;
        let event = RawEvent { context: self.clone(), raw };
        self.record_again(stream, &event)?;
        Ok(event)
    }

    fn record_again(&self, stream: &RawStream, event: &RawEvent) -> Result<(), DeviceError> {
        let _inside = self.enter()?;
        self.outside_graphs(stream)?;
        // SAFETY: both are alive.
        check("cuEventRecord", unsafe { (self.calls().event_record)(event.raw, stream.raw) })
    }

    pub(in super::super) fn wait(&self, stream: &RawStream, event: &RawEvent) -> Result<(), DeviceError> {
        let _inside = self.enter()?;
        self.outside_graphs(stream)?;
        // SAFETY: both are alive.
        check("cuStreamWaitEvent", unsafe { (self.calls().stream_wait)(stream.raw, event.raw, 0) })
    }

    /// Whether everything before the event is done; an error is that of the work before it, or of a driver that does
    /// not say.
    pub(in super::super) fn is_done(&self, event: &RawEvent) -> Result<bool, DeviceError> {
        let _inside = self.enter()?;
        // SAFETY: it is alive.
        match unsafe { (self.calls().event_query)(event.raw) } {
            // The last are refusals to look while a graph is captured: whatever runs goes on meanwhile.
            NOT_READY | CAPTURE_UNSUPPORTED | CAPTURE_IMPLICIT => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }
}

/// The events of a device, the one that was recorded or looked at longest ago first.
#[derive(Debug, Default)]
pub(in super::super) struct Events(Mutex<VecDeque<Arc<RawEvent>>>);

impl Events {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<RawEvent>>> {
        // Each change is one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An event that no caller holds. A wait that was enqueued before keeps the state that the event had then, so it may be recorded again.
    fn free(&self) -> Option<Arc<RawEvent>> {
        let mut all = self.lock();
        for _ in 0..LOOKS.min(all.len()) {
            let mut event = all.pop_front()?;
            if Arc::get_mut(&mut event).is_some() {
                return Some(event);
            }
            all.push_back(event);
        }
        None
    }

    /// An event behind what the stream was given so far.
    pub(in super::super) fn record(
        &self,
        context: &Context,
        stream: &RawStream,
    ) -> Result<Event, DeviceError> {
        // One that could not be recorded is not used again: what it stands for is not known.
        let event = match self.free() {
            Some(event) => {
                context.record_again(stream, &event)?;
                event
            }
            None => Arc::new(context.record(stream)?),
        };
        let mut all = self.lock();
        if all.len() < KEPT_MAX {
            all.push_back(Arc::clone(&event));
        }
        Ok(Event(event))
    }
}
