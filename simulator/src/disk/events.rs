//! What happened to blocks in a replay, in order.

use std::fmt;

use kvarts_contract::events::EventKind;
use kvarts_layout::BlockKey;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// A request found the block and read it whole.
    Hit,
    /// The engine has it.
    Stored,
    /// The engine evicted it.
    Evicted,
    /// Anything else that the engine tells of a block: damage, a delete, the end of its time.
    Other,
}

impl Kind {
    pub(super) fn of(kind: EventKind) -> Self {
        match kind {
            EventKind::Stored => Self::Stored,
            EventKind::Evicted => Self::Evicted,
            _ => Self::Other,
        }
    }

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Stored => "stored",
            Self::Evicted => "evicted",
            Self::Other => "other",
        }
    }
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Happened {
    /// The request during which it happened, from 1.
    pub request: u64,
    /// What happened.
    pub kind: Kind,
    /// To which block of the trace.
    pub block: u64,
}

impl fmt::Display for Happened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request, kind, block } = self;
        write!(f, r#"{{"request": {request}, "event": "{}", "block": {block}}}"#, kind.name())
    }
}

/// The key of a block of a trace carries its id, so that an engine's events name it.
pub(super) fn key_of(block: u64) -> BlockKey {
    let mut bytes = [0; 32];
    let (id, rest) = bytes.split_at_mut(8);
    id.copy_from_slice(&block.to_le_bytes());
    let mut state = block ^ 0x6b76_6172_7473;
    for word in rest.chunks_exact_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word.copy_from_slice(&(bits ^ (bits >> 31)).to_le_bytes());
    }
    BlockKey(bytes)
}

/// The block that has this key.
pub(super) fn block_of(key: &BlockKey) -> u64 {
    let mut id = [0; 8];
    id.iter_mut().zip(key.0).for_each(|(to, from)| *to = from);
    u64::from_le_bytes(id)
}

/// All events of a replay as one number: of two replays it is equal if every event is.
#[derive(Debug, Default)]
pub(super) struct Tally {
    hasher: blake3::Hasher,
    /// Events so far.
    pub(super) count: u64,
}

impl Tally {
    /// The next event.
    pub(super) fn add(&mut self, event: &Happened) {
        self.count += 1;
        self.hasher.update(&[event.kind as u8]);
        self.hasher.update(&event.request.to_le_bytes());
        self.hasher.update(&event.block.to_le_bytes());
    }

    /// The number of all so far, as hexadecimal digits.
    pub(super) fn digest(&self) -> String {
        self.hasher.finalize().to_hex().chars().take(32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_its_block_and_an_event_is_a_line() {
        for block in [0, 1, 77, u64::MAX] {
            assert_eq!(block_of(&key_of(block)), block);
        }
        assert_ne!(key_of(1).0[8..], key_of(2).0[8..]);
        let event = Happened { request: 3, kind: Kind::Evicted, block: 9 };
        assert_eq!(event.to_string(), r#"{"request": 3, "event": "evicted", "block": 9}"#);
        let (mut one, mut other) = (Tally::default(), Tally::default());
        one.add(&event);
        other.add(&Happened { block: 8, ..event });
        assert_ne!(one.digest(), other.digest());
    }
}
