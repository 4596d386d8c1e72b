//! What the model does about space: deletes, times to live, events, snapshots.

use std::collections::BTreeSet;
use std::time::Duration;

use kvarts_contract::api::{
    DeleteOutcome, DeleteReply, DeleteRequest, LeaseId, MAX_REQUEST_BLOCKS, SnapshotCursor, SnapshotPage,
    Target, TtlReply, TtlRequest,
};
use kvarts_contract::error::Reason;
use kvarts_contract::events::{Cause, EventKind, Subject};
use kvarts_layout::{BlockKey, IndexKey, NamespaceId};

use super::{Model, Name, State};

/// A block's name as events have it.
pub(super) fn index_key((namespace, group, coordinate, key): Name) -> IndexKey {
    IndexKey { namespace, key, group, coordinate }
}

impl State {
    /// Forgets a block; leases on it hold nothing more of it, and count as before.
    fn take(&mut self, name: &Name) {
        self.blocks.remove(name);
        self.leases.values_mut().for_each(|lease| lease.held.retain(|held| held != name));
    }

    /// Everything that is known to descend from a key, the key included.
    fn descendants(&self, namespace: NamespaceId, root: BlockKey) -> BTreeSet<BlockKey> {
        let mut found = BTreeSet::from([root]);
        loop {
            let before = found.len();
            for ((of, _, _, key), block) in &self.blocks {
                if *of == namespace && block.parent.is_some_and(|parent| found.contains(&parent)) {
                    found.insert(*key);
                }
            }
            if found.len() == before {
                return found;
            }
        }
    }
}

impl Model {
    pub(super) fn try_delete(&self, request: &DeleteRequest) -> Result<DeleteReply, Reason> {
        self.deadline(request.deadline)?;
        let mut state = self.current();
        let namespace = request.namespace;
        if !state.namespaces.contains_key(&namespace) {
            return Err(Reason::UnknownNamespace(namespace));
        }
        let here = |state: &State, chosen: &dyn Fn(&Name) -> bool| -> Vec<Name> {
            state.blocks.keys().filter(|name| name.0 == namespace && chosen(name)).copied().collect()
        };
        let (names, cause) = match &request.target {
            Target::Keys { keys, .. } if keys.is_empty() => return Err(Reason::Empty),
            Target::Keys { keys, .. } if keys.len() > MAX_REQUEST_BLOCKS => {
                return Err(Reason::TooMany("blocks"));
            }
            Target::Keys { column, keys } => {
                if let Some((group, coordinate)) = column {
                    state.shape(namespace, *group, *coordinate)?;
                }
                let in_column = |name: &Name| column.is_none_or(|column| column == (name.1, name.2));
                (here(&state, &|name| keys.contains(&name.3) && in_column(name)), Cause::Key)
            }
            Target::Prefix(root) => {
                let keys = state.descendants(namespace, *root);
                (here(&state, &|name| keys.contains(&name.3)), Cause::Prefix)
            }
            Target::Namespace => (here(&state, &|_| true), Cause::Namespace),
        };
        names.iter().for_each(|name| state.take(name));
        let deleted: BTreeSet<BlockKey> = names.iter().map(|name| name.3).collect();
        let mut change = self.events.change();
        if request.target == Target::Namespace {
            let subject = Subject::Namespace(namespace);
            change.tell(self.wall_ms(), EventKind::Deleted, cause, subject);
        } else {
            for name in &names {
                let subject = Subject::Block(index_key(*name));
                change.tell(self.wall_ms(), EventKind::Deleted, cause, subject);
            }
        }
        let outcome = |key: &BlockKey| match deleted.contains(key) {
            true => DeleteOutcome::Deleted,
            false => DeleteOutcome::NotHere,
        };
        let outcomes = match &request.target {
            Target::Keys { keys, .. } => keys.iter().map(outcome).collect(),
            _ => Vec::new(),
        };
        Ok(DeleteReply { outcomes, blocks: names.len() as u64 })
    }

    pub(super) fn try_set_ttl(&self, request: &TtlRequest<'_>) -> Result<TtlReply, Reason> {
        if request.keys.len() > MAX_REQUEST_BLOCKS {
            return Err(Reason::TooMany("blocks"));
        }
        let mut state = self.current();
        state.shape(request.namespace, request.group, request.coordinate)?;
        let expires = request.ttl.map(|ttl| self.expiry(ttl));
        let changed = request.keys.iter().map(|key| {
            let name = (request.namespace, request.group, request.coordinate, *key);
            state.blocks.get_mut(&name).map(|block| block.expires = expires).is_some()
        });
        Ok(TtlReply { changed: changed.collect() })
    }

    pub(super) fn try_set_default_ttl(
        &self,
        namespace: NamespaceId,
        ttl: Option<Duration>,
    ) -> Result<(), Reason> {
        let mut state = self.lock();
        let known = state.namespaces.get_mut(&namespace).ok_or(Reason::UnknownNamespace(namespace))?;
        known.default_ttl = ttl;
        Ok(())
    }

    pub(super) fn try_renew(&self, lease: LeaseId, hold: Duration) -> Result<(), Reason> {
        let mut state = self.current();
        let lease = state.leases.get_mut(&lease).ok_or(Reason::LeaseEnded)?;
        lease.until = self.clock.now().plus(hold);
        Ok(())
    }

    /// One page with everything: the model has no segments to go through.
    pub(super) fn try_snapshot(&self, cursor: Option<SnapshotCursor>) -> Result<SnapshotPage, Reason> {
        let state = self.current();
        let sequence = self.events.sequence();
        if cursor.is_some_and(|cursor| cursor.sequence != sequence) {
            return Err(Reason::EventGap);
        }
        Ok(SnapshotPage {
            sequence,
            blocks: state.blocks.keys().copied().map(index_key).collect(),
            next: None,
        })
    }
}
