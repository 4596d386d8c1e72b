//! Which of many blocks are here, each by itself, and a lease on those that are.

use super::lookup::not_given;
use crate::engine::shared::Shared;
use crate::index::{self, Lookup};
use kvarts_contract::api::{ContainsReply, ContainsRequest, MAX_REQUEST_BLOCKS, PIN_BYTES, Presence};
use kvarts_contract::error::Reason;

/// Answers from the index alone. With a lease, each block that is said to be here was pinned in that moment.
pub(crate) fn contains(shared: &Shared, request: &ContainsRequest<'_>) -> Result<ContainsReply, Reason> {
    if request.keys.len() > MAX_REQUEST_BLOCKS {
        return Err(Reason::TooMany("blocks"));
    }
    let namespace = shared.names.get(request.namespace).ok_or(Reason::UnknownNamespace(request.namespace))?;
    let shape = namespace.shape(request.group, request.coordinate)?;
    let prints = shared.prints_of(&namespace, request.keys, (request.group, request.coordinate));
    let mut found = Vec::new();
    let lease = match &request.lease {
        None => {
            shared.index.lookup_many(&prints, &mut found);
            None
        }
        Some(terms) => {
            let now = shared.clock.now();
            let until = Some(now.plus(terms.hold));
            let terms = index::LeaseTerms { tenant: terms.tenant, until, cap_bytes: terms.cap_bytes };
            let least = if kvarts_layout::planted!("small-pins-are-free") { 0 } else { PIN_BYTES };
            let bytes_of = |_| shape.block_bytes().max(least);
            let lease = shared.index.match_and_lease(&prints, terms, now, bytes_of, &mut found);
            lease.map_err(not_given)?
        }
    };
    shared.hide_dead(&mut found);
    let presence = |found: &Lookup| match found {
        Lookup::Live(_) => Presence::Here,
        Lookup::Pending => Presence::Pending,
        Lookup::Absent | Lookup::Quarantined => Presence::Absent,
    };
    let mut missing = shared.missing(0..prints.len(), std::iter::once((&prints[..], &found[..])));
    // Each block is for itself here.
    missing.cut_off = 0;
    let deletes = namespace.deletes(shared.events.stream());
    Ok(ContainsReply { presence: found.iter().map(presence).collect(), missing, lease, deletes })
}
