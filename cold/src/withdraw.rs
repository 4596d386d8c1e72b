//! What was deleted, or is to live less long, is taken out of the tier: packs that have it are condemned, as garbage collection condemns
//! them, and the manifest says what was deleted.
//!
//! A pack never changes, so its other blocks go with it: that costs hits. When this has succeeded, no manifest names a pack with
//! a deleted block that was named before, and no pusher names one afterwards that listed its blocks before: it has
//! to change the manifest too, finds it changed, and the delete in it. A change that its pusher gave up without an answer, and that may
//! happen yet, meets another manifest too.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::StreamExt;
use kvarts_layout::format::body::Parent;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId, planted};

use crate::error::ColdError;
use crate::format::deletions::{Delete, Listed};
use crate::format::{
    IndexedRun, Manifest, PackEntry, PackId, PackIndex, Point, fingerprint, wide_fingerprint,
};
use crate::tier::{INDEXES_AT_ONCE, Known, Tier};

/// What was deleted of a namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Deleted {
    /// The blocks under these keys, of every group and coordinate.
    Keys(Vec<BlockKey>),
    /// The block under this key and what descends from it. What may descend goes too: where a link leads out of the bucket,
    /// descent cannot be known, nor where there is too much to follow.
    Prefix(BlockKey),
    /// Everything.
    Namespace,
    /// Nothing was, and the blocks under these keys now expire at this time, in milliseconds since 1970: copies that live longer go.
    Later(Vec<BlockKey>, (Group, Coordinate), u64),
}

/// How often it is begun again because another writer added packs meanwhile.
const ROUNDS: u32 = 8;
/// Packs whose indexes are read to follow links; where there are more all go.
const FOLLOWED: usize = 1024;
/// Bytes of these indexes together, the same.
const FOLLOWED_BYTES: u64 = 32 << 20;

impl Deleted {
    /// Whether a pack may have some of it, by what the manifest says of it.
    fn may_be_in(&self, pack: &PackEntry) -> bool {
        match self {
            Self::Keys(keys) | Self::Later(keys, ..) => {
                keys.iter().any(|key| pack.may_have(fingerprint(key)))
            }
            Self::Prefix(_) | Self::Namespace => true,
        }
    }

    /// The manifest says from its next generation on that this was deleted, if it does not say so already since `since`: then another
    /// attempt of this has, or another delete. Gives whether it said so already.
    fn note(&self, manifest: &mut Manifest, since: Point, at_ms: u64) -> bool {
        if planted!("deletes-not-noted") {
            return true;
        }
        let delete = Delete { generation: manifest.next_generation(), at_ms };
        let known = &manifest.deletions;
        let is_noted = manifest.since(since).is_some_and(|since| {
            // To a writer that listed it then; when it was produced is another question.
            let is_hidden = |key: &BlockKey| {
                let fingerprint = wide_fingerprint(key);
                known.hides(Listed { since: Some(since), fingerprint, created_ms: u64::MAX })
            };
            let is_deleted = |key: &BlockKey| known.was_deleted(wide_fingerprint(key), at_ms);
            match self {
                Self::Keys(keys) => keys.iter().all(|key| is_hidden(key) && is_deleted(key)),
                Self::Later(keys, ..) => keys.iter().all(is_hidden),
                Self::Prefix(root) => since < known.listed_after && is_deleted(root),
                Self::Namespace => since < known.listed_after && known.made_after_ms >= at_ms,
            }
        });
        if is_noted {
            return true;
        }
        let deletions = &mut manifest.deletions;
        match self {
            Self::Keys(keys) => deletions.add_keys(keys.iter().map(wide_fingerprint), delete),
            // The blocks are there, so none is hidden that is listed from now on.
            Self::Later(keys, ..) => {
                deletions.add_keys(keys.iter().map(wide_fingerprint), Delete { at_ms: 0, ..delete });
            }
            Self::Prefix(root) => {
                // What descends from it is not known here: a writer may have listed any of it.
                deletions.add_unknown(delete);
                deletions.add_keys([wide_fingerprint(root)], delete);
            }
            Self::Namespace => deletions.add_all(delete),
        }
        false
    }
}

/// Condemns every pack that has some of what was deleted, and has the manifest say what that was; gives how many. It must be called when
/// the store has deleted it: what is listed there afterwards may be named.
///
/// All of it is one change, so that who is about to name a pack finds another manifest than it has read, with the deletes in it.
pub async fn withdraw(tier: &Tier, namespace: NamespaceId, deleted: &[Deleted]) -> Result<u64, ColdError> {
    let at_ms = tier.access().time().wall_ms();
    let mut begun: Option<Point> = None;
    for _ in 0..ROUNDS {
        let known = tier.read_manifest(namespace).await?;
        let since = *begun.get_or_insert(known.manifest.point());
        let mut going = BTreeSet::new();
        for one in deleted {
            going.extend(with_some(tier, &known, one).await);
        }
        let is_all = deleted.contains(&Deleted::Namespace);
        let changed = tier.change(namespace, |manifest| {
            let new = manifest.packs.iter().filter(|(pack, _)| !known.manifest.packs.contains_key(*pack));
            let new: Vec<PackId> = new
                .filter(|(_, entry)| deleted.iter().any(|one| one.may_be_in(entry)))
                .map(|(pack, _)| *pack)
                .collect();
            if !new.is_empty() && !is_all {
                // Another writer added these packs: what they have is not known.
                return Err(ColdError::Contended(namespace));
            }
            going.extend(new);
            let now_ms = tier.access().time().wall_ms();
            let gone = going.iter().filter(|pack| condemn(manifest, pack, now_ms)).count();
            let noted: Vec<bool> = deleted.iter().map(|one| one.note(manifest, since, at_ms)).collect();
            let is_noted = !noted.contains(&false);
            // An attempt of ours whose answer was lost has done it.
            Ok((gone > 0 || !is_noted).then_some(gone as u64))
        });
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
async fn with_some(tier: &Tier, known: &Known, deleted: &Deleted) -> BTreeSet<PackId> {
    let namespace = known.manifest.namespace;
    let all = || known.manifest.packs.keys().copied().collect();
    match deleted {
        Deleted::Namespace => all(),
        Deleted::Keys(keys) => {
            let wanted: BTreeSet<BlockKey> = keys.iter().copied().collect();
            those_near(tier, known, keys, |index| index.keys().any(|key| wanted.contains(&key))).await
        }
        Deleted::Later(keys, (group, coordinate), expires_ms) => {
            let outlives = |index: &PackIndex, key: &BlockKey| {
                let place = index.find(key, *group, *coordinate);
                let run = place.and_then(|place| index.run(place.run));
                run.is_some_and(|run| run.run.expires_ms == 0 || run.run.expires_ms > *expires_ms)
            };
            those_near(tier, known, keys, |index| keys.iter().any(|key| outlives(index, key))).await
        }
        Deleted::Prefix(_) if !can_be_followed(known) => all(),
        Deleted::Prefix(root) => {
            let packs = known.manifest.packs.keys().copied();
            let links = look_at(tier, namespace, packs, links_of).await;
            // Where an index cannot be had links may lead through it.
            let links: Option<Vec<Vec<Link>>> = links.into_iter().map(|(_, links)| links).collect();
            links.map_or_else(all, |links| behind(*root, &links.into_iter().flatten().collect::<Vec<_>>()))
        }
    }
}

/// Whether links can be followed through all packs of a namespace.
fn can_be_followed(known: &Known) -> bool {
    let packs = &known.manifest.packs;
    let bytes = packs.values().map(|pack| u64::from(pack.index_bytes)).fold(0, u64::saturating_add);
    packs.len() <= FOLLOWED && bytes <= FOLLOWED_BYTES
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
    futures_util::stream::iter(looks).buffer_unordered(INDEXES_AT_ONCE).collect().await
}

/// The keys of a run, and what it is linked to.
#[derive(Clone, Debug)]
struct Link {
    pack: PackId,
    parent: Parent,
    keys: Vec<BlockKey>,
}

fn links_of(index: &PackIndex) -> Vec<Link> {
    let link = |IndexedRun { run, .. }: &IndexedRun| {
        let keys = run.blocks.iter().map(|block| block.key).collect();
        Link { pack: index.id(), parent: run.parent, keys }
    };
    index.runs().iter().map(link).collect()
}

/// The packs that have the block of this key, or what descends from it, or may: what is linked to a block that is in no pack.
fn behind(root: BlockKey, links: &[Link]) -> BTreeSet<PackId> {
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
            packs.insert(link.pack);
            // What stands behind a block that went before went with it.
            let new = link.keys.iter().skip(place).filter(|key| gone.insert(**key));
            left.extend(new);
        }
    }
    packs
}
