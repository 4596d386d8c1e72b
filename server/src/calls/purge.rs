//! Deletes everything that a tenant has stored, also one that is not in the configuration any more: its namespaces are known by
//! the salt of their identities, and not by who registered them.
//!
//! What the store knows of goes, here, in the bucket and wherever else a delete of a namespace reaches. Namespaces that only the
//! bucket or another node has are not known here.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvarts_contract::api::Target;
use kvarts_layout::identity::{MAX_SALT_BYTES, TenantSalt};
use kvarts_wire::proto;

use super::call::Call;
use super::fault::{Fault, Outcome};
use super::store::deleted;
use crate::state::tenant::salt_of;

/// Namespaces of one tenant that are deleted, and counted, at most.
const NAMESPACES_MAX: usize = 1 << 20;

/// Whose namespaces are meant.
fn salt(call: &Call, wire: &proto::PurgeTenantRequest) -> Outcome<TenantSalt> {
    match (wire.name.as_str(), wire.salt.len(), wire.unsalted) {
        ("", 0, true) => Ok(TenantSalt::default()),
        ("", 1..=MAX_SALT_BYTES, false) => Ok(TenantSalt(wire.salt.to_vec())),
        (name, 0, false) if !name.is_empty() => {
            let tenants = call.state.gate.tenants();
            let known = tenants.iter().find(|tenant| tenant.name == name);
            Ok(known.map_or_else(|| salt_of(name), |tenant| tenant.salt.clone()))
        }
        _ => Err(Fault::malformed(
            "purge_tenant: set exactly one of name, salt (at most 64 bytes) and unsalted",
        )),
    }
}

/// Deletes everything of a tenant, or says what would go.
pub(crate) async fn purge(
    call: Arc<Call>,
    wire: proto::PurgeTenantRequest,
) -> Outcome<proto::PurgeTenantReply> {
    let salt = salt(&call, &wire)?;
    let mut all = call.state.engine.namespaces(&salt, NAMESPACES_MAX);
    // Of the others nothing was ever stored.
    all.retain(|one| one.is_used);
    let (blocks, bytes) =
        all.iter().fold((0, 0), |sum, one| (sum.0 + one.live_blocks, sum.1 + one.live_bytes));
    let namespaces = all.len() as u64;
    if wire.dry_run {
        return Ok(proto::PurgeTenantReply { namespaces, blocks, bytes, away: Vec::new() });
    }
    let (of, by) = (wire.name.as_str(), call.caller.tenant.name.as_str());
    tracing::info!(target: "audit", tenant = by, of, unsalted = wire.unsalted, namespaces, blocks, "purge of a tenant");
    let (mut gone, mut away) = (0, BTreeSet::new());
    for one in &all {
        // Also where nothing is live: what was evicted may still lie on disk.
        let (reply, were_away) = deleted(&call, one.namespace, Target::Namespace).await?;
        gone += reply.blocks;
        away.extend(were_away.into_iter().map(|one| format!("{}: {}", one.address, one.trouble)));
    }
    Ok(proto::PurgeTenantReply { namespaces, blocks: gone, bytes, away: away.into_iter().collect() })
}
