//! Pools that the processes of an engine share, and what a scheduler stages in them.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvarts_client::pool::{self, Column, DraftTerms, StageRequest};
use kvarts_contract::api::{BlockOutcome, Durability, Parent};
use kvarts_contract::buffers::Region;
use kvarts_contract::class::Class;
use kvarts_contract::error::{Error, Reason};
use kvarts_layout::BlockShape;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer;
use crate::error::{OrRaise, exception, invalid};
use crate::guarded::Guarded;
use crate::handle::Core;
use crate::memory::{Adopted, Memory};
use crate::pages::Pages;
use crate::{keys, waiting};

/// How often a thread that waits looks for signals.
const LOOK: Duration = Duration::from_millis(50);

/// Why a column is refused.
fn no_column(column: usize, count: usize) -> String {
    format!("column {column} does not exist: the number of columns is {count}")
}

/// Memory of a pool, as this process has it.
pub(crate) fn memory(py: Python<'_>, core: &Arc<Core>, region: &Arc<Region>) -> PyResult<Memory> {
    let remote = core.remote.as_ref();
    let file = remote.and_then(|remote| remote.file_of(region));
    let file = file.ok_or(Error(Reason::Bug("the pool has no file"))).or_raise(py)?;
    // Of the same pages once more, as the interpreter maps memory: its views keep that.
    let owner = py.import("mmap")?.getattr("mmap")?.call1((file.as_raw_fd(), region.len()))?;
    let given = buffer::given("nbytes", &owner, true)?;
    let adopted = Adopted {
        address: given.address,
        nbytes: given.len,
        held: Some(given.held),
        owner: Some(owner.unbind()),
        mode: "adopted",
        region: Some((Arc::clone(region), 0)),
    };
    Memory::new(core, adopted).ok_or_else(|| invalid(py, "nbytes", "this memory is already registered"))
}

#[doc = stub!("Pool")]
#[pyclass(frozen, weakref, module = "kvarts")]
pub(crate) struct Pool {
    core: Arc<Core>,
    pool: Guarded<pool::Pool>,
    name: String,
    memory: Py<Memory>,
}

impl Pool {
    /// Takes memory from the server.
    pub(crate) fn take(py: Python<'_>, core: &Arc<Core>, nbytes: usize) -> PyResult<Self> {
        let remote = core.remote.as_ref();
        let embedded =
            || Error(Reason::Config("a store in this process has no pools: connect to a server".to_owned()));
        let remote = remote.ok_or_else(embedded).or_raise(py)?;
        let (region, name) = py.detach(|| remote.shared_pool(nbytes)).or_raise(py)?;
        let memory = Py::new(py, memory(py, core, &region)?)?;
        let pool = pool::Pool::new(remote.store(), remote.clock(), &region);
        Ok(Self { core: Arc::clone(core), pool: Guarded::new(pool), name: name.to_string(), memory })
    }
}

#[pymethods]
impl Pool {
    #[doc = stub!("Pool.name")]
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[doc = stub!("Pool.memory")]
    #[getter]
    fn memory(&self, py: Python<'_>) -> Py<Memory> {
        self.memory.clone_ref(py)
    }

    #[doc = stub!("Pool.counts")]
    #[getter]
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.pool.get()?.counts();
        let found = PyDict::new(py);
        for (name, count) in counts.named() {
            found.set_item(name, count)?;
        }
        Ok(found)
    }

    #[doc = stub!("Pool.clear")]
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let pool = self.pool.get()?;
        py.detach(|| pool.clear());
        Ok(())
    }

    #[doc = stub!("Pool.stage")]
    #[pyo3(signature = (columns, keys, *, first_block=0, silence=10.0))]
    fn stage(
        &self,
        columns: Vec<(PyRef<'_, Pages>, u32, Option<u16>)>,
        keys: &Bound<'_, PyAny>,
        first_block: u32,
        silence: f64,
    ) -> PyResult<Stage> {
        let py = keys.py();
        self.core.alive(py)?;
        let column = |(pages, group, rank): &(PyRef<'_, Pages>, u32, Option<u16>)| {
            let handle = pages.handle.get()?;
            let (group, coordinate, shape) = handle.cut.column(*group, *rank).or_raise(py)?;
            let column = Column { namespace: handle.namespace, group, coordinate };
            Ok::<_, PyErr>((column, Arc::new(shape.clone())))
        };
        let columns = columns.iter().map(column).collect::<PyResult<Vec<_>>>()?;
        let shapes = columns.iter().map(|(_, shape)| Arc::clone(shape)).collect();
        let request = StageRequest {
            columns,
            keys: keys::keys(keys)?,
            first_block,
            silence: waiting::duration(py, "silence", silence)?,
            class: Class::Foreground,
        };
        let pool = self.pool.get()?;
        let stage = py.detach(|| pool.stage(request)).or_raise(py)?;
        Ok(Stage { stage: Guarded::new(Mutex::new(Some(Arc::new(stage)))), shapes })
    }

    #[doc = stub!("Pool.draft")]
    #[pyo3(signature = (handle, keys, *, group=0, rank=None, first_block=0, wait=true))]
    #[allow(clippy::too_many_arguments, reason = "the stub defines these keyword arguments")]
    fn draft(
        &self,
        handle: &Pages,
        keys: &Bound<'_, PyAny>,
        group: u32,
        rank: Option<u16>,
        first_block: u32,
        wait: bool,
    ) -> PyResult<Draft> {
        let py = keys.py();
        self.core.alive(py)?;
        let handle = handle.handle.get()?;
        let (group, coordinate, shape) = handle.cut.column(group, rank).or_raise(py)?;
        let column = Column { namespace: handle.namespace, group, coordinate };
        let (shape, keys) = (Arc::new(shape.clone()), keys::keys(keys)?);
        let pool = self.pool.get()?;
        let draft = py.detach(|| match wait {
            true => pool.draft((column, &shape), &keys, first_block),
            false => pool.draft_now((column, &shape), &keys, first_block),
        });
        let draft = draft.or_raise(py)?;
        let draft = Guarded::new(Mutex::new(Some(Arc::new(Mutex::new(Some(draft))))));
        Ok(Draft { core: Arc::clone(&self.core), draft, why: Mutex::default() })
    }

    fn __repr__(&self) -> PyResult<String> {
        Ok(format!("<kvarts.Pool {} bytes>", self.pool.get()?.region().len()))
    }
}

#[doc = stub!("Stage")]
#[pyclass(frozen, weakref, module = "kvarts")]
pub(crate) struct Stage {
    /// Nothing once it was let go of.
    stage: Guarded<Mutex<Option<Arc<pool::Stage>>>>,
    shapes: Vec<Arc<BlockShape>>,
}

impl Stage {
    pub(crate) fn held(&self, py: Python<'_>) -> PyResult<Arc<pool::Stage>> {
        let held = self.stage.get()?.lock().unwrap_or_else(PoisonError::into_inner).clone();
        held.ok_or_else(|| invalid(py, "stage", "the stage was closed"))
    }
}

#[pymethods]
impl Stage {
    #[doc = stub!("Stage.staged")]
    #[getter]
    fn staged(&self, py: Python<'_>) -> PyResult<u32> {
        let stage = self.held(py)?;
        Ok(py.detach(|| stage.look()).staged)
    }

    #[doc = stub!("Stage.is_over")]
    #[getter]
    fn is_over(&self, py: Python<'_>) -> PyResult<bool> {
        let stage = self.held(py)?;
        Ok(py.detach(|| stage.look()).is_over)
    }

    #[doc = stub!("Stage.why")]
    #[getter]
    fn why(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let why = self.held(py)?.why();
        Ok(why.map(|reason| exception(py, &reason).into_value(py).into_any()))
    }

    #[doc = stub!("Stage.wait")]
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<u32> {
        let stage = self.held(py)?;
        let mut left = timeout.map(|seconds| waiting::duration(py, "timeout", seconds)).transpose()?;
        loop {
            let some = left.map_or(LOOK, |left| left.min(LOOK));
            // ends: `LOOK`, and the caller's time or a signal; a stage ends by itself once the store is silent
            let progress = py.detach(|| stage.wait(some));
            if progress.is_over || left.is_some_and(|left| left <= some) {
                return Ok(progress.staged);
            }
            left = left.map(|left| left - some);
            py.check_signals()?;
        }
    }

    #[doc = stub!("Stage.stretches")]
    #[pyo3(signature = (column=0))]
    fn stretches(&self, py: Python<'_>, column: usize) -> PyResult<Vec<(u64, u32, u32, u32)>> {
        let stage = self.held(py)?;
        if column >= self.shapes.len() {
            return Err(invalid(py, "column", no_column(column, self.shapes.len())));
        }
        let found = py.detach(|| stage.stretches(column));
        Ok(found.iter().map(|one| (one.at, one.blocks, one.first, one.count)).collect())
    }

    #[doc = stub!("Stage.places")]
    #[pyo3(signature = (part, column=0))]
    fn places(&self, py: Python<'_>, part: u32, column: usize) -> PyResult<Vec<(u64, u64)>> {
        let stage = self.held(py)?;
        let shape = self.shapes.get(column);
        let shape = shape.ok_or_else(|| invalid(py, "column", no_column(column, self.shapes.len())))?;
        let found = py.detach(|| stage.stretches(column));
        let places = found.iter().map(|one| one.part(shape, part)).collect::<Option<Vec<_>>>();
        places.ok_or_else(|| {
            invalid(
                py,
                "part",
                format!("part {part} does not exist: a block has {} parts", shape.chunk_count()),
            )
        })
    }

    #[doc = stub!("Stage.close")]
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.stage.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(held));
        Ok(())
    }
}

fn ended(py: Python<'_>) -> PyErr {
    invalid(py, "draft", "the draft has already been put or closed")
}

/// A draft that its handle and a save hold: nothing once it was put.
pub(crate) type SharedDraft = Arc<Mutex<Option<pool::Draft>>>;

#[doc = stub!("Draft")]
#[pyclass(frozen, weakref, module = "kvarts")]
pub(crate) struct Draft {
    core: Arc<Core>,
    /// Nothing once it was let go of.
    draft: Guarded<Mutex<Option<SharedDraft>>>,
    why: Mutex<Option<Reason>>,
}

impl Draft {
    /// What a save holds: the room is given back behind it.
    pub(crate) fn held(&self, py: Python<'_>) -> PyResult<SharedDraft> {
        let held = self.draft.get()?.lock().unwrap_or_else(PoisonError::into_inner).clone();
        held.ok_or_else(|| ended(py))
    }
}

#[pymethods]
impl Draft {
    #[doc = stub!("Draft.stretches")]
    fn stretches(&self, py: Python<'_>) -> PyResult<Vec<(u64, u32, u32, u32)>> {
        let held = self.held(py)?;
        let held = held.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(held
            .as_ref()
            .ok_or_else(|| ended(py))?
            .stretches()
            .iter()
            .map(|one| (one.at, one.blocks, one.first, one.count))
            .collect())
    }

    #[doc = stub!("Draft.put")]
    #[pyo3(signature = (*, parent=None, durable=true, ttl=None, timeout=None))]
    fn put(
        &self,
        py: Python<'_>,
        parent: Option<&[u8]>,
        durable: bool,
        ttl: Option<f64>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<bool>> {
        self.core.alive(py)?;
        let parent = match parent {
            None | Some([]) => Parent::Root,
            Some(bytes) => Parent::Key(keys::parent(py, bytes)?),
        };
        let terms = DraftTerms {
            parent,
            durability: if durable { Durability::Durable } else { Durability::Relaxed },
            expires_after: ttl.map(|seconds| waiting::duration(py, "ttl", seconds)).transpose()?,
            deadline: self.core.deadline(py, timeout)?,
        };
        let held = self.held(py)?;
        // This call, and the handle itself.
        if Arc::strong_count(&held) > 2 {
            return Err(invalid(
                py,
                "draft",
                "a save still writes to the draft: put the draft after the save has ended",
            ));
        }
        let taken = held.lock().unwrap_or_else(PoisonError::into_inner).take();
        let draft = taken.ok_or_else(|| ended(py))?;
        let storing = py.detach(|| draft.put(&terms));
        let outcomes = waiting::run(py, storing)?;
        let why = outcomes.iter().find_map(|outcome| match outcome {
            BlockOutcome::Refused(reason) => Some(reason.clone()),
            BlockOutcome::InFlight => Some(Reason::InFlight),
            _ => None,
        });
        *self.why.lock().unwrap_or_else(PoisonError::into_inner) = why;
        let is_there =
            |outcome: &BlockOutcome| !matches!(outcome, BlockOutcome::Refused(_) | BlockOutcome::InFlight);
        Ok(outcomes.iter().map(is_there).collect())
    }

    #[doc = stub!("Draft.why")]
    #[getter]
    fn why(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let why = self.why.lock().unwrap_or_else(PoisonError::into_inner).clone();
        why.map(|reason| exception(py, &reason).into_value(py).into_any())
    }

    #[doc = stub!("Draft.close")]
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.draft.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(held));
        Ok(())
    }
}
