//! A path that collapses in the middle of a read, and what a node's own reads lose while it serves another one.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvarts_contract::api::{Origins, Placed, ReadRequest};
use kvarts_contract::buffers::{BufMut, SharedBuf};
use kvarts_contract::class::Class;
use kvarts_layout::BlockKey;
use kvarts_terminal::Failure;

use super::stage::{Model, Trio, chain_keys};
use super::{Bench, PAUSE};
use crate::pairs::{Contestant, Sample, take_turns};
use crate::report::Report;

/// Reads of one block in one run of those that are to be fast.
const READS: usize = 400;

/// All of it.
pub(super) fn measure(bench: &Bench<'_>, directory: &Path, report: &mut Report) -> Result<(), Failure> {
    let (runtime, rate) = (&bench.runtime, (bench.arguments.rate << 20) / 2);
    let trio = bench.trio(directory, [rate, rate])?;
    let count = bench.count(&trio);
    let [on_a, on_both] = [1, 3].map(|chain| chain_keys(chain, count));
    trio.put(runtime, 0, &on_a)?;
    [0, 1].iter().try_for_each(|node| trio.put(runtime, *node, &on_both))?;
    trio.until_known(runtime, &on_a, 1)?;
    trio.until_known(runtime, &on_both, 2)?;
    let bytes = (count * trio.model.shape.block_bytes()) as usize;
    let memory = BufMut::zeroed(bytes).map_err(Failure::user)?.share();
    collapse(bench, &trio, (&on_a, &on_both), &memory, report)?;
    serving(bench, &trio, (&on_a, &on_both), &memory, report)
}

/// One of two paths brings a tenth from the middle of the read on.
fn collapse(
    bench: &Bench<'_>,
    trio: &Trio,
    (on_a, on_both): (&[BlockKey], &[BlockKey]),
    memory: &SharedBuf,
    report: &mut Report,
) -> Result<(), Failure> {
    let rate = (bench.arguments.rate << 20) / 2;
    let middle = trio.model.shape.layers().len() as u32 / 2;
    let alone: Contestant<'_> = ("alone", Box::new(|| trio.read(on_a, memory)));
    let collapsing: Contestant<'_> = (
        "collapsing",
        Box::new(|| {
            std::thread::sleep(PAUSE);
            let mut changed = Ok(());
            let sample = trio.reads().read_with(on_both, memory, |layer| {
                if layer == middle {
                    changed = bench.limits.change(1, &trio.nodes[1], rate / 10);
                }
            });
            let changed = changed.and_then(|()| bench.limits.change(1, &trio.nodes[1], rate));
            changed.map_err(Failure::User)?;
            sample
        }),
    );
    let rounds = take_turns(bench.arguments.common.pairs, vec![alone, collapsing])?;
    let ratio = rounds.paired("collapsing", "alone", |both, alone| both.seconds / alone.seconds);
    report.median("collapse_ratio", ratio);
    Ok(())
}

/// The node that serves reads blocks of its own meanwhile, one at a time.
fn serving(
    bench: &Bench<'_>,
    trio: &Trio,
    (on_a, own): (&[BlockKey], &[BlockKey]),
    memory: &SharedBuf,
    report: &mut Report,
) -> Result<(), Failure> {
    let place = BufMut::zeroed(trio.model.shape.block_bytes() as usize).map_err(Failure::user)?.share();
    let serves = AtomicBool::new(false);
    let ends = AtomicBool::new(false);
    let of_this_one = trio.reads();
    let (samples, served) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                if serves.load(Ordering::Relaxed) {
                    of_this_one.read_with(on_a, memory, |_| {})?;
                } else {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Ok::<(), Failure>(())
        });
        let run = |beside: bool| {
            serves.store(beside, Ordering::Relaxed);
            std::thread::sleep(PAUSE);
            foreground(trio, own, &place)
        };
        let contestants: Vec<Contestant<'_>> =
            vec![("alone", Box::new(|| run(false))), ("beside", Box::new(|| run(true)))];
        let rounds = take_turns(bench.arguments.common.pairs, contestants);
        ends.store(true, Ordering::Relaxed);
        (rounds, reader.join())
    });
    served.map_err(|_| Failure::user("the concurrent reader panicked"))??;
    let rounds = samples?;
    let ratio = rounds.paired("beside", "alone", |beside, alone| beside.seconds / alone.seconds);
    report.median("own_p99_ratio", ratio);
    report.median("own_p99_alone_ms", rounds.figure("alone", |alone| alone.seconds * 1e3));
    report.median("own_p99_beside_ms", rounds.figure("beside", |beside| beside.seconds * 1e3));
    Ok(())
}

/// The 99th percentile of reads of one block from the store of the first node.
fn foreground(trio: &Trio, keys: &[BlockKey], place: &SharedBuf) -> Result<Sample, Failure> {
    let Model { namespace, group, coordinate, .. } = trio.model;
    let mut seconds = Vec::with_capacity(READS);
    for n in 0..READS {
        let into = Placed::blocks(&trio.model.shape, place.clone(), 1).map_err(Failure::user)?;
        let key = keys[n * 7919 % keys.len()];
        let mut request = ReadRequest::new(namespace, group, coordinate, vec![key], into);
        request.class = Class::Foreground;
        let begun = Instant::now();
        let stream = trio.homes[0].store().read_part(request, &Origins::any(1), 0).map_err(Failure::user)?;
        let end = stream.wait_blocking();
        if end.usable_blocks != 1 {
            return Err(Failure::User(format!("a block was not read: {end:?}")));
        }
        seconds.push(begun.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(Sample { seconds: seconds[READS * 99 / 100], ..Sample::default() })
}
