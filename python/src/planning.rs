//! Plans of restores: an engine's times, and what a look-up says of them.

use std::sync::Arc;

use kvarts_contract::api::Planned;
use kvarts_planner::cost::{self, Prefill, Roofline, Sample};
use kvarts_planner::plan::{Does, Overlap, Source};
use pyo3::prelude::*;

use crate::error::invalid;

#[doc = stub!("Times")]
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Times(pub(crate) Arc<cost::Times>);

#[pymethods]
impl Times {
    #[new]
    #[pyo3(signature = (samples=None, *, model=None, device=None, devices=1))]
    fn new(
        py: Python<'_>,
        samples: Option<Vec<(u64, u64, f64)>>,
        model: Option<&str>,
        device: Option<&str>,
        devices: u32,
    ) -> PyResult<Self> {
        let roofline = match (model, device) {
            (None, None) => None,
            (Some(model), Some(device)) => {
                let compute = cost::model(model).ok_or_else(|| {
                    invalid(
                        py,
                        "model",
                        format!("the compute times of the model `{model}` are unknown: pass samples"),
                    )
                })?;
                let sheet = cost::device(device).ok_or_else(|| {
                    invalid(py, "device", format!("no device is named `{device}`: pass samples"))
                })?;
                Some(Roofline::new(compute, sheet, devices))
            }
            _ => {
                return Err(invalid(
                    py,
                    "model",
                    "the times of a data sheet require both model and device: set both",
                ));
            }
        };
        let sample = |(cached, new, ms)| Sample { cached, new, ms };
        let samples = samples.unwrap_or_default().into_iter().map(sample).collect();
        let times = cost::Times::new(samples, roofline).map_err(|error| invalid(py, "samples", error))?;
        Ok(Self(Arc::new(times)))
    }

    fn prefill_ms(&self, cached: u64, new: u64) -> f64 {
        self.0.prefill_ms(cached, new)
    }

    fn __repr__(&self) -> String {
        format!("<kvarts.Times {}>", self.0.told())
    }
}

/// What an engine computes while blocks are loaded, as it is written.
pub(crate) fn overlap(py: Python<'_>, text: &str) -> PyResult<Overlap> {
    match text {
        "layers" => Ok(Overlap::Layers),
        "none" => Ok(Overlap::None),
        _ => Err(invalid(py, "overlap", "the value must be \"layers\" or \"none\"")),
    }
}

#[doc = stub!("Plan")]
#[pyclass(frozen, module = "kvarts")]
pub(crate) struct Plan(pub(crate) Box<Planned>);

#[pymethods]
impl Plan {
    #[doc = stub!("Plan.blocks")]
    #[getter]
    fn blocks(&self) -> u32 {
        self.0.plan.boundary_blocks
    }

    #[getter]
    fn tokens(&self) -> u64 {
        self.0.plan.boundary_tokens
    }

    #[doc = stub!("Plan.recompute_tokens")]
    #[getter]
    fn recompute_tokens(&self) -> u64 {
        self.0.plan.recompute_tokens
    }

    #[doc = stub!("Plan.disk_bytes")]
    #[getter]
    fn disk_bytes(&self) -> u64 {
        self.0.plan.bytes_from(Source::Disk)
    }

    #[doc = stub!("Plan.load_ms")]
    #[getter]
    fn load_ms(&self) -> f64 {
        self.0.plan.load_ms
    }

    #[getter]
    fn recompute_ms(&self) -> f64 {
        self.0.plan.recompute_ms
    }

    #[doc = stub!("Plan.stall_ms")]
    #[getter]
    fn stall_ms(&self) -> f64 {
        self.0.plan.stall_ms
    }

    #[getter]
    fn first_token_ms(&self) -> f64 {
        self.0.plan.ttft_ms
    }

    #[doc = stub!("Plan.recompute_all_ms")]
    #[getter]
    fn recompute_all_ms(&self) -> f64 {
        self.0.plan.from_nothing_ms
    }

    #[doc = stub!("Plan.held_ms")]
    #[getter]
    fn held_ms(&self) -> f64 {
        self.0.plan.held_ms
    }

    #[doc = stub!("Plan.benefit_ms")]
    #[getter]
    fn benefit_ms(&self) -> f64 {
        self.0.plan.benefit_ms
    }

    #[getter]
    fn reason(&self) -> String {
        self.0.plan.reason.to_string()
    }

    #[doc = stub!("Plan.actions")]
    #[getter]
    fn actions(&self) -> Vec<(u32, u32, u32, String, u64)> {
        let does = |does| match does {
            Does::Use => "use".to_owned(),
            Does::Load(source) => source.name().to_lowercase(),
            Does::Recompute => "recompute".to_owned(),
            Does::LeaveOut => "leave out".to_owned(),
        };
        let actions = self.0.plan.actions.iter();
        actions.map(|one| (one.group.0, one.from, one.to, does(one.does), one.bytes)).collect()
    }

    #[doc = stub!("Plan.disk_bytes_per_second")]
    #[getter]
    fn disk_bytes_per_second(&self) -> f64 {
        self.0.disk.link.bytes_per_ms * 1000.0
    }

    #[getter]
    fn disk_outstanding_bytes(&self) -> u64 {
        self.0.disk.link.outstanding_bytes
    }

    #[doc = stub!("Plan.disk_reads_measured")]
    #[getter]
    fn disk_reads_measured(&self) -> u64 {
        self.0.disk.measured
    }

    fn __repr__(&self) -> String {
        let plan = &self.0.plan;
        format!(
            "<kvarts.Plan {} blocks, {:.1} ms sooner: {}>",
            plan.boundary_blocks, plan.benefit_ms, plan.reason
        )
    }
}
