//! Landing and saving from Python: blocks of a pool into pages of an engine's memory, and back, without the interpreter's lock.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvarts_contract::buffers::SharedBuf;
use kvarts_contract::error::{Error, Reason};
use kvarts_gpudirect::device;
use kvarts_gpudirect::device::name::{DeviceName, Opened};
use kvarts_gpudirect::device::slots::{Rows, SlotShape};
use kvarts_gpudirect::error::{DeviceError, LandError};
use kvarts_gpudirect::lander::{self, Column, Done, Move};
use kvarts_gpudirect::pages::{self as laid, PagePart};
use kvarts_layout::plan::Stretch;
use pyo3::prelude::*;

use crate::buffer;
use crate::error::{OrRaise, invalid};
use crate::guarded::Guarded;
use crate::memory::Memory;
use crate::pages::Pages;
use crate::pool::{Draft, Stage};
use crate::waiting;

/// How often a thread that waits looks for signals.
const LOOK: Duration = Duration::from_millis(50);

/// Where rows of a page lie: memory, `ring_first`, base and stride of slots, outer and inner rows (count, stride in the block, stride in the
/// page), bytes of a row.
type Part = (u32, u64, u64, u64, (u32, u64, u64), (u32, u64, u64), u64);

/// Blocks of a pool, as `Stage.stretches` gives them.
type Stretches = Vec<(u64, u32, u32, u32)>;

fn raised(error: LandError) -> Error {
    match error {
        LandError::Store(reason) => Error(reason),
        LandError::Device(error) => of_device(&error),
        other => Error(Reason::Config(other.to_string())),
    }
}

fn of_device(error: &DeviceError) -> Error {
    Error(Reason::Passing(format!("error of the device: {error}")))
}

#[doc = stub!("gpu.Device")]
#[pyclass(frozen, weakref, module = "kvarts.gpu")]
pub(crate) struct Device {
    opened: Guarded<Opened>,
}

#[pymethods]
impl Device {
    #[new]
    fn new(py: Python<'_>, name: &str) -> PyResult<Self> {
        let name: DeviceName = name.parse().map_err(|why: String| invalid(py, "name", why))?;
        let opened = py.detach(|| name.open()).map_err(|error| of_device(&error)).or_raise(py)?;
        Ok(Self { opened: Guarded::new(opened) })
    }

    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.opened.get()?.device().describe().name)
    }

    #[doc = stub!("gpu.Device.stream")]
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        let opened = self.opened.get()?;
        let stream =
            py.detach(|| opened.device().stream()).map_err(|error| of_device(&error)).or_raise(py)?;
        let handle = opened.handle_of(&stream).map_err(|error| of_device(&error)).or_raise(py)?;
        Ok(Stream { stream: Guarded::new(stream), handle, device: opened.clone() })
    }
}

#[doc = stub!("gpu.Stream")]
#[pyclass(frozen, weakref, module = "kvarts.gpu")]
pub(crate) struct Stream {
    stream: Guarded<device::Stream>,
    handle: u64,
    device: Opened,
}

#[pymethods]
impl Stream {
    #[getter]
    fn handle(&self) -> u64 {
        self.handle
    }

    #[doc = stub!("gpu.Stream.synchronize")]
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let stream = self.stream.get()?;
        py.detach(|| device::drain(&*self.device.device(), stream))
            .map_err(|error| of_device(&error))
            .or_raise(py)
    }
}

#[doc = stub!("gpu.Lander")]
#[pyclass(frozen, weakref, module = "kvarts.gpu")]
pub(crate) struct Lander {
    lander: Guarded<lander::Lander>,
    device: Opened,
}

impl Lander {
    fn stream(&self, py: Python<'_>, handle: u64) -> PyResult<device::Stream> {
        let device = self.device.device();
        device.adopt_stream(handle).map_err(|error| of_device(&error)).or_raise(py)
    }

    fn what(
        &self,
        py: Python<'_>,
        memory: &Memory,
        columns: Vec<(Stretches, PyRef<'_, DevicePages>)>,
        keeps: Box<dyn Any + Send>,
    ) -> PyResult<Move> {
        let (region, origin) = memory.region(py)?;
        if origin != 0 {
            return Err(invalid(py, "memory", "the call requires the memory of a pool"));
        }
        let column = |(stretches, pages): (Stretches, PyRef<'_, DevicePages>)| {
            let stretch = |(at, blocks, first, count)| Stretch { at, blocks, first, count };
            let stretches = stretches.into_iter().map(stretch).collect();
            Ok::<_, PyErr>(Column { stretches, pages: pages.pages.get()?.clone() })
        };
        let columns = columns.into_iter().map(column).collect::<PyResult<Vec<_>>>()?;
        Ok(Move { pool: region, columns, keeps })
    }
}

#[pymethods]
impl Lander {
    #[new]
    #[pyo3(signature = (device, *, ring_bytes=lander::RING_BYTES, timeout=30.0))]
    fn new(py: Python<'_>, device: &Device, ring_bytes: u64, timeout: f64) -> PyResult<Self> {
        let (device, timeout) = (device.opened.get()?.clone(), waiting::duration(py, "timeout", timeout)?);
        let made = py.detach(|| lander::Lander::with_timeout(&device.device(), ring_bytes, timeout));
        Ok(Self { lander: Guarded::new(made.map_err(raised).or_raise(py)?), device })
    }

    #[doc = stub!("gpu.Lander.pin")]
    fn pin(&self, py: Python<'_>, memory: &Memory) -> PyResult<()> {
        let (region, _) = memory.region(py)?;
        let device = self.device.device();
        py.detach(|| device.pin(&region)).map_err(|error| of_device(&error)).or_raise(py)
    }

    #[doc = stub!("gpu.Lander.pages")]
    #[pyo3(signature = (handle, memories, parts, slots, *, per_block=1, group=0, rank=None))]
    #[allow(clippy::too_many_arguments, reason = "the stub defines these keyword arguments")]
    fn pages(
        &self,
        py: Python<'_>,
        handle: &Pages,
        memories: Vec<Bound<'_, PyAny>>,
        parts: Vec<Part>,
        slots: Vec<u32>,
        per_block: u32,
        group: u32,
        rank: Option<u16>,
    ) -> PyResult<DevicePages> {
        let handle = handle.handle.get()?;
        let (_, _, shape) = handle.cut.column(group, rank).or_raise(py)?;
        let shape = Arc::new(shape.clone());
        let memories = memories.iter().map(|memory| self.memory(memory)).collect::<PyResult<Vec<_>>>()?;
        let chunks: Vec<u64> =
            shape.layers().iter().flat_map(|layer| &layer.chunks).map(|chunk| chunk.bytes).collect();
        if chunks.len() != parts.len() {
            let said = format!("{} parts were given, but a block has {} parts", parts.len(), chunks.len());
            return Err(invalid(py, "parts", said));
        }
        let part =
            |((memory, ring_first, pool_base, pool_stride, outer, inner, row_bytes), chunk): (Part, u64)| {
                let rows = |(count, ring, pool)| Rows { count, ring, pool };
                let (outer, inner) = (rows(outer), rows(inner));
                let ring_stride = chunk / u64::from(per_block.max(1));
                let rows =
                    SlotShape { ring_stride, ring_first, pool_base, pool_stride, outer, inner, row_bytes };
                PagePart { memory, rows }
            };
        let parts = parts.into_iter().zip(chunks).map(part).collect();
        let pages =
            laid::Pages::new(&shape, memories, parts, per_block, slots).map_err(raised).or_raise(py)?;
        Ok(DevicePages { pages: Guarded::new(pages) })
    }

    #[doc = stub!("gpu.Lander.land")]
    #[pyo3(signature = (memory, columns, *, after=None, stage=None))]
    fn land(
        &self,
        py: Python<'_>,
        memory: &Memory,
        columns: Vec<(Stretches, PyRef<'_, DevicePages>)>,
        after: Option<u64>,
        stage: Option<&Stage>,
    ) -> PyResult<Landed> {
        let stage = stage.map(|stage| stage.held(py)).transpose()?;
        let what = self.what(py, memory, columns, Box::new(stage))?;
        let after = after.map(|handle| self.stream(py, handle)).transpose()?;
        let (lander, device) = (self.lander.get()?, self.device.device());
        let landed = py.detach(|| {
            let after = after.map(|stream| device.record(&stream)).transpose()?;
            lander.land(what, after.as_ref())
        });
        Ok(Landed { landed: Guarded::new(landed.map_err(raised).or_raise(py)?), device: self.device.clone() })
    }

    #[doc = stub!("gpu.Lander.save")]
    #[pyo3(signature = (memory, columns, *, draft=None))]
    fn save(
        &self,
        py: Python<'_>,
        memory: &Memory,
        columns: Vec<(Stretches, PyRef<'_, DevicePages>)>,
        draft: Option<&Draft>,
    ) -> PyResult<Saving> {
        let draft = draft.map(|draft| draft.held(py)).transpose()?;
        let what = self.what(py, memory, columns, Box::new(draft))?;
        let lander = self.lander.get()?;
        let saving = py.detach(|| lander.save(what)).map_err(raised).or_raise(py)?;
        Ok(Saving { saving: Guarded::new(Mutex::new(Some(saving))), device: self.device.clone() })
    }
}

impl Lander {
    /// Memory of the device by its address and bytes, or a buffer of this process where the device is an emulated one.
    fn memory(&self, given: &Bound<'_, PyAny>) -> PyResult<device::Memory> {
        let py = given.py();
        if let Ok((address, nbytes)) = given.extract::<(u64, u64)>() {
            let device = self.device.device();
            return device.adopt(address, nbytes).map_err(|error| of_device(&error)).or_raise(py);
        }
        let Opened::Emulated(emulated) = &self.device else {
            return Err(invalid(
                py,
                "memories",
                "each entry must be (address, bytes) of memory on the device",
            ));
        };
        let given = buffer::given("memories", given, true)?;
        let (region, origin) = buffer::region(given.address, given.len, vec![given.held]);
        let buf = SharedBuf::new(&region, origin, given.len);
        Ok(emulated.over(&buf.ok_or_else(|| invalid(py, "memories", "the memory is empty"))?))
    }
}

#[doc = stub!("gpu.Pages")]
#[pyclass(frozen, weakref, module = "kvarts.gpu")]
pub(crate) struct DevicePages {
    pages: Guarded<laid::Pages>,
}

#[doc = stub!("gpu.Landed")]
#[pyclass(frozen, weakref, module = "kvarts.gpu")]
pub(crate) struct Landed {
    landed: Guarded<lander::Landed>,
    device: Opened,
}

#[pymethods]
impl Landed {
    #[doc = stub!("gpu.Landed.wait")]
    fn wait(&self, py: Python<'_>, layer: u32, stream: u64) -> PyResult<()> {
        let device = self.device.device();
        let stream = device.adopt_stream(stream).map_err(|error| of_device(&error)).or_raise(py)?;
        let landed = self.landed.get()?;
        // ends: at once: the stream waits, not the thread
        py.detach(|| landed.wait(layer, &stream)).map_err(raised).or_raise(py)
    }

    #[doc = stub!("gpu.Landed.done")]
    #[pyo3(signature = (timeout=0.0))]
    fn done(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        ended(py, self.landed.get()?.done(), timeout)
    }
}

#[doc = stub!("gpu.Saving")]
#[pyclass(frozen, weakref, module = "kvarts.gpu")]
pub(crate) struct Saving {
    saving: Guarded<Mutex<Option<lander::Saving>>>,
    device: Opened,
}

#[pymethods]
impl Saving {
    #[doc = stub!("gpu.Saving.layer")]
    fn layer(&self, py: Python<'_>, layer: u32, stream: u64) -> PyResult<()> {
        let device = self.device.device();
        let stream = device.adopt_stream(stream).map_err(|error| of_device(&error)).or_raise(py)?;
        let slot = self.saving.get()?;
        let left = py.detach(|| {
            let mut saving = slot.lock().unwrap_or_else(PoisonError::into_inner);
            let saving = saving.as_mut().ok_or_else(|| {
                LandError::Request("the save has already ended: begin a new save".to_owned())
            })?;
            let left = saving.layer(layer, &stream)?;
            // ends: at once: the stream waits, not the thread
            Ok::<_, LandError>(device.wait(&stream, &left)?)
        });
        left.map_err(raised).or_raise(py)
    }

    #[doc = stub!("gpu.Saving.finish")]
    fn finish(&self, py: Python<'_>) -> PyResult<Saved> {
        let saving = self.saving.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        let saving =
            saving.ok_or_else(|| invalid(py, "saving", "the save has already ended: begin a new save"))?;
        let done = py.detach(|| saving.finish()).map_err(raised).or_raise(py)?;
        Ok(Saved { done })
    }
}

#[doc = stub!("gpu.Saved")]
#[pyclass(frozen, weakref, module = "kvarts.gpu")]
pub(crate) struct Saved {
    done: Done,
}

#[pymethods]
impl Saved {
    #[doc = stub!("gpu.Saved.done")]
    #[pyo3(signature = (timeout=0.0))]
    fn done(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        ended(py, &self.done, timeout)
    }
}

/// Whether it has ended, by then; an error where it failed.
fn ended(py: Python<'_>, done: &Done, timeout: f64) -> PyResult<bool> {
    let mut left = waiting::duration(py, "timeout", timeout)?;
    loop {
        let some = left.min(LOOK);
        // ends: `LOOK`, and the caller's time
        match py.detach(|| done.wait(some)) {
            Some(Ok(())) => return Ok(true),
            Some(Err(error)) => return Err(of_device(&error)).or_raise(py),
            None if left.is_zero() => return Ok(false),
            None => left -= some,
        }
        py.check_signals()?;
    }
}
