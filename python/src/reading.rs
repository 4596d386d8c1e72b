//! Reads layer by layer.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvarts_contract::api::{Order, ReadEnd, ReadEvent, ReadRequest, ReadStream};
use kvarts_contract::error::Reason;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{OrRaise, exception, invalid, late, reasons};
use crate::guarded::Guarded;
use crate::handle::Handle;
use crate::places::{self, Laid};
use crate::{blocks, left, waiting};

#[doc = stub!("Layer")]
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Layer {
    layer: u32,
    blocks: u32,
}

#[pymethods]
impl Layer {
    #[doc = stub!("Layer.layer")]
    #[getter]
    fn layer(&self) -> u32 {
        self.layer
    }

    #[doc = stub!("Layer.blocks")]
    #[getter]
    fn blocks(&self) -> u32 {
        self.blocks
    }

    fn __repr__(&self) -> String {
        format!("<kvarts.Layer {}: {} blocks>", self.layer, self.blocks)
    }
}

/// Counts a read for as long as its memory is in use.
struct Counted(Arc<AtomicU64>);

impl Counted {
    fn new(all: &Arc<AtomicU64>) -> Arc<Self> {
        all.fetch_add(1, Ordering::SeqCst);
        Arc::new(Self(Arc::clone(all)))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Reading {
    handle: Arc<Handle>,
    /// Taken by the call that waits for the next event, and when the read is over.
    stream: Mutex<Option<ReadStream>>,
    /// Events that were looked at and not given yet.
    ahead: Mutex<VecDeque<ReadEvent>>,
    /// Layers that were given.
    given: AtomicU32,
    end: Mutex<Option<ReadEnd>>,
    /// Alive while the memory is in use.
    memory: std::sync::Weak<Counted>,
    /// The model's number of each layer of the blocks.
    numbers: BTreeMap<u32, u32>,
}

#[doc = stub!("Layers")]
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Layers {
    reading: Guarded<Reading>,
}

/// What a thread that panicked had is still right.
fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reading {
    fn ended(&self) -> ReadEnd {
        lock(&self.end).clone().unwrap_or_default()
    }

    fn stream(&self) -> Option<ReadStream> {
        lock(&self.stream).take()
    }

    /// Whether there is an event to be taken without waiting, after `seconds` at most.
    fn wait(&self, py: Python<'_>, stream: &ReadStream, seconds: f64) -> PyResult<bool> {
        let clock = &*self.handle.core.clock;
        let deadline = clock.now().plus(waiting::duration(py, "timeout", seconds)?);
        if !lock(&self.ahead).is_empty() {
            return Ok(true);
        }
        let event = waiting::run_until(py, clock, deadline, stream.next())?;
        let came = event.is_some();
        lock(&self.ahead).extend(event);
        Ok(came)
    }

    fn next(&self, py: Python<'_>, stream: &ReadStream) -> PyResult<ReadEvent> {
        if let Some(event) = lock(&self.ahead).pop_front() {
            return Ok(event);
        }
        // Ctrl-C drops the stream, which cancels the read.
        waiting::run(py, stream.next())
    }
}

#[pymethods]
impl Layers {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Layer>> {
        let reading = self.reading.get()?;
        let Some(stream) = reading.stream() else { return Ok(None) };
        loop {
            match reading.next(py, &stream)? {
                ReadEvent::Layer { blocks: 0, .. } | ReadEvent::Block(_) => {}
                ReadEvent::Layer { layer, blocks } => {
                    *lock(&reading.stream) = Some(stream);
                    reading.given.fetch_add(1, Ordering::Relaxed);
                    let layer = reading.numbers.get(&layer).copied().unwrap_or(layer);
                    return Ok(Some(Layer { layer, blocks }));
                }
                ReadEvent::End(end) => {
                    let held = end.held_bytes > 0;
                    *lock(&reading.end) = Some(end);
                    if !held {
                        break;
                    }
                }
                ReadEvent::Released => break,
            }
        }
        py.detach(|| drop(stream));
        left::settle(py);
        Ok(None)
    }

    #[doc = stub!("Layers.wait")]
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let reading = self.reading.get()?;
        let Some(stream) = reading.stream() else { return Ok(true) };
        // ends: `timeout`, the caller's
        let came = reading.wait(py, &stream, timeout);
        *lock(&reading.stream) = Some(stream);
        came
    }

    #[doc = stub!("Layers.arrived")]
    #[getter]
    fn arrived(&self) -> PyResult<u32> {
        let reading = self.reading.get()?;
        let mut ahead = lock(&reading.ahead);
        if let Some(stream) = &*lock(&reading.stream) {
            ahead.extend(std::iter::from_fn(|| stream.try_next()));
        }
        let waiting =
            ahead.iter().filter(|event| matches!(event, ReadEvent::Layer { blocks: 1.., .. })).count();
        Ok(reading.given.load(Ordering::Relaxed).saturating_add(waiting as u32))
    }

    #[getter]
    fn usable_blocks(&self) -> PyResult<u32> {
        Ok(self.reading.get()?.ended().usable_blocks)
    }

    #[getter]
    fn usable_layers(&self) -> PyResult<u32> {
        Ok(self.reading.get()?.ended().usable_layers)
    }

    #[getter]
    fn errors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        for (at, reason) in &self.reading.get()?.ended().failures {
            found.set_item(at, exception(py, reason).into_value(py))?;
        }
        Ok(found)
    }

    #[doc = stub!("Layers.reasons")]
    #[getter]
    fn reasons<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let end = self.reading.get()?.ended();
        reasons(py, end.failures.iter().map(|(_, reason)| reason))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let reading = self.reading.get()?;
        let stream = reading.stream();
        py.detach(|| drop(stream));
        let core = &reading.handle.core;
        let deadline = core.deadline(py, None)?;
        let free = waiting::until(py, &*core.clock, deadline, || reading.memory.strong_count() == 0)?;
        left::settle(py);
        if free { Ok(()) } else { Err(late(py, "a disk still writes to buffers of this read")) }
    }
}

/// The wanted layers of blocks, counted among those that they have.
fn wanted(
    py: Python<'_>,
    numbers: &BTreeMap<u32, u32>,
    layers: Option<(u32, u32)>,
) -> PyResult<Option<Range<u32>>> {
    let Some((start, stop)) = layers else { return Ok(None) };
    let mut some = numbers.iter().filter(|(_, number)| (start..stop).contains(number)).map(|(at, _)| *at);
    let none = || {
        let what = format!("the blocks have no layer in range({start}, {stop})");
        invalid(py, "layers", what)
    };
    let first = some.next().ok_or_else(none)?;
    Ok(Some(first..some.next_back().unwrap_or(first) + 1))
}

/// What a read by layers is asked for.
pub(crate) struct ByLayers<'a, 'py> {
    pub(crate) keys: &'a Bound<'py, PyAny>,
    pub(crate) buffers: Option<&'a Bound<'py, PyAny>>,
    pub(crate) layer_buffers: Option<Vec<Option<Bound<'py, PyAny>>>>,
    pub(crate) layers: Option<&'a Bound<'py, PyAny>>,
    pub(crate) group: u32,
    pub(crate) rank: Option<u16>,
    pub(crate) timeout: Option<f64>,
}

/// Begins a read by layers.
pub(crate) fn begin(handle: &Arc<Handle>, wanted: ByLayers<'_, '_>) -> PyResult<Layers> {
    let ByLayers { keys, buffers, layer_buffers, layers, group, rank, timeout } = wanted;
    let py = keys.py();
    let (group_id, coordinate, shape) = handle.cut.column(group, rank).or_raise(py)?;
    let group = group.into_pyobject(py)?.into_any();
    let rank = rank.unwrap_or(handle.cut.tp_rank).into_pyobject(py)?.into_any();
    let asked = blocks::asked(&handle.cut, keys, (Some(&group), Some(&rank)), true)?;
    let registry = &handle.core.registry;
    let placed = match (buffers, layer_buffers) {
        (Some(buffers), None) => match places::laid(registry, buffers, &asked, true)? {
            Laid::Placed(placed) => placed,
            Laid::Anywhere(pages) => one(py, shape, &pages)?,
        },
        (None, Some(each)) => places::by_layer(registry, &each, shape, asked.blocks.len() as u32, py)?,
        _ => return Err(invalid(py, "buffers", "exactly one of buffers and layer_buffers is required")),
    };
    let numbers: BTreeMap<u32, u32> = (0..).zip(shape.layers().iter().map(|layer| layer.layer)).collect();
    let range = match layers {
        Some(range) => Some((range.getattr("start")?.extract()?, range.getattr("stop")?.extract()?)),
        None => None,
    };
    let range = self::wanted(py, &numbers, range)?;
    let counted = Counted::new(&handle.calls);
    let memory = Arc::downgrade(&counted);
    let keys = asked.blocks.iter().map(|block| block.key).collect();
    let keeper: Arc<dyn Any + Send + Sync> = counted;
    let into = placed.kept_by(&keeper);
    let request = ReadRequest {
        layers: range,
        order: Order::Layers,
        deadline: handle.terms(py, timeout)?.deadline,
        ..ReadRequest::new(handle.namespace, group_id, coordinate, keys, into)
    };
    drop(keeper);
    let stream = py.detach(|| handle.core.store.read(request)).or_raise(py)?;
    let reading = Reading {
        handle: Arc::clone(handle),
        stream: Mutex::new(Some(stream)),
        ahead: Mutex::default(),
        given: AtomicU32::new(0),
        end: Mutex::default(),
        memory,
        numbers,
    };
    Ok(Layers { reading: Guarded::new(reading) })
}

/// Blocks that lie anywhere, as one placement.
fn one(
    py: Python<'_>,
    shape: &kvarts_layout::BlockShape,
    pages: &[kvarts_contract::buffers::SharedBuf],
) -> PyResult<kvarts_contract::api::Placed> {
    let mut all = kvarts_contract::api::Placed::scattered(shape, pages).or_raise(py)?;
    match (all.pop(), all.is_empty()) {
        (Some((which, placed)), true) => {
            // In the order of the keys again.
            let mut back = vec![0; which.len()];
            for (at, place) in (0u32..).zip(which) {
                if let Some(back) = back.get_mut(place as usize) {
                    *back = at;
                }
            }
            placed.select(&back).or_raise(py)
        }
        _ => Err(Reason::OutOfBounds).or_raise(py),
    }
}
