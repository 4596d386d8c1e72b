//! What to buy, and how to set it: configurations that keep what was promised, and those of them that nothing beats.
//!
//! Three stages, each from the best of the one before: the engine's limits by bisection; routers and prefetch policies; then what is
//! bought ([`Choices`]), from point to neighbouring point, as long as there is one that nothing beats and whose neighbours have
//! not been tried. What nothing beats in latency, throughput and cost at once is the answer.

use serde::Serialize;
use serde_json::Value;

use super::choices::{Choices, Point, What};
use super::figures::{Counted, round};
use super::spec::{Cluster, RouterKind};

/// What was promised.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Promise {
    /// The 99th percentile of the time to the first token.
    pub ttft_ms: f64,
    /// The 99th percentile of the time for each further token.
    pub tpot_ms: f64,
}

/// One configuration that was tried.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Tried {
    /// What it is.
    #[serde(skip)]
    pub cluster: Cluster,
    /// 99th percentiles.
    pub ttft_ms: f64,
    /// See above.
    pub tpot_ms: f64,
    /// Tokens of answers a second.
    pub tokens_per_s: f64,
    /// For a million of them.
    pub cost_per_million: f64,
    /// Of all nodes.
    pub cost_per_hour: f64,
    /// How long drives last, by the whole writes a day that they are made for; none without drives.
    pub drive_life_years: Option<f64>,
    /// Requests that fit on no node.
    pub refused: u64,
    /// Whether it keeps the promise.
    pub keeps: bool,
    /// In which stage it was tried.
    pub stage: u8,
}

impl Tried {
    /// How far it is from the promise: 0 if it keeps it. Times without the requests that are refused say nothing.
    fn excess(&self, promise: &Promise) -> f64 {
        if self.refused > 0 {
            return f64::INFINITY;
        }
        (self.ttft_ms / promise.ttft_ms - 1.0).max(0.0) + (self.tpot_ms / promise.tpot_ms - 1.0).max(0.0)
    }

    /// Better in nothing than the other, and worse in something.
    fn is_beaten_by(&self, other: &Self) -> bool {
        let figures = |one: &Self| [one.refused as f64, one.ttft_ms, -one.tokens_per_s, one.cost_per_million];
        let (mine, theirs) = (figures(self), figures(other));
        let no_worse = theirs.iter().zip(mine).all(|(theirs, mine)| *theirs <= mine);
        no_worse && theirs.iter().zip(mine).any(|(theirs, mine)| *theirs < mine)
    }
}

/// What was found.
#[derive(Clone, PartialEq, Debug)]
pub struct Searched {
    /// What nothing beats, the fastest first: of those that keep the promise, or of all if none does.
    pub front: Vec<Tried>,
    /// The cheapest of them.
    pub best: Option<Tried>,
    /// Runs that it took.
    pub runs: u32,
}

struct Search<'a, E> {
    run: &'a mut dyn FnMut(&Cluster) -> Result<Counted, E>,
    promise: Promise,
    choices: &'a Choices,
    runs: u32,
    tried: Vec<Tried>,
}

/// Searches; `run` runs the workload on a configuration, at most `runs` times.
pub fn search<E>(
    choices: &Choices,
    promise: Promise,
    runs: u32,
    run: &mut dyn FnMut(&Cluster) -> Result<Counted, E>,
) -> Result<Searched, E> {
    let mut search = Search { run, promise, choices, runs, tried: Vec::new() };
    let limited = search.limits(choices.start())?;
    let routed = search.routers(&limited)?;
    search.tiers(&routed)?;
    let runs = search.tried.len() as u32;
    let kept: Vec<Tried> = search.tried.iter().filter(|one| one.keeps).cloned().collect();
    let fewest = search.tried.iter().map(|one| one.refused).min().unwrap_or(0);
    let some = match kept.is_empty() {
        true => search.tried.into_iter().filter(|one| one.refused == fewest).collect(),
        false => kept,
    };
    let mut front: Vec<Tried> =
        some.iter().filter(|one| !some.iter().any(|other| one.is_beaten_by(other))).cloned().collect();
    front.sort_by(|one, other| one.ttft_ms.total_cmp(&other.ttft_ms));
    front.dedup_by(|one, other| {
        one.ttft_ms == other.ttft_ms
            && one.tokens_per_s == other.tokens_per_s
            && one.cost_per_million == other.cost_per_million
    });
    let cheaper = |one: &&Tried, other: &&Tried| {
        let excess = one.excess(&promise).total_cmp(&other.excess(&promise));
        excess.then(one.cost_per_million.total_cmp(&other.cost_per_million))
    };
    let best = front.iter().min_by(cheaper).cloned();
    Ok(Searched { front, best, runs })
}

impl<E> Search<'_, E> {
    fn left(&self) -> bool {
        (self.tried.len() as u32) < self.runs
    }

    fn look(&mut self, cluster: &Cluster, stage: u8) -> Result<Tried, E> {
        if let Some(known) = self.tried.iter().find(|one| one.cluster == *cluster) {
            return Ok(known.clone());
        }
        let counted = (self.run)(cluster)?;
        let figures = counted.json(cluster);
        let figure = |name: &str| figures.get(name).and_then(Value::as_f64);
        let (ttft_ms, tpot_ms) = (counted.ttft.percentile(0.99), counted.tpot.percentile(0.99));
        let tried = Tried {
            cluster: cluster.clone(),
            ttft_ms: round(ttft_ms),
            tpot_ms: round(tpot_ms),
            tokens_per_s: figure("output_tokens_per_s").unwrap_or(0.0),
            cost_per_million: figure("cost_per_million_output_tokens").unwrap_or(f64::INFINITY),
            cost_per_hour: round(cluster.cost_per_hour()),
            drive_life_years: figure("drive_life_years"),
            refused: counted.refused,
            keeps: counted.refused == 0 && ttft_ms <= self.promise.ttft_ms && tpot_ms <= self.promise.tpot_ms,
            stage,
        };
        self.tried.push(tried.clone());
        Ok(tried)
    }

    /// The largest chunk, and then the largest batch, with which further tokens still come in time.
    fn limits(&mut self, from: Cluster) -> Result<Cluster, E> {
        let mut best = from;
        self.look(&best, 1)?;
        if !self.choices.may(What::Limits) {
            return Ok(best);
        }
        for (low, high, chunk) in [(8u32, 15u32, true), (3, 10, false)] {
            let set = |cluster: &mut Cluster, power: u32| match chunk {
                true => cluster.engine.chunk_tokens = 1 << power,
                false => cluster.engine.batch_max = 1 << power,
            };
            let (mut low, mut high) = (low, high);
            while low < high && self.left() {
                let middle = (low + high).div_ceil(2);
                let mut cluster = best.clone();
                set(&mut cluster, middle);
                let tried = self.look(&cluster, 1)?;
                if tried.tpot_ms <= self.promise.tpot_ms { low = middle } else { high = middle - 1 }
            }
            let mut cluster = best.clone();
            set(&mut cluster, low);
            if !self.left() && !self.tried.iter().any(|one| one.cluster == cluster) {
                return Ok(best);
            }
            let (old, new) = (self.look(&best, 1)?, self.look(&cluster, 1)?);
            if new.excess(&self.promise) < old.excess(&self.promise)
                || (new.excess(&self.promise) == old.excess(&self.promise) && new.ttft_ms <= old.ttft_ms)
            {
                best = cluster;
            }
        }
        Ok(best)
    }

    /// The best router, and with it the best prefetch policy.
    fn routers(&mut self, from: &Cluster) -> Result<Cluster, E> {
        let best = self.look(from, 1)?;
        // The oracle is what could be, not what can be had.
        let routers = RouterKind::ALL.into_iter().filter(|router| *router != RouterKind::Oracle);
        let any = self.choices.may(What::Router) && from.nodes.mixed + from.nodes.prefill > 1;
        let routers = routers.filter(|_| any).map(|router| Cluster { router, ..from.clone() });
        let best = self.best_of(best, routers.collect())?;
        let mut others = Vec::new();
        for prefetch in self.choices.prefetches() {
            let mut cluster = best.cluster.clone();
            cluster.engine.prefetch = *prefetch;
            others.push(cluster);
        }
        Ok(self.best_of(best, others)?.cluster)
    }

    fn best_of(&mut self, mut best: Tried, others: Vec<Cluster>) -> Result<Tried, E> {
        for cluster in others {
            if !self.left() {
                break;
            }
            let tried = self.look(&cluster, 2)?;
            if (tried.excess(&self.promise), tried.ttft_ms) < (best.excess(&self.promise), best.ttft_ms) {
                best = tried;
            }
        }
        Ok(best)
    }

    /// From point to point: next come the neighbours of the one that is the nearest to the promise, and then the cheapest, of
    /// those that nothing beats.
    fn tiers(&mut self, engine: &Cluster) -> Result<(), E> {
        let start = self.choices.start_point();
        let mut seen: Vec<(Point, Tried, bool)> = vec![(start, self.look(engine, 3)?, false)];
        while self.left() {
            let beaten = |one: &Tried| {
                seen.iter().any(|(_, other, _)| (other.keeps || !one.keeps) && one.is_beaten_by(other))
            };
            let rank = |one: &Tried| (one.excess(&self.promise), one.cost_per_million, one.ttft_ms);
            let open = seen.iter().enumerate().filter(|(_, (_, one, done))| !done && !beaten(one));
            let next = open.min_by(|(_, (_, one, _)), (_, (_, other, _))| {
                rank(one).partial_cmp(&rank(other)).unwrap_or(std::cmp::Ordering::Equal)
            });
            let Some(at) = next.map(|(at, _)| at) else { break };
            seen[at].2 = true;
            for point in self.choices.beside(seen[at].0) {
                if !self.left() || seen.iter().any(|(other, ..)| *other == point) {
                    continue;
                }
                let Some(cluster) = self.choices.at(engine, point) else { continue };
                let tried = self.look(&cluster, 3)?;
                seen.push((point, tried, false));
            }
        }
        Ok(())
    }
}
