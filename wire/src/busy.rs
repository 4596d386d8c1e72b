//! What a server says when a call is to be made again and its client, or an operator, can do something about it meanwhile. A
//! client tells these words as they are; a server cannot make it keep others.

/// No room for a model: those that are there are all in use.
pub const MODELS_IN_USE: &str =
    "the tenant's limit of models is reached, and calls or leases use all models (end leases)";
/// No room for a model: the store remembers as many of the tenant as it may.
pub const MODELS_REMEMBERED: &str = "the store's limit of models for this tenant is reached (delete models; \
    a restart removes models without blocks)";
/// The tenant has as many leases as it may.
pub const LEASES: &str = "the tenant's limit of leases is reached (end leases)";
/// The tenant has as many sessions, or leases of them, as it may.
pub const SESSIONS: &str = "the tenant's limit of sessions, or of the leases of sessions, is reached \
    (close sessions)";
/// The session has.
pub const LEASES_OF_SESSION: &str = "the session's limit of leases is reached (end leases)";
/// A tenant's leases hold as many blocks as they may, as the store says it.
pub const BLOCKS_HELD: &str = "the tenant's leases and pins hold too many blocks (end leases or pins)";
/// All tenants' leases hold as many bytes as they may, as the store says it.
pub const HELD_BY_ALL: &str = "the limit for leases and pins of all tenants is reached (end leases or pins)";
/// A tenant has as many connections as it may.
pub const CONNECTIONS: &str = "the tenant's limit of connections is reached, and each connection has \
    a call under way (retry later)";
/// A connection has one of the places that are kept.
pub const KEPT_CONNECTIONS: &str =
    "the limit of connections is reached; the remaining connections are reserved for administrators";

/// The tenant's clients keep files whose pages the kernel charges to the server.
pub const MEMORY_KEPT: &str = "clients of this tenant keep too many files that they shared before, and the memory limit of the server \
    includes the pages of these files (close the files, or end these clients)";

/// Only another node of the cluster has a block, and there is no connection to it.
pub const PEER_AWAY: &str = "this server has no connection to the cluster node that stores the block";
/// Only another node of the cluster has a block, and nothing of it came.
pub const PEER_SILENT: &str = "the cluster node that has the block did not send the block";

/// Those that a client knows.
const KNOWN: [&str; 12] = [
    MODELS_IN_USE,
    MODELS_REMEMBERED,
    LEASES,
    SESSIONS,
    LEASES_OF_SESSION,
    BLOCKS_HELD,
    HELD_BY_ALL,
    CONNECTIONS,
    KEPT_CONNECTIONS,
    MEMORY_KEPT,
    PEER_AWAY,
    PEER_SILENT,
];

/// What a server said, if it is known.
pub(crate) fn said(what: &str) -> &'static str {
    KNOWN.into_iter().find(|known| *known == what).unwrap_or("the server cannot accept requests now")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_can_do_something_about_is_told_as_it_was_said() {
        for known in KNOWN {
            assert_eq!(said(known), known);
        }
        assert_eq!(said("words of another server"), "the server cannot accept requests now");
    }
}
