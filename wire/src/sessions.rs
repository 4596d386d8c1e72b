//! Classes and advice of sessions as messages of the contract, and back.

use std::num::NonZeroU32;

use kvarts_planner::route::Class;
use kvarts_planner::tails::{Keep, Tail};

use crate::proto;
use proto::route_reply::Class as WireClass;
use proto::tail::Keep as WireKeep;

/// The class of a turn.
pub fn wire_class(class: Class) -> WireClass {
    match class {
        Class::NewLongPrefix => WireClass::NewLongPrefix,
        Class::SmallTurn => WireClass::SmallTurn,
        Class::LongToolOutput => WireClass::LongToolOutput,
        Class::Continuation => WireClass::Continuation,
        Class::ForkedRollout => WireClass::ForkedRollout,
        Class::ColdResume => WireClass::ColdResume,
    }
}

/// The same, for a client.
pub fn class(wire: WireClass) -> Class {
    match wire {
        WireClass::NewLongPrefix => Class::NewLongPrefix,
        WireClass::SmallTurn => Class::SmallTurn,
        WireClass::LongToolOutput => Class::LongToolOutput,
        WireClass::Continuation => Class::Continuation,
        WireClass::ForkedRollout => Class::ForkedRollout,
        WireClass::ColdResume => Class::ColdResume,
    }
}

/// What is kept of windows and states.
pub fn wire_tail(tail: &Tail) -> proto::Tail {
    let (keep, every_blocks) = match tail.keep {
        Keep::Nothing => (WireKeep::Nothing, 0),
        Keep::EveryBlock => (WireKeep::EveryBlock, 0),
        Keep::EveryBlocks(blocks) => (WireKeep::EveryBlocks, blocks.get()),
        Keep::Replay => (WireKeep::Replay, 0),
    };
    let Tail { tip, replay_tokens, replay_ms, write_ms, .. } = *tail;
    proto::Tail { keep: keep.into(), every_blocks, tip, replay_tokens, replay_ms, write_ms }
}

/// The same, for a client.
pub fn tail(wire: &proto::Tail) -> Tail {
    let keep = match (wire.keep(), NonZeroU32::new(wire.every_blocks)) {
        (WireKeep::EveryBlock, _) | (WireKeep::EveryBlocks, None) => Keep::EveryBlock,
        (WireKeep::EveryBlocks, Some(blocks)) => Keep::EveryBlocks(blocks),
        (WireKeep::Replay, _) => Keep::Replay,
        (WireKeep::Nothing, _) => Keep::Nothing,
    };
    let proto::Tail { tip, replay_tokens, replay_ms, write_ms, .. } = *wire;
    Tail { keep, tip, replay_tokens, replay_ms, write_ms }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_told_what_the_planner_said() {
        let every = Keep::EveryBlocks(NonZeroU32::new(7).unwrap_or(NonZeroU32::MIN));
        for keep in [Keep::Nothing, Keep::EveryBlock, every, Keep::Replay] {
            let said = Tail { keep, tip: true, replay_tokens: 5, replay_ms: 1.5, write_ms: 2.5 };
            assert_eq!(tail(&wire_tail(&said)), said);
        }
        use Class::*;
        for said in [NewLongPrefix, SmallTurn, LongToolOutput, Continuation, ForkedRollout, ColdResume] {
            assert_eq!(class(wire_class(said)), said);
        }
    }
}
