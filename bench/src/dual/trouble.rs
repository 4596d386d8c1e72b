//! What goes wrong in the middle of a read, and what a node's own reads lose while it serves another one.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvarts_layout::BlockKey;
use kvarts_store::api::{Origins, Placed, ReadRequest};
use kvarts_store::io::{BufMut, SharedBuf};
use kvarts_store::rt::Class;
use kvarts_terminal::Failure;
use tokio::runtime::Runtime;

use super::{DualArgs, Trio, chain_keys, trio};
use crate::pairs::{Contestant, Sample, summary, take_turns};
use crate::report::Report;

/// Reads of one block in one run of those that are to be fast.
const READS: usize = 400;

/// All of it.
pub(super) fn measure(
    arguments: &DualArgs,
    runtime: &Runtime,
    directory: &Path,
    report: &mut Report,
) -> Result<(), Failure> {
    let rate = (arguments.rate << 20) / 2;
    let trio = runtime.block_on(trio(&arguments.common, directory, [rate, rate]))?;
    let count = trio.count(arguments);
    let [on_a, on_both] = [1, 3].map(|chain| chain_keys(chain, count));
    trio.put(runtime, 0, &on_a)?;
    trio.put(runtime, 0, &on_both)?;
    trio.copy(runtime, 1, &on_both)?;
    trio.until_known(runtime, &on_a, 1)?;
    let memory = BufMut::zeroed((count * trio.shape.block_bytes()) as usize).map_err(Failure::user)?.share();
    collapse(arguments, &trio, (&on_a, &on_both), &memory, report)?;
    serving(arguments, &trio, (&on_a, &on_both), &memory, report)?;
    failover(&trio, &on_both, &memory, report)
}

/// One of two paths brings a tenth from the middle of the read on.
fn collapse(
    arguments: &DualArgs,
    trio: &Trio,
    (on_a, on_both): (&[BlockKey], &[BlockKey]),
    memory: &SharedBuf,
    report: &mut Report,
) -> Result<(), Failure> {
    let rate = (arguments.rate << 20) / 2;
    let middle = trio.shape.layers().len() as u32 / 2;
    let alone: Contestant<'_> = ("alone", Box::new(|| trio.read(on_a, memory)));
    let collapsing: Contestant<'_> = (
        "collapsing",
        Box::new(|| {
            let sample = trio.read_with(on_both, memory, |layer| {
                if layer == middle {
                    trio.nodes[1].limit_serving(Some(rate / 10));
                }
            });
            trio.nodes[1].limit_serving(Some(rate));
            sample
        }),
    );
    let rounds = take_turns(arguments.common.pairs, vec![alone, collapsing])?;
    let ratio = rounds.paired("collapsing", "alone", |both, alone| both.seconds / alone.seconds);
    report.median("collapse_ratio", ratio);
    Ok(())
}

/// The node that serves reads blocks of its own meanwhile, one at a time.
fn serving(
    arguments: &DualArgs,
    trio: &Trio,
    (on_a, own): (&[BlockKey], &[BlockKey]),
    memory: &SharedBuf,
    report: &mut Report,
) -> Result<(), Failure> {
    let place = BufMut::zeroed(trio.shape.block_bytes() as usize).map_err(Failure::user)?.share();
    let serves = AtomicBool::new(false);
    let ends = AtomicBool::new(false);
    let of_this_one = trio.reads();
    let (samples, served) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                if serves.load(Ordering::Relaxed) {
                    of_this_one.read_with(on_a, memory, |_| {})?;
                } else {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            }
            Ok::<(), Failure>(())
        });
        let run = |beside: bool| {
            serves.store(beside, Ordering::Relaxed);
            std::thread::sleep(super::PAUSE * 2);
            foreground(trio, own, &place)
        };
        let contestants: Vec<Contestant<'_>> =
            vec![("alone", Box::new(|| run(false))), ("beside", Box::new(|| run(true)))];
        let rounds = take_turns(arguments.common.pairs, contestants);
        ends.store(true, Ordering::Relaxed);
        (rounds, reader.join())
    });
    served.map_err(|_| Failure::user("the reader beside ended"))??;
    let rounds = samples?;
    let ratio = rounds.paired("beside", "alone", |beside, alone| beside.seconds / alone.seconds);
    report.median("own_p99_ratio", ratio);
    report.median("own_p99_alone_ms", rounds.figure("alone", |alone| alone.seconds * 1e3));
    Ok(())
}

/// The 99th percentile of reads of one block from the store of the first node.
fn foreground(trio: &Trio, keys: &[BlockKey], place: &SharedBuf) -> Result<Sample, Failure> {
    let mut seconds = Vec::with_capacity(READS);
    for n in 0..READS {
        let into = Placed::blocks(&trio.shape, place.clone(), 1).map_err(Failure::user)?;
        let key = keys[n * 7919 % keys.len()];
        let mut request = ReadRequest::new(trio.namespace, trio.group, trio.coordinate, vec![key], into);
        request.class = Class::Foreground;
        let begun = Instant::now();
        let stream = trio.homes[0].store().read_part(request, &Origins::any(1), 0).map_err(Failure::user)?;
        let end = stream.wait_blocking();
        if end.usable_blocks != 1 {
            return Err(Failure::User(format!("a block did not come: {end:?}")));
        }
        seconds.push(begun.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(Sample { seconds: seconds[READS * 99 / 100], ..Sample::default() })
}

/// One of two nodes ends every connection in the middle of a read, as one does that is killed.
fn failover(
    trio: &Trio,
    on_both: &[BlockKey],
    memory: &SharedBuf,
    report: &mut Report,
) -> Result<(), Failure> {
    let middle = trio.shape.layers().len() as u32 / 2;
    let (mut last, mut longest) = (None::<Instant>, 0.0f64);
    trio.read_with(on_both, memory, |layer| {
        if layer == middle {
            trio.nodes[1].stop();
        }
        let now = Instant::now();
        if let Some(last) = last.replace(now).filter(|_| layer > middle) {
            longest = longest.max((now - last).as_secs_f64());
        }
    })?;
    report.number("failover_longest_pause_ms", longest * 1e3);
    let after = summary(vec![trio.read(on_both, memory)?.seconds]);
    report.number("after_failover_s", after.median);
    Ok(())
}
