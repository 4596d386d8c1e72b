//! Reads of which everything is here and at a peer: the own disk is limited as the peer is.
//!
//! Threads of the reader's store are put into a control group of their own, whose reads of the disk are limited. That needs root
//! and the controller `blkio` of cgroup version 1.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use kvarts_contract::buffers::BufMut;
use kvarts_terminal::Failure;
use kvarts_terminal::undo::Undo;

use super::Bench;
use super::stage::{Trio, chain_keys};
use crate::pairs::{Contestant, summary, take_turns};
use crate::report::Report;

const GROUPS: &str = "/sys/fs/cgroup/blkio";

/// A control group of some threads; they go back when it is dropped.
struct Throttle {
    _undo: Undo,
}

impl Throttle {
    /// Limits what these threads read from the disk of a directory.
    fn new(threads: &BTreeSet<String>, directory: &Path, bytes: u64) -> Result<Self, String> {
        let told = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
        let device = fs::metadata(directory).map_err(|error| told(directory, error))?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let group = Path::new(GROUPS).join(format!("kvarts-bench-{}", std::process::id()));
        let gone = group.clone();
        let make = || fs::create_dir(&group).map_err(|error| told(&group, error));
        let (undo, ()) = Undo::of(make, move || give_back(&gone))?;
        let throttle = Self { _undo: undo };
        let set = |name: &str, value: &str| {
            let path = group.join(name);
            fs::write(&path, value).map_err(|error| told(&path, error))
        };
        set("blkio.throttle.read_bps_device", &format!("{major}:{minor} {bytes}"))?;
        threads.iter().try_for_each(|thread| set("tasks", thread))?;
        Ok(throttle)
    }
}

fn give_back(group: &Path) {
    // What has ended meanwhile is in no group any more; a group that is not empty stays behind.
    for thread in fs::read_to_string(group.join("tasks")).unwrap_or_default().lines() {
        let _ = fs::write(Path::new(GROUPS).join("tasks"), thread);
    }
    let _ = fs::remove_dir(group);
}

fn threads() -> BTreeSet<String> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.map(|task| task.file_name().to_string_lossy().into_owned()).collect()
}

/// Own disk and peer, limited alike.
pub(super) fn measure(bench: &Bench<'_>, directory: &Path, report: &mut Report) -> Result<(), Failure> {
    let (runtime, rate) = (&bench.runtime, (bench.arguments.rate << 20) / 2);
    let a = bench.home(&directory.join("a"))?;
    let before = threads();
    let b = bench.home(&directory.join("b"))?;
    let own: BTreeSet<String> = threads().difference(&before).cloned().collect();
    let pair = bench.join(vec![a, b], &[Some(rate), None])?;
    let count = bench.count(&pair);
    let bytes = count * pair.model.shape.block_bytes();
    let [on_a, on_b, on_both] = [1, 2, 3].map(|chain| chain_keys(chain, count));
    pair.put(runtime, 0, &on_a)?;
    pair.put(runtime, 1, &on_b)?;
    [0, 1].iter().try_for_each(|node| pair.put(runtime, *node, &on_both))?;
    pair.until_known(runtime, &on_a, 1)?;
    pair.until_known(runtime, &on_b, 1)?;
    pair.until_known(runtime, &on_both, 2)?;
    // What is not on the disk yet is not read from there.
    runtime.block_on(pair.homes[1].store().checkpoint()).map_err(Failure::user)?;
    let _throttle = match Throttle::new(&own, directory, rate) {
        Ok(throttle) => throttle,
        Err(why) => {
            report.fact("own", "SKIPPED");
            report.note(format!(
                "own disk and a peer: SKIPPED, because the rate of the own disk cannot be limited: {why}"
            ));
            return Ok(());
        }
    };
    let memory = BufMut::zeroed(bytes as usize).map_err(Failure::user)?.share();
    let contestant = |name, keys| -> Contestant<'_> {
        let (memory, pair): (_, &Trio) = (memory.clone(), &pair);
        (name, Box::new(move || pair.read(keys, &memory)))
    };
    let contestants = vec![contestant("own", &on_b), contestant("peer", &on_a), contestant("both", &on_both)];
    let rounds = take_turns(bench.arguments.common.pairs, contestants)?;
    let triples = || rounds.of("own").iter().zip(rounds.of("peer")).zip(rounds.of("both"));
    let ratio = triples().map(|((own, peer), both)| own.seconds.min(peer.seconds) / both.seconds);
    report.median("dual_ratio", summary(ratio.collect()));
    let first = triples().map(|((own, peer), both)| both.first / own.first.min(peer.first));
    report.median("dual_first_layer_ratio", summary(first.collect()));
    report.median("dual_first_layer_ms", rounds.figure("both", |both| both.first * 1e3));
    let mib = bytes as f64 / f64::from(1 << 20);
    report.median("own_alone_mib_s", rounds.figure("own", |own| mib / own.seconds));
    report.median("peer_alone_mib_s", rounds.figure("peer", |peer| mib / peer.seconds));
    Ok(())
}
