//! Bytes that are sound, but not here: pages, records, footers, checkpoints, superblocks and whole files that are
//! swapped, copied, put back as they were or taken from another store; zeros and noise; and records that a client has
//! forged in its payload.
//!
//! Whatever the change is: no block is served with bytes that were never put under its key. The checker names every change
//! that changes an answer. A repair leaves a store that serves every block that it served, none in part, that is clean but for
//! damaged blocks which share their pages with sound ones, and in which a second repair finds nothing to do. Readings that
//! differ, and a header that a segment's next use has lost, cost nothing at all.

use kvarts_fsck::check::Checked;
use kvarts_fsck::disk::MemoryDisk;
use kvarts_layout::format::body::ENCODING_RAW;
use kvarts_layout::format::record::{self, Body, Fields};
use kvarts_layout::format::seal::claimed_position;
use kvarts_layout::format::{PAGE, Position, Secret, Structure};

use super::bits::{changed, names, quarantined};
use super::pool::{States, until};
use super::repaired::repaired;
use super::stores::{
    Make, Place, Prepared, Zone, files, key, look, payload_bytes, prepared, recycled, stranger, structures,
    zones,
};
use super::{Row, Tally};
use crate::sim::log::Mixer;
use crate::sim::{Rng, Seed};

/// Bytes that a device writes wholly or not at all.
const SECTOR: usize = 512;
/// Pages of the longest burst.
const BURST: u64 = 16;

/// Damage that was done.
pub(super) struct Damage {
    pub(super) disks: Vec<MemoryDisk>,
    pub(super) what: String,
    /// Where.
    places: Vec<Place>,
    /// Not the disk is damaged but some readings of it.
    misread: bool,
    /// It may change no answer.
    harmless: bool,
    /// A whole file is gone or as it once was, or a segment was not sealed: perhaps nothing says that there was more.
    rolled_back: bool,
}

fn any_place(disks: &[MemoryDisk], rng: &mut Rng) -> Place {
    let all = files(disks);
    let (at, path) = all[rng.index(all.len())].clone();
    let bytes = disks[at].contents(&path).unwrap_or_default();
    let found = structures(&bytes);
    // Half of the time where something begins that proves itself.
    let offset = match found.is_empty() || rng.coin() {
        true => rng.below((bytes.len() / PAGE).max(1) as u64) as usize * PAGE,
        false => found[rng.index(found.len())].0,
    };
    (at, path, offset)
}

fn bytes_at(disks: &[MemoryDisk], (at, path, offset): &Place, len: usize) -> Vec<u8> {
    let bytes = disks[*at].contents(path).unwrap_or_default();
    bytes.get(*offset..(*offset + len).min(bytes.len())).unwrap_or_default().to_vec()
}

fn write_at(disks: &[MemoryDisk], (at, path, offset): &Place, with: &[u8]) {
    disks[*at].tamper(path, |bytes| {
        let end = (*offset + with.len()).min(bytes.len());
        bytes[*offset..end].copy_from_slice(&with[..end - *offset]);
    });
}

/// Damage that may change no answer.
fn harmless(store: &Prepared, rng: &mut Rng) -> Option<Damage> {
    let disks = store.fork();
    let misread = rng.coin();
    let (place, what) = if misread {
        let place = any_place(&disks, rng);
        let what = format!("readings of {place:?} that differ");
        (place, what)
    } else {
        // The header of a segment that was used again, as it was before that.
        let all = recycled(&disks, &store.earlier);
        let (at, path) = all.get(rng.index(all.len().max(1)))?.clone();
        let what = format!("the header of {path} as it was before its last use");
        let place = (at, path, 0);
        write_at(&disks, &place, &bytes_at(&store.earlier, &place, PAGE));
        (place, what)
    };
    Some(Damage { disks, what, places: vec![place], misread, harmless: true, rolled_back: false })
}

/// Damage of a kind that the seed chooses; `None` if it would change nothing.
pub(super) fn damage(store: &Prepared, rng: &mut Rng) -> Option<Damage> {
    let disks = store.fork();
    let place = any_place(&disks, rng);
    let kind = rng.below(15);
    let mut rolled_back = false;
    let mut places = vec![place.clone()];
    let what = match kind {
        0 | 1 => {
            let len = [SECTOR, PAGE, PAGE * rng.between(2, BURST) as usize][rng.index(3)];
            let fill = if kind == 0 { vec![0; len] } else { noise(rng, len) };
            write_at(&disks, &place, &fill);
            // With its seal gone as well, a segment that no checkpoint knows to be sealed is one that was not.
            let end = store.disks[place.0].contents(&place.1).map_or(0, |bytes| bytes.len());
            rolled_back = store.make.is_killed() && place.2 + len >= end;
            format!("{len} bytes of {} over {place:?}", if kind == 0 { "zeros" } else { "noise" })
        }
        2 | 3 => {
            let other = any_place(&disks, rng);
            let (page, theirs) = (bytes_at(&disks, &place, PAGE), bytes_at(&disks, &other, PAGE));
            write_at(&disks, &place, &theirs);
            if kind == 2 {
                write_at(&disks, &other, &page);
                places.push(other.clone());
            }
            format!("{other:?} {} {place:?}", if kind == 2 { "swapped with" } else { "copied to" })
        }
        4 | 5 => {
            let from = if kind == 4 { &store.earlier } else { &stranger().disks };
            let len = if rng.coin() { PAGE } else { SECTOR };
            let theirs = if kind == 4 || rng.coin() { place.clone() } else { any_place(from, rng) };
            let old = from.get(theirs.0).map(|_| bytes_at(from, &theirs, len)).unwrap_or_default();
            write_at(&disks, &place, &old);
            let whose = if kind == 4 { "as it was before" } else { "from another store" };
            format!("{len} bytes of {theirs:?} {whose} over {place:?}")
        }
        6 | 7 => {
            let other = record_at(&disks, rng)?;
            let theirs = bytes_at(&disks, &other, record_len(&disks, &other));
            let target = if kind == 6 { record_at(&disks, rng)? } else { place };
            write_at(&disks, &target, &theirs);
            places = vec![target.clone()];
            format!("the whole record {other:?} over {target:?}")
        }
        8..=12 => {
            let (what, touched) = whole_file(store, &disks, kind, &place, (rng, &mut rolled_back))?;
            places = touched;
            what
        }
        _ => {
            let (what, touched) = forge(store, &disks, rng)?;
            places = touched;
            what
        }
    };
    let same = |(at, path): &(usize, String)| disks[*at].contents(path) == store.disks[*at].contents(path);
    let open = |(at, path, _): &Place| {
        let bytes = store.disks[*at].contents(path).unwrap_or_default();
        zones(path, &bytes).iter().any(|(_, zone)| *zone == Zone::Tail)
    };
    let rolled_back = rolled_back || places.iter().any(open);
    let unchanged = files(&disks) == store.files() && store.files().iter().all(same);
    (!unchanged).then_some(Damage { disks, what, places, misread: false, harmless: false, rolled_back })
}

fn noise(rng: &mut Rng, len: usize) -> Vec<u8> {
    (0..len.div_ceil(8)).flat_map(|_| rng.next_u64().to_le_bytes()).take(len).collect()
}

fn record_at(disks: &[MemoryDisk], rng: &mut Rng) -> Option<Place> {
    let records: Vec<Place> = files(disks)
        .into_iter()
        .flat_map(|(at, path)| {
            let found = structures(&disks[at].contents(&path).unwrap_or_default());
            let records = found.into_iter().filter(|one| one.1 == Structure::Record);
            records.map(|one| (at, path.clone(), one.0)).collect::<Vec<_>>()
        })
        .collect();
    (!records.is_empty()).then(|| records[rng.index(records.len())].clone())
}

fn record_len(disks: &[MemoryDisk], place: &Place) -> usize {
    let page = bytes_at(disks, place, PAGE);
    let header = u32::from_le_bytes(page[72..76].try_into().expect("four bytes")) as usize;
    header + payload_bytes(&page).next_multiple_of(PAGE)
}

/// Files that are swapped, renamed, gone, cut off, or another store's or time's.
fn whole_file(
    store: &Prepared,
    disks: &[MemoryDisk],
    kind: u64,
    (at, path, _): &Place,
    (rng, lost): (&mut Rng, &mut bool),
) -> Option<(String, Vec<Place>)> {
    let all = files(disks);
    let here = disks[*at].contents(path)?;
    let start = |at: usize, path: &str| (at, path.to_owned(), 0);
    match kind {
        8 => {
            let (other_at, other) = all[rng.index(all.len())].clone();
            let theirs = disks[other_at].contents(&other)?;
            disks[*at].plant(path, theirs);
            disks[other_at].plant(&other, here);
            Some((
                format!("files {path} and {other} swapped"),
                vec![start(*at, path), start(other_at, &other)],
            ))
        }
        9 => {
            // No other file knows the name of the newest segment.
            *lost = store.make.is_killed();
            disks[*at].remove(path);
            Some((format!("{path} is gone"), vec![start(*at, path)]))
        }
        10 => {
            let len = rng.below((here.len() / SECTOR) as u64) as usize * SECTOR;
            disks[*at].tamper(path, |bytes| bytes.truncate(len));
            Some((format!("{path} cut off at {len}"), vec![(*at, path.clone(), len)]))
        }
        11 => {
            *lost = true;
            let before = store.earlier.get(*at)?.contents(path)?;
            disks[*at].plant(path, before);
            Some((format!("{path} as it was before"), vec![start(*at, path)]))
        }
        _ => {
            let theirs = stranger().disks[0].contents(path)?;
            disks[*at].plant(path, theirs);
            Some((format!("{path} of another store"), vec![start(*at, path)]))
        }
    }
}

/// What a client that knows everything but the secret plants in a payload: whole records of a block that is not there,
/// for the place at which they lie. Then the record around them loses its header, so that a scan looks at every page.
fn forge(store: &Prepared, disks: &[MemoryDisk], rng: &mut Rng) -> Option<(String, Vec<Place>)> {
    let all = files(disks).into_iter().flat_map(|(at, path)| {
        let bytes = disks[at].contents(&path).unwrap_or_default();
        let found = structures(&bytes);
        found.into_iter().filter_map(move |(offset, structure, total)| {
            let large = structure == Structure::Record && payload_bytes(&bytes[offset..]) > 4 * PAGE;
            large.then(|| (at, path.clone(), offset, total))
        })
    });
    let hosts: Vec<_> = all.collect();
    if hosts.is_empty() {
        return None;
    }
    let (at, path, offset, total) = hosts[rng.index(hosts.len())].clone();
    let donor = store.disks.iter().enumerate().flat_map(|(at, disk)| {
        let of = move |path: String| (at, path);
        disk.files().into_iter().map(of)
    });
    let donor = donor.flat_map(|(at, path)| {
        let bytes = store.disks[at].contents(&path).unwrap_or_default();
        let records = structures(&bytes).into_iter().filter(|one| one.1 == Structure::Record);
        records.map(|one| bytes[one.0..].to_vec()).collect::<Vec<_>>()
    });
    let mut blocks = donor.filter_map(|bytes| {
        let position = claimed_position(&bytes)?;
        let record = record::open(&bytes, &position, &store.keyring.1).ok()?;
        match record.body() {
            Ok(Body::Blocks(blocks)) if payload_bytes(&bytes) < PAGE && blocks.encoding == ENCODING_RAW => {
                Some((blocks, bytes))
            }
            _ => None,
        }
    });
    let (mut blocks, bytes) = blocks.next()?;
    // A block of the client's choice, under a key that the store does not hold.
    blocks.blocks.iter_mut().zip(0..).for_each(|(name, n)| name.key = key(14 + n).0);
    let len = payload_bytes(&bytes) / blocks.blocks.len();
    blocks.blocks.truncate(1);
    let host = claimed_position(&bytes_at(disks, &(at, path.clone(), offset), PAGE))?;
    let place = Position { offset: (offset + total + PAGE) as u64, ..host };
    let evil = vec![0x66; len];
    let shape = len as u64;
    let digests = vec![crc32fast::hash(&evil[..len / 2]), crc32fast::hash(&evil[len / 2..])];
    let secret = Secret::new([rng.below(250) as u8; 32]);
    let fields = Fields { sequence: 1 << 40, durable_upto: 0, payload_bytes: shape };
    let digests =
        if blocks.group == crate::fixture::STATE.0 { vec![crc32fast::hash(&evil)] } else { digests };
    let header = record::encode(&place, &secret, &fields, &Body::Blocks(blocks), &digests).ok()?;
    write_at(disks, &(at, path.clone(), place.offset as usize), &header);
    write_at(disks, &(at, path.clone(), place.offset as usize + header.len()), &evil);
    write_at(disks, &(at, path.clone(), offset), &vec![0x5a; PAGE]);
    // And the footer that would tell where to look.
    let end = bytes_at(disks, &(at, path.clone(), 0), usize::MAX / 2).len();
    write_at(disks, &(at, path.clone(), end - PAGE), &vec![0; PAGE]);
    let what = format!("a record forged in the payload of {offset} of {path}, which loses its header");
    Some((what, vec![(at, path.clone(), offset), (at, path, end - PAGE)]))
}

fn strike(seed: Seed, states: &States) -> Result<(), String> {
    let make = Make::ALL[(seed.0 % Make::ALL.len() as u64) as usize];
    let mut rng = seed.child("harmless").rng();
    if rng.below(8) > 0 {
        return strike_at(make, seed, states);
    }
    let store = prepared(make);
    harmless(store, &mut rng).map_or(Ok(()), |damage| judged(store, &damage, states))
}

fn strike_at(make: Make, seed: Seed, states: &States) -> Result<(), String> {
    let store = prepared(make);
    let mut rng = seed.child("damage").rng();
    damage(store, &mut rng).map_or(Ok(()), |damage| judged(store, &damage, states))
}

fn judged(store: &Prepared, damage: &Damage, states: &States) -> Result<(), String> {
    let mut state = Mixer::new(store.make as u64);
    state.text(&damage.what);
    judge(store, damage).map_err(|what| format!("{:?}, {}: {what}", store.make, damage.what))?;
    states.reach(state.value());
    Ok(())
}

/// Whether anything that was touched is a superblock: then a store may refuse to be opened.
fn touches_superblock(damage: &Damage) -> bool {
    damage.places.iter().any(|(_, path, _)| path.contains("superblock"))
}

fn judge(store: &Prepared, damage: &Damage) -> Result<(), String> {
    let checked = look(&damage.disks);
    let opened = store.ask(&damage.disks);
    let (found, opened) = match opened {
        Ok(both) => both,
        Err(why) if why.starts_with("it does not open") && touches_superblock(damage) => {
            // Then the checker does not call it clean either.
            return match checked {
                Ok(checked) if checked.findings.is_clean() => {
                    Err(format!("{why}, and the checker is content"))
                }
                _ => Ok(()),
            };
        }
        Err(why) => return Err(why),
    };
    drop(opened);
    quarantined(&found)?;
    let checked = checked.map_err(|why| format!("it opens, and cannot be checked: {why}"))?;
    let changes = changed(&store.sound, &found);
    if damage.harmless && !changes.is_empty() {
        return Err(format!("it costs {changes:?}"));
    }
    if !changes.is_empty() && !damage.rolled_back && !is_named(&checked, damage) {
        return Err(format!("the checker says nothing of it, and {changes:?}"));
    }
    let was_lost = matches!(store.make, Make::Recycled) && damage.harmless && !damage.misread;
    if was_lost && checked.findings.times("recycled-header-lost") != 1 {
        return Err("the checker takes a segment that was used again for a free one".to_owned());
    }
    let misread = damage.misread.then(|| &damage.places[0]);
    repaired(store, &damage.disks, &found, misread)
}

fn is_named(checked: &Checked, damage: &Damage) -> bool {
    if touches_superblock(damage) {
        // Of the store that another one's superblock names, every segment is foreign.
        return !checked.findings.is_clean();
    }
    let near = |(_, path, _): &Place| names(checked, path, &|_| true);
    damage.places.iter().any(near)
}

/// Row R7.
pub(super) fn row() -> Row {
    Row {
        id: "R7",
        what: "bytes swapped, stale, misdirected, zeroed, foreign and forged, whole files too; then repaired",
        counts: "damages, each judged by engine, checker and repair",
        targets: [800, 14_000, 1_000_000],
        run: |ask, target| -> Tally { until(ask, target, strike) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recycled_segment_whose_header_was_lost_is_looked_at_before_it_counts_as_free() {
        let store = prepared(Make::Recycled);
        let again = recycled(&store.disks, &store.earlier);
        assert!(!again.is_empty(), "no segment was used again");
        for (at, path) in again {
            let disks = store.fork();
            let place = (at, path, 0);
            write_at(&disks, &place, &bytes_at(&store.earlier, &place, PAGE));
            let places = vec![place];
            let what = "the header is the one before".to_owned();
            let damage = Damage { disks, what, places, misread: false, harmless: true, rolled_back: false };
            let checked = look(&damage.disks).unwrap();
            assert_eq!(checked.findings.times("recycled-header-lost"), 1, "{:?}", checked.findings.counts);
            judge(store, &damage).unwrap();
        }
    }

    #[test]
    fn zeros_over_a_segment_and_its_seal_are_what_no_one_can_tell_from_a_segment_that_was_just_begun() {
        for seed in [16_441, 37_176] {
            let struck = strike_at(Make::Killed, Seed(seed), &States::default());
            struck.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        }
    }
}
