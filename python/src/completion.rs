//! The answer to a batch.

use kvarts_contract::batch::{BatchKind, Completion as Told};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{exception, reasons};

#[doc = stub!("Completion")]
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Completion(pub(crate) Told);

#[pymethods]
impl Completion {
    #[getter]
    fn id(&self) -> u64 {
        self.0.id.0
    }

    #[getter]
    fn kind(&self) -> &'static str {
        match self.0.kind {
            BatchKind::Put => "put",
            BatchKind::Get => "get",
            BatchKind::Exists => "exists",
            BatchKind::Lock => "lock",
            BatchKind::Delete => "delete",
        }
    }

    #[doc = stub!("Completion.ok")]
    #[getter]
    fn ok(&self) -> bool {
        self.0.is_ok()
    }

    #[doc = stub!("Completion.results")]
    #[getter]
    pub(crate) fn results(&self) -> Vec<bool> {
        self.0.results.iter().map(Result::is_ok).collect()
    }

    #[doc = stub!("Completion.errors")]
    #[getter]
    fn errors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        for (at, result) in self.0.results.iter().enumerate() {
            if let Err(reason) = result {
                found.set_item(at, exception(py, reason).into_value(py))?;
            }
        }
        Ok(found)
    }

    #[doc = stub!("Completion.reasons")]
    #[getter]
    fn reasons<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        reasons(py, self.0.results.iter().filter_map(|result| result.as_ref().err()))
    }

    #[doc = stub!("Completion.error")]
    #[getter]
    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.0.error().map(|reason| exception(py, reason).into_value(py).into_any())
    }

    #[doc = stub!("Completion.prefix")]
    #[getter]
    fn prefix(&self) -> u32 {
        self.0.usable_prefix()
    }

    #[doc = stub!("Completion.written")]
    #[getter]
    fn written(&self) -> u32 {
        self.0.written
    }

    fn __repr__(&self) -> String {
        let good = self.0.results.iter().filter(|result| result.is_ok()).count();
        format!(
            "<kvarts.Completion {} {}: {good} of {} good>",
            self.kind(),
            self.0.id.0,
            self.0.results.len()
        )
    }
}
