//! Recordings of a real engine's scheduler (`scripts/sim-record`), and the same requests in the simulator: whether it decides
//! the same, step by step, and how far off its times are.

#![allow(clippy::indexing_slicing, reason = "the tables have seven rows and seven columns")]

use std::collections::VecDeque;
use std::io::{BufRead, Read};

use serde::Deserialize;

use crate::cluster::work::{Arrival, Work};
use crate::cluster::{Batch, Cluster, Counted, EngineTimes, Measured, RunError, Simulation, SpecError, Step};
use crate::trace::{BLOCKS_MAX, LINE_BYTES_MAX, TOKENS_MAX, TraceError, tokens_are_few};

/// A recording has no more lines.
pub const LINES_MAX: u64 = 1 << 20;

/// An engine's limits, as a recording's first line has them.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct Limits {
    /// Its name and version.
    pub engine: String,
    /// What the requests were like: a name of the recorder's.
    #[serde(default)]
    pub workload: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Blocks of memory.
    pub blocks: u64,
    /// Sequences at once.
    pub batch_max: u32,
    /// Tokens of a step.
    pub chunk_tokens: u32,
    /// Whether prompts find what others computed.
    pub prefix_caching: bool,
    /// Whether what has left memory is read from a store's disk, in the step that lets a request in.
    #[serde(default)]
    pub disk: bool,
    /// Whether requests came by a clock, whatever the engine did by then, and not before numbered steps.
    #[serde(default)]
    pub by_clock: bool,
    /// When the last answer was there, if it was noted: otherwise the sum of the steps.
    #[serde(default)]
    pub end_ms: Option<f64>,
    /// Mean time to the first token of each turn, of which the recording says one or the median.
    #[serde(default)]
    pub ttft_ms_of_each: Vec<f64>,
    /// The machine's load when it was recorded.
    #[serde(default)]
    pub load: f64,
}

/// A request, as it was recorded.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// The step before which it came.
    pub step: u64,
    /// When.
    pub at_ms: f64,
    /// Tokens of the prompt.
    pub input_length: u64,
    /// Tokens of the answer.
    pub output_length: u64,
    /// Its full blocks, the answer's too.
    pub hash_ids: Vec<u64>,
    /// When its first token was there.
    pub first_token_ms: f64,
}

/// A step, as it was recorded.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decided {
    /// How long it took: the median of several runs.
    pub ms: f64,
    /// Requests, each with its tokens, in the order in which they were chosen.
    pub batch: Vec<(u64, u64)>,
    /// Requests that were stopped for want of memory.
    pub preempted: Vec<u64>,
    /// Requests that were let in with state that was there already: each with its tokens, and how many of them were read from
    /// disk.
    #[serde(default)]
    pub found: Vec<(u64, u64, u64)>,
}

/// An engine's times, from the steps of one recording.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Calibration {
    /// What a step takes without its reads of the disk.
    pub measured: Measured,
    /// What they take, if the recording has any.
    pub reads: Option<Reads>,
    /// How far off the recording's own steps it is, on average: a part of each.
    pub error: f64,
}

/// What a step's reads of the disk take.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Reads {
    /// All of them, however much they read.
    pub ms: f64,
    /// Each token of a prompt that is read.
    pub token_us: f64,
}

/// What a step's time is made of: itself, tokens, sequences, pairs, whether it computes prompts, whether anything is read, tokens that
/// are read.
const TERMS: usize = 7;
/// How often steps are weighed anew: weights are the same to a thousandth by then.
const ROUNDS: usize = 8;
/// Bytes of a block: what is read is measured in tokens, so any number does.
const BLOCK_BYTES: u64 = 1 << 20;
/// The disk holds whatever is written: 1e9 bytes, and as many of them a second as a cluster's file may have at most.
const DISK_GB: f64 = 1e8;
const DISK_GB_PER_S_MAX: f64 = 1e4;

/// A whole recording.
#[derive(Clone, PartialEq, Debug)]
pub struct Recording {
    /// Its first line.
    pub limits: Limits,
    /// Requests in the order of arrival.
    pub asked: Vec<Asked>,
    /// Steps.
    pub decided: Vec<Decided>,
}

impl Recording {
    /// Reads one; a fault names its line.
    pub fn read(mut from: impl BufRead) -> Result<Self, TraceError> {
        let (mut line, mut bytes) = (0, Vec::new());
        let (mut limits, mut asked, mut decided) = (None, Vec::<Asked>::new(), Vec::new());
        loop {
            bytes.clear();
            line += 1;
            let fault = |what: String| TraceError { line, what };
            let read = from.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes);
            if read.map_err(|error| fault(error.to_string()))? == 0 {
                break;
            }
            if line > LINES_MAX {
                return Err(fault(format!("the recording has more than {LINES_MAX} lines")));
            }
            let wrong = |error: serde_json::Error| fault(error.to_string());
            if limits.is_none() {
                limits = Some(serde_json::from_slice::<Limits>(&bytes).map_err(wrong)?);
            } else if bytes.starts_with(b"{\"step\"") {
                let one: Asked = serde_json::from_slice(&bytes).map_err(wrong)?;
                let before = asked.last().map_or(0, |last| last.step);
                if one.step < before || one.hash_ids.len() > BLOCKS_MAX || !decided.is_empty() {
                    return Err(fault(
                        "the recording must list all requests before all steps, and must sort the \
                        requests by step"
                            .into(),
                    ));
                }
                if !tokens_are_few(one.input_length, one.output_length) {
                    return Err(fault(format!("a request has more than {TOKENS_MAX} tokens")));
                }
                asked.push(one);
            } else {
                let one: Decided = serde_json::from_slice(&bytes).map_err(wrong)?;
                let found = one.found.iter().flat_map(|(_, there, read)| [*there, *read]);
                if one.batch.iter().map(|(_, tokens)| *tokens).chain(found).any(|tokens| tokens > TOKENS_MAX)
                {
                    return Err(fault(format!("a step has more than {TOKENS_MAX} tokens of a request")));
                }
                decided.push(one);
            }
        }
        let limits = limits.ok_or(TraceError { line: 1, what: "the recording is empty".into() })?;
        let steps = decided.len() as u64;
        if asked.is_empty() || decided.is_empty() || asked.iter().any(|one| one.step >= steps) {
            return Err(TraceError {
                line: 0,
                what: "the recording has no requests or no steps, or a request arrives after the last step"
                    .into(),
            });
        }
        Ok(Self { limits, asked, decided })
    }

    /// An engine with these limits, whose steps take these times.
    pub fn cluster(&self, times: &Calibration) -> Result<Cluster, RunError> {
        let Limits { block_tokens, blocks, batch_max, chunk_tokens, disk, .. } = self.limits;
        let measured = times.measured;
        let gb = (blocks as f64 + 0.5) * measured.block_bytes as f64 / 1e9;
        let mut text = format!(
            "model = \"recorded\"\nblock_tokens = {block_tokens}\nrouter = \"round_robin\"\n[nodes]\nmixed = 1\n\
             device = \"recorded\"\ndevices = 1\n[hbm]\ngb = {gb}\n[engine]\nbatch_max = {batch_max}\n\
             chunk_tokens = {chunk_tokens}\n"
        );
        if disk {
            let reads = times.reads.ok_or_else(|| {
                RunError::Spec(SpecError(
                    "the engine of the recording reads from disk, but the engine of the calibration does \
                    not: calibrate with a recording with `disk`"
                        .into(),
                ))
            })?;
            let ms_a_block = reads.token_us / 1e3 * f64::from(block_tokens);
            let rate = (measured.block_bytes as f64 / ms_a_block / 1e6).min(DISK_GB_PER_S_MAX);
            text += &format!(
                "prefetch = \"blocking\"\nplans = false\n[disk]\ngb = {DISK_GB}\ngb_per_s = {rate}\n\
                 write_gb_per_s = {DISK_GB_PER_S_MAX}\nlatency_ms = {}\n",
                reads.ms
            );
        }
        let mut cluster: Cluster = Cluster::unchecked(&text).map_err(RunError::Spec)?;
        cluster.measured = Some(measured);
        cluster.facts().map_err(RunError::Spec)?;
        Ok(cluster)
    }

    fn run(&self, cluster: &Cluster) -> Result<Counted, RunError> {
        let arrivals = self.asked.iter().map(|one| Arrival {
            at_ms: one.at_ms,
            input_tokens: one.input_length,
            output_tokens: one.output_length,
            // Without a prefix cache no block has a name.
            blocks: if self.limits.prefix_caching { one.hash_ids.clone() } else { Vec::new() },
            session: None,
            kind: None,
        });
        let steps = self.asked.iter().map(|one| if self.limits.by_clock { u64::MAX } else { one.step });
        let work = Again { coming: steps.zip(arrivals).collect() };
        let counted = Simulation::new(cluster, work, 1)?.recording().run(|_, _| ())?;
        if counted.requests < self.asked.len() as u64 {
            return Err(RunError::Trace(TraceError {
                line: 0,
                what: format!(
                    "the simulated engine became idle before all requests had arrived: {} of {} requests \
                    ended",
                    counted.requests,
                    self.asked.len()
                ),
            }));
        }
        Ok(counted)
    }

    /// What the simulator decides for the same requests before the same steps.
    pub fn replay(&self) -> Result<Vec<Batch>, RunError> {
        // Where tokens cost nothing, no plan loads any.
        let one = Measured { step_ms: 1.0, token_us: 1.0, ..ZERO };
        let times = Calibration { measured: one, reads: Some(Reads { ms: 0.0, token_us: 0.0 }), error: 0.0 };
        Ok(self.run(&self.cluster(&times)?)?.schedule.unwrap_or_default())
    }

    /// The first step that the simulator decides otherwise, in words; `None` if all are the same.
    pub fn difference(&self) -> Result<Option<String>, RunError> {
        let said = self.replay()?;
        for (at, recorded) in self.decided.iter().enumerate() {
            let batch = said.get(at).cloned().unwrap_or_default();
            let mut stopped = batch.stopped.clone();
            stopped.sort_unstable();
            if batch.tokens != recorded.batch || stopped != recorded.preempted {
                return Ok(Some(format!(
                    "step {at} of {}: the recording has the tokens {:?} and stops the requests {:?}; the \
                    simulator has the tokens {:?} and stops the requests {stopped:?}",
                    self.decided.len(),
                    recorded.batch,
                    recorded.preempted,
                    batch.tokens
                )));
            }
        }
        let more = said.len() > self.decided.len();
        Ok(more.then(|| {
            format!("the simulator continues after step {}, the last recorded step", self.decided.len())
        }))
    }

    /// A step's time as a sum (see [`Measured`]), by least squares over the recorded steps; no part of it is negative.
    pub fn calibrate(&self) -> Calibration {
        let rows = self.steps();
        let said = |found: &[f64; TERMS], terms: &[f64; TERMS]| {
            found.iter().zip(terms).map(|(each, count)| each * count).sum::<f64>()
        };
        // A step twice as long may be twice as far off. How long it is says the sum itself: a recorded time would weigh steps that
        // were short by chance most, and the whole would come out too short.
        let mut weights: Vec<f64> = rows.iter().map(|(_, ms)| 1.0 / (ms * ms).max(1e-9)).collect();
        let mut found = none_negative(&rows, &weights);
        for _ in 0..ROUNDS {
            weights.clear();
            weights.extend(rows.iter().map(|(terms, _)| said(&found, terms).powi(2).max(1e-9).recip()));
            found = none_negative(&rows, &weights);
        }
        let error =
            rows.iter().map(|(terms, ms)| (said(&found, terms) / ms.max(1e-9) - 1.0).abs()).sum::<f64>();
        let [step_ms, token, sequence, pair, prefill_ms, reads, read_token] = found;
        let (token_us, sequence_us, pair_ns) = (token * 1e3, sequence * 1e3, pair * 1e6);
        let any_read = rows.iter().any(|(terms, _)| terms[READS] > 0.0);
        Calibration {
            measured: Measured { step_ms, token_us, sequence_us, pair_ns, prefill_ms, ..ZERO },
            reads: any_read.then_some(Reads { ms: reads, token_us: read_token * 1e3 }),
            error: error / rows.len() as f64,
        }
    }

    /// What each recorded step did, and its time.
    fn steps(&self) -> Vec<([f64; TERMS], f64)> {
        let times = EngineTimes::Measured(ZERO);
        let mut at: Vec<u64> = vec![0; self.asked.len()];
        let mut rows = Vec::new();
        for step in &self.decided {
            let (mut sum, mut read) = (Step::default(), 0);
            for number in &step.preempted {
                at.get_mut(*number as usize).into_iter().for_each(|at| *at = 0);
            }
            for (number, there, from_disk) in &step.found {
                at.get_mut(*number as usize).into_iter().for_each(|at| *at = *there);
                read += from_disk;
            }
            for (number, tokens) in &step.batch {
                let Some((from, asked)) = at.get_mut(*number as usize).zip(self.asked.get(*number as usize))
                else {
                    continue;
                };
                match *from < asked.input_length || *tokens > 1 {
                    true => times.prefill(&mut sum, *from, *tokens),
                    false => times.decode(&mut sum, 1, *from),
                }
                *from += tokens;
            }
            let [step_itself, tokens, sequences, pairs, prefills] = sum.terms();
            let reads = if read > 0 { 1.0 } else { 0.0 };
            rows.push(([step_itself, tokens, sequences, pairs, prefills, reads, read as f64], step.ms));
        }
        rows
    }

    /// How the simulator says this recording by an engine's times from another one.
    pub fn told_by(&self, times: &Calibration) -> Result<Told, RunError> {
        let counted = self.run(&self.cluster(times)?)?;
        let mean = |sum: f64| sum / self.asked.len() as f64;
        let ttft = mean(self.asked.iter().map(|one| one.first_token_ms - one.at_ms).sum());
        let end = self.limits.end_ms.unwrap_or_else(|| self.decided.iter().map(|step| step.ms).sum());
        let output: u64 = self.asked.iter().map(|one| one.output_length).sum();
        let per_s = |ms: f64| output as f64 / ms.max(1e-9) * 1e3;
        let from_disk: u64 = self.decided.iter().flat_map(|step| &step.found).map(|(.., read)| read).sum();
        Ok(Told {
            ttft_ms: [ttft, counted.ttft.mean()],
            output_tokens_per_s: [per_s(end), per_s(counted.end_ms)],
            tokens_from_disk: [from_disk, counted.hits.disk * u64::from(self.limits.block_tokens)],
        })
    }
}

/// A recording's requests once more: by the step before which each came, or by the clock.
struct Again {
    coming: VecDeque<(u64, Arrival)>,
}

impl Work for Again {
    fn next(&mut self) -> Result<Option<Arrival>, TraceError> {
        let by_clock = self.coming.front().is_some_and(|(step, _)| *step == u64::MAX);
        Ok(self.coming.pop_front_if(|_| by_clock).map(|(_, arrival)| arrival))
    }

    fn ended(&mut self, _: u32, _: f64) -> Option<Arrival> {
        None
    }

    fn before_step(&mut self, step: u64, now_ms: f64) -> Option<Arrival> {
        let (_, arrival) = self.coming.pop_front_if(|(before, _)| *before <= step)?;
        Some(Arrival { at_ms: now_ms, ..arrival })
    }
}

/// Steps that take no time.
const ZERO: Measured = Measured {
    block_bytes: BLOCK_BYTES,
    layers: 1,
    step_ms: 0.0,
    token_us: 0.0,
    sequence_us: 0.0,
    pair_ns: 0.0,
    prefill_ms: 0.0,
};

/// What was measured, and what the simulator says.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Told {
    /// Mean time to the first token.
    pub ttft_ms: [f64; 2],
    /// Tokens of answers a second.
    pub output_tokens_per_s: [f64; 2],
    /// Tokens of prompts that were read from disk.
    pub tokens_from_disk: [u64; 2],
}

impl Told {
    /// The errors, as parts of what was measured.
    pub fn errors(&self) -> [f64; 2] {
        [self.ttft_ms, self.output_tokens_per_s].map(|[measured, said]| (said / measured - 1.0).abs())
    }
}

/// The place of `whether anything is read` in a row.
const READS: usize = 5;

/// Least squares; a term that no step has is left out, so is one that would be negative, and the rest is fitted again.
fn none_negative(rows: &[([f64; TERMS], f64)], weights: &[f64]) -> [f64; TERMS] {
    let mut used: [bool; TERMS] = std::array::from_fn(|at| rows.iter().any(|(terms, _)| terms[at] > 0.0));
    let mut found = loop {
        let found = least_squares(rows, weights, used);
        let worst = (1..TERMS)
            .filter(|at| used[*at] && found[*at] < 0.0)
            .min_by(|a, b| found[*a].total_cmp(&found[*b]));
        match worst {
            Some(at) => used[at] = false,
            None => break found,
        }
    };
    found[0] = found[0].max(1e-6);
    found
}

/// The coefficients that are used, by the normal equations.
fn least_squares(rows: &[([f64; TERMS], f64)], weights: &[f64], used: [bool; TERMS]) -> [f64; TERMS] {
    let mut sums = [[0.0f64; TERMS + 1]; TERMS];
    for ((terms, ms), weight) in rows.iter().zip(weights) {
        for (row, one) in sums.iter_mut().zip(terms) {
            for (sum, other) in row.iter_mut().zip(terms.iter().chain([ms])) {
                *sum += weight * one * other;
            }
        }
    }
    for at in 0..TERMS {
        if !used[at] {
            sums.iter_mut().for_each(|row| row[at] = 0.0);
            sums[at] = [0.0; TERMS + 1];
            sums[at][at] = 1.0;
        }
    }
    // What is left of a term that others say already is a rounding error.
    let least: [f64; TERMS] = std::array::from_fn(|at| 1e-10 * sums[at][at]);
    for at in 0..TERMS {
        let Some(best) = (at..TERMS).max_by(|a, b| sums[*a][at].abs().total_cmp(&sums[*b][at].abs())) else {
            break;
        };
        sums.swap(at, best);
        let pivot = sums[at];
        if pivot[at].abs() <= least[at] {
            continue;
        }
        for (_, row) in sums.iter_mut().enumerate().filter(|(other, _)| *other != at) {
            let part = row[at] / pivot[at];
            row.iter_mut().zip(pivot).for_each(|(cell, pivot)| *cell -= part * pivot);
        }
    }
    std::array::from_fn(
        |at| if sums[at][at].abs() <= least[at] { 0.0 } else { sums[at][TERMS] / sums[at][at] },
    )
}
