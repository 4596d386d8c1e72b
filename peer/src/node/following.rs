//! Members as they change in etcd: this node takes them over.

use std::sync::Arc;

use super::ClusterNode;
use crate::etcd::{PAUSE, Registered};

/// Has a node take over the members that are registered, for as long as it runs.
pub(super) async fn follow(node: Arc<ClusterNode>, registered: Registered) {
    let mut members = registered.members();
    registered.took((*node.members()).clone());
    loop {
        let new = members.borrow_and_update().clone();
        if let Some(new) = new.filter(|new| new.epoch() > node.members().epoch()) {
            let (epoch, count) = (new.epoch(), new.list().len());
            match node.change_members(new) {
                Ok(()) => tracing::info!(epoch, nodes = count, "the list of members has changed"),
                Err(reason) => tracing::warn!(epoch, %reason, "the new list of members cannot be used"),
            }
            registered.took((*node.members()).clone());
        }
        tokio::select! {
            // ends: `PAUSE` in the next arm
            changed = members.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(PAUSE) => {}
        }
        node.set_trouble(registered.trouble());
    }
}
