//! Memory that is known by its address: pools that disks write into, and memory that an engine made known once.

use std::sync::{Arc, Mutex, PoisonError};

use kvarts_contract::buffers::Region;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::buffer::{self, Held};
use crate::error::late;
use crate::guarded::Guarded;
use crate::handle::Core;
use crate::left;
use crate::registry::Known;
use crate::waiting;

/// Forgets a stretch.
struct Registered {
    core: Arc<Core>,
    known: Arc<Known>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.core.registry.remove(&self.known);
    }
}

#[doc = stub!("Memory")]
#[pyclass(frozen, weakref, module = "kvarts")]
pub(crate) struct Memory {
    /// Nothing once it was closed.
    registered: Guarded<Mutex<Option<Registered>>>,
    mode: &'static str,
    /// The object whose memory it is, unless it was given as an address.
    owner: Option<Py<PyAny>>,
    address: usize,
    nbytes: usize,
}

/// What is made known.
pub(crate) struct Adopted {
    pub(crate) address: usize,
    pub(crate) nbytes: usize,
    pub(crate) held: Option<Held>,
    pub(crate) owner: Option<Py<PyAny>>,
    pub(crate) mode: &'static str,
    /// A region that has these bytes, and where they begin there.
    pub(crate) region: Option<(Arc<Region>, usize)>,
}

impl Memory {
    pub(crate) fn new(core: &Arc<Core>, adopted: Adopted) -> Option<Self> {
        let Adopted { address, nbytes, held, owner, mode, region } = adopted;
        let (region, origin, held) = match region {
            Some((region, origin)) => (region, origin, held),
            None => {
                let (region, origin) = buffer::region(address, nbytes, held.into_iter().collect());
                (region, origin, None)
            }
        };
        let known = core.registry.insert(Known { start: address, len: nbytes, region, origin, held })?;
        let registered = Guarded::new(Mutex::new(Some(Registered { core: Arc::clone(core), known })));
        Some(Self { registered, mode, owner, address, nbytes })
    }

    /// The region that it is in, and where it begins there.
    pub(crate) fn region(&self, py: Python<'_>) -> PyResult<(Arc<Region>, usize)> {
        let slot = self.registered.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        let known = slot.as_ref().map(|all| (Arc::clone(&all.known.region), all.known.origin));
        known.ok_or_else(|| crate::error::invalid(py, "memory", "the memory has been closed"))
    }
}

#[pymethods]
impl Memory {
    #[doc = stub!("Memory.mode")]
    #[getter]
    fn mode(&self) -> &'static str {
        self.mode
    }

    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    #[doc = stub!("Memory.view")]
    #[getter]
    fn view<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let owner = self.owner.as_ref().ok_or_else(|| {
            crate::error::invalid(
                py,
                "view",
                "this memory was given as an address: read its bytes through the object that owns the memory",
            )
        })?;
        let view = PyMemoryView::from(owner.bind(py))?;
        Ok(view.call_method1("cast", ("B",)).unwrap_or_else(|_| view.into_any()))
    }

    #[doc = stub!("Memory.close")]
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        left::settle(py);
        let slot = self.registered.get()?;
        let registered = || slot.lock().unwrap_or_else(PoisonError::into_inner);
        let parts = registered().as_ref().map(|all| (Arc::clone(&all.core), Arc::clone(&all.known)));
        let Some((core, known)) = parts else { return Ok(()) };
        core.registry.remove(&known);
        let deadline = core.deadline(py, timeout)?;
        // The only reference is this one's.
        let is_free = || Arc::strong_count(&known.region) == 1;
        if !waiting::until(py, &*core.clock, deadline, is_free)? {
            return Err(late(py, "a batch still uses this memory"));
        }
        let closed = registered().take();
        py.detach(|| drop((closed, known)));
        // Its buffer is the caller's again.
        left::settle(py);
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("<kvarts.Memory {} bytes, {}>", self.nbytes, self.mode)
    }
}
