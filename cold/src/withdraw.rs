//! What was deleted, or is to live less long, is taken out of the tier: packs that have it are condemned, as garbage collection condemns
//! them, and the manifest says what was deleted.
//!
//! A pack never changes, so its other blocks go with it: that costs hits. When this has succeeded, no manifest names a pack with
//! a deleted block that was named before, and no pusher names one afterwards that listed its blocks before: it has
//! to change the manifest too, finds it changed, and the delete in it. A change that its pusher gave up without an answer, and that may
//! happen yet, meets another manifest too.

mod told;

use std::collections::{BTreeMap, BTreeSet};

use futures_util::StreamExt;
use kvarts_layout::format::body::Parent;
use kvarts_layout::{BlockKey, NamespaceId, planted};

use crate::error::ColdError;
use crate::format::{IndexedRun, Manifest, PackEntry, PackId, PackIndex, Point};
use crate::tier::{INDEXES_AT_ONCE, Known, Tier};
pub use told::{Deleted, Told, When};

/// How often it is begun again because another writer added packs meanwhile.
const ROUNDS: u32 = 8;
/// By how much a production may be said to be later than it was: the clocks of nodes may be apart, and who has heard of a delete gives later
/// times than its own.
const APART_MS: u64 = 5000;
/// Packs whose indexes are read to follow links, or for the times of what they have; where there are more all go.
const FOLLOWED: usize = 1024;
/// Bytes of these indexes together, the same.
const FOLLOWED_BYTES: u64 = 32 << 20;

/// Condemns every pack that has some of what was deleted just now, and has the manifest say what that was; gives how many. It must be
/// called when the store has deleted it: what is listed there afterwards may be named.
pub async fn withdraw(tier: &Tier, namespace: NamespaceId, deleted: &[Deleted]) -> Result<u64, ColdError> {
    let told = |deleted: &Deleted| Told { deleted: deleted.clone(), when: When::Now };
    withdraw_told(tier, namespace, &deleted.iter().map(told).collect::<Vec<_>>()).await
}

/// The same, of what was deleted whenever that was. Of what was heard late nothing is done that the manifest says already.
///
/// All of it is one change, so that who is about to name a pack finds another manifest than it has read, with the deletes in it.
pub async fn withdraw_told(tier: &Tier, namespace: NamespaceId, told: &[Told]) -> Result<u64, ColdError> {
    let at_ms = tier.access().time().wall_ms();
    let mut begun: Option<Point> = None;
    for _ in 0..ROUNDS {
        let known = tier.read_manifest(namespace).await?;
        let since = *begun.get_or_insert(known.manifest.point());
        let new = |one: &&Told| !one.is_known(&known.manifest.deletions);
        let told: Vec<&Told> = told.iter().filter(new).collect();
        if told.is_empty() {
            return Ok(0);
        }
        let mut going = BTreeSet::new();
        for one in &told {
            going.extend(with_some(tier, &known, one).await);
        }
        let is_all = told.iter().any(|one| one.is_all());
        let changed = tier.change(namespace, |manifest| {
            let new = manifest.packs.iter().filter(|(pack, _)| !known.manifest.packs.contains_key(*pack));
            let new: Vec<PackId> = new
                .filter(|(_, entry)| told.iter().any(|one| one.may_be_in(entry)))
                .map(|(pack, _)| *pack)
                .collect();
            if !new.is_empty() && !is_all {
                // Another writer added these packs: what they have is not known.
                return Err(ColdError::Contended(namespace));
            }
            going.extend(new);
            let now_ms = tier.access().time().wall_ms();
            let gone = going.iter().filter(|pack| condemn(manifest, pack, now_ms)).count();
            let noted: Vec<bool> = told.iter().map(|one| one.note(manifest, since, at_ms)).collect();
            let is_noted = !noted.contains(&false);
            // An attempt of ours whose answer was lost has done it.
            Ok((gone > 0 || !is_noted).then_some(gone as u64))
        });
        // ends: attempts that are counted, each with the time of its requests (`patience`)
        match changed.await {
            Err(ColdError::Contended(_)) => {}
            Ok(gone) => {
                going.iter().for_each(|pack| tier.forget(*pack));
                return Ok(gone.unwrap_or(0));
            }
            Err(error) => return Err(error),
        }
    }
    Err(ColdError::Contended(namespace))
}

fn condemn(manifest: &mut Manifest, pack: &PackId, now_ms: u64) -> bool {
    let was_there = manifest.packs.remove(pack).is_some();
    if was_there {
        manifest.condemned.insert(*pack, now_ms);
    }
    was_there
}

/// The packs that have some of it. One whose index cannot be had counts as one.
async fn with_some(tier: &Tier, known: &Known, told: &Told) -> BTreeSet<PackId> {
    let namespace = known.manifest.namespace;
    let all = || known.manifest.packs.keys().copied().collect();
    match &told.deleted {
        Deleted::Namespace if told.is_all() => all(),
        Deleted::Namespace => with_older(tier, known, told).await,
        Deleted::Keys(keys) => {
            let wanted: BTreeSet<BlockKey> = keys.iter().copied().collect();
            let is_it = |IndexedRun { run, .. }: &IndexedRun| {
                told.is_of(run.created_ms) && run.blocks.iter().any(|block| wanted.contains(&block.key))
            };
            those_near(tier, known, keys, |index| index.runs().iter().any(is_it)).await
        }
        Deleted::Later(..) if planted!("what-outlives-stays") => BTreeSet::new(),
        Deleted::Later(keys, (group, coordinate), expires_ms) => {
            let outlives = |index: &PackIndex, key: &BlockKey| {
                let place = index.find(key, *group, *coordinate);
                let run = place.and_then(|place| index.run(place.run)).map(|indexed| &indexed.run);
                let run = run.filter(|run| told.is_of(run.created_ms));
                run.is_some_and(|run| run.expires_ms == 0 || run.expires_ms > *expires_ms)
            };
            those_near(tier, known, keys, |index| keys.iter().any(|key| outlives(index, key))).await
        }
        Deleted::Prefix(_) if !can_be_followed(known.manifest.packs.values()) => all(),
        Deleted::Prefix(root) => {
            let packs = known.manifest.packs.keys().copied();
            let links = look_at(tier, namespace, packs, links_of).await;
            // Where an index cannot be had links may lead through it.
            let links: Option<Vec<Vec<Link>>> = links.into_iter().map(|(_, links)| links).collect();
            let links = links.map(|links| links.into_iter().flatten().collect::<Vec<_>>());
            links.map_or_else(all, |links| behind(*root, &links, |created_ms| told.is_of(created_ms)))
        }
    }
}

/// The packs that have any block that is old enough, whatever its key. All of them where there are too many to look at.
async fn with_older(tier: &Tier, known: &Known, told: &Told) -> BTreeSet<PackId> {
    let packs = &known.manifest.packs;
    // What was in a pack by then had been produced by then, as far as clocks agree.
    let is_older = |pack: &PackEntry| told.is_of(pack.added_ms.saturating_add(APART_MS));
    if !can_be_followed(packs.values().filter(|pack| !is_older(pack))) {
        return packs.keys().copied().collect();
    }
    let (mut going, mut later) = (BTreeSet::new(), Vec::new());
    for (pack, entry) in packs {
        if is_older(entry) {
            going.insert(*pack);
        } else {
            later.push(*pack);
        }
    }
    let is_of = |index: &PackIndex| index.runs().iter().any(|indexed| told.is_of(indexed.run.created_ms));
    let looks = look_at(tier, known.manifest.namespace, later.into_iter(), is_of).await;
    going.extend(looks.into_iter().filter(|(_, is_of)| is_of.unwrap_or(true)).map(|(pack, _)| pack));
    going
}

/// Whether the indexes of these packs are few enough to be read.
fn can_be_followed<'a>(packs: impl Iterator<Item = &'a PackEntry>) -> bool {
    let add = |(count, bytes): (usize, u64), pack: &PackEntry| {
        (count.saturating_add(1), bytes.saturating_add(u64::from(pack.index_bytes)))
    };
    let (count, bytes) = packs.fold((0, 0), add);
    count <= FOLLOWED && bytes <= FOLLOWED_BYTES
}

/// Of the packs that may have some of these keys those whose index says so.
async fn those_near(
    tier: &Tier,
    known: &Known,
    keys: &[BlockKey],
    goes: impl Fn(&PackIndex) -> bool,
) -> BTreeSet<PackId> {
    let near: BTreeSet<PackId> = keys.iter().flat_map(|key| known.packs_with(key)).collect();
    let looks = look_at(tier, known.manifest.namespace, near.into_iter(), goes).await;
    looks.into_iter().filter(|(_, goes)| goes.unwrap_or(true)).map(|(pack, _)| pack).collect()
}

/// Looks at the indexes of packs, several at once; none where an index cannot be had.
async fn look_at<T>(
    tier: &Tier,
    namespace: NamespaceId,
    packs: impl Iterator<Item = PackId>,
    look: impl Fn(&PackIndex) -> T,
) -> Vec<(PackId, Option<T>)> {
    let look = &look;
    let looks = packs.map(|pack| async move {
        let index = tier.index(namespace, pack).await.ok();
        (pack, index.map(|index| look(&index)))
    });
    // ends: the time of each request (`patience`)
    futures_util::stream::iter(looks).buffer_unordered(INDEXES_AT_ONCE).collect().await
}

/// The keys of a run, when they were produced, and what it is linked to.
#[derive(Clone, Debug)]
struct Link {
    pack: PackId,
    created_ms: u64,
    parent: Parent,
    keys: Vec<BlockKey>,
}

fn links_of(index: &PackIndex) -> Vec<Link> {
    let link = |IndexedRun { run, .. }: &IndexedRun| {
        let keys = run.blocks.iter().map(|block| block.key).collect();
        Link { pack: index.id(), created_ms: run.created_ms, parent: run.parent, keys }
    };
    index.runs().iter().map(link).collect()
}

/// The packs that have the block of this key, or what descends from it, or may: what is linked to a block that is in no pack. Of these the
/// ones that were produced at a time that it is of.
fn behind(root: BlockKey, links: &[Link], is_of: impl Fn(u64) -> bool) -> BTreeSet<PackId> {
    // Where each key stands; which runs are linked to it.
    let mut places: BTreeMap<BlockKey, Vec<(usize, usize)>> = BTreeMap::new();
    let mut children: BTreeMap<BlockKey, Vec<usize>> = BTreeMap::new();
    for (run, link) in links.iter().enumerate() {
        for (place, key) in link.keys.iter().enumerate() {
            places.entry(*key).or_default().push((run, place));
        }
        if let Parent::Key(parent) = link.parent {
            children.entry(BlockKey(parent)).or_default().push(run);
        }
    }
    let mut left: Vec<BlockKey> = vec![root];
    left.extend(children.keys().filter(|parent| !places.contains_key(*parent)));
    let mut gone: BTreeSet<BlockKey> = left.iter().copied().collect();
    let mut packs = BTreeSet::new();
    while let Some(key) = left.pop() {
        let stands = places.get(&key).into_iter().flatten().copied();
        let linked = children.get(&key).into_iter().flatten().map(|run| (*run, 0));
        for (run, place) in stands.chain(linked) {
            let Some(link) = links.get(run) else { continue };
            if is_of(link.created_ms) {
                packs.insert(link.pack);
            }
            // What stands behind a block that went before went with it.
            let new = link.keys.iter().skip(place).filter(|key| gone.insert(**key));
            left.extend(new);
        }
    }
    packs
}
