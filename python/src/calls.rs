//! Look-ups of prefixes, and what they hold.

use std::sync::Arc;
use std::time::Duration;

use kvarts_contract::api::{self, ContainsRequest, LeaseId, LeaseTerms, MatchRequest, PlanTerms, Presence};
use kvarts_contract::error::Reason;
use kvarts_planner::plan::Overlap;
use pyo3::prelude::*;

use crate::error::OrRaise;
use crate::guarded::Guarded;
use crate::handle::Handle;
use crate::missing::Missing;
use crate::planning::{Plan, Times};
use crate::{keys, waiting};

#[doc = stub!("Match")]
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Match {
    blocks: u32,
    pending: u32,
    missing: api::Missing,
    lease: Option<Py<Lease>>,
    plan: Option<Py<Plan>>,
}

/// The arguments of a plan.
pub(crate) struct PlanOf<'py> {
    pub(crate) times: Option<Bound<'py, Times>>,
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) hbm_blocks: u32,
    pub(crate) hbm_boundaries: Vec<u32>,
    pub(crate) overlap: Overlap,
}

#[pymethods]
impl Match {
    #[doc = stub!("Match.blocks")]
    #[getter]
    fn blocks(&self) -> u32 {
        self.blocks
    }

    #[doc = stub!("Match.pending")]
    #[getter]
    fn pending(&self) -> u32 {
        self.pending
    }

    #[doc = stub!("Match.missing")]
    #[getter]
    fn missing(&self) -> Missing {
        Missing(self.missing)
    }

    #[getter]
    fn lease(&self, py: Python<'_>) -> Option<Py<Lease>> {
        self.lease.as_ref().map(|lease| lease.clone_ref(py))
    }

    #[doc = stub!("Match.plan")]
    #[getter]
    fn plan(&self, py: Python<'_>) -> Option<Py<Plan>> {
        self.plan.as_ref().map(|plan| plan.clone_ref(py))
    }

    fn __repr__(&self) -> String {
        format!("<kvarts.Match {} blocks>", self.blocks)
    }
}

#[doc = stub!("Lease")]
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Lease {
    handle: Guarded<Arc<Handle>>,
    lease: Option<LeaseId>,
    blocks: u32,
}

#[pymethods]
impl Lease {
    #[doc = stub!("Lease.blocks")]
    #[getter]
    fn blocks(&self) -> u32 {
        self.blocks
    }

    fn renew(&self, py: Python<'_>, hold: f64) -> PyResult<()> {
        let handle = self.handle.get()?;
        handle.core.alive(py)?;
        let hold = waiting::duration(py, "hold", hold)?;
        let Some(lease) = self.lease else { return Ok(()) };
        py.detach(|| handle.core.store.renew(lease, hold)).or_raise(py)
    }

    #[doc = stub!("Lease.end")]
    fn end(&self, py: Python<'_>) -> PyResult<bool> {
        let handle = self.handle.get()?;
        handle.core.alive(py)?;
        let Some(lease) = self.lease else { return Ok(false) };
        Ok(py.detach(|| handle.core.store.unlock(lease)))
    }
}

fn terms(hold: Duration) -> LeaseTerms {
    LeaseTerms { hold, tenant: 0, cap_bytes: u64::MAX }
}

/// How long a prefix can be restored now.
pub(crate) fn find(
    handle: &Arc<Handle>,
    keys: &Bound<'_, PyAny>,
    hold: Option<f64>,
    plan: PlanOf<'_>,
) -> PyResult<Match> {
    let py = keys.py();
    let keys = keys::keys(keys)?;
    let lease = hold.map(|seconds| waiting::duration(py, "hold", seconds)).transpose()?.map(terms);
    let requirements = &handle.cut.requirements;
    let whole = keys.len() as u64 * u64::from(requirements.block_tokens());
    let (prompt_tokens, hbm_blocks) = (plan.prompt_tokens.unwrap_or(whole + 1), plan.hbm_blocks);
    let (overlap, hbm_boundaries) = (plan.overlap, &plan.hbm_boundaries[..]);
    let times = plan.times.map(|times| Arc::clone(&times.get().0));
    let terms =
        |times| PlanTerms { hbm_blocks, hbm_boundaries, overlap, ..PlanTerms::new(prompt_tokens, times) };
    let plan = times.as_deref().map(terms);
    let found = py.detach(|| {
        handle.core.store.match_prefix(&MatchRequest {
            namespace: handle.namespace,
            keys: &keys,
            requirements,
            recompute_tokens_max: 0,
            lease,
            plan,
        })
    });
    let found = found.or_raise(py)?;
    let blocks = found.usable.longest.blocks;
    let held = found.lease.map(|lease| {
        let handle = Guarded::new(Arc::clone(handle));
        Py::new(py, Lease { handle, lease: Some(lease), blocks })
    });
    let plan = found.plan.map(|planned| Py::new(py, Plan(planned))).transpose()?;
    let (pending, missing) = (found.pending, found.missing);
    Ok(Match { blocks, pending, missing, lease: held.transpose()?, plan })
}

/// Holds the blocks that are here.
pub(crate) fn pin(
    handle: &Arc<Handle>,
    keys: &Bound<'_, PyAny>,
    hold: f64,
    (group, rank): (u32, Option<u16>),
    timeout: Option<f64>,
) -> PyResult<Lease> {
    let py = keys.py();
    let keys = keys::keys(keys)?;
    let (group, coordinate, _) = handle.cut.column(group, rank).or_raise(py)?;
    let deadline = handle.terms(py, timeout)?.deadline;
    let lease = Some(terms(waiting::duration(py, "hold", hold)?));
    let request = ContainsRequest { namespace: handle.namespace, group, coordinate, keys: &keys, lease };
    let asked = py.detach(|| handle.core.store.look_up(&request, deadline));
    let answer = waiting::run(py, asked)?;
    let gone = |_| Reason::Busy("the store is closing");
    let found = answer.map_err(gone).or_raise(py)?.or_raise(py)?;
    let blocks = found.presence.iter().filter(|one| **one == Presence::Here).count() as u32;
    Ok(Lease { handle: Guarded::new(Arc::clone(handle)), lease: found.lease, blocks })
}
