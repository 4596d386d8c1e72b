//! The methods of the contract, each with the right that it needs: one table, so that no handler can forget to ask.

use crate::state::Right;

/// A method of the contract.
#[derive(Debug)]
pub(crate) struct Method {
    /// Its path in the contract; empty for one that only the local path has.
    pub(crate) path: &'static str,
    /// Its name in metrics and logs.
    pub(crate) name: &'static str,
    /// The right that it needs.
    pub(crate) right: Right,
}

impl Method {
    pub(crate) const fn new(path: &'static str, name: &'static str, right: Right) -> Self {
        Self { path, name, right }
    }
}

/// Each method and the right that it needs.
pub(crate) const METHODS: &[Method] = &[
    Method::new("/kvarts.v1.Models/RegisterModel", "register_model", Right::Read),
    Method::new("/kvarts.v1.Models/ListModels", "list_models", Right::Read),
    Method::new("/kvarts.v1.Store/Put", "put", Right::Write),
    Method::new("/kvarts.v1.Store/Match", "match", Right::Read),
    Method::new("/kvarts.v1.Store/Exists", "exists", Right::Read),
    Method::new("/kvarts.v1.Store/Unlock", "unlock", Right::Read),
    Method::new("/kvarts.v1.Store/Pin", "pin", Right::Pin),
    Method::new("/kvarts.v1.Store/Unpin", "unpin", Right::Read),
    Method::new("/kvarts.v1.Store/ListPins", "list_pins", Right::Read),
    Method::new("/kvarts.v1.Store/Renew", "renew", Right::Read),
    Method::new("/kvarts.v1.Store/SetDefaultTtl", "set_default_ttl", Right::Write),
    Method::new("/kvarts.v1.Store/SetTtl", "set_ttl", Right::Write),
    Method::new("/kvarts.v1.Store/Delete", "delete", Right::Delete),
    Method::new("/kvarts.v1.Plans/Route", "route", Right::Read),
    Method::new("/kvarts.v1.Sessions/Open", "session_open", Right::Write),
    Method::new("/kvarts.v1.Sessions/Fork", "session_fork", Right::Write),
    Method::new("/kvarts.v1.Sessions/Extend", "session_extend", Right::Write),
    Method::new("/kvarts.v1.Sessions/Renew", "session_renew", Right::Write),
    Method::new("/kvarts.v1.Sessions/HandOver", "session_hand_over", Right::Write),
    Method::new("/kvarts.v1.Sessions/Close", "session_close", Right::Write),
    Method::new("/kvarts.v1.Sessions/List", "list_sessions", Right::Read),
    Method::new("/kvarts.v1.Reads/Get", "get", Right::Read),
    Method::new("/kvarts.v1.Reads/GetLayers", "get_layers", Right::Read),
    Method::new("/kvarts.v1.Directory/Lookup", "lookup", Right::Read),
    Method::new("/kvarts.v1.Directory/Chain", "chain", Right::Write),
    Method::new("/kvarts.v1.Directory/Replicate", "replicate", Right::Write),
    Method::new("/kvarts.v1.Directory/Status", "cluster_status", Right::Admin),
    Method::new("/kvarts.v1.Admin/Watch", "watch", Right::Read),
    Method::new("/kvarts.v1.Admin/ListBlocks", "list_blocks", Right::Read),
    Method::new("/kvarts.v1.Admin/Stats", "stats", Right::Admin),
    Method::new("/kvarts.v1.Admin/Checkpoint", "checkpoint", Right::Admin),
    Method::new("/kvarts.v1.Admin/Resume", "resume", Right::Admin),
    Method::new("/kvarts.v1.Admin/Compact", "compact", Right::Admin),
    Method::new("/kvarts.v1.Admin/Scrub", "scrub", Right::Admin),
    Method::new("/kvarts.v1.Admin/ColdPush", "cold_push", Right::Admin),
    Method::new("/kvarts.v1.Admin/Drain", "drain", Right::Admin),
    Method::new("/kvarts.v1.Admin/SetBudget", "set_budget", Right::Admin),
    Method::new("/kvarts.v1.Admin/Reload", "reload", Right::Admin),
    Method::new("/kvarts.v1.Admin/PurgeTenant", "purge_tenant", Right::Admin),
];

/// The method of this path in the contract.
pub(crate) fn method(path: &str) -> Option<&'static Method> {
    METHODS.iter().find(|method| method.path == path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_of_the_contract_needs_a_right() {
        // What nodes say to each other is served to them alone, at an address of its own.
        let paths: Vec<_> =
            paths().into_iter().filter(|path| !path.starts_with("/kvarts.v1.Nodes/")).collect();
        assert_eq!(paths.len(), METHODS.len());
        for path in paths {
            assert!(METHODS.iter().any(|method| method.path == path), "{path} is not in the table");
        }
    }

    /// The paths of all methods, from the compiled contract.
    fn paths() -> Vec<String> {
        let text = include_str!("../../../proto/kvarts/v1/store.proto").to_owned()
            + include_str!("../../../proto/kvarts/v1/reads.proto")
            + include_str!("../../../proto/kvarts/v1/models.proto")
            + include_str!("../../../proto/kvarts/v1/admin.proto")
            + include_str!("../../../proto/kvarts/v1/plans.proto")
            + include_str!("../../../proto/kvarts/v1/sessions.proto")
            + include_str!("../../../proto/kvarts/v1/directory.proto");
        let (mut service, mut paths) = ("", Vec::new());
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match (words.next(), words.next()) {
                (Some("service"), Some(name)) => service = name,
                (Some("rpc"), Some(name)) => {
                    let name = name.split('(').next().unwrap();
                    paths.push(format!("/kvarts.v1.{service}/{name}"));
                }
                _ => {}
            }
        }
        paths
    }
}
