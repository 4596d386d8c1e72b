//! Own reads while blocks are spilled or restored, beside the same reads alone. Quiet and loud phases take turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvarts_cold::restore::FetchOptions;
use kvarts_contract::api::{KvStore, Placed, ReadRequest};
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::BlockKey;
use kvarts_server::cold::ColdTier;
use kvarts_terminal::Failure;

use super::ColdArgs;
use super::restores::{BELOW, forget, restored};
use super::stage::{Stage, config};
use crate::pairs::{LEAST_ROUNDS, Summary, summary};
use crate::report::Report;
use crate::setup::{self, key, mix};

const MIB: f64 = (1u64 << 20) as f64;
/// The series of keys of what own reads want beside a spill, and beside restores.
const OWN: [u64; 2] = [12, 13];
/// The same of what is spilled.
const SPILLED: u64 = 14;
/// Bytes of the blocks that own reads want, and of those that are spilled beside them: each sweep copies both.
const OWN_BYTES: u64 = 64 << 20;
const SPILLED_BYTES: u64 = 128 << 20;
/// How long a phase's work goes on before its reads begin.
const RUN_UP: Duration = Duration::from_millis(50);

/// What own reads want.
pub(super) struct Reader<'a> {
    stage: &'a Stage,
    series: u64,
    blocks: u64,
    into: SharedBuf,
}

impl<'a> Reader<'a> {
    pub(super) fn new(stage: &'a Stage, series: u64, most: u64) -> Result<Self, Failure> {
        let block_bytes = stage.own.shape.block_bytes();
        let blocks = (OWN_BYTES.min(most) / block_bytes).max(4);
        let keys: Vec<BlockKey> = (0..blocks).map(|block| key(series, block)).collect();
        stage.own.fill(stage.store(), &keys, 4, None)?;
        Ok(Self { stage, series, blocks, into: setup::memory(block_bytes as usize)? })
    }

    /// The 99th percentile of this number of reads of one block each, in seconds.
    fn p99(&self, reads: u32, state: &mut u64) -> Result<f64, Failure> {
        let mut seconds = Vec::new();
        let subject = &self.stage.own;
        for _ in 0..reads {
            let keys = vec![key(self.series, mix(state) % self.blocks)];
            let into = Placed::blocks(&subject.shape, self.into.clone(), 1).map_err(Failure::user)?;
            let request = ReadRequest::new(subject.namespace, subject.group, subject.coordinate, keys, into);
            let begun = Instant::now();
            let end = self.stage.store().read(request).map_err(Failure::user)?.wait_end();
            seconds.push(begun.elapsed().as_secs_f64());
            if end.map_err(Failure::user)?.usable_blocks != 1 {
                return Err(Failure::user(
                    "a read of the node's own store did not return the requested block",
                ));
            }
        }
        seconds.sort_by(f64::total_cmp);
        let at = (seconds.len() * 99 / 100).min(seconds.len().saturating_sub(1));
        Ok(seconds.get(at).copied().unwrap_or(f64::NAN))
    }
}

/// What loud phases do, again and again: gives the bytes of one turn.
pub(super) type Work<'a> = dyn Fn() -> Result<u64, Failure> + Sync + 'a;

/// Quiet and loud phases in turns.
pub(super) fn phases(reader: &Reader<'_>, arguments: &ColdArgs, work: &Work<'_>) -> Result<Phases, Failure> {
    let (mut quiet, mut loud, mut state) = (Vec::new(), Vec::new(), 5);
    let (bytes, mut seconds) = (AtomicU64::new(0), 0.0);
    reader.p99(arguments.reads, &mut state)?;
    let (began, pairs) = (Instant::now(), arguments.common.pairs);
    for pair in 0..pairs {
        if pair >= LEAST_ROUNDS && began.elapsed() >= arguments.time() {
            break;
        }
        setup::progress(&format!("phase {} of {pairs}", pair + 1));
        quiet.push(reader.p99(arguments.reads, &mut state)?);
        let is_over = AtomicBool::new(false);
        let begun = Instant::now();
        let p99 = std::thread::scope(|threads| {
            let working = threads.spawn(|| -> Result<(), Failure> {
                while !is_over.load(Ordering::Acquire) {
                    bytes.fetch_add(work()?, Ordering::Relaxed);
                }
                Ok(())
            });
            std::thread::sleep(RUN_UP);
            let p99 = reader.p99(arguments.reads, &mut state);
            is_over.store(true, Ordering::Release);
            let worked = working.join().map_err(|_| Failure::user("a thread of the benchmark panicked"))?;
            worked.and(p99)
        })?;
        seconds += begun.elapsed().as_secs_f64();
        loud.push(p99);
    }
    setup::progress("");
    let ratios = quiet.iter().zip(&loud).map(|(quiet, loud)| loud / quiet).collect();
    // Each quiet phase by the one before it: what nothing but time makes of the figure.
    let control = quiet.windows(2).map(|pair| pair[1] / pair[0]).collect();
    let of = |values: Vec<f64>| summary(values.into_iter().map(|one| one * 1e3).collect());
    Ok(Phases {
        ratio: summary(ratios),
        control: summary(control),
        alone_ms: of(quiet),
        beside_ms: of(loud),
        rate: bytes.load(Ordering::Relaxed) as f64 / seconds,
    })
}

/// What phases came to.
pub(super) struct Phases {
    pub(super) ratio: Summary,
    control: Summary,
    alone_ms: Summary,
    beside_ms: Summary,
    /// Bytes a second of the work.
    rate: f64,
}

impl Phases {
    pub(super) fn tell(&self, report: &mut Report, name: &str) {
        report.median(&format!("{name}_p99_ratio"), self.ratio);
        report.median(&format!("{name}_p99_control"), self.control);
        report.median(&format!("{name}_p99_ms_alone"), self.alone_ms);
        report.median(&format!("{name}_p99_ms"), self.beside_ms);
    }

    fn tell_with_rate(&self, report: &mut Report, name: &str) {
        self.tell(report, name);
        report.number(&format!("{name}_mib_s"), self.rate / MIB);
    }
}

/// Own reads while sweeps copy blocks into the bucket, each sweep into an empty one.
pub(super) fn spill(stage: &Stage, arguments: &ColdArgs, report: &mut Report) -> Result<(), Failure> {
    let most = (arguments.mib << 20).min(SPILLED_BYTES);
    let reader = Reader::new(stage, OWN[0], most)?;
    let blocks = (most / stage.subject.shape.block_bytes()).max(4);
    let keys: Vec<BlockKey> = (0..blocks).map(|block| key(SPILLED, block)).collect();
    stage.subject.fill(stage.store(), &keys, 4, None)?;
    let sweeps = AtomicU64::new(0);
    let rate = arguments.spill_rate();
    report.fact("spill_rate_mib", arguments.spill_mib);
    let work = || {
        let number = sweeps.fetch_add(1, Ordering::Relaxed);
        let below = format!("spill-{number}");
        let bucket = stage.bucket(&below)?;
        let spilled = stage.runtime.block_on(async {
            let cold = ColdTier::over(bucket, &config(rate), stage.store(), None, number);
            let cold: Arc<ColdTier> = cold.map_err(Failure::User)?;
            let swept = cold.sweep().await.map_err(Failure::user);
            let counted = cold.counted();
            cold.stop().await;
            swept?;
            let spilled = counted.counts.iter().find(|(name, ..)| *name == "spilled_bytes");
            match spilled.map_or(0, |(_, _, bytes)| *bytes) {
                0 => Err(Failure::user("the cold tier found no block to upload: raise --mib")),
                bytes => Ok(bytes),
            }
        })?;
        stage.clean(&below)?;
        Ok(spilled)
    };
    phases(&reader, arguments, &work)?.tell_with_rate(report, "spill");
    report.fact("sweeps", sweeps.into_inner());
    Ok(())
}

/// Own reads while blocks are restored again and again.
pub(super) fn restore(stage: &Stage, arguments: &ColdArgs, report: &mut Report) -> Result<(), Failure> {
    let reader = Reader::new(stage, OWN[1], arguments.mib << 20)?;
    let keys = stage.keys(arguments.mib.min(64));
    let tier = stage.tier(stage.bucket(BELOW)?);
    stage.clean(BELOW)?;
    stage.push(&tier, &keys)?;
    let options = FetchOptions::default();
    let work = || {
        restored(stage, &tier, &keys, &options)?;
        forget(stage, &keys)?;
        Ok(keys.len() as u64 * stage.subject.shape.block_bytes())
    };
    phases(&reader, arguments, &work)?.tell_with_rate(report, "restoring");
    stage.clean(BELOW)
}
