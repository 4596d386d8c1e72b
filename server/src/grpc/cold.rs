//! What a match says of the cold tier: which prefix could be restored with what the bucket has, and what that costs.

use std::collections::BTreeMap;
use std::time::Duration;

use kvarts_layout::{Coordinate, Group};
use kvarts_store::api::{ContainsRequest, MatchRequest, Presence};
use kvarts_wire::proto;
use tokio::time::Instant;

use super::call::Call;
use super::convert;
use super::fault::Outcome;

/// How long a match waits for the manifest of a namespace that was not in use.
const FIRST_TIMEOUT: Duration = Duration::from_millis(250);

/// Which blocks of a column are here, and which only the bucket seems to have.
struct InColumn {
    here: Vec<bool>,
    cold: Vec<bool>,
    block_bytes: u64,
}

/// Waits for the manifest of a namespace that was not in use, and for nothing else.
pub(super) async fn prepare(call: &Call, wire: &proto::MatchRequest) {
    let Some(cold) = &call.state.decided.cold else { return };
    // What is wrong with it is told by the match.
    let Ok(namespace) = convert::namespace(&wire.namespace) else { return };
    if call.state.models.get(&call.caller, namespace).is_ok() {
        let left = call.deadline.saturating_duration_since(Instant::now());
        // It is remembered.
        let _ = cold.known_within(namespace, FIRST_TIMEOUT.min(left)).await;
    }
}

/// What the bucket adds to what was found, from memory alone.
pub(super) fn in_cold(
    call: &Call,
    request: &MatchRequest<'_>,
    own: u32,
) -> Outcome<Option<proto::match_reply::InCold>> {
    let Some(cold) = &call.state.decided.cold else { return Ok(None) };
    let MatchRequest { namespace, keys, requirements, recompute_tokens_max: most, .. } = *request;
    // Also where all is here: the namespace is in use.
    let Some(known) = cold.known(namespace).filter(|_| cold.is_asked()) else { return Ok(None) };
    if known.manifest.packs.is_empty() || own as usize == keys.len() {
        return Ok(None);
    }
    let may_have: Vec<bool> = keys.iter().map(|key| known.may_have(key)).collect();
    if !may_have.contains(&true) {
        return Ok(None);
    }
    let mut columns: BTreeMap<(Group, Coordinate), InColumn> = BTreeMap::new();
    for requirement in requirements.groups() {
        for &coordinate in &requirement.coordinates {
            let (group, lease) = (requirement.group, None);
            let shape = call.state.engine.shape(namespace, group, coordinate)?;
            let request = ContainsRequest { namespace, group, coordinate, keys, lease };
            let found = call.state.store().contains(&request)?;
            let here: Vec<bool> = found.presence.iter().map(|one| *one == Presence::Here).collect();
            let is_cold =
                |(presence, may_have): (&Presence, &bool)| *presence == Presence::Absent && *may_have;
            let cold = found.presence.iter().zip(&may_have).map(is_cold).collect();
            columns.insert((group, coordinate), InColumn { here, cold, block_bytes: shape.block_bytes() });
        }
    }
    let present = |block: u32, group, coordinate| {
        let at = block as usize;
        columns
            .get(&(group, coordinate))
            .is_some_and(|column| column.here.get(at) == Some(&true) || column.cold.get(at) == Some(&true))
    };
    let usable = requirements.usable_prefix(keys.len() as u32, most, present);
    let of_longest = usable.longest.blocks as usize;
    let (mut blocks, mut bytes) = (0, 0u64);
    for column in columns.values() {
        let wanted = column.cold.iter().take(of_longest).filter(|cold| **cold).count() as u64;
        blocks += wanted;
        bytes = bytes.saturating_add(wanted.saturating_mul(column.block_bytes));
    }
    if blocks == 0 {
        return Ok(None);
    }
    Ok(Some(proto::match_reply::InCold {
        longest: Some(convert::wire_boundary(&usable.longest)),
        cheapest: Some(convert::wire_boundary(&usable.cheapest)),
        blocks,
        bytes,
        restore_ms: cold.takes(bytes).map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1)),
    }))
}
