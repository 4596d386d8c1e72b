//! Why blocks cannot be restored.

use std::sync::Arc;

use kvarts_contract::api::{self, ContainsRequest, MAX_REQUEST_BLOCKS};
use kvarts_contract::error::Reason;
use pyo3::prelude::*;

use crate::error::OrRaise;
use crate::handle::Handle;
use crate::{keys, waiting};

#[doc = stub!("Missing")]
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Missing(pub(crate) api::Missing);

#[pymethods]
impl Missing {
    #[doc = stub!("Missing.evicted")]
    #[getter]
    fn evicted(&self) -> u64 {
        self.0.evicted
    }

    #[doc = stub!("Missing.expired")]
    #[getter]
    fn expired(&self) -> u64 {
        self.0.expired
    }

    #[doc = stub!("Missing.deleted")]
    #[getter]
    fn deleted(&self) -> u64 {
        self.0.deleted
    }

    #[doc = stub!("Missing.out_of_service")]
    #[getter]
    fn out_of_service(&self) -> u64 {
        self.0.out_of_service
    }

    #[doc = stub!("Missing.never_stored")]
    #[getter]
    fn never_stored(&self) -> u64 {
        self.0.never_stored
    }

    #[doc = stub!("Missing.cut_off")]
    #[getter]
    fn cut_off(&self) -> u64 {
        self.0.cut_off
    }

    fn __bool__(&self) -> bool {
        self.0 != api::Missing::default()
    }

    fn __repr__(&self) -> String {
        let told: Vec<String> = self.0.told().map(|(blocks, why)| format!("{blocks} {why}")).collect();
        let told = if told.is_empty() { "none".to_owned() } else { told.join("; ") };
        format!("<kvarts.Missing {told}>")
    }
}

/// Why these blocks are not there.
pub(crate) fn of(
    handle: &Arc<Handle>,
    keys: &Bound<'_, PyAny>,
    (group, rank): (u32, Option<u16>),
    timeout: Option<f64>,
) -> PyResult<Missing> {
    let py = keys.py();
    let keys = keys::keys(keys)?;
    let (group, coordinate, _) = handle.cut.column(group, rank).or_raise(py)?;
    let deadline = handle.terms(py, timeout)?.deadline;
    let mut all = api::Missing::default();
    for keys in keys.chunks(MAX_REQUEST_BLOCKS) {
        let request = ContainsRequest { namespace: handle.namespace, group, coordinate, keys, lease: None };
        let asked = py.detach(|| handle.core.store.look_up(&request, deadline));
        let answer = waiting::run(py, asked)?;
        let gone = |_| Reason::Busy("the store is closing");
        all += answer.map_err(gone).or_raise(py)?.or_raise(py)?.missing;
    }
    Ok(Missing(all))
}
