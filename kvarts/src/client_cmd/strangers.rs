//! Identities that a server has nothing of: which of those that it has blocks of was meant.

use kvarts_client::Client;
use kvarts_layout::identity::{Difference, TenantSalt, nearest};
use kvarts_layout::{Fingerprint, Identity};
use kvarts_server::human::bytes;
use kvarts_terminal::Failure;
use kvarts_wire::{convert, proto};

/// What a server says of an identity.
pub(super) enum Standing {
    /// It was registered, or there are blocks of it; or the server cannot say.
    Known,
    /// Nothing is stored of it; the one that was meant, if it differs in a few fields.
    Unknown(Option<String>),
}

type Listed = (Identity, proto::list_models_reply::Model);

fn listed(reply: &proto::ListModelsReply) -> Vec<Listed> {
    let one = |model: &proto::list_models_reply::Model| {
        let wire = model.identity.clone().unwrap_or_default();
        let identity = convert::identity(wire, TenantSalt::default(), Fingerprint::default()).ok()?;
        Some((identity, model.clone()))
    };
    reply.models.iter().filter_map(one).collect()
}

/// What the server has of an identity. Registers nothing.
pub(super) fn standing(client: &Client, identity: &Identity) -> Result<Standing, Failure> {
    let reply = client.models().map_err(Failure::user)?;
    let known = listed(&reply);
    // Only a match says what a bucket and other nodes of a cluster have.
    let elsewhere = reply.cold || reply.clustered;
    if !reply.of_store || elsewhere || known.iter().any(|(one, _)| identity.differences(one).is_empty()) {
        return Ok(Standing::Known);
    }
    // One that was not listed for want of room may be it.
    let hint = hint(identity, &known);
    Ok(if reply.more && hint.is_none() { Standing::Known } else { Standing::Unknown(hint) })
}

/// The stored identity that differs in a few fields, and in which.
fn hint(identity: &Identity, known: &[Listed]) -> Option<String> {
    let stored: Vec<_> = known.iter().filter(|(_, model)| model.live_bytes > 0).collect();
    let near = nearest(identity, stored.iter().map(|(one, _)| one))?;
    let (there, model) = stored.get(near.at)?;
    let (name, size) = (there.model.escape_debug(), bytes(model.live_bytes));
    let fields: Vec<String> = near.differences.iter().map(in_words).collect();
    Some(format!(
        "the store contains {size} of {name} {}, whose identity differs from the request: {}",
        there.revision.escape_debug(),
        fields.join(", ")
    ))
}

/// A difference without hashes: what a fingerprint says is that the model's state has another shape.
fn in_words(difference: &Difference) -> String {
    match difference.field.as_str() {
        "spec_fingerprint" => {
            "the shape of the model's state (stored with another --model or --page-bytes)".to_owned()
        }
        _ => difference.to_string(),
    }
}

/// Why nothing of an identity was found, where that is a typo; nothing else may fail because of it.
pub(super) fn meant(client: &Client, identity: &Identity) -> Option<String> {
    let known = listed(&client.models().ok()?);
    let has_blocks =
        known.iter().any(|(one, model)| model.live_bytes > 0 && identity.differences(one).is_empty());
    if has_blocks { None } else { hint(identity, &known) }
}
