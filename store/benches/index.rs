//! What the index costs: lookups against a plain hash map, insertion, memory. One JSON object on one line.
//!
//! Lookups are compared in interleaved pairs of one run, in alternating order; beside the ratio stands the
//! hash map's against itself, which says how far the machine can be believed.
#![allow(missing_docs, reason = "a benchmark has no users")]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the benchmark measures real time, and compares the index with a plain hash map"
)]

use std::collections::HashMap;
use std::hint::black_box;
use std::num::NonZeroU16;
use std::time::Instant;

use kvarts_layout::{BlockKey, Coordinate, Group};
use kvarts_store::index::{BlockFingerprint, Heat, Index, Location, Lookup, RecordInfo, Recovered};

const BLOCKS: usize = 1 << 20;
const MATCH: usize = 4096;
const PAIRS: usize = 31;
/// Matches in one half of a pair: enough that a half takes milliseconds.
const ROUNDS: usize = 8;

/// A generator of numbers that look random enough to stand for hashes.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn key(&mut self) -> BlockKey {
        let mut key = BlockKey::default();
        key.0.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = self.next().to_le_bytes());
        key
    }
}

fn info(blocks: u16) -> RecordInfo {
    RecordInfo {
        shard: 0,
        segment: 1,
        page: 2,
        header_pages: 1,
        payload_pages: 16,
        blocks: NonZeroU16::new(blocks).expect("records hold blocks"),
        live: 0,
        class: 0,
        expires: 0,
        parent: 0,
        hangs: false,
    }
}

fn print(index: &Index, key: &BlockKey) -> BlockFingerprint {
    index.key().of(1, key, Group(0), Coordinate::Replicated)
}

/// Fills an index as recovery does and gives the nanoseconds a block took, fingerprints excluded.
fn fill(index: &Index, keys: &[BlockKey], blocks: u16) -> f64 {
    let found: Vec<Recovered> = keys
        .chunks(usize::from(blocks))
        .flat_map(|run| {
            let record = index.records().insert(info(blocks)).expect("numbers are left");
            (0..).zip(run).map(move |(block, key)| (key, Location { record, block }))
        })
        .map(|(key, location)| Recovered { print: print(index, key), location, heat: Heat::default() })
        .collect();
    let mut conflicts = Vec::new();
    let start = Instant::now();
    let mut gathering = index.gathering(keys.len().min(1 << 20));
    for batch in found.chunks(1 << 20) {
        batch.iter().for_each(|one| gathering.push(*one));
        index.insert_live(&mut gathering, &mut conflicts).expect("the records are there");
        assert!(conflicts.is_empty());
    }
    start.elapsed().as_nanos() as f64 / keys.len() as f64
}

/// Inserts through reserve and commit, 16 blocks a put, into an index that starts empty: nanoseconds a block.
fn put(index: &Index, keys: &[BlockKey]) -> f64 {
    let prints: Vec<_> = keys.iter().map(|key| print(index, key)).collect();
    let mut out = Vec::new();
    let start = Instant::now();
    for run in prints.chunks(16) {
        let ticket = index.reserve(run, &mut out);
        let record = index.records().insert(info(16)).expect("numbers are left");
        let lost = index.commit(ticket, record, run, 0).expect("the record is there");
        assert!(lost.is_empty());
    }
    start.elapsed().as_nanos() as f64 / keys.len() as f64
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Ratio {
    median: f64,
    low: f64,
    high: f64,
}

/// Median and interquartile range.
fn ratio(mut values: Vec<f64>) -> Ratio {
    let median = median(&mut values);
    Ratio { median, low: values[values.len() / 4], high: values[values.len() * 3 / 4] }
}

struct Lookups {
    ratio: Ratio,
    control: Ratio,
    index_ns: f64,
    map_ns: f64,
    fingerprint_ns: f64,
}

fn lookups(index: &Index, map: &HashMap<[u8; 32], u64>, keys: &[BlockKey], wanted: usize) -> Lookups {
    let mut numbers = Numbers(99);
    let (mut prints, mut found) = (Vec::with_capacity(wanted), Vec::new());
    // What `match` pays: fingerprints of the keys it was given, then the lookups.
    let mut by_index = |chosen: &[BlockKey]| {
        prints.clear();
        prints.extend(chosen.iter().map(|key| print(index, key)));
        index.lookup_many(&prints, &mut found);
        assert!(found.iter().all(|one| matches!(one, Lookup::Live(_))));
    };
    let mut places: Vec<u64> = Vec::with_capacity(wanted);
    let mut by_map = |chosen: &[BlockKey]| {
        places.clear();
        places.extend(chosen.iter().map(|key| map.get(&key.0).copied().unwrap_or(u64::MAX)));
        assert!(!places.contains(&u64::MAX));
    };
    let mut choose = || -> Vec<BlockKey> {
        (0..wanted).map(|_| keys[(numbers.next() % keys.len() as u64) as usize]).collect()
    };
    let time = |run: &mut dyn FnMut(&[BlockKey]), chosen: &[Vec<BlockKey>]| {
        let start = Instant::now();
        chosen.iter().for_each(|chosen| run(black_box(chosen)));
        start.elapsed().as_nanos() as f64 / (chosen.len() * wanted) as f64
    };
    let rounds = ROUNDS * MATCH / wanted;
    let (mut ratios, mut controls, mut all_index, mut all_map) = (vec![], vec![], vec![], vec![]);
    for pair in 0..PAIRS {
        // Each half gets keys of its own, or the second would find them in the cache.
        let mut set = || -> Vec<_> { (0..rounds).map(|_| choose()).collect() };
        let (one, two, three) = (set(), set(), set());
        let (mine, theirs, again);
        if pair % 2 == 0 {
            mine = time(&mut by_index, &one);
            theirs = time(&mut by_map, &two);
            again = time(&mut by_map, &three);
        } else {
            again = time(&mut by_map, &one);
            theirs = time(&mut by_map, &two);
            mine = time(&mut by_index, &three);
        }
        ratios.push(mine / theirs);
        controls.push(again / theirs);
        all_index.push(mine);
        all_map.push(theirs);
    }
    let start = Instant::now();
    for key in keys {
        black_box(print(index, black_box(key)));
    }
    let fingerprint_ns = start.elapsed().as_nanos() as f64 / keys.len() as f64;
    Lookups {
        ratio: ratio(ratios),
        control: ratio(controls),
        index_ns: median(&mut all_index),
        map_ns: median(&mut all_map),
        fingerprint_ns,
    }
}

fn main() {
    let mut numbers = Numbers(1);
    let keys: Vec<_> = (0..BLOCKS).map(|_| numbers.key()).collect();
    let seed = [7; 32];
    let map: HashMap<[u8; 32], u64> = (0..).zip(&keys).map(|(n, key)| (key.0, n)).collect();

    let single = Index::new(&seed, BLOCKS);
    let insert_single = fill(&single, &keys, 1);
    let single_memory = single.memory();
    drop(single);
    let grown = Index::new(&seed, 0);
    let insert_grown = fill(&grown, &keys, 1);
    let grown_memory = grown.memory();
    drop(grown);
    let put_index = Index::new(&seed, 0);
    let put_ns = put(&put_index, &keys);
    let put_memory = put_index.memory();
    drop(put_index);
    let index = Index::new(&seed, BLOCKS);
    let insert = fill(&index, &keys, 16);
    let memory = index.memory();

    let many = lookups(&index, &map, &keys, MATCH);
    let some = lookups(&index, &map, &keys, 256);
    println!(
        "{{\"blocks\":{BLOCKS},\"match_keys\":{MATCH},\"pairs\":{PAIRS},\"ratio\":{:.3},\"ratio_iqr\":[{:.3},{:.3}],\
         \"control\":{:.3},\"control_iqr\":[{:.3},{:.3}],\"match_ns_per_key\":{:.1},\"map_ns_per_key\":{:.1},\
         \"ratio_256_keys\":{:.3},\"match_256_ns_per_key\":{:.1},\"fingerprint_ns\":{:.1},\
         \"insert_ns\":{insert:.1},\"insert_ns_1_block_records\":{insert_single:.1},\
         \"insert_ns_1_block_records_grown\":{insert_grown:.1},\"put_ns\":{put_ns:.1},\
         \"bytes_per_block\":{:.2},\"bytes_per_block_grown\":{:.2},\
         \"bytes_per_block_1_block_records\":{:.2},\"bytes_per_block_1_block_records_grown\":{:.2}}}",
        many.ratio.median,
        many.ratio.low,
        many.ratio.high,
        many.control.median,
        many.control.low,
        many.control.high,
        many.index_ns,
        many.map_ns,
        some.ratio.median,
        some.index_ns,
        many.fingerprint_ns,
        memory.bytes_per_block,
        put_memory.bytes_per_block,
        single_memory.bytes_per_block,
        grown_memory.bytes_per_block,
    );
}
