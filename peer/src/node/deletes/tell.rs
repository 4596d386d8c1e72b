//! Telling another node what was deleted, and hearing of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use kvarts_cluster::deletes::{Known, Name, Numbered, Told};
use kvarts_cluster::members::NodeId;
use kvarts_contract::api::MAX_REQUEST_BLOCKS;
use kvarts_layout::BlockKey;
use kvarts_wire::proto;
use tonic::Status;

use super::super::ClusterNode;
use super::super::link::{self, Link};
use super::super::wire::{Malformed, node};
use super::carry::Done;
use super::{lock, wire};
use crate::read::in_time;

/// How long one message and its answer may take: what it deletes is deleted by then.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(20);
/// How long another node than the one that was asked waits before it tells a third: that one is told by the first.
const LATER: Duration = Duration::from_secs(1);

impl ClusterNode {
    /// Tells these nodes what they lack, all at once, and then each what the others have. It takes no longer than that; who was not told
    /// by then is told later.
    pub(super) async fn tell_each(self: &Arc<Self>, links: &[Arc<Link>], timeout: Duration) {
        let runner = &*self.footing.runner;
        let is_there = |link: &&Arc<Link>| link.state().is_connected && !link.is_late.load(Ordering::SeqCst);
        join_all(links.iter().filter(is_there).map(|link| async move {
            match in_time(runner, timeout, self.tell(link)).await {
                Some(Ok(())) => {}
                Some(Err(why)) => tracing::debug!(node = %link.id(), %why, "the delete could not be sent to \
                    the node"),
                None => {
                    link.is_late.store(true, Ordering::SeqCst);
                    tracing::warn!(node = %link.id(), "a node did not confirm a delete in time; the delete \
                        will be sent again");
                }
            }
        }))
        .await;
        let (told, lack): (Vec<_>, Vec<_>) =
            links.iter().partition(|link| !lock(&self.deletes.log).lacks(&link.id()));
        lack.into_iter().for_each(|link| self.tell_later(link));
        if told.len() < 2 {
            return;
        }
        for link in told.iter().map(|link| Arc::clone(link)) {
            let node = Arc::clone(self);
            let others: Vec<NodeId> =
                told.iter().map(|other| other.id()).filter(|id| *id != link.id()).collect();
            self.spawn(async move {
                let known = wire::wire_known(lock(&node.deletes.log).known());
                let other = |id: &NodeId| proto::deletes_request::Other {
                    node: id.0.to_vec().into(),
                    known: known.clone(),
                };
                let others = others.iter().map(other).collect();
                let request = proto::DeletesRequest { others, known: known.clone(), ..Default::default() };
                // Who does not hear of it tells the others itself.
                drop(link.deletes(request, MESSAGE_TIMEOUT).await);
            });
        }
    }

    /// Tells a node what it lacks, after a pause in which another one may have.
    fn tell_later(self: &Arc<Self>, link: &Arc<Link>) {
        if link.tells_later.swap(true, Ordering::SeqCst) {
            return;
        }
        let (node, link) = (Arc::clone(self), Arc::clone(link));
        self.spawn(async move {
            loop {
                node.sleep(LATER).await;
                // A connection that is made anew begins with this.
                if !link.state().is_connected || !node.is_linked(&link) {
                    break;
                }
                if !lock(&node.deletes.log).lacks(&link.id()) {
                    break;
                }
                if let Err(why) = node.tell(&link).await {
                    tracing::debug!(node = %link.id(), %why, "the deletes could not be sent to the node");
                }
            }
            link.tells_later.store(false, Ordering::SeqCst);
        });
    }

    /// A connection begins: each side tells the other what it lacks, before any bytes are asked for.
    pub(in super::super) async fn meet(self: &Arc<Self>, link: &Arc<Link>) -> Result<(), String> {
        if kvarts_layout::planted!("deletes-not-told-again") {
            return Ok(());
        }
        // ends: its holder tells messages of `MESSAGE_TIMEOUT` each
        *link.told.lock().await = None;
        self.tell(link).await
    }

    /// Tells a node all that it lacks; of one that was not spoken with yet it is asked first how far it has come, and what this one lacks.
    async fn tell(self: &Arc<Self>, link: &Arc<Link>) -> Result<(), String> {
        self.tell_all_of(link).await?;
        link.is_late.store(false, Ordering::SeqCst);
        Ok(())
    }

    async fn tell_all_of(self: &Arc<Self>, link: &Arc<Link>) -> Result<(), String> {
        // ends: its holder tells messages of `MESSAGE_TIMEOUT` each
        let mut told = link.told.lock().await;
        loop {
            let asks = told.is_none();
            let (entries, known) = {
                let log = lock(&self.deletes.log);
                let entries = told.as_ref().map(|known| log.beyond(known, wire::MESSAGE_BYTES).0);
                (entries.unwrap_or_default(), log.known().clone())
            };
            if entries.is_empty() && !asks {
                return Ok(());
            }
            let request = proto::DeletesRequest {
                entries: wire::wire_entries(&entries),
                known: wire::wire_known(&known),
                others: Vec::new(),
                tell: asks,
            };
            let reply = link.deletes(request, MESSAGE_TIMEOUT).await.map_err(|status| link::told(&status))?;
            let malformed = |malformed: Malformed| malformed.0.to_owned();
            let said = wire::known(&reply.known).map_err(malformed)?;
            let missing = wire::entries(&reply.entries).map_err(malformed)?;
            self.deletes.with_log(|log| log.has(link.id(), &said));
            for done in &reply.done {
                self.count(done).map_err(malformed)?;
            }
            if !missing.is_empty() {
                // There may be more: it is asked again.
                self.take_in(link.id(), missing).await?;
                continue;
            }
            let last = entries.last().map(|told| told.name);
            if last.is_some_and(|(of, sequence)| said.get(&of).is_none_or(|has| *has < sequence)) {
                return Err("the node does not accept the deletes".to_owned());
            }
            *told = Some(said);
        }
    }

    /// Another node says what came of an entry there.
    fn count(self: &Arc<Self>, done: &proto::deletes_reply::Done) -> Result<(), Malformed> {
        let name = (node(&done.node)?, done.sequence);
        let found = if done.all { None } else { Some(wire::keys(&done.found)?) };
        let mut tallies = lock(&self.deletes.tallies);
        let Some(tally) = tallies.get_mut(&name) else {
            drop(tallies);
            self.tell_found(&name, found);
            return Ok(());
        };
        tally.blocks = tally.blocks.saturating_add(done.blocks);
        let keys = (done.were.len() * 8).min(MAX_REQUEST_BLOCKS);
        if tally.were.len() < keys {
            tally.were.resize(keys, false);
        }
        for (at, were) in tally.were.iter_mut().enumerate() {
            *were |= wire::bit(&done.were, at);
        }
        tally.found = tally.found.take().zip(found).map(|(mut all, found)| {
            all.extend(found);
            all
        });
        Ok(())
    }

    /// A node that was away knows more blocks that descend from keys that are deleted: all others delete them, too.
    fn tell_found(self: &Arc<Self>, name: &Name, keys: Option<Vec<BlockKey>>) {
        let entry = lock(&self.deletes.log).entry(name).cloned();
        let is_something = keys.as_ref().is_none_or(|keys| !keys.is_empty());
        let Some(entry) = entry.filter(|_| is_something) else { return };
        let node = Arc::clone(self);
        self.spawn(async move {
            let told = match node.found(&entry, keys).await {
                Ok(found) => {
                    let entries = found.into_iter().map(|(found, _)| found).collect();
                    node.tell_all(entries, None).await.map(drop)
                }
                Err(error) => Err(error),
            };
            if let Err(error) = told {
                tracing::warn!(%error, "descendants of a deleted key are not deleted on all nodes");
            }
        });
    }

    /// Another node tells what was deleted.
    pub(in super::super) async fn told_of_deletes(
        self: &Arc<Self>,
        from: NodeId,
        request: proto::DeletesRequest,
    ) -> Result<proto::DeletesReply, Status> {
        let (entries, known) = (wire::entries(&request.entries)?, wire::known(&request.known)?);
        let mut others = Vec::new();
        for other in &request.others {
            others.push((node(&other.node)?, wire::known(&other.known)?));
        }
        let this = Arc::clone(self);
        let told = self.to_the_end(async move {
            let mut done = Vec::new();
            let taken = this.take_in_all(from, entries, &mut done).await;
            this.deletes.with_log(|log| {
                log.has(from, &known);
                others.iter().for_each(|(other, known)| log.has(*other, known));
            });
            Ok((taken, done, known))
        });
        // ends: the task of `to_the_end`; who told this has given up after `MESSAGE_TIMEOUT`
        let (taken, done, known) = told.await.map_err(|error| Status::unavailable(error.to_string()))?;
        let log = lock(&self.deletes.log);
        if let Err(why) = taken
            && done.is_empty()
        {
            return Err(Status::unavailable(why));
        }
        let entries = if request.tell { log.beyond(&known, wire::MESSAGE_BYTES).0 } else { Vec::new() };
        Ok(proto::DeletesReply {
            known: wire::wire_known(log.known()),
            entries: wire::wire_entries(&entries),
            done: done.iter().map(|(name, done)| wire_done(name, done)).collect(),
        })
    }

    /// Takes in what another node has told.
    async fn take_in(self: &Arc<Self>, from: NodeId, entries: Vec<Numbered>) -> Result<(), String> {
        self.take_in_all(from, entries, &mut Vec::new()).await
    }

    /// Deletes what is new, in order, and writes down that it did; up to what cannot be deleted now.
    async fn take_in_all(
        self: &Arc<Self>,
        from: NodeId,
        entries: Vec<Numbered>,
        done: &mut Vec<(Name, Done)>,
    ) -> Result<(), String> {
        let (runner, taking) = (&*self.footing.runner, self.deletes.taking.lock());
        // Who told this has given up by then: it tells it again.
        let _turn = in_time(runner, MESSAGE_TIMEOUT, taking).await.ok_or_else(|| {
            let seconds = MESSAGE_TIMEOUT.as_secs();
            format!(
                "earlier deletes that other nodes requested have been under way for {seconds} s: a disk of this node \
                is slow, or does not respond"
            )
        })?;
        let links = self.links();
        let lacking: Vec<NodeId> = links.iter().map(|link| link.id()).filter(|id| *id != from).collect();
        for Numbered { name, after, entry } in entries {
            match lock(&self.deletes.log).told(name, after) {
                Told::New => {}
                Told::Old => continue,
                Told::Early => return Err("an earlier entry of the list of deletes is missing".to_owned()),
            }
            let came = self.carry_out(&entry).await.map_err(|error| error.to_string())?;
            // Who numbered it has it.
            let lacking: Vec<NodeId> = lacking.iter().copied().filter(|id| *id != name.0).collect();
            self.note(|_| name, &entry, &lacking).await.map_err(|error| error.to_string())?;
            done.push((name, came));
        }
        links
            .iter()
            .filter(|link| lock(&self.deletes.log).lacks(&link.id()))
            .for_each(|link| self.tell_later(link));
        Ok(())
    }

    /// How far this node has everything.
    pub fn deletes_known(&self) -> Known {
        lock(&self.deletes.log).known().clone()
    }
}

fn wire_done((of, sequence): &Name, done: &Done) -> proto::deletes_reply::Done {
    proto::deletes_reply::Done {
        node: of.0.to_vec().into(),
        sequence: *sequence,
        blocks: done.blocks,
        were: wire::bits(&done.were),
        found: kvarts_wire::convert::key_bytes(done.found.as_deref().unwrap_or_default()),
        all: done.found.is_none(),
    }
}
