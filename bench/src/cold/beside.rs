//! Own reads while blocks are spilled or restored, beside the same reads alone. Quiet and loud phases take turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvarts_cold::promote::restore_into;
use kvarts_cold::restore::FetchOptions;
use kvarts_contract::api::{KvStore, Placed, ReadRequest};
use kvarts_contract::buffers::SharedBuf;
use kvarts_layout::BlockKey;
use kvarts_server::cold::ColdTier;
use kvarts_terminal::Failure;

use super::ColdArgs;
use super::restores::{BELOW, forget, wanted};
use super::stage::{Stage, config};
use crate::pairs::{Summary, summary};
use crate::report::Report;
use crate::setup::{self, key, mix};

const MIB: f64 = (1u64 << 20) as f64;
/// The series of keys of what own reads want beside a spill, and beside restores.
const OWN: [u64; 2] = [12, 13];
/// The same of what is spilled.
const SPILLED: u64 = 14;
/// Bytes of the blocks that own reads want.
const OWN_BYTES: u64 = 256 << 20;
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
        let block_bytes = stage.subject.shape.block_bytes();
        let blocks = (OWN_BYTES.min(most) / block_bytes).max(4);
        let keys: Vec<BlockKey> = (0..blocks).map(|block| key(series, block)).collect();
        stage.subject.fill(stage.store(), &keys, 4, None)?;
        Ok(Self { stage, series, blocks, into: setup::memory(block_bytes as usize)? })
    }

    /// The 99th percentile of this number of reads of one block each, in seconds.
    fn p99(&self, reads: u32, state: &mut u64) -> Result<f64, Failure> {
        let mut seconds = Vec::new();
        let subject = &self.stage.subject;
        for _ in 0..reads {
            let keys = vec![key(self.series, mix(state) % self.blocks)];
            let into = Placed::blocks(&subject.shape, self.into.clone(), 1).map_err(Failure::user)?;
            let request = ReadRequest::new(subject.namespace, subject.group, subject.coordinate, keys, into);
            let begun = Instant::now();
            let end = self.stage.store().read(request).map_err(Failure::user)?.wait_end();
            seconds.push(begun.elapsed().as_secs_f64());
            if end.map_err(Failure::user)?.usable_blocks != 1 {
                return Err(Failure::user("a block of own reads did not come"));
            }
        }
        seconds.sort_by(f64::total_cmp);
        let at = (seconds.len() * 99 / 100).min(seconds.len().saturating_sub(1));
        Ok(seconds.get(at).copied().unwrap_or(f64::NAN))
    }
}

/// What loud phases do, again and again: gives the bytes of one turn.
pub(super) type Work<'a> = dyn Fn() -> Result<u64, Failure> + Sync + 'a;

/// Quiet and loud phases in turns: the ratio of each pair, and bytes a second of the work.
pub(super) fn phases(
    reader: &Reader<'_>,
    arguments: &ColdArgs,
    work: &Work<'_>,
) -> Result<([Summary; 3], f64), Failure> {
    let (mut quiet, mut loud, mut state) = (Vec::new(), Vec::new(), 5);
    let (bytes, mut seconds) = (AtomicU64::new(0), 0.0);
    reader.p99(arguments.reads, &mut state)?;
    for pair in 0..arguments.common.pairs {
        setup::progress(&format!("phase {} of {}", pair + 1, arguments.common.pairs));
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
            let worked = working.join().map_err(|_| Failure::user("a thread of the benchmark ended"))?;
            worked.and(p99)
        })?;
        seconds += begun.elapsed().as_secs_f64();
        loud.push(p99);
    }
    setup::progress("");
    let ratios = quiet.iter().zip(&loud).map(|(quiet, loud)| loud / quiet).collect();
    let of = |values: Vec<f64>| summary(values.into_iter().map(|one| one * 1e3).collect());
    Ok(([summary(ratios), of(quiet), of(loud)], bytes.load(Ordering::Relaxed) as f64 / seconds))
}

fn tell(report: &mut Report, name: &str, ([ratio, quiet, loud], rate): ([Summary; 3], f64)) {
    report.median(&format!("{name}_p99_ratio"), ratio);
    report.median(&format!("{name}_p99_ms_alone"), quiet);
    report.median(&format!("{name}_p99_ms"), loud);
    report.number(&format!("{name}_mib_s"), rate / MIB);
}

/// Own reads while sweeps copy blocks into the bucket, each sweep into an empty one.
pub(super) fn spill(stage: &Stage, arguments: &ColdArgs, report: &mut Report) -> Result<(), Failure> {
    let most = arguments.mib << 20;
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
                0 => Err(Failure::user("a sweep found nothing to copy: raise --mib")),
                bytes => Ok(bytes),
            }
        })?;
        stage.clean(&below)?;
        Ok(spilled)
    };
    tell(report, "spill", phases(&reader, arguments, &work)?);
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
        let restored =
            stage.wait(restore_into(&tier, stage.store(), &wanted(stage, &keys), &options))?.stored;
        forget(stage, &keys)?;
        Ok(restored * stage.subject.shape.block_bytes())
    };
    tell(report, "restoring", phases(&reader, arguments, &work)?);
    stage.clean(BELOW)
}
