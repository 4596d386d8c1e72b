//! `kvarts match --plan`: what of a prefix is worth restoring, with the server's disks as they are now.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use kvarts_contract::api::{PlanTerms, Planned};
use kvarts_planner::cost::{Roofline, Times};
use kvarts_planner::plan::Overlap;
use kvarts_terminal::Failure;
use serde_json::{Value, json};

use super::subject::{ModelArgs, Subject};
use crate::plan_cmd;

/// Arguments of a plan.
#[derive(Args, Debug)]
pub(super) struct PlanArgs {
    /// Show which part of the prefix loads faster than the engine computes it; times come from the data sheet of --device, from --samples, or both
    #[arg(long)]
    plan: bool,
    /// For --plan: the engine's device: a100, h100, h200, h20, b200 or l40s
    #[arg(long, requires = "plan")]
    device: Option<String>,
    /// For --plan: number of devices that share the work
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024), requires = "plan")]
    devices: u32,
    /// For --plan: a file of measured prefills, in the format of `kvarts plan calibrate`
    #[arg(long, value_name = "FILE", requires = "plan")]
    samples: Option<PathBuf>,
    /// For --plan: number of leading blocks in device memory
    #[arg(long, default_value_t = 0, requires = "plan")]
    hbm_blocks: u32,
    /// For --plan: boundaries, as numbers of blocks, whose windows and states are in device memory
    #[arg(long, value_delimiter = ',', value_name = "BLOCKS", requires = "plan")]
    hbm_boundaries: Vec<u32>,
    /// For --plan: when the engine computes: layers (each layer once this layer is loaded), or none (after the whole load)
    #[arg(long, default_value = "layers", value_parser = plan_cmd::overlap, requires = "plan")]
    overlap: Overlap,
}

impl PlanArgs {
    /// The engine's times, if a plan is wanted.
    pub(super) fn times(&self, model: &ModelArgs) -> Result<Option<Times>, Failure> {
        if !self.plan {
            return Ok(None);
        }
        let device = match (&self.device, &self.samples) {
            (Some(device), _) => Some(device.as_str()),
            (None, Some(_)) => None,
            (None, None) => {
                return Err(Failure::user(
                    "the compute times of the engine are required: name its device (--device), or give measured times (--samples)",
                ));
            }
        };
        let roofline = |device: &str| {
            let name = model.model.as_ref().and_then(|name| name.to_str()).unwrap_or_default();
            let compute = plan_cmd::compute_of(name)?;
            Ok::<_, Failure>(Roofline::new(compute, plan_cmd::device_of(device)?, self.devices))
        };
        let samples = self.samples.as_deref().map(plan_cmd::samples).transpose()?.unwrap_or_default();
        let times = Times::new(samples, device.map(roofline).transpose()?).map_err(Failure::user)?;
        Ok(Some(times))
    }

    /// What the plan follows from. The prompt goes on behind its last block.
    pub(super) fn terms<'a>(&'a self, subject: &Subject, times: &'a Times) -> PlanTerms<'a> {
        let blocks = subject.keys.len() as u64 * u64::from(subject.requirements.block_tokens());
        let (hbm_blocks, overlap) = (self.hbm_blocks, self.overlap);
        PlanTerms {
            hbm_blocks,
            hbm_boundaries: &self.hbm_boundaries,
            overlap,
            ..PlanTerms::new(blocks + 1, times)
        }
    }
}

/// A plan for a program.
pub(super) fn report(planned: &Planned) -> Value {
    let Planned { plan, disk, times } = planned;
    json!({ "plan": plan, "disk": disk.link, "disk_measured": disk.measured, "prefill": times })
}

/// A plan for a person.
pub(super) fn show(planned: &Planned, out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(out)?;
    plan_cmd::show(&planned.plan, &planned.times, out)?;
    let link = planned.disk.link;
    let from = match planned.disk.measured {
        0 => "assumed: no reads so far".to_owned(),
        reads => format!("measured by {reads} reads"),
    };
    Ok(writeln!(
        out,
        "disk: {:.2} GB/s after {:.2} ms, {} queued ({from})",
        link.bytes_per_ms / 1e6,
        link.latency_ms,
        kvarts_server::human::bytes(link.outstanding_bytes)
    )?)
}
