//! What the directory and the dealing of pieces cost: `cargo bench -p kvarts-cluster`.
#![allow(clippy::disallowed_methods, reason = "measures time")]

use std::time::{Duration, Instant};

use kvarts_cluster::dealer::{Dealer, PathSet, Piece};
use kvarts_cluster::directory::{Change, Directory};
use kvarts_cluster::members::{Member, Members};
use kvarts_cluster::partition::{Holders, Tag};
use kvarts_cluster::paths::{PathId, Paths};

fn members(count: u8) -> Option<Members> {
    let one = |n: u8| Member {
        id: kvarts_layout::StoreId([n; 16]),
        address: format!("host-{n}:1"),
        zone: String::new(),
    };
    Members::new(1, (0..count).map(one).collect()).ok()
}

/// Tags as digests are: spread.
fn tag(n: u64) -> Tag {
    let mixed = u128::from(n).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
    Tag((mixed ^ (mixed >> 64)).wrapping_mul(0xDA94_2042_E4DD_58B5).to_be_bytes())
}

fn directory() {
    let Some(members) = members(1) else { return };
    let node = kvarts_layout::StoreId([0; 16]);
    for count in [100_000u64, 1_000_000, 10_000_000] {
        let mut directory = Directory::new(node, &members, count);
        let begin = Instant::now();
        let mut changes = Vec::with_capacity(1024);
        for n in 0..count {
            changes.push(Change::Stored(tag(n)));
            if changes.len() == 1024 || n + 1 == count {
                directory.apply(node, &changes);
                changes.clear();
            }
        }
        let announced = begin.elapsed();
        let begin = Instant::now();
        let found: usize = (0..count).step_by(97).map(|n| directory.copies(&tag(n)).count()).sum();
        let each = begin.elapsed().as_secs_f64() * 1e9 / found as f64;
        let bytes = directory.bytes() as f64 / directory.len() as f64;
        println!(
            "{count:9} copies: announced in {announced:.2?}, {bytes:.1} bytes each, a look-up {each:.0} ns"
        );
    }
}

fn holders() {
    for count in [8, 200] {
        let Some(members) = members(count) else { return };
        let begin = Instant::now();
        let holders = Holders::of(&members);
        println!("{count:9} nodes: holders of epoch {} in {:.2?}", holders.epoch(), begin.elapsed());
    }
}

/// Each path answers what it is asked for before it is asked again.
fn dealer() {
    const PIECES: usize = 100_000;
    for count in [1u16, 2, 8] {
        let all = (0..count).fold(PathSet::default(), |set, path| set.with(PathId(path)));
        let pieces = (0..PIECES as u64).map(|place| Piece { place, bytes: 1 << 20, paths: all });
        let mut dealer = Dealer::new(pieces.collect());
        let (mut paths, mut now) = (Paths::new(count), Duration::ZERO);
        let begin = Instant::now();
        while !dealer.is_done() {
            for path in (0..count).map(PathId) {
                now += Duration::from_micros(100);
                if let Some(piece) = dealer.take(path, true, &mut paths, now) {
                    dealer.arrived(piece, path, &mut paths, now + Duration::from_micros(50));
                }
            }
        }
        let each = begin.elapsed().as_secs_f64() * 1e9 / PIECES as f64;
        println!("{count:9} paths: {each:.0} ns a piece");
    }
}

fn main() {
    directory();
    holders();
    dealer();
}
