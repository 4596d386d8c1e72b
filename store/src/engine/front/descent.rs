//! What descends from a key, to be deleted with it.
//!
//! Every shard is asked once for the links of the namespace, from child to parent, that its segments list; the search
//! then walks them in memory. A chain of records that lies in all shards so costs one look at each footer, however long
//! it is. Memory is bounded: where there are more links than a search may keep, it walks what it has, lets go of it and
//! goes on with the rest, until a look at everything finds nothing more; and where more descends from the key than a
//! shard could ever remember to be deleted, it ends with that.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use kvarts_layout::format::body::Blocks;
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::identity::TenantSalt;
use kvarts_layout::{BlockKey, Coordinate, Group};

use super::links::{Ask, Link, Links, Listed};
use super::router::{Message, Router};
use crate::engine::read::Reads;
use crate::engine::read::listing::parent_of;
use crate::engine::shared::Shared;
use crate::engine::shared::names::Namespace;
use crate::engine::tasks::fair_turn::FairTurn;
use crate::engine::tasks::notify::{Section, with_deadline};
use crate::engine::volume::Volume;
use crate::engine::volume::segment::{Segment, SegmentState};
use crate::engine::write::delete::{self, Answer};
use crate::rt::Runtime;
use kvarts_contract::api::DeleteRequest;
use kvarts_contract::error::Reason;
use kvarts_contract::ticket::{Reply, ticket};

/// Links that a search keeps at most: about 100 MiB. One search runs at a time, of each tenant in its turn.
const LINKS_MAX: usize = 1 << 20;
/// Links after which a shard answers.
const ANSWER_LINKS: usize = 1 << 16;
/// How often a search looks at what is new because blocks were moved under it.
const REPEATS_MAX: u32 = 8;

/// The links of live blocks of a namespace that this shard lists.
pub(crate) async fn links(
    reads: &Reads,
    ask: Ask,
    reply: &Reply<Result<Links, Reason>>,
) -> Result<Links, Reason> {
    let Ask { namespace, mut listed, from, .. } = ask;
    let (mut links, mut section) = (Vec::new(), Section::default());
    for segment in reads.segments_from(from) {
        let generation = segment.generation.get();
        if listed.get(&segment.number) == Some(&generation) {
            continue;
        }
        if links.len() >= ANSWER_LINKS {
            return Ok(Links { links, listed, next: Some(segment.number) });
        }
        if reply.is_cancelled() {
            break;
        }
        let mut settled = segment.state.get() == SegmentState::Sealed;
        for entry in reads.listing(&segment).await? {
            let Content::Blocks(blocks) = &entry.content else { continue };
            if segment.local(blocks.namespace) == namespace.local {
                settled &= links_of(&reads.volume, (&segment, &entry, blocks), &mut links);
                reads.volume.shared.work.searches.add(1 + blocks.blocks.len() as u64);
                section.spend(1 + blocks.blocks.len() as u64 / 8).await;
            }
        }
        if settled && segment.generation.get() == generation {
            listed.insert(segment.number, generation);
        }
    }
    Ok(Links { links, listed, next: None })
}

/// The links of the blocks of a record that are live there. False if one is elsewhere: it may be on its way here.
fn links_of(
    volume: &Volume,
    (segment, entry, blocks): (&Segment, &Entry, &Blocks),
    links: &mut Vec<Link>,
) -> bool {
    let Some(coordinate) = Coordinate::from_u64(blocks.coordinate) else { return true };
    let (index, namespace) = (&volume.shared.index, segment.local(blocks.namespace));
    let mut settled = true;
    for (place, name) in blocks.blocks.iter().enumerate() {
        let key = BlockKey(name.key);
        let print = index.key().of(namespace, &key, Group(blocks.group), coordinate);
        let Some(found) = index.locate(print) else { continue };
        if !volume.is_at(segment, entry.offset, &found.record) {
            settled = false;
        } else if let Some(parent) = parent_of(blocks, place)
            && volume.shared.is_here(print, &found.record)
        {
            links.push((parent, key));
        }
    }
    settled
}

/// Links of a namespace in all shards, no more than `most` of them.
pub(crate) async fn all_links(
    router: &Router,
    namespace: &Arc<Namespace>,
    most: usize,
) -> Result<BTreeSet<Link>, Reason> {
    let mut links = BTreeSet::new();
    for shard in 0..router.shards() {
        let (mut listed, mut next) = (Listed::new(), Some(0));
        while let Some(from) = next {
            let (reply, answer) = ticket();
            let ask = Ask { shard, namespace: Arc::clone(namespace), listed, from };
            router.send(shard, Message::Links(ask, reply))?;
            let found = answer.await.map_err(|_| Reason::Busy("the store is closing"))??;
            links.extend(found.links.into_iter().take(most.saturating_sub(links.len())));
            if links.len() >= most {
                return Ok(links);
            }
            (listed, next) = (found.listed, found.next);
        }
    }
    Ok(links)
}

/// Finds everything that descends from a key, in all shards, and deletes it with the key. A device that does not answer
/// keeps the caller no longer than its deadline.
pub(crate) async fn delete_prefix(
    shared: &Arc<Shared>,
    router: &Router,
    (request, root): (DeleteRequest, BlockKey),
    reply: Answer,
    (rt, turn): (&dyn Runtime, &FairTurn<TenantSalt>),
) {
    let mut finding = pin!(async {
        let namespace = delete::check(shared, &request)?;
        let _turn = turn.take(&namespace.salt).await;
        let mut search = Search::new(root, router.shards(), delete::keys_max(shared.shards));
        search.run(shared, router, &namespace).await?;
        Ok::<_, Reason>((namespace, search.keys))
    });
    let deadline = request.deadline.map(|at| rt.sleep_until(at));
    match with_deadline(finding.as_mut(), deadline).await.unwrap_or(Err(Reason::DeadlinePassed)) {
        Ok(found) => {
            for (shard, part) in delete::begin_found(shared, found, request.deadline, reply) {
                router.delete(shard, part);
            }
        }
        // A caller that is gone needs no answer.
        Err(reason) => drop(reply.send(Err(reason.into()))),
    }
}

/// A search for what descends from a key.
struct Search {
    /// The key, and what was found to descend from it.
    keys: BTreeSet<BlockKey>,
    keys_max: usize,
    links: BTreeSet<Link>,
    /// Some links have been let go of since everything was looked at.
    let_go: bool,
    /// Of each shard.
    listed: Vec<Listed>,
    section: Section,
}

impl Search {
    fn new(root: BlockKey, shards: u32, keys_max: usize) -> Self {
        Self {
            keys: BTreeSet::from([root]),
            keys_max,
            links: BTreeSet::new(),
            let_go: false,
            listed: vec![Listed::new(); shards as usize],
            section: Section::default(),
        }
    }

    async fn run(
        &mut self,
        shared: &Shared,
        router: &Router,
        namespace: &Arc<Namespace>,
    ) -> Result<(), Reason> {
        let moved = || shared.counters.blocks_moved.load(Relaxed);
        let mut repeats = 0;
        loop {
            let (moved_before, known) = (moved(), self.keys.len());
            for shard in 0..router.shards() {
                self.look_at(shard, (shared, router), namespace).await?;
            }
            self.walk(shared).await?;
            let again = self.let_go || kvarts_layout::planted!("footers-read-again");
            if again && self.keys.len() > known {
                // What was let go of may lead on from what was found since.
                self.let_go = false;
                self.listed.iter_mut().for_each(Listed::clear);
            } else if moved() != moved_before && repeats < REPEATS_MAX {
                // Compaction may have moved a block from a segment that is still to be read into one already read.
                repeats += 1;
            } else {
                return Ok(());
            }
        }
    }

    /// Takes in the links of a shard.
    async fn look_at(
        &mut self,
        shard: u32,
        (shared, router): (&Shared, &Router),
        namespace: &Arc<Namespace>,
    ) -> Result<(), Reason> {
        let mut next = Some(0);
        while let Some(from) = next {
            let Some(listed) = self.listed.get_mut(shard as usize).map(std::mem::take) else { break };
            let (reply, answer) = ticket();
            let ask = Ask { shard, namespace: Arc::clone(namespace), listed, from };
            router.send(shard, Message::Links(ask, reply))?;
            let found = answer.await.map_err(|_| Reason::Busy("the store is closing"))??;
            if let Some(listed) = self.listed.get_mut(shard as usize) {
                *listed = found.listed;
            }
            next = found.next;
            for link in found.links {
                self.links.insert(link);
                shared.work.searches.add(1);
                self.section.spend(1).await;
            }
            if self.links.len() >= LINKS_MAX {
                self.walk(shared).await?;
                self.links.clear();
                self.let_go = true;
            }
        }
        Ok(())
    }

    /// Adds what descends from the keys by the links that are here.
    async fn walk(&mut self, shared: &Shared) -> Result<(), Reason> {
        let mut parents: Vec<BlockKey> = self.keys.iter().copied().collect();
        while let Some(parent) = parents.pop() {
            for (_, child) in self.links.range((parent, BlockKey([0; 32]))..=(parent, BlockKey([0xff; 32]))) {
                if self.keys.insert(*child) {
                    parents.push(*child);
                }
                self.section.spend(1).await;
                if self.keys.len() > self.keys_max {
                    return Err(Reason::TooMany("blocks that descend from the key"));
                }
            }
            shared.work.searches.add(1);
            self.section.spend(1).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::recover::tests::harness::{Place, key};

    #[test]
    fn a_search_that_finds_more_than_can_be_deleted_ends_there() {
        Place::new().run(|world| async move {
            for (keys_max, children, ends) in [(100, 100, false), (100, 101, true), (100, 5000, true)] {
                let mut search = Search::new(key(0), 1, keys_max + 1);
                // Half of them one under the other, half under the key.
                let child = |n: u64| (key(if n.is_multiple_of(2) { n - n.min(2) } else { 0 }), key(n));
                search.links.extend((1..=children).map(child));
                let walked = search.walk(&world.shared).await;
                assert_eq!(walked.is_err(), ends, "{children}");
                assert!(search.keys.len() <= keys_max + 2, "{} are kept", search.keys.len());
            }
        });
    }
}
