//! Any bytes at all: every structure of the format mutated with its shape in mind, as it is and with its tags made right,
//! through the decoders' own entry points; and whole stores with such structures in them through engine, checker and
//! repair.
//!
//! A faulty writer leaves structures whose tags are right and whose content is wrong. Engine, checker and repair neither
//! panic nor hang over them, and serve no block with bytes that were never put.

use std::sync::OnceLock;

use kvarts_fsck::disk::MemoryDisk;
use kvarts_layout::codec::fuzz_chunk;
use kvarts_layout::format::fuzz::{TARGETS, fuzz_names, prove};
use kvarts_layout::format::seal::claimed_position;
use kvarts_layout::format::{PAGE, Structure};

use super::bits::changed;
use super::pool::{States, until};
use super::repaired::put_right;
use super::stores::{KEYS, Make, Prepared, files, key, look, payload_bytes, prepared, structures};
use super::{Row, Tally};
use crate::sim::log::Mixer;
use crate::sim::{Rng, Seed};

/// Inputs of one seed.
const INPUTS: usize = 200;
/// One seed in this many is about a whole store.
const STORES: u64 = 2;

/// Numbers at which limits lie.
const EDGES: [u64; 12] =
    [0, 1, 2, 127, 128, 4095, 4096, 4097, 0x7fff_ffff, 0xffff_ffff, u64::MAX >> 1, u64::MAX];

/// Every structure of every store.
fn corpus() -> &'static Vec<(Structure, Vec<u8>)> {
    static ALL: OnceLock<Vec<(Structure, Vec<u8>)>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut all = Vec::new();
        for store in Make::ALL.map(prepared) {
            for (at, path) in store.files() {
                let bytes = store.disks[at].contents(&path).expect("it was listed");
                let found = structures(&bytes).into_iter();
                all.extend(found.map(|(from, what, len)| (what, bytes[from..from + len].to_vec())));
            }
        }
        all
    })
}

/// Stored chunks of the encoded store, as far as its payloads go.
fn payloads() -> &'static Vec<Vec<u8>> {
    static ALL: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    ALL.get_or_init(|| {
        let (store, mut all) = (prepared(Make::Encoded), Vec::new());
        for (at, path) in store.files() {
            let bytes = store.disks[at].contents(&path).expect("it was listed");
            for (from, structure, len) in structures(&bytes) {
                if structure == Structure::Record {
                    let payload = payload_bytes(&bytes[from..]);
                    all.push(bytes[from + len..from + len + payload.min(8192)].to_vec());
                }
            }
        }
        all
    })
}

/// Changes an image in some places: mostly where something stands, sometimes a number at a limit.
fn mutate(image: &mut Vec<u8>, rng: &mut Rng, splice: bool) {
    let used = image.iter().rposition(|byte| *byte != 0).map_or(1, |last| last + 1);
    for _ in 0..rng.between(1, 6) {
        let within = if rng.below(8) == 0 { image.len() } else { used.min(image.len()) };
        if within < 16 {
            return;
        }
        let at = rng.index(within);
        match rng.below(if splice { 7 } else { 4 }) {
            0 | 1 => image[at] ^= 1 << rng.below(8),
            2 => image[at] = rng.next_u64() as u8,
            3 => {
                let width = [1, 2, 4, 8][rng.index(4)];
                let at = (at / width * width).min(within - width);
                let value = EDGES[rng.index(EDGES.len())].wrapping_add(rng.below(3)).to_le_bytes();
                image[at..at + width].copy_from_slice(&value[..width]);
            }
            4 => {
                let from = rng.index(within);
                let len = rng.below((within - from.max(at)) as u64 + 1) as usize;
                image.copy_within(from..from + len, at);
            }
            5 => image.truncate(at),
            _ => {
                let other = &corpus()[rng.index(corpus().len())].1;
                let len = (other.len() - at.min(other.len())).min(within - at);
                image[at..at + len].copy_from_slice(&other[at.min(other.len())..][..len]);
            }
        }
    }
}

fn decoders(seed: Seed, states: &States) -> Result<(), String> {
    let mut rng = seed.child("inputs").rng();
    for _ in 0..INPUTS {
        let mut state = Mixer::new(0);
        if rng.below(8) == 0 {
            let mut stored = payloads()[rng.index(payloads().len())].clone();
            mutate(&mut stored, &mut rng, true);
            state.bytes(&stored);
            let length = (rng.below(4200) as u16).to_le_bytes();
            fuzz_chunk(&[&[rng.next_u64() as u8], &length[..], &stored].concat());
        } else {
            let (structure, image) = &corpus()[rng.index(corpus().len())];
            let mut image = image.clone();
            mutate(&mut image, &mut rng, true);
            state.bytes(&image);
            // Also as something that it is not.
            let own = TARGETS.iter().position(|(one, _)| one == structure).expect("each has one");
            let (_, target) = TARGETS[if rng.below(8) == 0 { rng.index(TARGETS.len()) } else { own }];
            target(&image);
            fuzz_names(&image[..image.len().min(80)]);
        }
        states.reach(state.value());
    }
    Ok(())
}

/// Mutates structures of a store; some prove themselves all the same.
fn mistake(disks: &[MemoryDisk], store: &Prepared, rng: &mut Rng) -> String {
    let mut told = Vec::new();
    // In every sixth a footer contradicts its records, and nothing else is wrong: who believes it is seen at once.
    let footer_alone = rng.below(6) == 0;
    for _ in 0..if footer_alone { 1 } else { rng.between(1, 3) } {
        let mut all = files(disks);
        let of = |at: usize, path: &str| disks[at].contents(path).unwrap_or_default();
        let wanted = |what: &Structure| !footer_alone || *what == Structure::Footer;
        all.retain(|(at, path)| structures(&of(*at, path)).iter().any(|(_, what, _)| wanted(what)));
        if all.is_empty() {
            continue;
        }
        let (at, path) = all[rng.index(all.len())].clone();
        let bytes = of(at, &path);
        let mut found = structures(&bytes);
        found.retain(|(_, what, _)| wanted(what));
        if found.is_empty() {
            continue;
        }
        let (from, structure, len) = found[rng.index(found.len())];
        let mut image = bytes[from..from + len].to_vec();
        let proves = footer_alone || rng.below(4) > 0;
        let swaps = structure == Structure::Footer && (footer_alone || rng.coin());
        let swapped = swaps && swap_keys(&mut image, rng);
        if !swapped {
            // What is copied within a proven record could be a key: then the record is of another block.
            mutate(&mut image, rng, !proves);
        }
        image.resize(len, 0);
        if proves && let Some(position) = claimed_position(&bytes[from..]) {
            prove(structure, &mut image, &position, &store.keyring.1);
        }
        told.push(format!("{structure:?} at {from} of {path}, proven {proves}, keys swapped {swapped}"));
        let tag = image[16..32].to_vec();
        disks[at].tamper(&path, |bytes| {
            bytes[from..from + len].copy_from_slice(&image);
            if proves && structure == Structure::Footer {
                rename(bytes, from, &tag, store);
            }
        });
    }
    told.join("; ")
}

/// Swaps two keys that a footer lists.
fn swap_keys(image: &mut [u8], rng: &mut Rng) -> bool {
    let find = |n: u64| image.windows(32).position(|window| window == key(n).0);
    let places: Vec<usize> = (0..KEYS).filter_map(find).collect();
    if places.len() < 2 {
        return false;
    }
    let one = rng.index(places.len());
    let other = (one + 1 + rng.index(places.len() - 1)) % places.len();
    let (one, other) = (places[one].min(places[other]), places[one].max(places[other]));
    let (before, behind) = image.split_at_mut(other);
    before[one..one + 32].swap_with_slice(&mut behind[..32]);
    true
}

/// Makes the trailer name a footer that was changed.
fn rename(bytes: &mut [u8], footer: usize, tag: &[u8], store: &Prepared) {
    let at = bytes.len() - PAGE;
    let Some(trailer) = bytes.get_mut(at..) else { return };
    let names = u64::from_le_bytes(trailer[72..80].try_into().expect("eight bytes")) as usize;
    if names == footer
        && let Some(position) = claimed_position(trailer)
    {
        trailer[80..96].copy_from_slice(tag);
        prove(Structure::Trailer, trailer, &position, &store.keyring.1);
    }
}

fn whole_store(seed: Seed, states: &States) -> Result<(), String> {
    let make = Make::ALL[(seed.0 / STORES % Make::ALL.len() as u64) as usize];
    let store = prepared(make);
    let mut rng = seed.child("store").rng();
    let disks = store.fork();
    let told = mistake(&disks, store, &mut rng);
    let note = |what: String| format!("{make:?}, {told}: {what}");
    let mut state = Mixer::new(1);
    state.text(&told);
    for round in ["", "after repair: "] {
        match store.ask(&disks) {
            Ok(_) => {}
            // It may well not be a store any more.
            Err(why) if why.starts_with("it does not open") => {}
            Err(why) => return Err(note(format!("{round}{why}"))),
        }
        let checked = look(&disks);
        let alone = told.matches("keys swapped true").count() == 1 && !told.contains("keys swapped false");
        if round.is_empty() && alone && told.contains("proven true") {
            let content = checked.is_ok_and(|checked| checked.findings.is_clean());
            let answers = store.ask(&disks).map(|(answers, _)| changed(&store.sound, &answers));
            if content && answers.is_ok_and(|changed| !changed.is_empty()) {
                return Err(note("the checker believes a footer that its records contradict".to_owned()));
            }
        }
        if round.is_empty() {
            // What is proven and wrong cannot always be put right; it is tried without harm.
            let _ = put_right(&disks, None);
        }
    }
    states.reach(state.value());
    Ok(())
}

/// Row R18.
pub(super) fn row() -> Row {
    Row {
        id: "R18",
        what: "mutated bytes on disk: every decoder, and whole stores with proven nonsense in them",
        counts: "inputs, whole stores among them",
        targets: [100_000, 10_000_000, 100_000_000],
        run: |ask, target| -> Tally {
            until(ask, target, |seed, states| match seed.0 % STORES {
                0 => whole_store(seed, states),
                _ => decoders(seed, states),
            })
        },
    }
}
