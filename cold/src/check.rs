//! Checks what a bucket has, and repairs what can be repaired without a guess.
//!
//! Guarantee: nothing that a reader could still read is taken away. An index is made again from a pack whose every byte was verified; a
//! pack that is gone is named no longer; a damaged pack stays, because its other blocks are proven one by one when they are read. Only
//! a pack with blocks that were deleted goes: no writer that keeps to the format names one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use bytes::Bytes;
use kvarts_layout::NamespaceId;

use crate::bucket::{Condition, Listed};
use crate::error::ColdError;
use crate::fault::Fault;
use crate::format::names::{self, Named};
use crate::format::pack::verify;
use crate::format::{Deletions, FormatError, PackId, PackIndex, wide_fingerprint};
use crate::tier::Tier;

/// Objects of one answer to a listing.
const PAGE: usize = 1000;

/// How thoroughly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// Manifests, indexes, and the lengths of packs.
    Quick,
    /// And every byte of every pack.
    Full,
}

/// What is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Finding {
    /// The manifest is no manifest: nothing of the namespace can be read.
    Manifest(FormatError),
    /// A pack that the manifest names is not there.
    MissingPack(PackId),
    /// A pack has another length: the number of its bytes, and the number that would be right.
    PackLength(PackId, u64, u64),
    /// Bytes of a pack are not what they were.
    DamagedPack(PackId, FormatError),
    /// The index of a pack is not there.
    MissingIndex(PackId),
    /// The index of a pack is not what it was.
    DamagedIndex(PackId, FormatError),
    /// A pack has this number of blocks that were deleted before, as the manifest says.
    DeletedBlocks(PackId, u64),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Manifest(why) => write!(f, "the manifest is damaged: {why}"),
            Self::MissingPack(pack) => write!(f, "pack {pack} does not exist"),
            Self::PackLength(pack, is, right) => write!(f, "pack {pack} has {is} bytes instead of {right}"),
            Self::DamagedPack(pack, why) => write!(f, "pack {pack} is damaged: {why}"),
            Self::MissingIndex(pack) => write!(f, "pack {pack} has no index"),
            Self::DamagedIndex(pack, why) => write!(f, "the index of pack {pack} is damaged: {why}"),
            Self::DeletedBlocks(pack, blocks) => write!(
                f,
                "pack {pack} has {blocks} blocks that were deleted: a writer ignored the deletes, or the \
                bucket ignored a condition"
            ),
        }
    }
}

/// A finding, and whether it was repaired.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// What is wrong.
    pub finding: Finding,
    /// It was put right.
    pub is_repaired: bool,
}

/// What a check of a namespace came to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Checked {
    /// Packs that count.
    pub packs: u64,
    /// Blocks in them.
    pub blocks: u64,
    /// What packs and indexes take.
    pub stored_bytes: u64,
    /// What is wrong.
    pub found: Vec<Found>,
    /// Objects that no manifest names, left by pushes that did not end: garbage collection takes them.
    pub orphans: u64,
    /// Their bytes.
    pub orphan_bytes: u64,
    /// Packs that wait for their deletion.
    pub condemned: u64,
    /// Keys whose deletes the manifest lists.
    pub deletes: u64,
}

impl Checked {
    /// Whether nothing is wrong, or nothing is wrong any more.
    pub fn is_clean(&self) -> bool {
        self.found.iter().all(|found| found.is_repaired)
    }

    fn find(&mut self, finding: Finding, is_repaired: bool) {
        self.found.push(Found { finding, is_repaired });
    }
}

/// The namespaces of which a bucket has anything: manifests, or packs and indexes without one, left by a first push that did not end or by
/// a manifest that was deleted.
pub async fn namespaces(tier: &Tier) -> Result<Vec<NamespaceId>, ColdError> {
    let mut found = BTreeSet::new();
    for prefix in [names::MANIFESTS, names::PACKS, names::INDEXES] {
        let mut after: Option<String> = None;
        loop {
            let page = tier.access().list(prefix, after.as_deref(), PAGE).await?;
            let named = page.iter().filter_map(|listed| Named::parse(&listed.name));
            found.extend(named.map(|named| named.namespace()));
            let Some(last) = page.last().filter(|_| page.len() >= PAGE) else { break };
            // A namespace may have thousands of packs, and the first one says that it is there.
            after = Some(names::behind(&last.name));
        }
    }
    Ok(found.into_iter().collect())
}

/// Calls for each object whose name begins so. What is put or deleted meanwhile may be missed.
pub async fn each_listed(tier: &Tier, prefix: &str, mut each: impl FnMut(&Listed)) -> Result<(), ColdError> {
    let mut after: Option<String> = None;
    loop {
        let page = tier.access().list(prefix, after.as_deref(), PAGE).await?;
        page.iter().for_each(&mut each);
        match page.last() {
            Some(last) if page.len() >= PAGE => after = Some(last.name.clone()),
            _ => return Ok(()),
        }
    }
}

/// The packs of a namespace that lie in the bucket, then the indexes; named or not.
pub(crate) async fn lying(
    tier: &Tier,
    namespace: NamespaceId,
) -> Result<[BTreeMap<PackId, Listed>; 2], ColdError> {
    let mut both = [BTreeMap::new(), BTreeMap::new()];
    for (prefix, lying) in [names::packs(namespace), names::indexes(namespace)].iter().zip(&mut both) {
        each_listed(tier, prefix, |listed| {
            if let Some(Named::Pack(_, pack) | Named::Index(_, pack)) = Named::parse(&listed.name) {
                lying.insert(pack, listed.clone());
            }
        })
        .await?;
    }
    Ok(both)
}

/// Checks a namespace. What the bucket does not answer ends the check, because it says nothing of what is there.
pub async fn check(
    tier: &Tier,
    namespace: NamespaceId,
    level: Level,
    repairs: bool,
) -> Result<Checked, ColdError> {
    let mut checked = Checked::default();
    // The listing first: what is put after it is named later than what is read here, and is no orphan.
    let [packs, indexes] = lying(tier, namespace).await?;
    let known = match tier.read_manifest(namespace).await {
        Ok(known) => known,
        Err(ColdError::Object(_, why)) => {
            checked.find(Finding::Manifest(why), false);
            return Ok(checked);
        }
        Err(error) => return Err(error),
    };
    let manifest = &known.manifest;
    checked.condemned = manifest.condemned.len() as u64;
    checked.deletes = manifest.deletions.keys.len() as u64;
    for listed in packs.iter().chain(&indexes) {
        if !manifest.packs.contains_key(listed.0) && !manifest.condemned.contains_key(listed.0) {
            checked.orphans += 1;
            checked.orphan_bytes += listed.1.bytes;
        }
    }
    let (mut gone, mut deleted) = (Vec::new(), Vec::new());
    let how = How { level, repairs, deletions: &manifest.deletions };
    for (pack, entry) in &manifest.packs {
        checked.packs += 1;
        checked.blocks += u64::from(entry.blocks);
        checked.stored_bytes += entry.stored_bytes();
        let name = names::pack(namespace, *pack);
        let bytes = match packs.get(pack) {
            Some(listed) => listed.bytes,
            // A listing may be older than the manifest.
            None => match tier.access().head(&name).await {
                Ok(facts) => facts.bytes,
                Err(ColdError::Bucket(_, Fault::Missing)) => {
                    gone.push(*pack);
                    continue;
                }
                Err(error) => return Err(error),
            },
        };
        if bytes == entry.pack_bytes() {
            let blocks = check_pack(tier, (namespace, *pack, bytes), how, &mut checked).await?;
            // A listing may show what has been deleted since, by garbage collection or otherwise.
            if blocks.is_none() && tier.read_manifest(namespace).await?.manifest.packs.contains_key(pack) {
                gone.push(*pack);
            }
            deleted.extend(blocks.filter(|blocks| *blocks > 0).map(|blocks| (*pack, blocks)));
        } else {
            checked.find(Finding::PackLength(*pack, bytes, entry.pack_bytes()), false);
        }
    }
    let forgotten = repairs && !gone.is_empty() && forget(tier, namespace, &gone).await?;
    gone.into_iter().for_each(|pack| checked.find(Finding::MissingPack(pack), forgotten));
    let packs: Vec<PackId> = deleted.iter().map(|(pack, _)| *pack).collect();
    let condemned = repairs && !packs.is_empty() && condemn(tier, namespace, &packs).await?;
    deleted
        .into_iter()
        .for_each(|(pack, blocks)| checked.find(Finding::DeletedBlocks(pack, blocks), condemned));
    Ok(checked)
}

#[derive(Clone, Copy)]
struct How<'a> {
    level: Level,
    repairs: bool,
    deletions: &'a Deletions,
}

/// Blocks of a pack that were deleted.
fn deleted_blocks(index: &PackIndex, deletions: &Deletions) -> u64 {
    let of = |(created_ms, key)| deletions.was_deleted(wide_fingerprint(key), created_ms);
    let runs = index.runs().iter().map(|indexed| &indexed.run);
    let blocks = runs.flat_map(|run| run.blocks.iter().map(|block| (run.created_ms, &block.key)));
    blocks.filter(|block| of(*block)).count() as u64
}

/// Checks the index of a pack that has the right length, and its bytes where that is asked for or an index is to be made of them. Gives how many
/// of its blocks were deleted; none if the pack is not there when it is read.
async fn check_pack(
    tier: &Tier,
    (namespace, pack, bytes): (NamespaceId, PackId, u64),
    How { level, repairs, deletions }: How<'_>,
    checked: &mut Checked,
) -> Result<Option<u64>, ColdError> {
    let mut deleted = 0;
    let index = match tier.read_index(namespace, pack).await {
        Ok(index) => {
            deleted = deleted_blocks(&index, deletions);
            None
        }
        Err(ColdError::Bucket(_, Fault::Missing)) => Some(Finding::MissingIndex(pack)),
        Err(ColdError::Bucket(_, Fault::Length)) => Some(Finding::DamagedIndex(pack, FormatError::Damaged)),
        Err(ColdError::Object(_, why)) => Some(Finding::DamagedIndex(pack, why)),
        Err(error) => return Err(error),
    };
    let reads = level == Level::Full || repairs && index.is_some();
    let whole = if reads { read_pack(tier, &names::pack(namespace, pack), pack, bytes).await? } else { None };
    if reads && whole.is_none() {
        return Ok(None);
    }
    if let Some(finding) = index {
        let sound = whole.as_ref().and_then(|whole| whole.as_ref().ok()).filter(|_| repairs);
        if let Some(index) = sound {
            let name = names::index(namespace, pack);
            tier.access().put(&name, std::slice::from_ref(index), Condition::Any).await?;
        }
        checked.find(finding, sound.is_some());
    }
    if let Some(Err(why)) = whole {
        checked.find(Finding::DamagedPack(pack, why), false);
    }
    Ok(Some(deleted))
}

/// Verifies a pack; its index, made anew. `None` if it is not there.
async fn read_pack(
    tier: &Tier,
    name: &str,
    pack: PackId,
    bytes: u64,
) -> Result<Option<Result<Bytes, FormatError>>, ColdError> {
    let read = match tier.access().get_known(name, bytes, bytes).await {
        Ok((read, _)) => read,
        Err(ColdError::Bucket(_, Fault::Missing)) => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(Some(verify(&read).and_then(|(index, bytes)| {
        if index.id() == pack {
            Ok(bytes.into())
        } else {
            Err(FormatError::Rule("the name of the object differs from the name of the pack in the object"))
        }
    })))
}

/// The manifest names packs that are gone no longer.
async fn forget(tier: &Tier, namespace: NamespaceId, gone: &[PackId]) -> Result<bool, ColdError> {
    let changed = tier.change(namespace, |manifest| {
        let before = manifest.packs.len();
        manifest.packs.retain(|pack, _| !gone.contains(pack));
        Ok((manifest.packs.len() < before).then_some(()))
    });
    // ends: attempts that are counted, each with the time of its requests (`patience`)
    changed.await.map(|_| true)
}

/// Packs with blocks that were deleted wait for their deletion, as they should have from the delete on.
async fn condemn(tier: &Tier, namespace: NamespaceId, packs: &[PackId]) -> Result<bool, ColdError> {
    let now_ms = tier.access().time().wall_ms();
    let changed = tier.change(namespace, |manifest| {
        let here: Vec<PackId> =
            packs.iter().filter(|pack| manifest.packs.remove(pack).is_some()).copied().collect();
        manifest.condemned.extend(here.iter().map(|pack| (*pack, now_ms)));
        Ok((!here.is_empty()).then_some(()))
    });
    // ends: attempts that are counted, each with the time of its requests (`patience`)
    changed.await.map(|_| true)
}
