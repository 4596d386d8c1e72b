//! Every bit of small whole stores flipped, one at a time: the engine opens what is left and reads every block, and the
//! checker looks at everything.
//!
//! A flip is one of three things: it is named by the checker with its place; or it lies where nothing that counts
//! lies, and nothing changes; or it is one of the listed bits that mean nothing. It is never another byte than was put,
//! and costs no more than the record that it lies in. Footers and trailers are repaired then, which costs nothing either.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

use kvarts_contract::error::Reason;
use kvarts_fsck::check::Checked;
use kvarts_fsck::findings::Finding;
use kvarts_layout::format::PAGE;

use super::pool::{States, until};
use super::repaired::repaired;
use super::stores::{Answers, Make, Name, Prepared, Zone, free_segments, look, prepared, zones};
use super::{Row, Tally};
use crate::sim::Seed;
use crate::sim::log::Mixer;

/// A step through bits that visits each once, for it is prime and larger than no store's number of bits.
const STRIDE: u64 = 1_000_003;

/// Ranges of bytes in files of a store, with what they are for.
struct Part {
    directory: usize,
    path: String,
    range: Range<usize>,
    zone: Zone,
    /// Where the record begins that the bytes belong to, if they belong to one.
    record: Option<usize>,
}

/// The bytes of a store: those that prove others, and the rest.
struct Map {
    vital: Vec<Part>,
    rest: Vec<Part>,
}

fn bits(parts: &[Part]) -> u64 {
    parts.iter().map(|part| part.range.len() as u64 * 8).sum()
}

fn map(store: &Prepared) -> Map {
    let mut map = Map { vital: Vec::new(), rest: Vec::new() };
    let free = free_segments(&store.disks);
    for (directory, path) in store.files() {
        let bytes = store.disks[directory].contents(&path).expect("it was listed");
        let mut record = None;
        for (range, zone) in zones(&path, &bytes) {
            let zone = if free.contains(&path) { Zone::Unused } else { zone };
            record = match zone {
                Zone::Header => Some(range.start),
                Zone::Payload | Zone::Padding => record,
                Zone::Tail => record.or(Some(range.start)),
                _ => None,
            };
            // Structures end in many zeros, and to a reader that verifies a tag they are all the same.
            let used = bytes[range.clone()].iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            let cut = match zone {
                Zone::Payload | Zone::Padding | Zone::Unused => range.start,
                _ => range.start + used,
            };
            let part = |range: Range<usize>| Part { directory, path: path.clone(), range, zone, record };
            if cut > range.start {
                map.vital.push(part(range.start..cut));
            }
            if cut < range.end {
                map.rest.push(part(cut..range.end));
            }
        }
    }
    map
}

fn map_of(make: Make) -> &'static Map {
    static ALL: [OnceLock<Map>; Make::ALL.len()] = [const { OnceLock::new() }; Make::ALL.len()];
    let at = Make::ALL.iter().position(|one| *one == make).expect("one of them");
    ALL[at].get_or_init(|| map(prepared(make)))
}

/// Bits of all stores together.
pub(super) fn all_bits() -> u64 {
    let both = |make: Make| bits(&map_of(make).vital) + bits(&map_of(make).rest);
    Make::ALL.into_iter().map(both).sum()
}

/// The `n`th bit of a store: those that prove others take turns with the rest until there are no more of them.
fn bit(map: &Map, n: u64) -> Option<(&Part, usize, u8)> {
    let (vital, rest) = (bits(&map.vital), bits(&map.rest));
    let turns = 2 * vital.min(rest);
    let (parts, total, number) = match n {
        n if n < turns && n.is_multiple_of(2) => (&map.vital, vital, n / 2),
        n if n < turns => (&map.rest, rest, n / 2),
        n if vital > rest => (&map.vital, vital, n - turns / 2),
        n => (&map.rest, rest, n - turns / 2),
    };
    if number >= total {
        return None;
    }
    let mut at = number * (STRIDE % total) % total;
    if !coprime(STRIDE % total, total) {
        at = number;
    }
    for part in parts {
        let here = part.range.len() as u64 * 8;
        if at < here {
            return Some((part, part.range.start + (at / 8) as usize, (at % 8) as u8));
        }
        at -= here;
    }
    None
}

fn coprime(mut a: u64, mut b: u64) -> bool {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}

/// Whether the checker says anything of one of these pages, or of the file where it says things of files.
pub(super) fn names(checked: &Checked, path: &str, pages: &dyn Fn(usize) -> bool) -> bool {
    is_near(checked.findings.problems.iter().chain(&checked.findings.notes), path, pages)
}

/// The same of damage alone, not of what a crash leaves too.
fn blames(checked: &Checked, path: &str, pages: &dyn Fn(usize) -> bool) -> bool {
    is_near(checked.findings.problems.iter(), path, pages)
}

fn is_near<'a>(
    mut all: impl Iterator<Item = &'a Finding>,
    path: &str,
    pages: &dyn Fn(usize) -> bool,
) -> bool {
    all.any(|finding| {
        let offset = finding.place.offset.map(|offset| offset as usize);
        let file = match (finding.place.shard, finding.place.segment) {
            (Some(shard), Some(segment)) => format!("shard-{shard:04}/segment-{segment:08}"),
            _ => finding.file.clone().unwrap_or_default(),
        };
        let same_file = file.ends_with(path);
        same_file && offset.is_none_or(|offset| pages(offset / PAGE))
    })
}

/// What an answer that changed means, if it is more than a miss.
pub(super) fn changed(sound: &Answers, found: &Answers) -> BTreeMap<Name, String> {
    let differs = |(name, before): (&Name, &super::stores::Answer)| {
        let after = &found.blocks[name];
        // Words of an error are no answer: that it is one is.
        let same = match (before, after) {
            (Ok(before), Ok(after)) => before == after,
            (Err(_), Err(Reason::NotHere(_))) => true,
            (Err(before), Err(after)) => before == after,
            _ => false,
        };
        (!same).then(|| (*name, format!("{before:?}, then {after:?}")))
    };
    sound.blocks.iter().filter_map(differs).collect()
}

/// What was found damaged is out of service by the time it is asked for again.
pub(super) fn quarantined(found: &Answers) -> Result<(), String> {
    let bad = |(name, answer): (&Name, &super::stores::Answer)| {
        let damaged = matches!(answer, Err(Reason::Digest { .. } | Reason::Header { .. }));
        (damaged && found.again[name]).then(|| format!("{name:?} was damaged and is served: {answer:?}"))
    };
    found.blocks.iter().find_map(bad).map_or(Ok(()), Err)
}

/// How many records' blocks a flip may cost.
fn cost(zone: Zone) -> usize {
    match zone {
        // A record's own blocks; merged ones have as many as a column has keys.
        Zone::Header | Zone::Payload | Zone::Tail => 16,
        _ => 0,
    }
}

fn flip(seed: Seed, states: &States) -> Result<(), String> {
    let makes = Make::ALL.len() as u64;
    let make = Make::ALL[(seed.0 % makes) as usize];
    let store = prepared(make);
    let Some((part, at, bit)) = bit(map_of(make), seed.0 / makes) else { return Ok(()) };
    let disks = store.fork();
    disks[part.directory].tamper(&part.path, |bytes| bytes[at] ^= 1 << bit);
    let note =
        |what: String| format!("{make:?}, {}, byte {at} ({:?}), bit {bit}: {what}", part.path, part.zone);
    let (found, opened) = store.ask(&disks).map_err(note)?;
    drop(opened);
    quarantined(&found).map_err(note)?;
    let checked = look(&disks).map_err(|why| note(why.to_string()))?;
    let changed = changed(&store.sound, &found);
    let pages = part.range.start / PAGE..part.range.end.div_ceil(PAGE);
    let near = |page| pages.contains(&page) || part.record.is_some_and(|record| record / PAGE == page);
    let named = names(&checked, &part.path, &near);
    if changed.len() > cost(part.zone) {
        return Err(note(format!("it costs other blocks than its own record's: {changed:?}")));
    }
    if !changed.is_empty() && part.zone != Zone::Tail && !blames(&checked, &part.path, &near) {
        return Err(note(format!("the checker says nothing of damage, and {changed:?}")));
    }
    let was_hole = |(start, len): &(u64, u64)| (*start..start + len).contains(&(at as u64));
    let silent = match part.zone {
        // A bit in a block that was evicted makes it no block again: other pages of it are still not there.
        _ if store.disks[part.directory].holes(&part.path).iter().any(was_hole) => true,
        // What is not used and what an older checkpoint says means nothing; of a tail nothing is known for certain.
        Zone::Unused | Zone::Checkpoint | Zone::Tail => true,
        // The head of a zstd frame has a bit that means nothing; the bytes were the same.
        Zone::Payload => make == Make::Encoded,
        _ => false,
    };
    if !named && !silent {
        return Err(note("the checker says nothing".to_owned()));
    }
    if matches!(part.zone, Zone::Footer | Zone::Trailer) {
        repaired(store, &disks, &found, None).map_err(note)?;
    }
    let mut state = Mixer::new(seed.0 % makes);
    state.word(seed.0 / makes);
    states.reach(state.value());
    Ok(())
}

/// Row R6.
pub(super) fn row() -> Row {
    Row {
        id: "R6",
        what: "every bit of small whole stores flipped: raw, killed, spread, encoded, compacted, full, recycled",
        counts: "bits flipped, each looked at by engine and checker",
        targets: [2_000, 64_000, u64::MAX],
        run: |ask, target| -> Tally { until(ask, target.min(all_bits()), flip) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_a_store_has_its_turn_once() {
        let map = map_of(Make::Plain);
        let total = bits(&map.vital) + bits(&map.rest);
        let mut seen = vec![false; total as usize];
        let mut starts = BTreeMap::new();
        let mut next = 0;
        for part in map.vital.iter().chain(&map.rest) {
            starts.insert((part.path.clone(), part.range.start), next);
            next += part.range.len() * 8;
        }
        for n in 0..total {
            let (part, at, bit) = bit(map, n).unwrap();
            let place = starts[&(part.path.clone(), part.range.start)];
            let number = place + (at - part.range.start) * 8 + usize::from(bit);
            assert!(!std::mem::replace(&mut seen[number], true), "bit {n} comes twice");
        }
        assert!(bit(map, total).is_none() && seen.iter().all(|seen| *seen));
    }
}
