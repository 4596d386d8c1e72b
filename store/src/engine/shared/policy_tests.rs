//! Each policy by itself: who goes before whom.

use super::*;

fn of_age(age: u32) -> Candidate {
    Candidate { age, ..Candidate::default() }
}

#[test]
fn every_policy_lets_the_older_of_two_alike_go_first() {
    for policy in EvictionPolicy::ALL {
        assert_eq!(EvictionPolicy::named(policy.name()), Some(policy));
        for frequency in [0, 2, 3] {
            let ranks = (0..900).map(|age| policy.rank(&Candidate { frequency, ..of_age(age) }));
            let ranks: Vec<u32> = ranks.collect();
            assert!(ranks.is_sorted_by(|a, b| a < b), "{}: {frequency}", policy.name());
        }
    }
    assert_eq!(EvictionPolicy::named("fifo"), None);
}

#[test]
fn every_policy_tells_ages_of_years_apart_and_knows_the_age_of_a_plain_block_by_its_rank() {
    for policy in EvictionPolicy::ALL {
        for age in [30, 900, 20_000, 500_000, 2_000_000] {
            let (one, later) = (policy.rank(&of_age(age)), policy.rank(&of_age(age + 1)));
            assert!(one < later, "{policy:?}: {age}");
            assert_eq!((policy.age_of(one), policy.age_of(later)), (age, age + 1), "{policy:?}");
        }
    }
}

#[test]
fn lru_knows_nothing_but_the_last_use() {
    let lru = EvictionPolicy::Lru;
    let all = Candidate { age: 7, frequency: 3, tip: true, passed: true, boundary: true, cost: 4 };
    assert_eq!(lru.rank(&all), lru.rank(&of_age(7)));
}

#[test]
fn weights_say_what_the_evidence_is_worth() {
    let rank = |block: Candidate| EvictionPolicy::Weighted.rank(&block);
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
