//! Many nodes, many faults, one seed: whatever is read is what was put, and when the faults are over everything that was
//! acknowledged is there.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;

use super::fixture::*;
use crate::format::samples;
use crate::testing::{Kind, Plan};
use crate::tier::Tier;

const KINDS: [Kind; 13] = [
    Kind::Outage,
    Kind::Lost,
    Kind::Busy(None),
    Kind::Busy(Some(Duration::from_secs(2))),
    Kind::Slow(Duration::from_secs(1)),
    Kind::Slow(Duration::from_secs(30)),
    Kind::Silent,
    Kind::Truncated,
    Kind::Longer,
    Kind::Altered,
    Kind::Missing,
    Kind::Changed,
    Kind::Stale,
];

/// Pushes prefixes of its own and of others, and reads, for a while; what of it was acknowledged.
async fn node(tier: &Tier, number: u8) -> BTreeSet<(u8, u32)> {
    let mut acknowledged = BTreeSet::new();
    for round in 0..6u32 {
        let prefix = if round % 2 == 0 { number } else { 100 };
        let to = 3 + round * 4;
        if push(tier, &[(prefix, 0, to)], options()).await.is_ok() {
            acknowledged.extend((0..to).map(|block| (prefix, block)));
        }
        for prefix in [number, 100, 1] {
            let Ok((blocks, _)) = read(tier, prefix, 30).await else { continue };
            for (block, bytes) in (0..).zip(blocks) {
                if let Some(bytes) = bytes {
                    assert_eq!(bytes, samples::bytes_of(prefix, block), "a wrong byte");
                }
            }
        }
    }
    acknowledged
}

fn storm(seed: u64, thousandths: u32) -> (BTreeSet<(u8, u32)>, Duration, u64) {
    let world = World::seeded(seed);
    world.faulty.plan(Plan { thousandths, kinds: KINDS.to_vec(), ..Plan::default() });
    let tiers = [world.other(), world.other(), world.other()];
    let nodes = tiers.iter().zip(1..).map(|(tier, number)| node(tier, number));
    let acknowledged: BTreeSet<_> = world.time.run(join_all(nodes)).into_iter().flatten().collect();
    world.faulty.plan(Plan::default());
    let reader = world.other();
    for prefix in acknowledged.iter().map(|(prefix, _)| *prefix).collect::<BTreeSet<_>>() {
        let to = acknowledged.iter().filter(|(other, _)| *other == prefix).count() as u32;
        assert_eq!(world.good(&reader, prefix, to), to as usize, "seed {seed}: acknowledged and not there");
    }
    (acknowledged, crate::time::Time::now(&world.time), world.faulty.asked_in_all())
}

#[test]
fn storms_cost_hits_and_never_bytes() {
    let mut pushed = 0;
    for seed in 0..150 {
        pushed += storm(seed, [20, 100, 300][seed as usize % 3]).0.len();
    }
    // It was not all lost either.
    assert!(pushed > 150 * 20, "{pushed}");
}

#[test]
fn a_seed_decides_everything() {
    assert_eq!(storm(7, 200), storm(7, 200));
    assert_ne!(storm(7, 200).2, storm(8, 200).2);
}
