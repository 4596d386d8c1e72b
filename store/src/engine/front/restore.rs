//! The plan of a restore: what a match found, as a question to the planner.

use kvarts_layout::prefix::{Absence, Need, Requirement};
use kvarts_planner::cost::Prefill;
use kvarts_planner::plan::{Link, Links, MAX_RUNS, Part, Question, Run, Source, Sources};

use super::column::Column;
use crate::engine::shared::Shared;
use crate::engine::shared::names::Namespace;
use crate::index::Lookup;
use kvarts_contract::api::{Beyond, MatchRequest, PlanTerms, Planned};
use kvarts_contract::error::Reason;

/// Bytes by layer of what one requirement asks of a block, and where its blocks are.
type Owned = (Vec<u64>, Vec<Run>);

/// Plans the restore of what a match found.
pub(super) fn plan(
    shared: &Shared,
    namespace: &Namespace,
    (request, terms): (&MatchRequest<'_>, &PlanTerms<'_>),
    columns: &[Column],
) -> Result<Planned, Reason> {
    namespace.note_times(terms.times);
    let disk = shared.disk_path.at(shared.clock.now());
    let links = ways(disk.link, terms, |beyond| &beyond.ways);
    let (mut owned, mut rest) = (Vec::<Owned>::new(), columns);
    for requirement in request.requirements.groups() {
        // Columns are in the order of the requirements.
        let (of_group, others) = rest.split_at_checked(requirement.coordinates.len()).unwrap_or((rest, &[]));
        rest = others;
        let runs = runs(requirement, of_group, terms, request)?;
        owned.push((layer_bytes(namespace, of_group)?, runs));
    }
    let parts: Vec<Part<'_>> = request
        .requirements
        .groups()
        .iter()
        .zip(&owned)
        .map(|(requirement, (layer_bytes, runs))| {
            let (group, need, absence) = (requirement.group, requirement.need, requirement.absence);
            Part { group, need, absence, layer_bytes, runs }
        })
        .collect();
    let (block_tokens, prompt_tokens) = (request.requirements.block_tokens(), terms.prompt_tokens);
    let question =
        Question { block_tokens, prompt_tokens, parts: &parts, links: &links, overlap: terms.overlap };
    let mut plan = question.plan(terms.times)?;
    if plan.reason.is_too_slow() && plan.loads_nothing() && shared.disk_path.probes() {
        let links = ways(shared.disk_path.assumed(), terms, |beyond| &beyond.assumed);
        plan = Question { links: &links, ..question }.plan(terms.times)?;
    }
    Ok(Planned { plan, disk, times: terms.times.told() })
}

/// The ways to bytes: these of the caller, the disks, and what is beyond them.
fn ways(disk: Link, terms: &PlanTerms<'_>, of: impl Fn(&Beyond) -> &[(Source, Link)]) -> Links {
    let own = Links::NONE.with(Source::Disk, disk);
    let own = terms.dram.map_or(own, |(_, link)| own.with(Source::Dram, link));
    let beyond = terms.beyond.map_or(&[][..], of);
    beyond.iter().fold(own, |links, (source, link)| links.with(*source, *link))
}

/// Bytes of a block by layer, of all coordinates together: each of them is loaded.
fn layer_bytes(namespace: &Namespace, columns: &[Column]) -> Result<Vec<u64>, Reason> {
    let mut layers = vec![0u64; namespace.spec.geometry.layers().len()];
    for column in columns {
        for layer in namespace.shape(column.group, column.coordinate)?.layers() {
            if let Some(bytes) = layers.get_mut(layer.layer as usize) {
                *bytes = bytes.saturating_add(layer.bytes());
            }
        }
    }
    Ok(layers)
}

/// Where a read would bring a block of a column from.
fn read_from(column: &Column, terms: &PlanTerms<'_>, block: usize) -> Option<Source> {
    if matches!(column.found.get(block), Some(Lookup::Live(_))) {
        return Some(Source::Disk);
    }
    let beyond = terms.beyond?.columns.get(&(column.group, column.coordinate))?;
    let is = |all: &[bool]| all.get(block) == Some(&true);
    match (is(&beyond.peers), is(&beyond.cold)) {
        (true, _) => Some(Source::Peer),
        (false, true) => Some(Source::Cold),
        (false, false) => None,
    }
}

/// Blocks of a group that a caller has in device memory.
enum Held {
    /// Those before this one.
    Before(u32),
    /// This number of them before each of these boundaries, which are in order.
    At(Vec<u32>, u32),
}

impl Held {
    /// Of streams the leading ones; of windows and states those that are needed at the boundaries at which it has them.
    fn of(requirement: &Requirement, terms: &PlanTerms<'_>, block_tokens: u32) -> Self {
        let blocks = match requirement.need {
            Need::All => return Self::Before(terms.hbm_blocks),
            Need::Last { tokens } => tokens.div_ceil(block_tokens.max(1)),
            Need::At => 1,
        };
        let mut boundaries = terms.hbm_boundaries.to_vec();
        boundaries.sort_unstable();
        Self::At(boundaries, blocks)
    }

    fn has(&self, block: u32) -> bool {
        match self {
            Self::Before(end) => block < *end,
            Self::At(boundaries, blocks) => {
                let next = boundaries.get(boundaries.partition_point(|boundary| *boundary <= block));
                next.is_some_and(|boundary| boundary - block <= *blocks)
            }
        }
    }
}

/// Where the blocks of a group are: those that the caller has, and those that a read brings at all coordinates, by the
/// farthest of their places. Behind the first gap of a stream without which nothing can be done, nothing is of use.
fn runs(
    requirement: &Requirement,
    columns: &[Column],
    terms: &PlanTerms<'_>,
    request: &MatchRequest<'_>,
) -> Result<Vec<Run>, Reason> {
    let mut runs: Vec<Run> = Vec::new();
    let is_stream = requirement.need == Need::All;
    let dram = if is_stream { terms.dram.map_or(0, |(blocks, _)| blocks) } else { 0 };
    let hbm = Held::of(requirement, terms, request.requirements.block_tokens());
    for block in 0..request.keys.len() as u32 {
        let mut sources = Sources::NONE;
        for (source, is_there) in [(Source::Hbm, hbm.has(block)), (Source::Dram, block < dram)] {
            sources = if is_there { sources.and(source) } else { sources };
        }
        let farthest = columns.iter().map(|column| read_from(column, terms, block as usize));
        if let Some(source) = farthest.reduce(|one, other| one.zip(other).map(|(a, b)| a.max(b))).flatten() {
            sources = sources.and(source);
        }
        if sources.is_empty() {
            if is_stream && requirement.absence == Absence::Required {
                break;
            }
            continue;
        }
        let runs_so_far = runs.len();
        match runs.last_mut() {
            Some(run) if run.to == block && run.sources == sources => run.to = block + 1,
            _ if runs_so_far == MAX_RUNS => return Err(Reason::TooMany("separate runs of blocks")),
            _ => runs.push(Run { from: block, to: block + 1, sources }),
        }
    }
    Ok(runs)
}
