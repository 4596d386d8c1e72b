//! Handles on blocks: batches that are answered later, and the same as calls that wait.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use kvarts_contract::api::{DeleteRequest, Parent, Target};
use kvarts_contract::batch::{BatchId, BatchKind, Lane, Memory, Terms};
use kvarts_contract::error::Reason;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::blocks::{self, Asked};
use crate::calls::{self, Lease, Match};
use crate::completion::Completion;
use crate::error::{OrRaise, invalid, late};
use crate::guarded::Guarded;
use crate::handle::{self, Handle};
use crate::left;
use crate::missing::{self, Missing};
use crate::places::{self, Laid};
use crate::planning::{self, Times};
use crate::reading::{self, ByLayers, Layers};
use crate::{keys, waiting};

fn lane(py: Python<'_>, name: &str) -> PyResult<Lane> {
    match name {
        "store" => Ok(Lane::Store),
        "lookup" => Ok(Lane::Lookup),
        "load" => Ok(Lane::Load),
        _ => Err(invalid(py, "lane", "the value must be store, lookup or load")),
    }
}

#[doc = stub!("Pages")]
#[pyclass(frozen, weakref, module = "kvarts")]
pub(crate) struct Pages {
    pub(crate) handle: Guarded<Arc<Handle>>,
}

/// What all calls on keys take.
type Given<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

impl Pages {
    fn handle(&self, py: Python<'_>) -> PyResult<&Arc<Handle>> {
        let handle = self.handle.get()?;
        handle.core.alive(py)?;
        left::settle(py);
        Ok(handle)
    }

    fn submit(
        &self,
        kind: BatchKind,
        keys: &Bound<'_, PyAny>,
        buffers: Given<'_, '_>,
        (group, rank): (Given<'_, '_>, Given<'_, '_>),
        change: impl FnOnce(&mut Terms) -> PyResult<()>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let py = keys.py();
        let handle = self.handle(py)?;
        let (asked, laid, terms) = prepare(handle, kind, keys, buffers, (group, rank), change, timeout)?;
        let memory = laid.as_ref().map_or(Memory::Nowhere, |laid| laid.memory(&handle.shapes));
        let submitted = py.detach(|| asked.submit(&handle.pages, kind, &memory, &terms));
        Ok(submitted.or_raise(py)?.0)
    }

    fn call(
        &self,
        kind: BatchKind,
        keys: &Bound<'_, PyAny>,
        buffers: Given<'_, '_>,
        (group, rank): (Given<'_, '_>, Given<'_, '_>),
        change: impl FnOnce(&mut Terms) -> PyResult<()>,
        timeout: Option<f64>,
    ) -> PyResult<Completion> {
        let py = keys.py();
        let handle = self.handle(py)?;
        let (asked, laid, terms) = prepare(handle, kind, keys, buffers, (group, rank), change, timeout)?;
        let told = handle.call(py, kind, asked, laid.as_ref(), &terms);
        drop(laid);
        left::settle(py);
        told.map(Completion)
    }
}

fn prepare<'a>(
    handle: &'a Handle,
    kind: BatchKind,
    keys: &Bound<'_, PyAny>,
    buffers: Given<'_, '_>,
    (group, rank): (Given<'_, '_>, Given<'_, '_>),
    change: impl FnOnce(&mut Terms) -> PyResult<()>,
    timeout: Option<f64>,
) -> PyResult<(Asked<'a>, Option<Laid>, Terms)> {
    let asked = blocks::asked(&handle.cut, keys, (group, rank), buffers.is_some())?;
    let registry = &handle.core.registry;
    let laid =
        buffers.map(|given| places::laid(registry, given, &asked, kind == BatchKind::Get)).transpose()?;
    let mut terms = handle.terms(keys.py(), timeout)?;
    change(&mut terms)?;
    Ok((asked, laid, terms))
}

fn unchanged(_: &mut Terms) -> PyResult<()> {
    Ok(())
}

/// What is said of a put: that its blocks follow each other, and how long they live.
fn stored<'a>(
    py: Python<'a>,
    parent: Option<&'a [u8]>,
    ttl: Option<f64>,
) -> impl FnOnce(&mut Terms) -> PyResult<()> + 'a {
    move |terms| {
        terms.expires_after = ttl.map(|seconds| waiting::duration(py, "ttl", seconds)).transpose()?;
        terms.parent = match parent {
            None => Parent::Unknown,
            Some([]) => Parent::Root,
            Some(bytes) => Parent::Key(keys::parent(py, bytes)?),
        };
        Ok(())
    }
}

#[pymethods]
impl Pages {
    #[doc = stub!("Pages.namespace")]
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, self.handle.get()?.namespace.as_bytes()))
    }

    #[doc = stub!("Pages.under_way")]
    #[getter]
    fn under_way(&self) -> PyResult<usize> {
        Ok(self.handle.get()?.pages.under_way())
    }

    #[pyo3(signature = (group=0))]
    fn block_bytes(&self, py: Python<'_>, group: u32) -> PyResult<u64> {
        Ok(self.handle.get()?.cut.column(group, None).or_raise(py)?.2.block_bytes())
    }

    #[doc = stub!("Pages.parts")]
    #[pyo3(signature = (group=0))]
    fn parts(&self, py: Python<'_>, group: u32) -> PyResult<Vec<(u32, u64)>> {
        let (_, _, shape) = self.handle.get()?.cut.column(group, None).or_raise(py)?;
        let parts = shape.layers().iter();
        Ok(parts.flat_map(|layer| layer.chunks.iter().map(|chunk| (layer.layer, chunk.bytes))).collect())
    }

    #[doc = stub!("Pages.submit_put")]
    #[pyo3(signature = (keys, buffers, *, group=None, rank=None, parent=None, ttl=None, timeout=None))]
    #[allow(clippy::too_many_arguments, reason = "the stub defines these keyword arguments")]
    fn submit_put(
        &self,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        group: Given<'_, '_>,
        rank: Given<'_, '_>,
        parent: Option<&[u8]>,
        ttl: Option<f64>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let change = stored(keys.py(), parent, ttl);
        self.submit(BatchKind::Put, keys, Some(buffers), (group, rank), change, timeout)
    }

    #[doc = stub!("Pages.submit_get")]
    #[pyo3(signature = (keys, buffers, *, group=None, rank=None, timeout=None))]
    fn submit_get(
        &self,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        group: Given<'_, '_>,
        rank: Given<'_, '_>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        self.submit(BatchKind::Get, keys, Some(buffers), (group, rank), unchanged, timeout)
    }

    #[doc = stub!("Pages.submit_exists")]
    #[pyo3(signature = (keys, *, group=None, rank=None, timeout=None))]
    fn submit_exists(
        &self,
        keys: &Bound<'_, PyAny>,
        group: Given<'_, '_>,
        rank: Given<'_, '_>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        self.submit(BatchKind::Exists, keys, None, (group, rank), unchanged, timeout)
    }

    #[doc = stub!("Pages.submit_lock")]
    #[pyo3(signature = (keys, *, hold=60.0, group=None, rank=None, timeout=None))]
    fn submit_lock(
        &self,
        keys: &Bound<'_, PyAny>,
        hold: f64,
        group: Given<'_, '_>,
        rank: Given<'_, '_>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        let hold = waiting::duration(keys.py(), "hold", hold)?;
        let change = |terms: &mut Terms| {
            terms.hold = hold;
            Ok(())
        };
        self.submit(BatchKind::Lock, keys, None, (group, rank), change, timeout)
    }

    #[doc = stub!("Pages.submit_delete")]
    #[pyo3(signature = (keys, *, group=None, rank=None, timeout=None))]
    fn submit_delete(
        &self,
        keys: &Bound<'_, PyAny>,
        group: Given<'_, '_>,
        rank: Given<'_, '_>,
        timeout: Option<f64>,
    ) -> PyResult<u64> {
        self.submit(BatchKind::Delete, keys, None, (group, rank), unchanged, timeout)
    }

    #[doc = stub!("Pages.unlock")]
    fn unlock(&self, what: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = what.py();
        let handle = self.handle(py)?;
        if let Ok(id) = what.extract::<u64>() {
            py.detach(|| handle.pages.unlock(BatchId(id)));
            return Ok(());
        }
        let keys = keys::keys(what)?;
        py.detach(|| handle.pages.unlock_keys(&keys));
        Ok(())
    }

    #[doc = stub!("Pages.cancel")]
    fn cancel(&self, py: Python<'_>, id: u64) -> PyResult<bool> {
        let handle = self.handle(py)?;
        Ok(py.detach(|| handle.pages.cancel(BatchId(id))))
    }

    #[doc = stub!("Pages.drain")]
    #[pyo3(signature = (lane=None))]
    fn drain(&self, py: Python<'_>, lane: Option<&str>) -> PyResult<Vec<Completion>> {
        let handle = self.handle(py)?;
        let lane = lane.map(|name| self::lane(py, name)).transpose()?;
        let mut told = Vec::new();
        py.detach(|| match lane {
            Some(lane) => handle.pages.drain_lane(lane, &mut told),
            None => handle.pages.drain(&mut told),
        });
        left::settle(py);
        Ok(told.into_iter().map(Completion).collect())
    }

    #[doc = stub!("Pages.wait")]
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Vec<Completion>> {
        let handle = self.handle(py)?;
        let left = timeout.map(|seconds| waiting::duration(py, "timeout", seconds)).transpose()?;
        let told = handle::wait(py, &handle.pages, left)?;
        left::settle(py);
        Ok(told.into_iter().map(Completion).collect())
    }

    #[doc = stub!("Pages.fileno")]
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.handle.get()?.pages.event_fd(Lane::Load).as_raw_fd())
    }

    #[doc = stub!("Pages.event_fd")]
    fn event_fd(&self, py: Python<'_>, lane: &str) -> PyResult<i32> {
        Ok(self.handle.get()?.pages.event_fd(self::lane(py, lane)?).as_raw_fd())
    }

    #[doc = stub!("Pages.close")]
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let handle = self.handle.get()?;
        let deadline = handle.core.deadline(py, timeout)?;
        py.detach(|| handle.pages.close());
        let free = waiting::until(py, &*handle.core.clock, deadline, || handle.is_free())?;
        left::settle(py);
        if free { Ok(()) } else { Err(late(py, "a disk or a thread still uses buffers of a batch")) }
    }

    #[pyo3(signature = (keys, buffers, *, group=None, rank=None, parent=None, ttl=None, timeout=None))]
    #[allow(clippy::too_many_arguments, reason = "the stub defines these keyword arguments")]
    fn put(
        &self,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        group: Given<'_, '_>,
        rank: Given<'_, '_>,
        parent: Option<&[u8]>,
        ttl: Option<f64>,
        timeout: Option<f64>,
    ) -> PyResult<Completion> {
        let change = stored(keys.py(), parent, ttl);
        self.call(BatchKind::Put, keys, Some(buffers), (group, rank), change, timeout)
    }

    #[pyo3(signature = (keys, buffers, *, group=None, rank=None, timeout=None))]
    fn get(
        &self,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        group: Given<'_, '_>,
        rank: Given<'_, '_>,
        timeout: Option<f64>,
    ) -> PyResult<Completion> {
        self.call(BatchKind::Get, keys, Some(buffers), (group, rank), unchanged, timeout)
    }

    #[pyo3(signature = (keys, *, group=None, rank=None, timeout=None))]
    fn exists(
        &self,
        keys: &Bound<'_, PyAny>,
        group: Given<'_, '_>,
        rank: Given<'_, '_>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<bool>> {
        let told = self.call(BatchKind::Exists, keys, None, (group, rank), unchanged, timeout)?;
        // What is absent, or not there yet, is an answer; anything else is not.
        let wrong = told.0.results.iter().find_map(|result| match result {
            Ok(()) | Err(Reason::NotHere(_) | Reason::InFlight) => None,
            Err(reason) => Some(reason.clone()),
        });
        wrong.map_or(Ok(()), Err).or_raise(keys.py())?;
        Ok(told.results())
    }

    #[doc = stub!("Pages.missing")]
    #[pyo3(signature = (keys, *, group=0, rank=None, timeout=None))]
    fn missing(
        &self,
        keys: &Bound<'_, PyAny>,
        group: u32,
        rank: Option<u16>,
        timeout: Option<f64>,
    ) -> PyResult<Missing> {
        missing::of(self.handle(keys.py())?, keys, (group, rank), timeout)
    }

    #[pyo3(signature = (keys, *, group=None, rank=None, timeout=None))]
    fn delete(
        &self,
        keys: &Bound<'_, PyAny>,
        group: Given<'_, '_>,
        rank: Given<'_, '_>,
        timeout: Option<f64>,
    ) -> PyResult<Completion> {
        self.call(BatchKind::Delete, keys, None, (group, rank), unchanged, timeout)
    }

    #[doc = stub!("Pages.match")]
    #[pyo3(signature = (keys, *, hold=None, times=None, prompt_tokens=None, hbm_blocks=0, hbm_boundaries=Vec::new(), overlap="layers"))]
    #[allow(clippy::too_many_arguments, reason = "the stub defines these keyword arguments")]
    fn r#match(
        &self,
        keys: &Bound<'_, PyAny>,
        hold: Option<f64>,
        times: Option<Bound<'_, Times>>,
        prompt_tokens: Option<u64>,
        hbm_blocks: u32,
        hbm_boundaries: Vec<u32>,
        overlap: &str,
    ) -> PyResult<Match> {
        let overlap = planning::overlap(keys.py(), overlap)?;
        let plan = calls::PlanOf { times, prompt_tokens, hbm_blocks, hbm_boundaries, overlap };
        calls::find(self.handle(keys.py())?, keys, hold, plan)
    }

    #[doc = stub!("Pages.pin")]
    #[pyo3(signature = (keys, *, hold, group=0, rank=None, timeout=None))]
    fn pin(
        &self,
        keys: &Bound<'_, PyAny>,
        hold: f64,
        group: u32,
        rank: Option<u16>,
        timeout: Option<f64>,
    ) -> PyResult<Lease> {
        calls::pin(self.handle(keys.py())?, keys, hold, (group, rank), timeout)
    }

    #[doc = stub!("Pages.layers")]
    #[pyo3(signature = (keys, buffers=None, *, layer_buffers=None, layers=None, group=0, rank=None, timeout=None))]
    #[allow(clippy::too_many_arguments, reason = "the stub defines these keyword arguments")]
    fn layers(
        &self,
        keys: &Bound<'_, PyAny>,
        buffers: Option<&Bound<'_, PyAny>>,
        layer_buffers: Option<Vec<Option<Bound<'_, PyAny>>>>,
        layers: Option<&Bound<'_, PyAny>>,
        group: u32,
        rank: Option<u16>,
        timeout: Option<f64>,
    ) -> PyResult<Layers> {
        let wanted = ByLayers { keys, buffers, layer_buffers, layers, group, rank, timeout };
        reading::begin(self.handle(keys.py())?, wanted)
    }

    #[doc = stub!("Pages.delete_all")]
    fn delete_all(&self, py: Python<'_>) -> PyResult<u64> {
        let handle = self.handle(py)?;
        let deadline = handle.terms(py, None)?.deadline;
        let request = DeleteRequest { namespace: handle.namespace, target: Target::Namespace, deadline };
        let answer = waiting::run(py, handle.core.store.delete(request))?;
        let gone = |_| Reason::Busy("the store is closing");
        Ok(answer.map_err(gone).or_raise(py)?.or_raise(py)?.blocks)
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, None)
    }
}
