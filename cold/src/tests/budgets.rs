//! What a day's budget stops, and what it does not.

use super::fixture::*;
use crate::access::Limits;
use crate::bucket::Condition;
use crate::error::ColdError;
use crate::format::samples;
use crate::withdraw::{Deleted, withdraw};

#[test]
fn bytes_that_were_read_beyond_a_budget_stop_reads_and_nothing_else() {
    let world = World::new();
    world.push(&[(1, 0, 12)]).unwrap();
    // The manifest alone is more: that is known when it has come.
    let tier = world.other_with_limits(Limits { read_bytes_a_day: 100, ..limits() });
    let access = tier.access();
    world.time.run(async {
        let known = tier.read_manifest(samples::namespace_id("r1")).await.unwrap();
        assert!(access.today().read_bytes > 100);
        let refused = tier.read_manifest(samples::namespace_id("r1")).await;
        assert_eq!(refused.unwrap_err(), ColdError::Budget("bytes read"));
        assert!(!known.manifest.packs.is_empty());
        access.put("a", &["b".into()], Condition::Any).await.unwrap();
        assert_eq!(access.list("a", None, 10).await.unwrap().len(), 1);
        assert_eq!(access.head("a").await.unwrap().bytes, 1);
        access.delete("a").await.unwrap();
    });
    let tier = world.other_with_limits(Limits { written_bytes_a_day: 0, ..limits() });
    assert_eq!(world.good(&tier, 1, 12), 12, "reads write nothing");
}

#[test]
fn deletes_reach_the_bucket_when_blocks_have_spent_their_part_of_the_day() {
    for (limits, pushes) in [
        (Limits { read_bytes_a_day: 40_000, ..limits() }, false),
        (Limits { written_bytes_a_day: 160_000, ..limits() }, true),
        (Limits { requests_a_day: 64, ..limits() }, false),
        (Limits { requests_a_day: 64, ..limits() }, true),
    ] {
        let world = World::new();
        world.push(&[(1, 0, 12)]).unwrap();
        let tier = world.other_with_limits(limits.clone());
        let mut rounds = 0;
        while rounds < 100 {
            rounds += 1;
            let is_spent = if pushes {
                world.time.run(push(&tier, &[(100 + rounds, 0, 12)], options())).is_err()
            } else {
                // An index that is not remembered is read again, as the pack is.
                world.read(&tier, 1, 12).1.lost > 0
            };
            if is_spent {
                break;
            }
        }
        assert!(rounds < 100, "nothing is spent: {limits:?}");
        let keys = Deleted::Keys(vec![samples::key(1, 3)]);
        let gone = world.time.run(withdraw(&tier, samples::namespace_id("r1"), std::slice::from_ref(&keys)));
        assert_eq!(gone, Ok(1), "{limits:?}");
        let today = tier.access().today();
        assert!(today.requests <= limits.requests_a_day && today.written_bytes <= limits.written_bytes_a_day);
        assert!(today.read_bytes <= limits.read_bytes_a_day);
    }
}
