//! What descends from a key, to be deleted with it.
//!
//! Which records may descend from it, memory knows: each record has the fingerprint of the block that it hangs on, and one pass over
//! the namespace's records follows them ([`Candidates`]). The names of their blocks are read from the footers of the segments in which
//! they lie, each once, as links from child to parent; the search then walks those. Where a key that was found has blocks in another
//! column that the pass did not meet, another pass begins with them. Memory is bounded: where there are more links than a search may
//! keep, it walks what it has, lets go of it and goes on with the rest, until a look at everything finds nothing more; and where more
//! descends from the key than a shard could ever remember to be deleted, it ends with that.

mod candidates;

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use kvarts_layout::format::PAGE_BYTES;
use kvarts_layout::format::body::Blocks;
use kvarts_layout::format::footer::{Content, Entry};
use kvarts_layout::identity::TenantSalt;
use kvarts_layout::{BlockKey, Coordinate, Group};

use super::links::{Ask, Link, Links, Places};
use super::router::{Message, Router};
use crate::engine::read::Reads;
use crate::engine::read::listing::parent_of;
use crate::engine::shared::Shared;
use crate::engine::shared::names::Namespace;
use crate::engine::tasks::fair_turn::FairTurn;
use crate::engine::tasks::notify::{Section, with_deadline, yield_now};
use crate::engine::volume::Volume;
use crate::engine::volume::segment::Segment;
use crate::engine::write::delete::{self, Answer};
use crate::rt::Runtime;
use candidates::Candidates;
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
    let Ask { namespace, among, from, .. } = ask;
    let (mut links, mut section) = (Vec::new(), Section::default());
    for segment in reads.segments_from(from) {
        let pages = match among.as_ref().map(|among| among.get(&segment.number)) {
            Some(None) => continue,
            Some(Some(pages)) => pages.as_ref(),
            None => None,
        };
        if links.len() >= ANSWER_LINKS {
            return Ok(Links { links, next: Some(segment.number) });
        }
        if reply.is_cancelled() {
            break;
        }
        for entry in reads.listing(&segment).await? {
            section.spend(1).await;
            let page = u32::try_from(entry.offset / PAGE_BYTES).unwrap_or(u32::MAX);
            let Content::Blocks(blocks) = &entry.content else { continue };
            if segment.local(blocks.namespace) == namespace.local
                && pages.is_none_or(|pages| pages.contains(&page))
            {
                links_of(&reads.volume, (&segment, &entry, blocks), &mut links);
                reads.volume.shared.work.searches.add(1 + blocks.blocks.len() as u64);
                section.spend(blocks.blocks.len() as u64 / 8).await;
            }
        }
    }
    Ok(Links { links, next: None })
}

/// The links of the blocks of a record that are live there.
fn links_of(volume: &Volume, (segment, entry, blocks): (&Segment, &Entry, &Blocks), links: &mut Vec<Link>) {
    let Some(coordinate) = Coordinate::from_u64(blocks.coordinate) else { return };
    let (index, namespace) = (&volume.shared.index, segment.local(blocks.namespace));
    for (place, name) in blocks.blocks.iter().enumerate() {
        let key = BlockKey(name.key);
        let print = index.key().of(namespace, &key, Group(blocks.group), coordinate);
        if let Some(found) = index.locate(print)
            && volume.is_at(segment, entry.offset, &found.record)
            && let Some(parent) = parent_of(blocks, place)
            && volume.shared.is_here(print, &found.record)
        {
            links.push((parent, key));
        }
    }
}

/// Links of a namespace in all shards, no more than `most` of them.
pub(crate) async fn all_links(
    router: &Router,
    namespace: &Arc<Namespace>,
    most: usize,
) -> Result<BTreeSet<Link>, Reason> {
    let mut links = BTreeSet::new();
    for shard in 0..router.shards() {
        let mut next = Some(0);
        while let Some(from) = next {
            let (reply, answer) = ticket();
            let ask = Ask { shard, namespace: Arc::clone(namespace), among: None, from };
            router.send(shard, Message::Links(ask, reply))?;
            let found = answer.await.map_err(|_| Reason::Busy("the store is closing"))??;
            links.extend(found.links.into_iter().take(most.saturating_sub(links.len())));
            if links.len() >= most {
                return Ok(links);
            }
            next = found.next;
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
        let (namespace, began) = delete::check(shared, &request)?;
        let _turn = turn.take(&namespace.salt).await;
        let mut search = Search::new(root, delete::keys_max(shared.shards));
        search.run(shared, router, &namespace).await?;
        let (found, mut keys) = (search.keys, Vec::new());
        let mut section = Section::default();
        for key in found {
            keys.push(key);
            section.spend(1).await;
        }
        Ok::<_, Reason>(((namespace, began), keys))
    });
    let deadline = request.deadline.map(|at| rt.sleep_until(at));
    match with_deadline(finding.as_mut(), deadline).await.unwrap_or(Err(Reason::DeadlinePassed)) {
        Ok(found) => {
            for (shard, part) in delete::begin_found(shared, found, request.deadline, reply).await {
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
    section: Section,
}

impl Search {
    fn new(root: BlockKey, keys_max: usize) -> Self {
        Self {
            keys: BTreeSet::from([root]),
            keys_max,
            links: BTreeSet::new(),
            let_go: false,
            section: Section::default(),
        }
    }

    async fn run(
        &mut self,
        shared: &Shared,
        router: &Router,
        namespace: &Arc<Namespace>,
    ) -> Result<(), Reason> {
        let moved = || shared.counters.blocks_moved.load(SeqCst);
        let (mut repeats, mut candidates) = (0, Candidates::of(shared, namespace));
        loop {
            let (moved_before, known) = (moved(), self.keys.len());
            if candidates.find(shared, &self.keys).await {
                for (shard, places) in candidates.take_found() {
                    self.look_at(shard, places, (shared, router), namespace).await?;
                }
                self.walk(shared).await?;
            } else if !self.let_go && !is_moving(shared, moved_before).await {
                return Ok(());
            }
            let again = self.let_go || kvarts_layout::planted!("footers-read-again");
            if again && self.keys.len() > known {
                // What was let go of may lead on from what was found since.
                candidates = Candidates::of(shared, namespace);
                self.let_go = false;
            } else if is_moving(shared, moved_before).await && repeats < REPEATS_MAX {
                // Compaction may have moved a block from a segment that is still to be read into one already read.
                candidates = Candidates::of(shared, namespace);
                repeats += 1;
            } else {
                self.let_go = false;
            }
        }
    }

    /// Takes in the links of some records of a shard.
    async fn look_at(
        &mut self,
        shard: u32,
        places: Places,
        (shared, router): (&Shared, &Router),
        namespace: &Arc<Namespace>,
    ) -> Result<(), Reason> {
        let (places, mut next) = (Arc::new(places), Some(0));
        while let Some(from) = next {
            let (reply, answer) = ticket();
            let among = Some(Arc::clone(&places));
            let ask = Ask { shard, namespace: Arc::clone(namespace), among, from };
            router.send(shard, Message::Links(ask, reply))?;
            let found = answer.await.map_err(|_| Reason::Busy("the store is closing"))??;
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

/// Whether blocks have been moved since this number of them was counted.
async fn is_moving(shared: &Shared, before: u64) -> bool {
    // What is moved at this moment is counted when it is.
    while shared.switching.load(SeqCst) > 0 {
        yield_now().await;
    }
    shared.counters.blocks_moved.load(SeqCst) != before
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::recover::tests::harness::{Place, key};

    #[test]
    fn a_search_that_finds_more_than_can_be_deleted_ends_there() {
        Place::new().run(|world| async move {
            for (keys_max, children, ends) in [(100, 100, false), (100, 101, true), (100, 5000, true)] {
                let mut search = Search::new(key(0), keys_max + 1);
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
