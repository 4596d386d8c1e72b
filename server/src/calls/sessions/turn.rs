//! What a turn of a session is, by what the session knows of it, and what its writer should keep of windows and states.

use kvarts_layout::prefix::BYTES_PER_SECOND;
use kvarts_planner::cost::Prefill;
use kvarts_planner::route::Class;
use kvarts_planner::tails::Turn;
use kvarts_wire::{proto, sessions};

use super::super::call::Call;
use super::super::fault::Outcome;
use crate::state::Model;

/// What a session knows of a turn, in blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// What it had before.
    pub(super) before: u32,
    /// From the first on, what is stored or was the session's before.
    pub(super) stored: u32,
    /// What it has now.
    pub(super) blocks: u32,
    /// Whether others go on from the same blocks.
    pub(super) forked: bool,
}

impl Facts {
    /// Class and advice.
    pub(super) fn reply(
        self,
        call: &Call,
        model: &Model,
        wire: Option<&proto::SessionTurn>,
    ) -> Outcome<proto::SessionReply> {
        let nothing = proto::SessionTurn::default();
        let wire = wire.unwrap_or(&nothing);
        let times = wire.times.as_ref().map(|times| call.state.times.of(Some(times))).transpose()?;
        let block_tokens = model.identity.block_tokens;
        let tokens = |blocks: u32| u64::from(blocks) * u64::from(block_tokens);
        let prompt = if wire.prompt_tokens == 0 { tokens(self.blocks) } else { wire.prompt_tokens };
        let in_memory = tokens(wire.engine_blocks.unwrap_or(self.before)).min(prompt);
        let there = tokens(self.stored).clamp(in_memory, prompt);
        let class = Class::of(in_memory, there - in_memory, prompt - there, self.forked);
        let turn = Turn {
            class,
            tokens: prompt,
            block_tokens,
            boundary_bytes: model.geometry.boundary_bytes(block_tokens).unwrap_or(0),
            bytes_per_second: BYTES_PER_SECOND,
        };
        let tail = turn.tail(times.as_deref().map(|times| times as &dyn Prefill));
        Ok(proto::SessionReply {
            blocks: self.blocks,
            class: sessions::wire_class(class).into(),
            tail: Some(sessions::wire_tail(&tail)),
            ..proto::SessionReply::default()
        })
    }
}
