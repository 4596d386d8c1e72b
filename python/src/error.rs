//! Reasons as exceptions: one class for each kind, of `kvarts.errors`.

use kvarts_contract::batch::{CANCELLED, CLOSED};
use kvarts_contract::error::{Error, Kind, Reason};
use kvarts_layout::cut::CutError;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

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
    if *reason == CLOSED {
        // To the server's side it is one that is busy; here no later call can succeed.
        return made(py, Kind::Invalid, "Closed", "the handle is closed: create another handle");
    }
    made(py, reason.kind(), &name(reason), &reason.to_string())
}

/// Each reason of these once: (the exception of the first, how many there are), by its name. One exception for each key would
/// cost an engine's scheduler more than the look-up.
pub(crate) fn reasons<'py, 'a>(
    py: Python<'py>,
    all: impl Iterator<Item = &'a Reason>,
) -> PyResult<Bound<'py, PyDict>> {
    // Two reasons are values of others' variants.
    let special = |reason: &Reason| (*reason == CANCELLED, *reason == CLOSED);
    let mut found: Vec<(&Reason, u64)> = Vec::new();
    for reason in all {
        let known = found.iter_mut().find(|(known, _)| {
            std::mem::discriminant(*known) == std::mem::discriminant(reason)
                && special(known) == special(reason)
        });
        match known {
            Some((_, count)) => *count += 1,
            None => found.push((reason, 1)),
        }
    }
    let told = PyDict::new(py);
    for (reason, count) in found {
        told.set_item(name(reason), (exception(py, reason).into_value(py), count))?;
    }
    Ok(told)
}

/// An argument that cannot be.
pub(crate) fn invalid(py: Python<'_>, argument: &str, what: impl std::fmt::Display) -> PyErr {
    made(py, Kind::Invalid, "Argument", &format!("{argument}: {what}"))
}

/// A call in a process that was forked from the one that made the object.
pub(crate) fn forked() -> PyErr {
    let text = "this object was made before a fork: connect again in this process";
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

impl<T> OrRaise<T> for Result<T, CutError> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|CutError { argument, why }| invalid(py, argument, why))
    }
}

impl<T> OrRaise<T> for Result<T, Error> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, &error.0))
    }
}
