//! What look-ups say of the cold tier: which prefix could be restored with what the bucket has, and what that costs; and what of it is offered to
//! look-ups that make no plan.

use std::collections::BTreeMap;
use std::time::Duration;

use kvarts_contract::api::{ContainsRequest, MatchRequest, Presence};
use kvarts_layout::prefix::UsablePrefix;
use kvarts_layout::{BlockShape, Coordinate, Group};
use kvarts_wire::proto;
use tokio::time::Instant;

use crate::cold::{OFFERED_MOST, Wish};
use crate::state::Model;

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

/// Which blocks of a column a look-up without a lease counts as here although only the bucket has them.
pub(super) fn offered(
    call: &Call,
    request: &ContainsRequest<'_>,
    model: &Model,
    presence: &[Presence],
) -> Outcome<Option<Vec<bool>>> {
    let Some(cold) = call.state.decided.cold.as_ref().filter(|cold| cold.offers()) else { return Ok(None) };
    let shape = model.shape(request.group, request.coordinate)?;
    let wish = wish(request, &shape);
    let offered = cold.offered(&wish, presence, model.identity.block_tokens, left(call));
    cold.has_offered(offered.iter().flatten().filter(|one| **one).count());
    Ok(offered)
}

/// What a match without a plan finds together with the bucket's blocks that are offered to it, if that is more than `own`.
pub(super) fn offered_prefix(
    call: &Call,
    request: &MatchRequest<'_>,
    model: &Model,
    own: u32,
) -> Outcome<Option<UsablePrefix>> {
    let Some(cold) = call.state.decided.cold.as_ref().filter(|cold| cold.offers()) else { return Ok(None) };
    let MatchRequest { namespace, keys, requirements, recompute_tokens_max: most, .. } = *request;
    if request.plan.is_some() || own as usize == keys.len() {
        return Ok(None);
    }
    let columns: usize = requirements.groups().iter().map(|group| group.coordinates.len()).sum();
    // All of them are brought in the same time.
    let left = left(call).min(OFFERED_MOST) / u32::try_from(columns.max(1)).unwrap_or(u32::MAX);
    let mut present: BTreeMap<(Group, Coordinate), (Vec<bool>, Vec<bool>)> = BTreeMap::new();
    for requirement in requirements.groups() {
        for &coordinate in &requirement.coordinates {
            let (group, lease) = (requirement.group, None);
            let request = ContainsRequest { namespace, group, coordinate, keys, lease };
            let presence = call.state.store().contains(&request)?.presence;
            let shape = model.shape(group, coordinate)?;
            let wish = wish(&request, &shape);
            let offered = cold.offered(&wish, &presence, model.identity.block_tokens, left);
            let here = presence.iter().map(|one| *one == Presence::Here).collect();
            present.insert((group, coordinate), (here, offered.unwrap_or_default()));
        }
    }
    let usable = requirements.usable_prefix(keys.len() as u32, most, |block, group, coordinate| {
        let is = |all: &[bool]| all.get(block as usize) == Some(&true);
        present.get(&(group, coordinate)).is_some_and(|(here, offered)| is(here) || is(offered))
    });
    let longest = usable.longest.blocks;
    if longest <= own {
        return Ok(None);
    }
    let counted = |offered: &[bool]| offered.iter().take(longest as usize).filter(|one| **one).count();
    cold.has_offered(present.values().map(|(_, offered)| counted(offered)).sum());
    Ok(Some(usable))
}

fn left(call: &Call) -> Duration {
    call.deadline.saturating_duration_since(Instant::now())
}

fn wish<'a>(request: &ContainsRequest<'a>, shape: &BlockShape) -> Wish<'a> {
    let ContainsRequest { namespace, group, coordinate, keys, .. } = *request;
    Wish { namespace, group, coordinate, keys, block_bytes: shape.block_bytes(), by_layers: false }
}
