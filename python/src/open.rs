//! A store inside this process.

use std::path::PathBuf;
use std::time::Duration;

use kvarts_layout::format::DEFAULT_SEGMENT_BYTES;
use kvarts_store::engine::Options;
use kvarts_store::home::{Home, HomeOptions, Stop, segment_bytes};
use pyo3::prelude::*;

use crate::error::{OrRaise, invalid};
use crate::guarded::Guarded;
use crate::handle::Client;
use crate::handle::Core;

/// Segments that a budget should have, and the least size to which they shrink for it.
const SEGMENTS_WANTED: u64 = 64;
const SEGMENT_MIN: u64 = 32 << 20;
/// Segments below which a store has no room to work.
const SEGMENTS_MIN: u64 = 4;
/// How long a call may take that does not say.
const TIMEOUT: Duration = Duration::from_secs(60);

#[doc = stub!("open")]
#[pyfunction]
#[pyo3(signature = (dirs, budget, *, executors=None))]
pub(crate) fn open(
    py: Python<'_>,
    dirs: Vec<PathBuf>,
    budget: u64,
    executors: Option<usize>,
) -> PyResult<Client> {
    let own = segment_bytes(&dirs, &Stop::default());
    let share = (budget / SEGMENTS_WANTED).max(SEGMENT_MIN);
    let segment_bytes = own.unwrap_or((1 << share.ilog2()).min(DEFAULT_SEGMENT_BYTES));
    if budget < segment_bytes.saturating_mul(SEGMENTS_MIN) {
        let least = segment_bytes.saturating_mul(SEGMENTS_MIN);
        return Err(invalid(
            py,
            "budget",
            format!("{budget} is too small: the smallest budget is {least}, for four segments"),
        ));
    }
    if executors == Some(0) {
        return Err(invalid(py, "executors", "the value must be at least 1"));
    }
    let options = HomeOptions {
        directories: dirs,
        store: Options {
            segment_bytes,
            budget_bytes: budget,
            executors: executors.unwrap_or(1),
            ..Options::default()
        },
        ..HomeOptions::default()
    };
    let home = py.detach(|| Home::open(&options)).or_raise(py)?;
    Ok(Client { core: Guarded::new(Core::of_home(home, TIMEOUT)) })
}
