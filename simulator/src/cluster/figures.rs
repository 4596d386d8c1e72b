//! What a run is worth: times in histograms of bounded size, counts, and what follows from them.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value, json};

/// Times by size, each place a hundredth wider than the one before: percentiles are within one percent.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    places: Vec<u64>,
    count: u64,
    sum: f64,
    most: f64,
}

/// The least that is told apart, in milliseconds.
const LEAST: f64 = 1e-3;
const WIDER: f64 = 1.01;

impl Histogram {
    pub(super) fn add(&mut self, ms: f64) {
        let place = if ms <= LEAST { 0 } else { ((ms / LEAST).ln() / WIDER.ln()).ceil() as usize };
        if self.places.len() <= place {
            self.places.resize(place + 1, 0);
        }
        if let Some(count) = self.places.get_mut(place) {
            *count += 1;
        }
        self.count += 1;
        self.sum += ms;
        self.most = self.most.max(ms);
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The time below which so large a part of them is.
    pub fn percentile(&self, part: f64) -> f64 {
        let wanted = (part * self.count as f64).ceil().max(1.0) as u64;
        let mut sum = 0;
        for (place, count) in self.places.iter().enumerate() {
            sum += count;
            if sum >= wanted {
                return (LEAST * WIDER.powi(i32::try_from(place).unwrap_or(i32::MAX))).min(self.most);
            }
        }
        0.0
    }

    /// The mean.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }

    fn json(&self) -> Value {
        json!({
            "mean": round(self.mean()),
            "p50": round(self.percentile(0.5)),
            "p90": round(self.percentile(0.9)),
            "p99": round(self.percentile(0.99)),
            "max": round(self.most),
        })
    }

    /// Points of the distribution: time, and the part of all that is no longer.
    pub fn points(&self) -> Vec<(f64, f64)> {
        let mut sum = 0;
        let mut points = Vec::new();
        for (place, count) in self.places.iter().enumerate().filter(|(_, count)| **count > 0) {
            sum += count;
            let at = LEAST * WIDER.powi(i32::try_from(place).unwrap_or(i32::MAX));
            points.push((at, sum as f64 / self.count as f64));
        }
        points
    }
}

/// Seven digits are more than any of this deserves, and the same on every machine.
pub(super) fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(6 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

/// Blocks by where they came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Hits {
    /// Device memory.
    pub hbm: u64,
    /// Host memory.
    pub dram: u64,
    /// Disks.
    pub disk: u64,
    /// Other nodes.
    pub peer: u64,
    /// The cold tier.
    pub cold: u64,
    /// None: computed.
    pub miss: u64,
}

/// One stretch of time, for plots.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slice {
    /// Requests that ended.
    pub ended: u64,
    /// Sum of their times to the first token.
    pub ttft_ms: f64,
    /// Blocks that were hits, and all.
    pub hits: u64,
    /// See above.
    pub blocks: u64,
}

/// One step of a node's engine.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Batch {
    /// The node.
    pub node: u16,
    /// When it began, and how long it took.
    pub at_ms: f64,
    /// See above.
    pub ms: f64,
    /// Requests by their place in the order of arrival, each with its tokens, in the order in which they were let in.
    pub tokens: Vec<(u64, u64)>,
    /// Requests that were stopped for want of memory before it.
    pub stopped: Vec<u64>,
}

/// What was counted.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// Requests that ended.
    pub requests: u64,
    /// Requests whose state fits on no node.
    pub refused: u64,
    /// Sessions that ended.
    pub sessions: u64,
    /// Time to the first token.
    pub ttft: Histogram,
    /// The same by kind, of requests that have one.
    pub ttft_by_kind: BTreeMap<Arc<str>, Histogram>,
    /// Time for each token after it.
    pub tpot: Histogram,
    /// A whole request.
    pub step: Histogram,
    /// A whole session.
    pub task: Histogram,
    /// Blocks asked for, by where they came from.
    pub hits: Hits,
    /// Tokens of prompts that were computed.
    pub computed_tokens: u64,
    /// Tokens of all prompts.
    pub input_tokens: u64,
    /// Tokens of all answers.
    pub output_tokens: u64,
    /// Bytes between nodes.
    pub network_bytes: u64,
    /// Bytes written to disks.
    pub disk_bytes_written: u64,
    /// Bytes written to the cold tier.
    pub cold_bytes_written: u64,
    /// Requests that went to the node that has most of their prompt, of those of which some node had any.
    pub to_owner: u64,
    /// See above.
    pub with_owner: u64,
    /// Time that decoding waited for prefills in its steps.
    pub interference_ms: f64,
    /// Time of steps in which something was decoded.
    pub decoding_ms: f64,
    /// Reads of the cold tier by another node's way.
    pub by_other_path: u64,
    /// Reads of it.
    pub cold_reads: u64,
    /// The end of the last request.
    pub end_ms: f64,
    /// Different blocks in device memory and on disks at the end, and all with copies.
    pub distinct: [(u64, u64); 2],
    /// Events: the work of the simulation.
    pub events: u64,
    /// The greatest number of requests that waited and ran at once.
    pub open_max: u64,
    /// How often a request was stopped for want of device memory.
    pub preemptions: u64,
    /// Bytes of stopped requests that went to the host's memory and came back from there.
    pub swapped_bytes: u64,
    /// Every step, if the run was told to note them.
    pub schedule: Option<Vec<Batch>>,
    /// By time.
    pub slices: Vec<Slice>,
    /// What a slice is long.
    pub slice_ms: f64,
}

impl Counted {
    pub(super) fn slice(&mut self, at_ms: f64) -> Option<&mut Slice> {
        const SLICES: usize = 200;
        if self.slice_ms == 0.0 {
            self.slice_ms = 1000.0;
        }
        // Twice as long when there are too many: the memory stays what it is.
        while (at_ms / self.slice_ms) as usize >= SLICES {
            self.slice_ms *= 2.0;
            let halves = std::mem::take(&mut self.slices);
            self.slices = halves
                .chunks(2)
                .map(|pair| {
                    pair.iter().fold(Slice::default(), |a, b| Slice {
                        ended: a.ended + b.ended,
                        ttft_ms: a.ttft_ms + b.ttft_ms,
                        hits: a.hits + b.hits,
                        blocks: a.blocks + b.blocks,
                    })
                })
                .collect();
        }
        let place = (at_ms / self.slice_ms) as usize;
        if self.slices.len() <= place {
            self.slices.resize(place + 1, Slice::default());
        }
        self.slices.get_mut(place)
    }

    /// The part of the blocks asked for that were somewhere.
    pub fn hit_rate(&self) -> f64 {
        let Hits { hbm, dram, disk, peer, cold, miss } = self.hits;
        let hits = hbm + dram + disk + peer + cold;
        hits as f64 / (hits + miss).max(1) as f64
    }

    /// As an object: what programs read, in a fixed order, the same bytes for the same run.
    pub fn json(&self, cluster: &super::Cluster) -> Map<String, Value> {
        let part = |one: u64, of: u64| round(one as f64 / of.max(1) as f64);
        let hours = self.end_ms / 3.6e6;
        let mut map = Map::new();
        let mut add = |name: &str, value: Value| drop(map.insert(name.to_owned(), value));
        add("router", json!(cluster.router.name()));
        add("model", json!(cluster.model));
        add("nodes", json!(cluster.node_count()));
        add("requests", json!(self.requests));
        add("requests_refused", json!(self.refused));
        add("sessions", json!(self.sessions));
        add("end_ms", json!(round(self.end_ms)));
        add("ttft_ms", self.ttft.json());
        if !self.ttft_by_kind.is_empty() {
            let kinds = self.ttft_by_kind.iter().map(|(kind, times)| (kind.to_string(), times.json()));
            add("ttft_ms_by_type", Value::Object(kinds.collect()));
        }
        add("tpot_ms", self.tpot.json());
        add("step_ms", self.step.json());
        add("task_ms", self.task.json());
        add("requests_per_s", json!(round(self.requests as f64 / self.end_ms.max(1e-9) * 1e3)));
        add("input_tokens_per_s", json!(round(self.input_tokens as f64 / self.end_ms.max(1e-9) * 1e3)));
        add("output_tokens_per_s", json!(round(self.output_tokens as f64 / self.end_ms.max(1e-9) * 1e3)));
        add("hit_rate", json!(round(self.hit_rate())));
        add("hits", json!(self.hits));
        add("computed_part", json!(part(self.computed_tokens, self.input_tokens)));
        add("hbm_duplicate_factor", json!(part(self.distinct[0].1, self.distinct[0].0)));
        let with_disks = cluster.disk.filter(|disk| disk.gb > 0.0);
        let on_disks = with_disks.map(|_| part(self.distinct[1].1, self.distinct[1].0));
        add("disk_duplicate_factor", json!(on_disks));
        add("network_bytes", json!(self.network_bytes));
        add("owner_hit_rate", json!(part(self.to_owner, self.with_owner)));
        add("decode_interference", json!(round(self.interference_ms / self.decoding_ms.max(1e-9))));
        add("by_other_path", json!(part(self.by_other_path, self.cold_reads)));
        let per_day = self.disk_bytes_written as f64 / hours.max(1e-9) * 24.0;
        add("disk_bytes_written", json!(self.disk_bytes_written));
        add("cold_bytes_written", json!(self.cold_bytes_written));
        add("disk_bytes_per_day", json!(round(per_day)));
        let disks = cluster.disk.map_or(0.0, |disk| disk.gb * 1e9 * f64::from(cluster.node_count()));
        let writes_a_day = if disks > 0.0 { per_day / disks } else { 0.0 };
        add("disk_writes_per_day", json!(round(writes_a_day)));
        let years = cluster.disk.map(|disk| 5.0 * disk.dwpd / writes_a_day.max(1e-12));
        add("drive_life_years", json!(years.map(|years| round(years.min(100.0)))));
        let cost = cluster.cost_per_hour();
        add("cost_per_hour", json!(round(cost)));
        let million = self.output_tokens as f64 / 1e6;
        add("cost_per_million_output_tokens", json!(round(cost * hours / million.max(1e-9))));
        add("preemptions", json!(self.preemptions));
        add("swapped_bytes", json!(self.swapped_bytes));
        add("events", json!(self.events));
        add("open_requests_max", json!(self.open_max));
        map
    }
}
