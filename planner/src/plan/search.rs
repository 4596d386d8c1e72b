//! Finding the plan: boundaries by halving, those with the least bound first, at each boundary every choice that may be the best.
//!
//! A stretch of boundaries can have no plan faster than its *bound*: what must be loaded at its shortest boundary, and
//! the least that computing may take up to its longest ([`Prefill::least_ms`]). A stretch whose bound is no better than
//! the best plan so far is passed over.
//!
//! At one boundary, of the parts that can be rebuilt by running tokens again one replay rebuilds all whose cost it
//! covers: so only as many thresholds are tried as there are such parts. Runs that several sources have are tried in
//! every combination, up to [`COMBINATIONS_MAX`]; beyond that one after the other.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use kvarts_layout::prefix::{Absence, Need};

use super::answer::{Action, Does, Plan};
use super::pipeline::{Loads, Pipeline};
use super::words::Reason;
use super::{Part, PlanError, Question, Run, Source, Sources};
use crate::cost::Prefill;

/// Combinations of sources that are tried at one boundary.
const COMBINATIONS_MAX: usize = 4096;
/// Steps after which the best plan so far is taken: runs and sums that were looked at.
pub(super) const STEPS_MAX: u64 = 1 << 22;

/// Blocks of one run that something may be done with, in more than one way.
#[derive(Clone, Copy, Debug)]
struct Unit {
    part: usize,
    from: u32,
    to: u32,
    sources: Sources,
    /// Tokens that rebuild it instead.
    tokens: Option<u64>,
}

impl Unit {
    fn blocks(&self) -> u64 {
        u64::from(self.to - self.from)
    }

    fn choices(&self) -> usize {
        self.sources.len() + usize::from(self.tokens.is_some())
    }

    /// The `n`th thing that may be done with it.
    fn does(&self, n: usize) -> Does {
        match self.sources.iter().nth(n) {
            Some(Source::Hbm) => Does::Use,
            Some(source) => Does::Load(source),
            None => Does::Recompute,
        }
    }
}

/// A part that is good for one boundary, at the boundary that is looked at.
#[derive(Clone, Copy, Debug)]
struct Boundary {
    part: usize,
    /// The blocks that it needs.
    from: u32,
    to: u32,
    /// Tokens that rebuild it.
    tokens: Option<u64>,
}

/// Boundaries that are still to be looked at; the greatest is the one whose bound is the least.
#[derive(PartialEq, Debug)]
struct Stretch {
    bound: f64,
    low: u32,
    high: u32,
}

impl Eq for Stretch {}

impl Ord for Stretch {
    fn cmp(&self, other: &Self) -> Ordering {
        other.bound.total_cmp(&self.bound).then(self.high.cmp(&other.high))
    }
}

impl PartialOrd for Stretch {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The best plan so far.
#[derive(Clone, Debug)]
struct Best {
    boundary: u32,
    ms: f64,
    /// Boundary parts whose cost is no more are rebuilt.
    threshold: u64,
    picks: Vec<usize>,
}

pub(super) struct Search<'a> {
    question: &'a Question<'a>,
    prefill: &'a dyn Prefill,
    pipeline: Pipeline,
    reached: Sources,
    /// Blocks of each part that are loaded from each source, of the choice that is counted.
    loads: Vec<Loads>,
    /// What the choices at one boundary have in common, and what they have by its streams alone.
    base: Vec<Loads>,
    of_streams: Vec<Loads>,
    thresholds: Vec<u64>,
    /// What may be done in several ways: of streams, and behind them of boundary parts.
    units: Vec<Unit>,
    boundaries: Vec<Boundary>,
    picks: Vec<usize>,
    best: Option<Best>,
    exact: bool,
    looked_at: u64,
    steps: u64,
    sound: bool,
}

/// The cost of rebuilding, where there is one.
fn stated(absence: Absence) -> Option<u64> {
    match absence {
        Absence::Recompute { tokens } if tokens != u64::MAX => Some(tokens),
        _ => None,
    }
}

/// Whether anything can be gone on from with what is in device memory alone, as far as this part is concerned: of most prompts it is
/// seen here that nothing can.
pub(super) fn may_begin_in_device_memory(part: &Part<'_>) -> bool {
    let is_optional = part.need != Need::All || stated(part.absence).is_some();
    is_optional || part.runs.first().is_some_and(|run| run.from == 0 && run.sources.has(Source::Hbm))
}

/// The runs in which a boundary part's blocks lie.
fn clipped<'a>(parts: &'a [Part<'_>], one: &Boundary) -> impl Iterator<Item = Run> + 'a {
    let (from, to) = (one.from, one.to);
    let runs = parts.get(one.part).map_or(&[][..], |part| part.runs);
    let first = runs.partition_point(|run| run.to <= from);
    let runs = runs.iter().skip(first).take_while(move |run| run.from < to);
    runs.map(move |run| Run { from: run.from.max(from), to: run.to.min(to), ..*run })
}

impl<'a> Search<'a> {
    pub(super) fn new(question: &'a Question<'a>, prefill: &'a dyn Prefill) -> Result<Self, PlanError> {
        let mut search = Self {
            question,
            prefill,
            pipeline: Pipeline::new(question.parts, question.layers(), question.overlap),
            reached: question.links.reached(),
            loads: vec![Default::default(); question.parts.len()],
            base: Vec::new(),
            of_streams: Vec::new(),
            thresholds: Vec::new(),
            units: Vec::new(),
            boundaries: Vec::new(),
            picks: Vec::new(),
            best: None,
            exact: true,
            looked_at: 0,
            steps: 0,
            sound: true,
        };
        search.compute(0);
        if search.sound { Ok(search) } else { Err(PlanError::Prefill) }
    }

    pub(super) fn run(mut self) -> Result<Plan, PlanError> {
        let blocks = self.question.blocks();
        let reach = self.reach().map_or(blocks, |(_, block)| block);
        // Nothing is always possible.
        self.at(0);
        if reach > 0 {
            self.at(reach);
            self.look(1, reach - 1);
        }
        if !self.sound {
            return Err(PlanError::Prefill);
        }
        let Some(best) = self.best.take() else { return Err(PlanError::Prefill) };
        let reason = self.reason(&best, reach);
        let plan = self.tell(&best, reason);
        if self.sound { Ok(plan) } else { Err(PlanError::Prefill) }
    }

    /// The first block that a stream lacks which is required, and whose.
    fn reach(&self) -> Option<(usize, u32)> {
        let streams = self.question.parts.iter().enumerate();
        let required = streams.filter(|(_, part)| part.need == Need::All && stated(part.absence).is_none());
        required
            .map(|(place, part)| (place, self.first_gap(part)))
            .min_by_key(|(_, block)| *block)
            .filter(|(_, block)| *block < self.question.blocks())
    }

    fn here(&self, run: &Run) -> Sources {
        let sources = run.sources.both(self.reached);
        // Nothing is nearer than where it is used.
        if sources.has(Source::Hbm) { Sources::of(Source::Hbm) } else { sources }
    }

    fn first_gap(&self, part: &Part<'_>) -> u32 {
        let mut next = 0;
        for run in part.runs {
            if run.from > next || self.here(run).is_empty() {
                break;
            }
            next = run.to;
        }
        next
    }

    /// Looks at the boundaries from `low` to `high`, always next at the middle of the stretch with the least bound.
    fn look(&mut self, low: u32, high: u32) {
        let mut stretches = BinaryHeap::new();
        let mut more = vec![(low, high)];
        loop {
            for (low, high) in more.drain(..).filter(|(low, high)| low <= high) {
                let bound = self.bound(low, high);
                stretches.push(Stretch { bound, low, high });
            }
            let Some(Stretch { bound, low, high }) = stretches.pop() else { return };
            let passed = |best: &Best| bound > best.ms || (bound == best.ms && high < best.boundary);
            if self.is_over() {
                return;
            }
            if self.best.as_ref().is_some_and(passed) {
                if bound > self.best.as_ref().map_or(0.0, |best| best.ms) {
                    return;
                }
                continue;
            }
            let middle = low + (high - low) / 2;
            self.at(middle);
            more.extend([(low, middle - 1), (middle + 1, high)]);
        }
    }

    /// No plan with a boundary of this stretch is faster.
    fn bound(&mut self, low: u32, high: u32) -> f64 {
        self.loads.fill(Default::default());
        let (mut shared, mut rate) = (0u64, 0.0);
        let mut sharing = Sources::NONE;
        for (place, part) in self.question.parts.iter().enumerate() {
            if part.need != Need::All || stated(part.absence).is_some() {
                continue;
            }
            for run in part.runs.iter().take_while(|run| run.from < low) {
                self.steps += 1;
                let (sources, blocks) = (self.here(run), u64::from(run.to.min(low) - run.from));
                match sources.len() {
                    1 => self.load(place, sources, blocks),
                    _ => {
                        shared = shared.saturating_add(blocks * part.layer_bytes.iter().sum::<u64>());
                        sharing = sources.iter().fold(sharing, Sources::and);
                    }
                }
            }
        }
        let compute = self.prefill.least_ms(self.question.prompt_tokens, self.tokens(high));
        for source in sharing.iter() {
            rate += self.question.links.get(source).map_or(0.0, |link| link.bytes_per_ms);
        }
        let bound = self.time(compute);
        if rate > 0.0 { bound.max(shared as f64 / rate) } else { bound }
    }

    fn load(&mut self, part: usize, sources: Sources, blocks: u64) {
        if let (Some(loads), Some(source)) = (self.loads.get_mut(part), sources.iter().next())
            && let Some(count) = loads.get_mut(source as usize)
        {
            *count += blocks;
        }
    }

    fn tokens(&self, blocks: u32) -> u64 {
        u64::from(blocks) * u64::from(self.question.block_tokens)
    }

    /// The time of computing the prompt when `cached` tokens are there.
    fn compute(&mut self, cached: u64) -> f64 {
        let new = self.question.prompt_tokens.saturating_sub(cached);
        let ms = self.prefill.prefill_ms(cached, new);
        self.sound &= ms.is_finite() && ms >= 0.0;
        ms
    }

    /// When the last layer is computed.
    fn time(&mut self, compute: f64) -> f64 {
        self.looked_at += 1;
        self.steps += self.pipeline.steps();
        self.pipeline.time(&self.loads, self.question.links, compute)
    }

    /// Whether as much was looked at as may be.
    fn is_over(&mut self) -> bool {
        let over = self.steps > STEPS_MAX;
        self.exact &= !over;
        over
    }

    /// Looks at one boundary with everything that may be chosen at it.
    fn at(&mut self, boundary: u32) {
        let Some(holes) = self.streams(boundary) else { return };
        let Some(least) = self.boundary_parts(boundary) else { return };
        let streams = self.units.len();
        self.of_streams.clone_from(&self.loads);
        self.steps += self.boundaries.len() as u64;
        let mut thresholds = std::mem::take(&mut self.thresholds);
        thresholds.clear();
        thresholds.extend(self.boundaries.iter().filter_map(|part| part.tokens));
        thresholds.retain(|tokens| *tokens > least);
        thresholds.push(least);
        thresholds.sort_unstable();
        thresholds.dedup();
        for threshold in &thresholds {
            self.loads.clone_from(&self.of_streams);
            self.load_boundary_parts(*threshold);
            self.combine(boundary, holes, *threshold);
            self.units.truncate(streams);
        }
        self.thresholds = thresholds;
    }

    /// What streams need at a boundary: fills `loads` and `units`. Tokens that must be run again for holes; `None` if the
    /// boundary cannot be used.
    fn streams(&mut self, boundary: u32) -> Option<u64> {
        self.loads.fill(Default::default());
        self.units.clear();
        let mut holes = 0u64;
        for (place, part) in self.question.parts.iter().enumerate() {
            if part.need != Need::All {
                continue;
            }
            let each = stated(part.absence);
            let mut covered = 0u64;
            for run in part.runs.iter().take_while(|run| run.from < boundary) {
                self.steps += 1;
                let (sources, to) = (self.here(run), run.to.min(boundary));
                if sources.is_empty() {
                    continue;
                }
                let blocks = u64::from(to - run.from);
                covered += blocks;
                let tokens = each.map(|tokens| tokens.saturating_mul(blocks));
                let unit = Unit { part: place, from: run.from, to, sources, tokens };
                match (sources.has(Source::Hbm), each) {
                    (false, Some(0)) => {}
                    (false, Some(_)) => self.units.push(unit),
                    (false, None) if sources.len() > 1 => self.units.push(unit),
                    _ => self.load(place, sources, blocks),
                }
            }
            let absent = u64::from(boundary) - covered;
            match each {
                None if absent > 0 => return None,
                None => {}
                Some(tokens) => holes = holes.saturating_add(tokens.saturating_mul(absent)),
            }
        }
        Some(holes)
    }

    /// What the parts that are good for one boundary need there. The threshold that covers those that are absent;
    /// `None` if the boundary cannot be used.
    fn boundary_parts(&mut self, boundary: u32) -> Option<u64> {
        self.boundaries.clear();
        let mut least = 0;
        for (place, part) in self.question.parts.iter().enumerate() {
            let blocks = match part.need {
                Need::All => continue,
                Need::At => 1,
                Need::Last { tokens } => tokens.div_ceil(self.question.block_tokens.max(1)),
            };
            if boundary == 0 {
                continue;
            }
            let (from, tokens) = (boundary - blocks.min(boundary), stated(part.absence));
            let here = self.covers(part, from, boundary);
            if !here {
                least = least.max(tokens?);
            }
            self.boundaries.push(Boundary { part: place, from, to: boundary, tokens });
        }
        Some(least)
    }

    /// Whether all these blocks of a part are there.
    fn covers(&self, part: &Part<'_>, from: u32, to: u32) -> bool {
        let first = part.runs.partition_point(|run| run.to <= from);
        let mut next = from;
        for run in part.runs.iter().skip(first) {
            if next >= to || run.from > next || self.here(run).is_empty() {
                break;
            }
            next = run.to;
        }
        next >= to
    }

    /// Loads the boundary parts whose cost is above the threshold.
    fn load_boundary_parts(&mut self, threshold: u64) {
        for at in 0..self.boundaries.len() {
            let Some(one) = self.boundaries.get(at).copied() else { return };
            if one.tokens.is_some_and(|tokens| tokens <= threshold) {
                continue;
            }
            for run in clipped(self.question.parts, &one) {
                let sources = self.here(&run);
                let unit = Unit { part: one.part, from: run.from, to: run.to, sources, tokens: None };
                match sources.len() {
                    1 => self.load(one.part, sources, unit.blocks()),
                    _ => self.units.push(unit),
                }
            }
        }
    }

    /// Tries what may be done with the units.
    fn combine(&mut self, boundary: u32, holes: u64, threshold: u64) {
        let all = self.units.iter().try_fold(1usize, |all, unit| {
            all.checked_mul(unit.choices()).filter(|all| *all <= COMBINATIONS_MAX)
        });
        self.picks.clear();
        self.picks.resize(self.units.len(), 0);
        self.base.clone_from(&self.loads);
        let Some(all) = all else {
            self.exact = false;
            return self.one_by_one(boundary, holes, threshold);
        };
        for mut number in 0..all {
            if number > 0 && self.is_over() {
                break;
            }
            for (pick, unit) in self.picks.iter_mut().zip(&self.units) {
                *pick = number % unit.choices();
                number /= unit.choices();
            }
            let ms = self.counted(boundary, holes, threshold);
            self.keep(boundary, threshold, ms);
        }
    }

    /// Gives each unit in turn to what ends first with those before it, twice.
    fn one_by_one(&mut self, boundary: u32, holes: u64, threshold: u64) {
        for _ in 0..2 {
            for at in 0..self.units.len() {
                if self.is_over() {
                    break;
                }
                let choices = self.units.get(at).map_or(0, Unit::choices);
                let mut least = (f64::INFINITY, 0);
                for choice in 0..choices {
                    self.pick(at, choice);
                    let ms = self.counted(boundary, holes, threshold);
                    if ms < least.0 {
                        least = (ms, choice);
                    }
                }
                self.pick(at, least.1);
            }
        }
        let ms = self.counted(boundary, holes, threshold);
        self.keep(boundary, threshold, ms);
    }

    fn pick(&mut self, at: usize, choice: usize) {
        if let Some(pick) = self.picks.get_mut(at) {
            *pick = choice;
        }
    }

    /// The time of the choice that `picks` says.
    fn counted(&mut self, boundary: u32, holes: u64, threshold: u64) -> f64 {
        self.loads.clone_from(&self.base);
        let again = self.apply_picks(holes).saturating_add(threshold).min(self.tokens(boundary));
        let compute = self.compute(self.tokens(boundary) - again);
        self.time(compute)
    }

    /// Adds what the picks load to `loads`; gives the tokens that they and the holes have run again.
    fn apply_picks(&mut self, holes: u64) -> u64 {
        let mut again = holes;
        self.steps += self.units.len() as u64;
        for at in 0..self.units.len() {
            let (Some(unit), Some(pick)) = (self.units.get(at).copied(), self.picks.get(at)) else { break };
            match unit.does(*pick) {
                Does::Load(source) => self.load(unit.part, Sources::of(source), unit.blocks()),
                Does::Use => {}
                Does::Recompute | Does::LeaveOut => again = again.saturating_add(unit.tokens.unwrap_or(0)),
            }
        }
        again
    }

    fn keep(&mut self, boundary: u32, threshold: u64, ms: f64) {
        let better = |best: &Best| ms < best.ms || (ms == best.ms && boundary > best.boundary);
        if self.best.as_ref().is_none_or(better) {
            self.best = Some(Best { boundary, ms, threshold, picks: self.picks.clone() });
        }
    }

    /// Why it is this boundary.
    fn reason(&mut self, best: &Best, reach: u32) -> Reason {
        let parts = self.question.parts;
        if parts.iter().all(|part| part.runs.iter().all(|run| self.here(run).is_empty())) {
            return Reason::Nothing;
        }
        let longest = self.longest(best.boundary.max(1), reach);
        let group = |place: usize| parts.get(place).map_or(kvarts_layout::Group(0), |part| part.group);
        let missing = self.reach().map(|(place, block)| (group(place), block));
        match longest {
            Some(longest) if longest > best.boundary => {
                let (longest_tokens, longest_ms, ms) = (self.tokens(longest), self.alone(longest), best.ms);
                match best.boundary {
                    0 => Reason::Slower { longest_tokens, longest_ms, ms },
                    _ => Reason::Shorter { longest_tokens, longest_ms, ms },
                }
            }
            Some(longest)
                if parts.iter().all(|part| part.runs.last().is_none_or(|run| run.to <= longest)) =>
            {
                Reason::All
            }
            Some(longest) if longest == self.question.blocks() => Reason::All,
            found => {
                let lacking = parts.iter().find(|part| {
                    part.need != Need::All && stated(part.absence).is_none() && reach > found.unwrap_or(0)
                });
                let (group, block) = match (lacking, missing) {
                    (Some(part), _) => (part.group, reach.saturating_sub(1)),
                    (None, Some(missing)) => missing,
                    (None, None) => return Reason::All,
                };
                if found.is_some() { Reason::Missing(group, block) } else { Reason::Unusable(group, block) }
            }
        }
    }

    /// The longest boundary from `low` to `high` that can be used. It is not looked for beyond what a search may take.
    fn longest(&mut self, low: u32, high: u32) -> Option<u32> {
        let end = self.steps.saturating_add(STEPS_MAX);
        for boundary in (low..=high).rev() {
            self.steps += 1;
            if self.steps > end {
                break;
            }
            if self.streams(boundary).is_some() && self.boundary_parts(boundary).is_some() {
                return Some(boundary);
            }
        }
        None
    }

    /// The least time to the first token from one boundary.
    fn alone(&mut self, boundary: u32) -> f64 {
        self.best = None;
        self.at(boundary);
        self.best.take().map_or(f64::INFINITY, |best| best.ms)
    }

    /// The plan that was found.
    fn tell(&mut self, best: &Best, reason: Reason) -> Plan {
        let boundary = best.boundary;
        let holes = self.streams(boundary).unwrap_or(0);
        let _ = self.boundary_parts(boundary);
        self.load_boundary_parts(best.threshold);
        self.picks.clone_from(&best.picks);
        let again = self.apply_picks(holes).saturating_add(best.threshold).min(self.tokens(boundary));
        let tokens = self.tokens(boundary);
        let (from_nothing_ms, base) = (self.compute(0), self.compute(tokens));
        let compute_ms = self.compute(tokens - again);
        let (parts, links) = (self.question.parts, self.question.links);
        let (load_ms, stall_ms, transfer_ms) = self.pipeline.waits(parts, &self.loads, links, compute_ms);
        // One sum, so that the identities hold to the last bit that matters.
        let ttft_ms = load_ms + stall_ms + compute_ms;
        Plan {
            boundary_blocks: boundary,
            boundary_tokens: tokens,
            actions: self.actions(best),
            recompute_tokens: again,
            new_tokens: self.question.prompt_tokens - tokens,
            load_ms,
            recompute_ms: compute_ms - base,
            stall_ms,
            compute_ms,
            transfer_ms,
            ttft_ms,
            from_nothing_ms,
            held_ms: from_nothing_ms,
            benefit_ms: (from_nothing_ms - ttft_ms).max(0.0),
            reason,
            exact: self.exact,
            looked_at: self.looked_at,
        }
    }

    fn actions(&self, best: &Best) -> Vec<Action> {
        let mut actions = Vec::new();
        let mut tell = |place: usize, from: u32, to: u32, does: Does| {
            let Some(part) = self.question.parts.get(place) else { return };
            let bytes = match does {
                Does::Use | Does::Load(_) => part.layer_bytes.iter().sum::<u64>() * u64::from(to - from),
                Does::Recompute | Does::LeaveOut => 0,
            };
            actions.push(Action { group: part.group, from, to, does, bytes });
        };
        let picked = |place: usize, from: u32| {
            let unit =
                self.units.iter().zip(&best.picks).find(|(unit, _)| unit.part == place && unit.from == from);
            unit.map(|(unit, pick)| unit.does(*pick))
        };
        let fixed = |sources: Sources| match sources.iter().next() {
            Some(Source::Hbm) => Does::Use,
            Some(source) => Does::Load(source),
            None => Does::LeaveOut,
        };
        for (place, part) in self.question.parts.iter().enumerate() {
            if part.need == Need::All {
                let absent = if stated(part.absence) == Some(0) { Does::LeaveOut } else { Does::Recompute };
                let mut next = 0;
                for run in part.runs.iter().take_while(|run| run.from < best.boundary) {
                    let (sources, to) = (self.here(run), run.to.min(best.boundary));
                    if run.from > next {
                        tell(place, next, run.from, absent);
                    }
                    let left_out = stated(part.absence) == Some(0) && !sources.has(Source::Hbm);
                    let does = match picked(place, run.from) {
                        Some(does) => does,
                        None if left_out || sources.is_empty() => absent,
                        None => fixed(sources),
                    };
                    tell(place, run.from, to, does);
                    next = to;
                }
                if next < best.boundary {
                    tell(place, next, best.boundary, absent);
                }
            }
        }
        for one in &self.boundaries {
            match one.tokens {
                Some(0) => tell(one.part, one.from, one.to, Does::LeaveOut),
                Some(tokens) if tokens <= best.threshold => tell(one.part, one.from, one.to, Does::Recompute),
                _ => {
                    for run in clipped(self.question.parts, one) {
                        let does = picked(one.part, run.from).unwrap_or(fixed(self.here(&run)));
                        tell(one.part, run.from, run.to, does);
                    }
                }
            }
        }
        actions
    }
}
