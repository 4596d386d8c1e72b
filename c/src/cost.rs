//! What restoring a prefix would cost, and computing it.

use kvarts_contract::api::{KvStore, MatchRequest, PlanTerms};
use kvarts_contract::error::{Error, Reason};
use kvarts_planner::cost::{self, Times};
use kvarts_planner::plan::Source;

use crate::blocks::{Blocks, Client, keys};
use crate::said::{Status, call, given, leave, several, wrong};

/// `kvarts_sample`.
#[repr(C)]
struct Sample {
    cached: u64,
    computed: u64,
    ms: f64,
}

/// `kvarts_cost`.
#[repr(C)]
struct Cost {
    here: u32,
    blocks: u32,
    disk_bytes: u64,
    load_ms: f64,
    recompute_ms: f64,
    first_token_ms: f64,
    recompute_all_ms: f64,
    disk_bytes_per_second: f64,
    disk_outstanding_bytes: u64,
}

#[unsafe(no_mangle)]
extern "C" fn kvarts_estimate(
    client: *const Client,
    blocks: *const Blocks,
    chain: *const u8,
    count: usize,
    prompt_tokens: u64,
    samples: *const Sample,
    sample_count: usize,
    told: *mut Cost,
) -> Status {
    call(|| {
        let Client { remote } = given(client, "client")?;
        let Blocks { cut, namespace } = given(blocks, "blocks")?;
        let sample = |one: &Sample| cost::Sample { cached: one.cached, new: one.computed, ms: one.ms };
        let samples = several(samples, sample_count, "samples")?.iter().map(sample).collect();
        let times = Times::new(samples, None).map_err(|error| wrong(format!("invalid samples: {error}")))?;
        let found = remote.match_prefix(&MatchRequest {
            namespace: *namespace,
            keys: &keys(chain, count)?,
            requirements: &cut.requirements,
            recompute_tokens_max: 0,
            lease: None,
            plan: Some(PlanTerms::new(prompt_tokens, &times)),
        })?;
        let here = found.usable.longest.blocks;
        let planned =
            found.plan.ok_or(Error(Reason::Passing("the server returned no estimate".to_owned())))?;
        let (plan, link) = (&planned.plan, &planned.disk.link);
        let cost = Cost {
            here,
            blocks: plan.boundary_blocks,
            disk_bytes: plan.bytes_from(Source::Disk),
            load_ms: plan.load_ms,
            recompute_ms: plan.recompute_ms,
            first_token_ms: plan.ttft_ms,
            recompute_all_ms: plan.from_nothing_ms,
            disk_bytes_per_second: link.bytes_per_ms * 1000.0,
            disk_outstanding_bytes: link.outstanding_bytes,
        };
        leave(told, cost, "cost")
    })
}
