//! Lookups as messages of the contract, and their replies as answers: the same on every path.

use std::time::Duration;

use kvarts_contract::api::{
    ContainsReply, ContainsRequest, LeaseTerms, MatchReply, MatchRequest, Missing, Presence,
};
use kvarts_contract::error::Reason;
use kvarts_layout::UsablePrefix;
use kvarts_layout::prefix::Coverage;

use super::remote::lease;
use kvarts_wire::{convert, plans, proto};

/// Whole milliseconds, at least one: zero has other meanings.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1)
}

fn lease_ms(terms: Option<&LeaseTerms>) -> u64 {
    terms.map_or(0, |terms| millis(terms.hold))
}

/// What a prefix is looked up with.
pub(super) fn matching(request: &MatchRequest<'_>, of_cluster: bool) -> proto::MatchRequest {
    proto::MatchRequest {
        namespace: request.namespace.as_bytes().to_vec().into(),
        keys: convert::key_bytes(request.keys),
        block_tokens: request.requirements.block_tokens(),
        requirements: convert::wire_requirements(request.requirements),
        recompute_tokens_max: Some(request.recompute_tokens_max),
        lease_ms: lease_ms(request.lease.as_ref()),
        lease_cap_bytes: request.lease.map(|terms| terms.cap_bytes),
        plan: request.plan.as_ref().map(plans::wire_terms),
        of_cluster,
    }
}

/// Why blocks cannot be used.
fn missing(wire: Option<&proto::Missing>) -> Missing {
    let Some(&proto::Missing { evicted, expired, deleted, out_of_service, never_stored, cut_off }) = wire
    else {
        return Missing::default();
    };
    Missing { evicted, expired, deleted, out_of_service, never_stored, cut_off }
}

/// What was found of a prefix.
pub(super) fn matched(found: &proto::MatchReply) -> Result<MatchReply, Reason> {
    let coverage = |one: &proto::match_reply::Coverage| {
        let column = convert::column(one.column.as_ref());
        let (group, coordinate) =
            column.map_err(|_| Reason::Bug("the answer of the server has an unknown column"))?;
        Ok(Coverage { group, coordinate, blocks: one.blocks })
    };
    let usable = UsablePrefix {
        coverage: found.coverage.iter().map(coverage).collect::<Result<_, Reason>>()?,
        longest: convert::boundary(found.longest.clone()),
        cheapest: convert::boundary(found.cheapest.clone()),
    };
    let plan = found.plan.as_ref().map(plans::planned).transpose()?.map(Box::new);
    let missing = missing(found.missing.as_ref());
    Ok(MatchReply { usable, pending: found.pending, missing, lease: lease(found.lease), plan })
}

/// The same; what the nodes of the cluster have together counts, where that was asked and is more. `missing` is of this node alone.
pub(super) fn matched_together(found: &proto::MatchReply) -> Result<MatchReply, Reason> {
    let mut reply = matched(found)?;
    if let Some(together) = &found.in_cluster {
        let longest = convert::boundary(together.longest.clone());
        if longest.blocks > reply.usable.longest.blocks {
            (reply.usable.longest, reply.usable.cheapest) =
                (longest, convert::boundary(together.cheapest.clone()));
        }
    }
    Ok(reply)
}

/// What single blocks are looked up with; `of_cluster`: also with other nodes.
pub(super) fn asking(request: &ContainsRequest<'_>, of_cluster: bool) -> proto::ExistsRequest {
    proto::ExistsRequest {
        keys: convert::key_bytes(request.keys),
        ..asking_without_keys(request, of_cluster)
    }
}

/// The field of [`proto::ExistsRequest`] in which the keys stand.
pub(super) const ASKED_KEYS: u32 = 3;

/// The same without its keys, which are put into the frame behind it.
pub(super) fn asking_without_keys(request: &ContainsRequest<'_>, of_cluster: bool) -> proto::ExistsRequest {
    proto::ExistsRequest {
        namespace: request.namespace.as_bytes().to_vec().into(),
        column: Some(convert::wire_column(request.group, request.coordinate)),
        keys: Default::default(),
        lease_ms: lease_ms(request.lease.as_ref()),
        lease_cap_bytes: request.lease.map(|terms| terms.cap_bytes),
        of_cluster,
    }
}

/// Which of `keys` blocks were found.
pub(super) fn found(reply: &proto::ExistsReply, keys: usize) -> Result<ContainsReply, Reason> {
    use proto::exists_reply::Presence as Wire;
    let presence: Vec<_> = reply
        .presence()
        .map(|one| match one {
            Wire::Here => Presence::Here,
            Wire::Pending => Presence::Pending,
            Wire::Absent => Presence::Absent,
        })
        .collect();
    if presence.len() != keys {
        return Err(Reason::Bug("the reply has a wrong number of keys"));
    }
    let missing = missing(reply.missing.as_ref());
    Ok(ContainsReply { presence, missing, lease: lease(reply.lease), deletes: reply.deletes })
}
