//! The plan of a restore as the model has it: block by block, over a way that nothing was measured of.

use kvarts_contract::api::{DiskLink, MatchRequest, PlanTerms, Planned};
use kvarts_contract::error::Reason;
use kvarts_layout::prefix::Need;
use kvarts_layout::{Coordinate, Group, LayerShape};
use kvarts_planner::cost::Prefill;
use kvarts_planner::plan::{Link, Links, MeasuredLink, Part, Question, Run, Source, Sources};

/// Plans the restore of what is here; `layers` are all that the model has.
pub(super) fn plan(
    request: &MatchRequest<'_>,
    terms: &PlanTerms<'_>,
    layers: usize,
    here: impl Fn(u32, Group, Coordinate) -> bool,
    shape: impl Fn(Group, Coordinate) -> Result<Vec<LayerShape>, Reason>,
) -> Result<Planned, Reason> {
    let link = MeasuredLink::default().link(0.0);
    let dram = terms.dram.unwrap_or((0, Link::gb_per_s(1.0, 0.0)));
    let links = Links::NONE.with(Source::Disk, link).with(Source::Dram, dram.1);
    let mut owned = Vec::new();
    for one in request.requirements.groups() {
        let mut bytes = vec![0; layers];
        for &coordinate in &one.coordinates {
            shape(one.group, coordinate)?
                .iter()
                .for_each(|layer| bytes[layer.layer as usize] += layer.bytes());
        }
        let mut runs = Vec::new();
        for block in 0..request.keys.len() as u32 {
            let there = one.coordinates.iter().all(|coordinate| here(block, one.group, *coordinate));
            let stream = one.need == Need::All;
            let needed = match one.need {
                Need::Last { tokens } => tokens.div_ceil(request.requirements.block_tokens()),
                Need::All | Need::At => 1,
            };
            let held = |end: &u32| block < *end && end - block <= needed;
            let places = [
                (Source::Hbm, stream && block < terms.hbm_blocks),
                (Source::Hbm, !stream && terms.hbm_boundaries.iter().any(held)),
                (Source::Dram, stream && block < dram.0),
                (Source::Disk, there),
            ];
            let sources = places.into_iter().filter(|(_, is)| *is);
            let sources = sources.fold(Sources::NONE, |all, (source, _)| all.and(source));
            if !sources.is_empty() {
                runs.push(Run { from: block, to: block + 1, sources });
            }
        }
        owned.push((one, bytes, runs));
    }
    let parts: Vec<Part<'_>> = owned
        .iter()
        .map(|(one, layer_bytes, runs)| {
            let (group, need, absence) = (one.group, one.need, one.absence);
            Part { group, need, absence, layer_bytes, runs }
        })
        .collect();
    let (block_tokens, prompt_tokens) = (request.requirements.block_tokens(), terms.prompt_tokens);
    let question =
        Question { block_tokens, prompt_tokens, parts: &parts, links: &links, overlap: terms.overlap };
    let plan = question.plan(terms.times)?;
    Ok(Planned { plan, disk: DiskLink { link, measured: 0 }, times: terms.times.told() })
}
