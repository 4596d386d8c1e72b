//! What was deleted, or is to live less long, is taken out of the tier: packs that have it are condemned, as garbage collection condemns
//! them.
//!
//! A pack never changes, so its other blocks go with it: that costs hits. When this has succeeded, no manifest names a pack with
//! a deleted block that was named before, and a pusher that was told first ([`crate::Pusher::guarded`]) names none afterwards: it has
//! to change the manifest too, and finds it changed.

use std::collections::BTreeSet;

use kvarts_layout::format::body::Parent;
use kvarts_layout::{BlockKey, Coordinate, Group, NamespaceId};

use crate::error::ColdError;
use crate::format::{Manifest, PackId, PackIndex};
use crate::tier::{Known, Tier};

/// What was deleted of a namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Deleted {
    /// The blocks under these keys, of every group and coordinate.
    Keys(Vec<BlockKey>),
    /// The block under this key and what descends from it. What may descend goes too: where a link leads out of the bucket,
    /// descent cannot be known.
    Prefix(BlockKey),
    /// Everything.
    Namespace,
    /// Nothing was, and the blocks under these keys now expire at this time, in milliseconds since 1970: copies that live longer go.
    Later(Vec<BlockKey>, (Group, Coordinate), u64),
}

/// How often it is begun again because another writer added packs meanwhile.
const ROUNDS: u32 = 8;
/// Packs whose indexes are read to follow links; of more all go.
const FOLLOWED: usize = 64;

/// Condemns every pack that has some of what was deleted; gives how many. With `always` the manifest is changed even if there is none:
/// who is about to name a pack then has to look again.
pub async fn withdraw(
    tier: &Tier,
    namespace: NamespaceId,
    deleted: &Deleted,
    always: bool,
) -> Result<u64, ColdError> {
    for _ in 0..ROUNDS {
        let known = tier.read_manifest(namespace).await?;
        let going = with_some(tier, &known, deleted).await;
        if going.is_empty() && !always {
            return Ok(0);
        }
        let now_ms = tier.access().time().wall_ms();
        let changed = tier.change(namespace, |manifest| {
            if manifest.packs.keys().any(|pack| !known.manifest.packs.contains_key(pack)) {
                // Another writer added these packs: what they have is not known.
                return Err(ColdError::Contended(namespace));
            }
            let gone = going.iter().filter(|pack| condemn(manifest, pack, now_ms)).count();
            Ok(Some(gone as u64))
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
        Deleted::Prefix(_) if known.manifest.packs.len() > FOLLOWED => all(),
        Deleted::Prefix(root) => {
            let mut indexes = Vec::new();
            for pack in known.manifest.packs.keys() {
                match tier.index(namespace, *pack).await {
                    Ok(index) => indexes.push(index),
                    // Links may lead through it.
                    Err(_) => return all(),
                }
            }
            let gone = descendants(*root, indexes.iter().map(|index| &**index));
            let has_some = |index: &&std::sync::Arc<PackIndex>| index.keys().any(|key| gone.contains(&key));
            indexes.iter().filter(has_some).map(|index| index.id()).collect()
        }
    }
}

/// Of the packs that may have some of these keys those whose index says so.
async fn those_near(
    tier: &Tier,
    known: &Known,
    keys: &[BlockKey],
    goes: impl Fn(&PackIndex) -> bool,
) -> BTreeSet<PackId> {
    let near: BTreeSet<PackId> = keys.iter().flat_map(|key| known.packs_with(key)).collect();
    let mut going = BTreeSet::new();
    for pack in near {
        let index = tier.index(known.manifest.namespace, pack).await;
        if index.map_or(true, |index| goes(&index)) {
            going.insert(pack);
        }
    }
    going
}

/// The block of this key and all that descends from it, or may.
fn descendants<'a>(
    root: BlockKey,
    indexes: impl Iterator<Item = &'a PackIndex> + Clone,
) -> BTreeSet<BlockKey> {
    let here: BTreeSet<BlockKey> = indexes.clone().flat_map(PackIndex::keys).collect();
    let mut gone = BTreeSet::from([root]);
    loop {
        let before = gone.len();
        for run in indexes.clone().flat_map(PackIndex::runs) {
            let behind = match run.run.parent {
                Parent::Key(key) => gone.contains(&BlockKey(key)) || !here.contains(&BlockKey(key)),
                Parent::Root | Parent::Unknown => false,
            };
            let keys = || run.run.blocks.iter().map(|block| block.key);
            let first = if behind { Some(0) } else { keys().position(|key| gone.contains(&key)) };
            if let Some(first) = first {
                gone.extend(keys().skip(first));
            }
        }
        if gone.len() == before {
            return gone;
        }
    }
}
