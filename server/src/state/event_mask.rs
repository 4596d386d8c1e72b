//! Event numbers as a tenant is shown them: masked, so that they tell nothing of other tenants' events.
//!
//! The engine numbers the events of all tenants one after the other. Shown as they are, the numbers of a tenant's own
//! events would tell it how much happens elsewhere. What a tenant is shown is a permutation of them that only the
//! server can undo, another one for each tenant and each start: two numbers are equal or not, and nothing else.

use kvarts_contract::events::Sequence;

const ROUNDS: u32 = 4;

/// The permutations of one server.
#[derive(Clone)]
pub struct EventMask([u8; 32]);

impl std::fmt::Debug for EventMask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventMask")
    }
}

impl EventMask {
    /// Permutations by a secret.
    pub fn new(secret: [u8; 32]) -> Self {
        Self(secret)
    }

    fn hash(&self, tenant: u32, what: u32, number: u64) -> u64 {
        let mut input = [0; 16];
        input[..4].copy_from_slice(&tenant.to_le_bytes());
        input[4..8].copy_from_slice(&what.to_le_bytes());
        input[8..].copy_from_slice(&number.to_le_bytes());
        let hash = blake3::keyed_hash(&self.0, &input);
        hash.as_bytes().iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }

    /// The name of a stream for a tenant.
    pub fn stream(&self, tenant: u32, stream: u64) -> u64 {
        self.hash(tenant, ROUNDS, stream)
    }

    /// A point of a stream as a tenant is shown it.
    pub fn hide(&self, tenant: u32, point: Sequence) -> Sequence {
        let (mut left, mut right) = ((point.number >> 32) as u32, point.number as u32);
        for round in 0..ROUNDS {
            let mixed = self.hash(tenant, round, u64::from(right)) as u32;
            (left, right) = (right, left ^ mixed);
        }
        let number = u64::from(left) << 32 | u64::from(right);
        Sequence { stream: self.stream(tenant, point.stream), number }
    }

    /// The number behind one that a tenant was shown. One that it made up is some number, too.
    pub fn number(&self, tenant: u32, shown: u64) -> u64 {
        let (mut left, mut right) = ((shown >> 32) as u32, shown as u32);
        for round in (0..ROUNDS).rev() {
            let mixed = self.hash(tenant, round, u64::from(left)) as u32;
            (left, right) = (right ^ mixed, left);
        }
        u64::from(left) << 32 | u64::from(right)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_hidden_comes_back_for_its_tenant_alone() {
        let event_mask = EventMask::new([7; 32]);
        for number in [0, 1, 2, 255, 1 << 31, u64::from(u32::MAX), 1 << 40, u64::MAX] {
            let shown = event_mask.hide(3, Sequence { stream: 9, number });
            assert_eq!(event_mask.number(3, shown.number), number);
            assert_ne!(event_mask.number(4, shown.number), number);
            assert_ne!(shown.number, number);
        }
    }

    #[test]
    fn neighbours_and_equals_look_alike_to_nobody() {
        let (event_mask, other) = (EventMask::new([7; 32]), EventMask::new([8; 32]));
        let shown =
            |event_mask: &EventMask, tenant, number| event_mask.hide(tenant, Sequence { stream: 1, number });
        let near: Vec<u64> = (0..100).map(|number| shown(&event_mask, 1, number).number).collect();
        let ordered = near.windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!((20..80).contains(&ordered), "the order shows: {ordered} of 99");
        assert!(near.windows(2).all(|pair| pair[0].abs_diff(pair[1]) > 1 << 32));
        assert_ne!(shown(&event_mask, 1, 5), shown(&event_mask, 2, 5));
        assert_ne!(shown(&event_mask, 1, 5), shown(&other, 1, 5));
    }
}
