//! Matching a prompt against the index, and leases on what was found.

use std::sync::Arc;

use kvarts_layout::prefix::Requirement;
use kvarts_layout::{BlockKey, Coordinate, Group, UsablePrefix};

use super::column::Column;
use super::restore;
use crate::engine::shared::Shared;
use crate::engine::shared::names::Namespace;
use crate::index::{self, LeaseError, Lookup};
use kvarts_contract::api::LeaseId;
use kvarts_contract::api::{
    LeaseTerms, MAX_MATCH_ENTRIES, MAX_REQUEST_BLOCKS, MatchReply, MatchRequest, PIN_BYTES,
};
use kvarts_contract::error::{Reason, ShapeCause};

/// How often a match is repeated because what it leased was evicted meanwhile.
const ROUNDS_MAX: usize = 8;

/// Answers a match.
pub(crate) fn match_prefix(shared: &Shared, request: &MatchRequest<'_>) -> Result<MatchReply, Reason> {
    if request.keys.len() > MAX_REQUEST_BLOCKS {
        return Err(Reason::TooMany("blocks"));
    }
    // Before anything is made for each of them.
    let columns: usize = request.requirements.groups().iter().map(|group| group.coordinates.len()).sum();
    if request.keys.len().saturating_mul(columns) > MAX_MATCH_ENTRIES {
        return Err(Reason::TooMany("keys times coordinates"));
    }
    let namespace = shared.names.get(request.namespace).ok_or(Reason::UnknownNamespace(request.namespace))?;
    if request.requirements.block_tokens() != namespace.block_tokens {
        let (asked, stored) = (request.requirements.block_tokens(), namespace.block_tokens);
        return Err(Reason::Shape(ShapeCause::BlockTokens { asked, stored }));
    }
    let mut columns = Vec::new();
    for requirement in request.requirements.groups() {
        for &coordinate in &requirement.coordinates {
            // What the model does not have is a mistake, not a miss.
            namespace.shape(requirement.group, coordinate)?;
            columns.push(column(shared, &namespace, request.keys, requirement, coordinate));
        }
    }
    // A block may be evicted between the look and the lease: then both are done again. It ends because each
    // round means that something was evicted; a store that evicts faster than this is answered without a lease.
    for _ in 0..ROUNDS_MAX {
        for column in &mut columns {
            shared.drop_expired(&column.prints, |place| request.keys.get(place).copied());
            shared.index.lookup_many(&column.prints, &mut column.found);
            shared.hide_dead(&mut column.found);
        }
        let usable = usable_prefix(shared, request, &columns);
        let lease = match &request.lease {
            None => None,
            Some(terms) => match take_lease(shared, &namespace, terms, &columns, &usable)? {
                Held::All(lease) => lease,
                Held::Changed => continue,
            },
        };
        let pending = pending_behind(&columns, usable.longest.blocks);
        let planned =
            request.plan.map(|terms| restore::plan(shared, &namespace, (request, &terms), &columns));
        let plan = match planned.transpose() {
            Ok(plan) => plan.map(Box::new),
            Err(reason) => {
                // Who is refused has no lease.
                lease.map(|lease| shared.index.unlock(lease));
                return Err(reason);
            }
        };
        let behind = usable.longest.blocks as usize..request.keys.len();
        let missing = shared.missing(behind, columns.iter().map(|one| (&one.prints[..], &one.found[..])));
        return Ok(MatchReply { usable, pending, missing, lease, plan });
    }
    Err(Reason::Busy("blocks were evicted while a lease on them was being made"))
}

/// Blocks behind the usable prefix whose put is in flight.
fn pending_behind(columns: &[Column], blocks: u32) -> u32 {
    let behind = |column: &Column| {
        let rest = column.found.iter().skip(blocks as usize);
        rest.filter(|found| **found == Lookup::Pending).count() as u32
    };
    columns.iter().map(behind).max().unwrap_or(0)
}

fn column(
    shared: &Shared,
    namespace: &Namespace,
    keys: &[BlockKey],
    requirement: &Requirement,
    coordinate: Coordinate,
) -> Column {
    let key = shared.index.key();
    let group = requirement.group;
    let prints = keys.iter().map(|name| key.of(namespace.local, name, group, coordinate)).collect();
    Column { group, coordinate, prints, found: Vec::new() }
}

fn usable_prefix(shared: &Shared, request: &MatchRequest<'_>, columns: &[Column]) -> UsablePrefix {
    let blocks = request.keys.len() as u32;
    let (mut next, mut steps) = (0, 0);
    let present = |block: u32, group: Group, coordinate: Coordinate| {
        // Of each block all columns are asked for, in their order.
        let mut from_next = (next..columns.len()).chain(0..next);
        let found = from_next.find_map(|at| {
            steps += 1;
            let column = columns.get(at)?;
            (column.group == group && column.coordinate == coordinate).then_some((at, column))
        });
        let Some((at, column)) = found else { return false };
        next = (at + 1) % columns.len().max(1);
        matches!(column.found.get(block as usize), Some(Lookup::Live(_)))
    };
    let usable = request.requirements.usable_prefix(blocks, request.recompute_tokens_max, present);
    shared.work.matches.add(steps);
    usable
}

/// What became of a lease.
enum Held {
    /// Everything that was found live is held.
    All(Option<LeaseId>),
    /// Something of it was gone by then; nothing is held.
    Changed,
}

/// Holds what the longest usable prefix is made of.
fn take_lease(
    shared: &Shared,
    namespace: &Arc<Namespace>,
    terms: &LeaseTerms,
    columns: &[Column],
    usable: &UsablePrefix,
) -> Result<Held, Reason> {
    let (mut prints, mut bytes) = (Vec::new(), Vec::new());
    for column in columns {
        let each = namespace.shape(column.group, column.coordinate)?.block_bytes().max(PIN_BYTES);
        let used = column.prints.iter().zip(&column.found).take(usable.longest.blocks as usize);
        let live = used.filter(|(_, found)| matches!(found, Lookup::Live(_)));
        prints.extend(live.map(|(print, _)| *print));
        bytes.resize(prints.len(), each);
    }
    let now = shared.clock.now();
    let until = Some(now.plus(terms.hold));
    let terms = index::LeaseTerms { tenant: terms.tenant, until, cap_bytes: terms.cap_bytes };
    let bytes_of = |place: usize| bytes.get(place).copied().unwrap_or(1);
    let mut found = Vec::new();
    let lease = shared.index.match_and_lease(&prints, terms, now, bytes_of, &mut found).map_err(not_given)?;
    if found.iter().all(|found| matches!(found, Lookup::Live(_))) {
        return Ok(Held::All(lease));
    }
    if let Some(lease) = lease {
        shared.index.unlock(lease);
    }
    Ok(Held::Changed)
}

/// Why a lease was not given.
pub(crate) fn not_given(error: LeaseError) -> Reason {
    match error {
        LeaseError::Cap { limit, wanted } => Reason::PinCap { limit, wanted },
        LeaseError::Blocks => {
            Reason::Busy("the tenant's leases and pins hold too many blocks (end leases or pins)")
        }
        LeaseError::Together => {
            Reason::Busy("the limit for leases and pins of all tenants is reached (end leases or pins)")
        }
        LeaseError::Expired => Reason::Bug("a lease ended while it was being made"),
    }
}
