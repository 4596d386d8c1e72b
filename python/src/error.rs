//! Reasons as exceptions: one class for each kind, of `kvarts.errors`.

use kvarts_contract::batch::{CANCELLED, CLOSED};
use kvarts_contract::error::{Error, Kind, Reason};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The class of a kind, and its name there.
fn class_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Miss => "Miss",
        Kind::Retry => "Retry",
        Kind::Refused => "Refused",
        Kind::Invalid => "Invalid",
        Kind::Deadline => "Deadline",
        Kind::Corrupt => "Corrupt",
        Kind::ReadOnly => "ReadOnly",
        Kind::Bug => "Bug",
    }
}

/// A reason in one word that does not change.
fn name(reason: &Reason) -> String {
    match reason {
        reason if *reason == CANCELLED => "Cancelled".to_owned(),
        reason if *reason == CLOSED => "Closed".to_owned(),
        // The name of the variant is what its debug form begins with.
        reason => {
            let text = format!("{reason:?}");
            text.split(|letter: char| !letter.is_ascii_alphanumeric()).next().unwrap_or_default().to_owned()
        }
    }
}

fn classes(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static CLASSES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = CLASSES.get_or_try_init(py, || py.import("kvarts.errors").map(Bound::unbind))?;
    Ok(module.bind(py))
}

fn made(py: Python<'_>, kind: Kind, reason: &str, text: &str) -> PyErr {
    let made = || classes(py)?.getattr("_make")?.call1((class_name(kind), reason, text));
    match made() {
        Ok(made) => PyErr::from_value(made),
        Err(error) => error,
    }
}

/// The exception of a reason.
pub(crate) fn exception(py: Python<'_>, reason: &Reason) -> PyErr {
    made(py, reason.kind(), &name(reason), &reason.to_string())
}

/// An argument that cannot be.
pub(crate) fn invalid(py: Python<'_>, argument: &str, what: impl std::fmt::Display) -> PyErr {
    made(py, Kind::Invalid, "Argument", &format!("{argument}: {what}"))
}

/// A call in a process that was forked from the one that made the object.
pub(crate) fn forked() -> PyErr {
    let text = "made before a fork: connect again in this process";
    let made = Python::try_attach(|py| made(py, Kind::Invalid, "Forked", text));
    made.unwrap_or_else(|| PyRuntimeError::new_err(text))
}

/// The time that a caller gave is over.
pub(crate) fn late(py: Python<'_>, what: &str) -> PyErr {
    made(py, Kind::Deadline, "DeadlinePassed", what)
}

/// Turns the engine's errors into exceptions.
pub(crate) trait OrRaise<T> {
    /// The value, or the exception.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for Result<T, Reason> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|reason| exception(py, &reason))
    }
}

impl<T> OrRaise<T> for Result<T, Error> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, &error.0))
    }
}
