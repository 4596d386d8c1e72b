//! Each policy by itself: who goes before whom.

use super::*;

fn of_age(age: u32) -> Candidate {
    Candidate { age, ..Candidate::default() }
}

#[test]
fn every_policy_lets_the_older_of_two_alike_go_first() {
    for policy in EvictionPolicy::ALL {
        assert_eq!(EvictionPolicy::named(policy.name()), Some(policy));
        for (frequency, main) in [(0, false), (2, false), (0, true), (3, true)] {
            let ranks = (0..900)
                .map(|age| policy.policy().rank(&Candidate { age, frequency, main, ..Candidate::default() }));
            let ranks: Vec<u32> = ranks.collect();
            assert!(ranks.is_sorted_by(|a, b| a < b), "{}: {frequency} {main}", policy.name());
        }
    }
    assert_eq!(EvictionPolicy::named("fifo"), None);
}

#[test]
fn every_policy_tells_ages_of_years_apart_and_knows_the_age_of_a_plain_block_by_its_rank() {
    for policy in EvictionPolicy::ALL {
        let policy = policy.policy();
        for age in [30, 900, 20_000, 500_000, 2_000_000] {
            let (one, later) = (policy.rank(&of_age(age)), policy.rank(&of_age(age + 1)));
            assert!(one < later, "{policy:?}: {age}");
            assert_eq!((policy.age_of(one), policy.age_of(later)), (age, age + 1), "{policy:?}");
        }
    }
}

#[test]
fn lru_knows_nothing_but_the_last_use() {
    let lru = EvictionPolicy::Lru.policy();
    let all =
        Candidate { age: 7, frequency: 3, main: true, tip: true, passed: true, boundary: true, cost: 4 };
    assert_eq!(lru.rank(&all), lru.rank(&of_age(7)));
    assert_eq!(lru.choose(&all), Chosen::Goes);
    assert!(lru.renews());
}

#[test]
fn weights_say_what_the_evidence_is_worth() {
    let rank = |block: Candidate| EvictionPolicy::Weighted.policy().rank(&block);
    let fresh = of_age(100);
    let used = Candidate { frequency: 1, ..fresh };
    assert!(rank(used) < rank(fresh));
    assert!(rank(Candidate { age: 205, ..used }) > rank(fresh), "twice as old, and a little");
    let tip = Candidate { tip: true, ..fresh };
    assert!(rank(tip) > rank(fresh));
    assert!(rank(Candidate { age: 24, ..tip }) < rank(fresh), "a fourth of the age, less a little");
    assert_eq!(rank(Candidate { passed: true, ..tip }), rank(tip), "not twice for one thing");
    assert_eq!(rank(Candidate { tip: true, ..used }), rank(used), "a used tip is none");
    assert!(rank(Candidate { boundary: true, ..used }) > rank(used));
    assert!(rank(Candidate { cost: 2, ..fresh }) < rank(fresh));
    assert!(rank(Candidate { cost: -2, ..fresh }) > rank(fresh));
    assert_eq!(rank(Candidate { cost: 1, ..fresh }), rank(fresh), "by the square root");
    assert_eq!(rank(Candidate { cost: 120, ..fresh }), rank(Candidate { cost: 4, ..fresh }), "within bounds");
}

#[test]
fn s3_fifo_drops_what_was_not_used_early_and_gives_the_rest_rounds() {
    let policy = EvictionPolicy::S3Fifo.policy();
    let overdue = of_age(SMALL_STEPS);
    let main = Candidate { main: true, ..of_age(900) };
    let young = of_age(SMALL_STEPS - 1);
    assert!(policy.rank(&overdue) > policy.rank(&main) && policy.rank(&main) > policy.rank(&young));
    assert_eq!(policy.choose(&overdue), Chosen::Goes);
    assert_eq!(policy.choose(&Candidate { frequency: 1, ..overdue }), Chosen::Stays(0));
    assert_eq!(policy.choose(&Candidate { frequency: 2, ..main }), Chosen::Stays(1));
    assert_eq!(policy.choose(&main), Chosen::Goes);
    assert!(!policy.renews());
}
